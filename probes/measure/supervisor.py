"""Runs a job in a fresh process and survives any outcome: crash, garbage, hang, wedge."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from probes.core.codec import Json, decode, encode, load
from probes.core.errors import Exit
from probes.core.unknown import Unknown
from probes.measure.worker import Job, Line, Told
from probes.records.schema import Done, Failed, Outcome

T = TypeVar("T")
R = TypeVar("R")
Command = Callable[[int], Sequence[str]]  # a worker's command line, by the descriptor that it writes to

GRACE_S = 5.0  # between SIGTERM and SIGKILL, and for SIGKILL to work
KEPT_LINES = 8  # of the output of the worker's libraries, enough to hold the cause
LONGEST_LINE = 64 * 2**20
READ_BYTES = 2**16


@dataclass(frozen=True)
class Ended(Generic[T]):
    """How a job ended and everything it had sent by then."""

    outcome: Outcome
    records: tuple[T, ...]
    seconds: float

    def answer(self, kind: type[R], none: str) -> R | Unknown:
        """The record that was asked for. Unknown, as `none` says, without one; Ctrl-C goes on as that."""
        for record in self.records:
            if isinstance(record, kind):
                return record
        if not isinstance(self.outcome, Failed):
            return Unknown(none)
        if self.outcome.exit_code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        return Unknown(self.outcome.reason)


def running(module: str) -> Command:
    """What makes the command line of a module's worker: this Python, importing from where this process does.

    `-m` would look into the current directory first, where a user may have a json.py or a folder probes.
    """

    def command(descriptor: int) -> list[str]:
        start = (
            f"import runpy, sys; sys.path[:] = {sys.path}; runpy.run_module({module!r}, None, '__main__', 1)"
        )
        return [sys.executable, "-P", "-c", start, str(descriptor), str(os.getpid())]

    return command


command = running("probes.measure.worker")


def run(
    job: Job,
    *,
    limit_s: float,
    heard: Callable[[Told], None],
    command: Command = command,
    grace_s: float = GRACE_S,
    spare: "Spare | None" = None,
) -> Ended[Told]:
    """Run a probe's job; see `oversee`."""
    return oversee(job, told, limit_s=limit_s, heard=heard, command=command, grace_s=grace_s, spare=spare)


def told(line: Json) -> Told | Done | Failed:
    """A message of a probe's worker. Raises ValueError for anything else."""
    return decode(Line, line, "message").message


def oversee(
    job: object,
    parse: Callable[[Json], T | Done | Failed],
    *,
    limit_s: float,
    heard: Callable[[T], None],
    command: Command,
    grace_s: float = GRACE_S,
    spare: "Spare | None" = None,
) -> Ended[T]:
    """Run the job for at most `limit_s` in a fresh process, passing every record to `heard` as it comes.

    `parse` makes a message of a line, or raises ValueError. Never raises for what the worker does. An
    interrupt ends the worker and is an outcome too.
    """
    began = time.monotonic()
    ear = _Ear(heard, parse)
    chosen = spare or start(command)
    try:
        outcome = _watch(chosen.process, chosen.pipe, job=job, ear=ear, limit_s=limit_s, grace_s=grace_s)
    finally:
        os.close(chosen.pipe)
    return Ended(outcome, tuple(ear.records), time.monotonic() - began)


@dataclass(frozen=True)
class Spare:
    """A worker that was started ahead and waits for its job."""

    process: "subprocess.Popen[bytes]"
    pipe: int  # where its messages are read


def start(command: Command = command) -> Spare:
    """A fresh worker. It imports torch at once, which takes seconds, and touches no GPU before its job."""
    reading, writing = os.pipe()
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command(writing), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, pass_fds=(writing,)
        )
        return Spare(process, reading)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


@contextmanager
def crew(count: int, command: Command = command) -> Iterator[list[Spare]]:
    """Workers started together, to be taken one by one; unused ones are ended."""
    spares = [start(command) for _ in range(count)]
    try:
        yield spares
    finally:
        for spare in spares:
            _end(spare.process, at_once=True, grace_s=GRACE_S)
            os.close(spare.pipe)


