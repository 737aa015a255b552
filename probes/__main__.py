"""`python3 -m probes`: an interrupt is a message from the start, also while the command line is imported."""

from collections.abc import Sequence

from probes.core.entry import delivered, run_as_program


def main(argv: Sequence[str]) -> int:
    """Run one verb; returns the exit code and never raises for anything a user can cause."""
    return delivered(_run, argv, interrupted="nothing was begun")


def _run(argv: Sequence[str]) -> int:
    from probes.cli import program

    return program.main(argv)


def entry() -> None:
    """Console entry point."""
    run_as_program(main)


if __name__ == "__main__":
    entry()
