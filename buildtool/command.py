"""Buildtool's only door to other programs: run one, hear its output, turn its failure into our errors."""

import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildtool.errors import BuildFailed, EnvironmentMissing

KEPT_LINES = 25  # of a failed program's output, enough to hold the cause


class CommandFailed(BuildFailed):
    """A program exited non-zero. Keeps the command, the code and the last lines it said."""

    def __init__(self, args: Sequence[str], code: int, tail: str) -> None:
        super().__init__(f"`{' '.join(args[:6])}{' ...' if len(args) > 6 else ''}` exited with {code}", tail)
        self.command = tuple(args)
        self.code = code
        self.tail = tail


@dataclass(frozen=True)
class Completed:
    """What a program said: standard output, and both streams' last lines."""

    stdout: str
    tail: str


def find(program: str) -> Path | None:
    """The program's path, or None when it isn't installed."""
    found = shutil.which(program)
    return Path(found) if found else None


def run(
    args: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> Completed:
    """Run to the end in silence and return the output.

    Raises EnvironmentMissing when the program isn't installed, CommandFailed when it exits non-zero.
    """
    try:
        done = subprocess.run(
            args, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise _missing(args[0]) from error
    tail = "\n".join((done.stdout + done.stderr).splitlines()[-KEPT_LINES:])
    if done.returncode:
        raise CommandFailed(args, done.returncode, tail)
    return Completed(done.stdout, tail)


def run_loud(
    args: Sequence[str],
    *,
    say: Callable[[str], None],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> Completed:
    """Run to the end, handing every line (both streams, as it comes) to `say`. Raises as `run` does."""
    try:
        process = subprocess.Popen(
            args,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        raise _missing(args[0]) from error
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    try:
        if stdin is not None and process.stdin is not None:
            process.stdin.write(stdin)
            process.stdin.close()
        for line in process.stdout or ():
            kept.append(line.rstrip("\n"))
            say(kept[-1])
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    tail = "\n".join(kept)
    if code:
        raise CommandFailed(args, code, tail)
    return Completed("", tail)


def spawn(args: Sequence[str], *, log: Path) -> None:
    """Start a program that outlives us, in a session of its own; it speaks into a log. Raises as `run`."""
    try:
        with log.open("ab") as stream:
            subprocess.Popen(
                args, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True, cwd="/"
            )
    except FileNotFoundError as error:
        raise _missing(args[0]) from error


def _missing(program: str) -> EnvironmentMissing:
    return EnvironmentMissing(
        f"`{program}` is not installed", f"install it with your distribution's packages: {program}"
    )
