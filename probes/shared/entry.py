"""What both programs do around their command lines: signals, failures, output that is lost, the exit code."""

import sys
from collections.abc import Callable, Sequence

from probes.shared.failure import Failure
from probes.shared.interrupt import interruptible
from probes.shared.output import OutputLost, complain, harden

DATA = 5  # of both programs' exit codes
INTERRUPTED = 130


def delivered(run: Callable[[Sequence[str]], int], argv: Sequence[str], *, interrupted: str) -> int:
    """The exit code of `run`, or of the failure that ends it, which is shown; `interrupted` is for Ctrl-C."""
    try:
        try:
            return int(run(argv))
        except Failure as error:
            complain(f"error: {error}")
            return int(error.exit_code)
        except OSError as error:  # about a file in the way that no module expects
            unnamed = " the current directory" if isinstance(error, FileNotFoundError) else ""  # it is gone
            where = f" {error.filename}" if error.filename else unnamed
            complain(
                f"error: can't use{where}: {error.strerror or error}\n  check the path and its permissions"
            )
            return DATA
        except KeyboardInterrupt:
            complain(f"interrupted; {interrupted}")
            return INTERRUPTED
        finally:
            sys.stdout.flush()  # also after --help, whose SystemExit passes by here
    except OutputLost as error:
        complain(
            f"error: can't write standard output: {error}\n  free space there, or write elsewhere: > FILE"
        )
        return DATA


def run_as_program(main: Callable[[Sequence[str]], int]) -> None:
    """Run a command line as this process's program."""
    harden()
    with interruptible():
        code = main(sys.argv[1:])
    sys.exit(code)
