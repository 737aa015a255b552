"""Runs a command line as a program: signals, failures, lost output, the exit code. For both programs."""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from probes.core.errors import Failure
from probes.core.output import OutputLost, error, error_from_handler, harden

DATA, INTERRUPTED = 5, 130  # exit codes of both programs
# Longer than an orderly exit takes: 3 s for programs to end (buildtool.core.command), 3 s for threads that
# wait for them (buildtool.core.progress).
PATIENCE_S = 10.0
_AGAIN_S = 0.01  # after an interruption that was raised where Python ignores exceptions
_STOPPING = f"stopping, which takes some seconds; a signal after {PATIENCE_S:.0f} s cuts the clean-up short"


class Interrupts:
    """A handler that raises KeyboardInterrupt, but not twice within PATIENCE_S.

    A terminal, a shell and `timeout` may each send a signal for one request to stop, and a second
    KeyboardInterrupt would end the clean-up that follows the first. A later signal interrupts again, since
    the clean-up may hang.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_s: float | None = None
        self._warned = False

    def __call__(self, _number: int, frame: FrameType | None) -> None:
        """Handle one signal."""
        while frame is not None:
            if frame.f_code is Interrupts.ignored.__code__:  # what is raised there is lost
                signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
                return
            frame = frame.f_back
        now = self._now()
        if self._last_s is None or now - self._last_s >= PATIENCE_S:
            self._last_s, self._warned = now, False
            raise KeyboardInterrupt
        if not self._warned:
            self._warned = True
            error_from_handler(_STOPPING)

    def ignored(self, raised: "sys.UnraisableHookArgs") -> None:
        """Stands in for sys.unraisablehook. Python calls finalisers and weak references' callbacks anywhere.

        What is raised in one goes no further, so the same interruption is raised again a moment later.
        """
        if isinstance(raised.exc_value, KeyboardInterrupt):
            self._last_s = None
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            sys.__unraisablehook__(raised)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP interrupt the block as `Interrupts` says, and do nothing after it.

    A SIGINT or SIGHUP that is ignored (`nohup`, `&` in a script) stays so. What follows the block is an exit
    whose code is known already.
    """
    handler = Interrupts()
    handled = [signal.SIGTERM, signal.SIGALRM]
    optional = (signal.SIGINT, signal.SIGHUP)
    handled += [number for number in optional if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handler)
    before, sys.unraisablehook = sys.unraisablehook, handler.ignored
    try:
        yield
    finally:
        sys.unraisablehook = before
        for number in handled:
            signal.signal(number, signal.SIG_IGN)


def delivered(run: Callable[[Sequence[str]], int], argv: Sequence[str], *, interrupted: str) -> int:
    """Run a command line: its exit code, or that of the failure that ends it, which is shown.

    `interrupted` says, after a Ctrl-C, what became of the work.
    """
    try:
        try:
            return int(run(argv))
        except Failure as failure:
            error(f"error: {failure}")
            return int(failure.exit_code)
        except OSError as fault:  # about a file in the way that no module expects
            unnamed = " the current directory" if isinstance(fault, FileNotFoundError) else ""  # it is gone
            where = f" {fault.filename}" if fault.filename else unnamed
            error(f"error: can't use{where}: {fault.strerror or fault}\n  check the path and its permissions")
            return DATA
        except KeyboardInterrupt:
            error(f"interrupted; {interrupted}")
            return INTERRUPTED
        finally:
            sys.stdout.flush()  # also after --help, whose SystemExit passes by here
    except OutputLost as fault:
        error(f"error: can't write standard output: {fault}\n  free space there, or write elsewhere: > FILE")
        return DATA


def run_as_program(main: Callable[[Sequence[str]], int]) -> None:
    """Run a command line as this process's program."""
    harden()
    with interruptible():
        code = main(sys.argv[1:])
    sys.exit(code)
