"""Runs a command beside the watch: its own process group, in the terminal's foreground, signals passed on.

The command is started as the shell would start it: a terminal's Ctrl-C and Ctrl-Z reach it and not the watch,
which stops and continues with it.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from probes.core.errors import CommandMissing, Exit
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.records.watch import Ended

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGTERM, signal.SIGHUP)
AWAITING_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)
_SIGNALLED = 128


def program_of(word: str, path: str | None) -> str:
    """The program that a command's first word names. Raises CommandMissing."""
    if found := shutil.which(word, path=path):
        return found
    there = os.path.exists(word)  # noqa: PTH110 - a word of a command, not a path of ours
    raise CommandMissing(word, Exit.NOT_EXECUTABLE if there and "/" in word else Exit.NOT_FOUND)


class Command:
    """A running command. `wake` becomes readable when there is something to do for `look`."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], *, inherit: Sequence[int] = ()
    ) -> None:
        self.wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals: list[int] = []
        heard = [one for one in PASSED_ON if signal.getsignal(one) is not signal.SIG_IGN]  # nohup stays
        self._handlers = {one: signal.signal(one, self._note) for one in (*heard, signal.SIGCHLD)}
        self._old_wake = signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        self._terminal = _terminal()
        self.ended: Ended | None = None
        self.pid = 0
        try:
            self.pid = self._start(words, environment, inherit)
            self._own_kib = _peak_kib()  # of when it had called `exec`
            self._hand_terminal_to(self.pid)
        except BaseException:
            self._restore()
            raise

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _start(self, words: Sequence[str], environment: Mapping[str, str], inherit: Sequence[int]) -> int:
        found = program_of(words[0], environment.get("PATH"))
        for descriptor in inherit:
            os.set_inheritable(descriptor, True)
        try:
            return os.posix_spawn(
                found,
                list(words),
                environment,
                setpgroup=0,
                setsigdef=[*self._handlers, signal.SIGPIPE, signal.SIGTTOU],
            )
        except OSError as error:
            raise CommandMissing(words[0], Exit.NOT_EXECUTABLE, error.strerror or "") from error

    def _hand_terminal_to(self, group: int) -> None:
        """Put a process group in the terminal's foreground, and wake it where it had to wait for that."""
        if self._terminal is None:
            return
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        with contextlib.suppress(OSError):  # it has ended already
            os.tcsetpgrp(self._terminal, group)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        if self.pid and self.ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _pass_on(self, number: int) -> None:
        """A signal, and for one that asks to end SIGCONT: a stopped process receives nothing else."""
        self._tell(number)
        if number in ENDING:
            self._tell(signal.SIGCONT)

    def look(self) -> Ended | None:
        """Pass on what signals came; how the command ended, once it has."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        while self._signals:
            self._pass_on(self._signals.pop(0))
        if self.ended is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                self._stop_too(os.WSTOPSIG(status))
            elif pid:
                code = os.waitstatus_to_exitcode(status)
                exit_code = code if code >= 0 else _SIGNALLED - code
                largest = self._largest_bytes(usage.ru_maxrss)
                self.ended = Ended(exit_code, largest, usage.ru_utime + usage.ru_stime)
        return self.ended

    def _largest_bytes(self, found_kib: int) -> int | Unknown:
        """Linux counts a process's peak from before `exec` on, when it still had the memory of this one."""
        if found_kib > self._own_kib:
            return found_kib * 1024
        return Unknown(f"less than the watch itself: {binary_bytes(self._own_kib * 1024)}")

    def _stop_too(self, reason: int) -> None:
        """The command was stopped from the terminal: stop with it, and go on with it."""
        if self._terminal is None:
            return
        if reason in AWAITING_TERMINAL and os.tcgetpgrp(self._terminal) == self.pid:
            self._tell(signal.SIGCONT)  # it asked just before it was given the terminal
            return
        self._hand_back()
        os.kill(os.getpid(), signal.SIGSTOP)  # goes on here when the shell continues this process
        self._hand_terminal_to(self.pid)

    def _hand_back(self) -> None:
        if self._terminal is not None:
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._terminal, os.getpgrp())
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def __enter__(self) -> "Command":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._pass_on(signal.SIGTERM)  # where the watch failed: the command doesn't go on unwatched
        self._restore()

    def _restore(self) -> None:
        self._hand_back()
        signal.set_wakeup_fd(self._old_wake)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self.wake)
        os.close(self._wake_end)


def _peak_kib() -> int:
    """This program's own largest memory, which the kernel counts as its child's before that calls `exec`.

    `ru_maxrss` would be too much: it includes the memory of the program that started this one.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _terminal() -> int | None:
    """The terminal whose foreground this process is in, if any."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = sys.__stdin__.fileno() if sys.__stdin__ else -1
        if os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp():
            return descriptor
    return None