def _watch(
    process: "subprocess.Popen[bytes]",
    reading: int,
    *,
    job: object,
    ear: "_Ear[T]",
    limit_s: float,
    grace_s: float,
) -> Outcome:
    """Read all of the worker's messages, or stop it."""
    try:
        ear.kept = partial(_write, process, b"")
        _write(process, json.dumps(encode(job)).encode())
        in_time = _listen(process, reading, ear=ear, until=time.monotonic() + limit_s)
        gone = _end(process, at_once=not in_time or ear.garbage is not None, grace_s=grace_s)
    except KeyboardInterrupt:
        _end(process, at_once=True, grace_s=grace_s)
        return Failed("interrupted", "", int(Exit.INTERRUPTED), wedged=False)
    except BaseException:
        _end(process, at_once=True, grace_s=grace_s)
        raise
    if not gone:
        return _failed(f"wedged: SIGKILL did not end process {process.pid}", wedged=True)
    if not in_time:
        return _failed(f"no end within {limit_s:.0f} s; it was stopped", tail=ear.tail)
    return _judge(ear, process.returncode)


def _write(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    """Hand the worker its job, or an empty line: its last message is kept, and it can go on."""
    assert process.stdin
    with suppress(BrokenPipeError):  # it has died; its exit code shows why
        process.stdin.write(line + b"\n")
        process.stdin.flush()


@dataclass
class _Ear(Generic[T]):
    """Collects a worker's output: messages from its pipe, the last lines of anything else."""

    heard: Callable[[T], None]
    parse: Callable[[Json], T | Done | Failed]
    records: list[T] = field(default_factory=list)
    last: Done | Failed | None = None
    garbage: str | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    rest: bytes = b""
    kept: Callable[[], None] = lambda: None

    def said(self, data: bytes) -> None:
        """Bytes of the pipe, cut anywhere."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            self.garbage = "a line without an end"
        for line in lines:
            self._line(line)

    def muttered(self, data: bytes) -> None:
        """Bytes of its output, kept only to explain a failure."""
        self.tail.extend(line for line in data.decode(errors="replace").splitlines() if line.strip())

    def _line(self, line: bytes) -> None:
        if self.garbage is not None:
            return
        try:
            message = self.parse(load(line))
        except ValueError as error:
            self.garbage = f"{line[:80]!r} ({error})"
            return
        if isinstance(message, Done | Failed):
            self.last = message
        else:
            self.records.append(message)
            self.heard(message)
            self.kept()


def _listen(process: "subprocess.Popen[bytes]", pipe: int, *, ear: _Ear[T], until: float) -> bool:
    """Read everything until the pipe is closed at the other end or garbage comes; False when time is up."""
    assert process.stdout
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ, ear.said)
        selector.register(process.stdout, selectors.EVENT_READ, ear.muttered)
        while selector.get_map() and ear.garbage is None:
            ready = selector.select(max(until - time.monotonic(), 0))
            if not ready:
                return False
            for key, _ in ready:
                data = os.read(key.fd, READ_BYTES)
                if data:
                    key.data(data)
                else:
                    selector.unregister(key.fileobj)
    return True


def _end(process: "subprocess.Popen[bytes]", *, at_once: bool, grace_s: float) -> bool:
    """Wait for the process, with ever stronger signals; False when it is still there after SIGKILL.

    Its streams are closed; `with process` would wait for a wedged one forever.
    """
    steps = (process.terminate, process.kill)
    try:
        for step in steps if at_once else (lambda: None, *steps):
            step()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
                return True
        return False
    finally:
        for stream in filter(None, (process.stdin, process.stdout)):
            with suppress(BrokenPipeError):
                stream.close()


def _judge(ear: _Ear[T], code: int) -> Outcome:
    if ear.garbage is not None:
        return _failed(f"the worker wrote something unreadable: {ear.garbage}", tail=ear.tail)
    if ear.last is not None:
        return ear.last
    if code < 0:
        named = -code in list(signal.Signals)  # most real-time signals have no name
        name = signal.Signals(-code).name if named else f"signal {-code}"
        hint = "perhaps for memory: raise the container's limit, see dmesg" if -code == signal.SIGKILL else ""
        return _failed(f"the worker was killed by {name}", hint=hint, tail=ear.tail)
    return _failed(f"the worker exited with code {code} before it had finished", tail=ear.tail)


def _failed(reason: str, *, hint: str = "", tail: Sequence[str] = (), wedged: bool = False) -> Failed:
    words = "\n  ".join(part for part in (hint, *tail) if part)
    return Failed(reason, words, int(Exit.BROKEN), wedged=wedged)
