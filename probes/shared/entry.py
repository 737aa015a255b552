"""What both programs do around their command lines: signals, output that is lost, the exit code."""

import sys
from collections.abc import Callable, Sequence

from probes.shared.interrupt import interruptible
from probes.shared.output import OutputLost, complain, harden


def delivered(run: Callable[[Sequence[str]], int], argv: Sequence[str], *, lost: int) -> int:
    """The exit code of `run`, or `lost` where standard output doesn't take what it prints."""
    try:
        try:
            return run(argv)
        finally:
            sys.stdout.flush()  # also after --help, whose SystemExit passes by here
    except OutputLost as error:
        complain(f"error: can't write standard output: {error}")
        return lost


def run_as_program(main: Callable[[Sequence[str]], int]) -> None:
    """Run a command line as this process's program."""
    harden()
    with interruptible():
        code = main(sys.argv[1:])
    sys.exit(code)
