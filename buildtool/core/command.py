"""Runs other programs, which buildtool does here alone: their output, their failures as our errors.

Every program gets its own session, so that it can be ended with everything that it started.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from buildtool.core.errors import BuildFailed, EnvironmentMissing
from buildtool.core.progress import Progress

KEPT_LINES = 25  # of a failed program's output, enough to hold the cause
TIMED_OUT = 124  # the exit code of a program that ran for too long, as of timeout(1)
GRACE_S = 3.0  # from SIGTERM to SIGKILL


class _Children:
    """The programs that run now, in any thread; once `stopped`, no further one starts."""

    def __init__(self) -> None:
        self.running: set[subprocess.Popen[str]] = set()
        self.stopped = False
        self.lock = threading.Lock()


_children = _Children()


class CommandFailed(BuildFailed):
    """A program exited non-zero. Keeps the command, the code and the last lines of output."""

    def __init__(self, args: Sequence[str], code: int, tail: str) -> None:
        super().__init__(f"`{' '.join(args[:6])}{' ...' if len(args) > 6 else ''}` exited with {code}", tail)
        self.command = tuple(args)
        self.code = code
        self.tail = tail


@dataclass(frozen=True)
class Completed:
    """What a program printed: standard output, and both streams' last lines."""

    stdout: str
    tail: str


def find(program: str) -> Path | None:
    """The program's path, or None when it isn't installed."""
    path = shutil.which(program)
    return Path(path) if path else None


def run(args: Sequence[str], *, seconds: float | None = None) -> Completed:
    """Run to the end without showing anything, and return the output.

    Raises EnvironmentMissing when the program isn't installed, CommandFailed when it exits non-zero, or goes
    on for longer than `seconds` (and was ended), KeyboardInterrupt when `stop_children` ended it or has been
    called before.
    """
    try:
        with _child(args, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(args, TIMED_OUT, f"it had not ended after {seconds:g} s") from error
    return _completed(args, process.returncode, out, (out + err).splitlines())


def run_streaming(
    args: Sequence[str],
    *,
    progress: Progress,
    env: Mapping[str, str] | None = None,
    stdin: str | Iterable[bytes] | None = None,
) -> Completed:
    """Run to the end, passing each line of both streams to `progress` as it comes. Raises as `run` does.

    A program that is given bytes prints little until it has read them all.
    """
    last: deque[str] = deque(maxlen=KEPT_LINES)
    with _child(args, env=env, has_stdin=stdin is not None, stderr=subprocess.STDOUT) as process:
        if stdin is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # its exit code shows why it stopped reading
                with open(process.stdin.fileno(), "wb", closefd=False) as file:
                    for piece in [stdin.encode()] if isinstance(stdin, str) else stdin:
                        file.write(piece)
                process.stdin.close()
        for line in process.stdout or ():
            last.append(line.rstrip("\n"))
            progress(last[-1])
        process.wait()
    return _completed(args, process.returncode, "", list(last))


def _completed(args: Sequence[str], code: int, stdout: str, lines: Sequence[str]) -> Completed:
    tail = "\n".join(lines[-KEPT_LINES:])
    if code:
        raise CommandFailed(args, code, tail)
    return Completed(stdout, tail)


def relay(progress: Progress, shorten: Callable[[str], str | None], *, verbose: bool) -> Progress:
    """A function that passes on to `progress` what `shorten` returns for a line; with `verbose`, every line.

    `shorten` returns None for a line that is to be left out.
    """

    def pass_on(line: str) -> None:
        shown = line if verbose else shorten(line)
        if shown is not None:
            progress(shown)

    return pass_on


def stop_children() -> None:
    """End every running program, with everything that it started, and let none start afterwards.

    Threads that wait for one, or want to start one, get a KeyboardInterrupt. Returns after GRACE_S at most.
    """
    with _children.lock:
        _children.stopped = True
        running = list(_children.running)
    _end(running)


@contextmanager
def _child(
    args: Sequence[str],
    *,
    stderr: int,
    env: Mapping[str, str] | None = None,
    has_stdin: bool = False,
) -> Iterator["subprocess.Popen[str]"]:
    """A program that runs during the block, and ends with it if the block fails."""
    with _children.lock:
        if _children.stopped:
            raise KeyboardInterrupt
        process = _start(args, env, has_stdin=has_stdin, stderr=stderr)
        _children.running.add(process)
    try:
        yield process
    except BaseException:
        _end([process])
        process.wait()
        raise
    finally:
        _children.running.discard(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()
    if _children.stopped:
        raise KeyboardInterrupt  # its exit code shows that we ended it, and nothing about its work


def _start(
    args: Sequence[str], env: Mapping[str, str] | None, *, has_stdin: bool, stderr: int
) -> "subprocess.Popen[str]":
    try:
        return subprocess.Popen(
            args,
            env=english_environment(os.environ if env is None else env),
            stdin=subprocess.PIPE if has_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise _missing(args[0], error) from error


def english_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with a locale in which programs print English, which we parse. Pure."""
    kept = {name: value for name, value in env.items() if name != "LANGUAGE"}
    return kept | {"LC_ALL": "C.UTF-8" if kept.get("LC_ALL") == "C.UTF-8" else "C"}


def _end(running: Sequence["subprocess.Popen[str]"]) -> None:
    """SIGTERM, then after GRACE_S SIGKILL, for programs and everything in their sessions."""
    for process in running:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for process in running:
        with contextlib.suppress(OSError):  # it is gone already
            descriptor = os.pidfd_open(process.pid)
            try:
                select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(descriptor)
        _signal(process, signal.SIGKILL)


def _signal(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def spawn(args: Sequence[str], *, log: Path) -> None:
    """Start a program that outlives this process, in its own session; it writes to a log. Raises as `run`."""
    try:
        with log.open("ab") as stream:
            subprocess.Popen(
                args, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, cwd="/"
            )
    except OSError as error:
        raise _missing(args[0], error) from error


def _missing(program: str, error: OSError) -> EnvironmentMissing:
    if not isinstance(error, FileNotFoundError):
        return EnvironmentMissing(
            f"`{program}` can't be started: {error.strerror}", f"look at the file: command -v {program}"
        )
    return EnvironmentMissing(
        f"`{program}` is not installed", f"install it with your distribution's packages: {program}"
    )
