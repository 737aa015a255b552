"""The command line of `python -m probes`: a module a verb."""

from probes.cli.program import main

__all__ = ["main"]
