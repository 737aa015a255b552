"""`python -m probes`."""

from probes.cli import entry

if __name__ == "__main__":
    entry()
