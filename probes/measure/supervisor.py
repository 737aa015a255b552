"""The parent's side of a worker process: runs a job in it and survives any outcome (crash, garbage, hang).

`worker` is the child's side. What a job is, and how its messages are read, is said by who runs one.
"""

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

from probes.core.codec import Json, encode, load
from probes.core.errors import Exit
from probes.core.unknown import Unknown
from probes.records.schema import Done, Failed, Outcome

T = TypeVar("T")
R = TypeVar("R")
Command = Callable[[int], Sequence[str]]  # a worker's command line, by the descriptor that it writes to

GRACE_S = 5.0  # between SIGTERM and SIGKILL, and for SIGKILL to work
KEPT_LINES = 8  # of the output of the worker's libraries, enough to hold the cause
LONGEST_LINE = 64 * 2**20
READ_BYTES = 2**16


@dataclass(frozen=True)
class JobResult(Generic[T]):
    """How a job ended and everything it had sent by then."""

    outcome: Outcome
    records: tuple[T, ...]
    seconds: float

    def answer(self, kind: type[R], none: str) -> R | Unknown:
        """The first record of this kind. Unknown, as `none` says, without one; Ctrl-C goes on as that."""
        for record in self.records:
            if isinstance(record, kind):
                return record
        if not isinstance(self.outcome, Failed):
            return Unknown(none)
        if self.outcome.exit_code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        return Unknown(self.outcome.reason)


def run_job(
    job: object,
    parse: Callable[[Json], T | Done | Failed],
    *,
    limit_s: float,
    on_record: Callable[[T], None],
    command: Command,
    grace_s: float = GRACE_S,
    worker: "WorkerProcess | None" = None,
) -> JobResult[T]:
    """Run the job for at most `limit_s` in a fresh process, passing every record to `on_record` as it comes.

    `parse` makes a message of a line, or raises ValueError. `worker` was started ahead; else `command`
    starts one. Never raises for what the worker does. An interrupt ends the worker and is an outcome too.
    """
    began = time.monotonic()
    output = _Output(on_record, parse)
    chosen = worker or start(command)
    try:
        outcome = _watch(
            chosen.process, chosen.pipe, job=job, output=output, limit_s=limit_s, grace_s=grace_s
        )
    finally:
        os.close(chosen.pipe)
    return JobResult(outcome, tuple(output.records), time.monotonic() - began)


@dataclass(frozen=True)
class WorkerProcess:
    """A worker that was started and waits for its job."""

    process: "subprocess.Popen[bytes]"
    pipe: int  # where its messages are read


def start(command: Command) -> WorkerProcess:
    """A fresh worker. It imports torch at once, which takes seconds, and touches no GPU before its job."""
    reading, writing = os.pipe()
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command(writing), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, pass_fds=(writing,)
        )
        return WorkerProcess(process, reading)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)


@contextmanager
def idle_workers(count: int, command: Command) -> Iterator[list[WorkerProcess]]:
    """Workers started together, to be taken one by one; unused ones are ended."""
    workers = [start(command) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            _end(worker.process, at_once=True, grace_s=GRACE_S)
            os.close(worker.pipe)


def module_command(module: str) -> Command:
    """What makes the command line of a module's worker: this Python, importing from where this process does.

    `-m` would look into the current directory first, where a user may have a json.py or a folder probes.
    """

    def command(descriptor: int) -> list[str]:
        return [*module_words(module), str(descriptor), str(os.getpid())]

    return command


def module_words(module: str, *, first: str = "pass") -> list[str]:
    """What starts a module as a program, importing from where this process does; `first` runs before it."""
    program = f"runpy.run_module({module!r}, None, '__main__', 1)"
    start = f"import os, runpy, sys; sys.path[:] = {sys.path}; {first}; {program}"
    return [sys.executable, "-P", "-c", start]


def _watch(
    process: "subprocess.Popen[bytes]",
    pipe: int,
    *,
    job: object,
    output: "_Output[T]",
    limit_s: float,
    grace_s: float,
) -> Outcome:
    """Read all of the worker's messages, or stop it."""
    try:
        output.acknowledge = partial(_write, process, b"")
        _write(process, json.dumps(encode(job)).encode())
        in_time = _listen(process, pipe, output=output, until=time.monotonic() + limit_s)
        gone = _end(process, at_once=not in_time or output.garbage is not None, grace_s=grace_s)
    except KeyboardInterrupt:
        _end(process, at_once=True, grace_s=grace_s)
        return Failed("interrupted", "", int(Exit.INTERRUPTED), wedged=False)
    except BaseException:
        _end(process, at_once=True, grace_s=grace_s)
        raise
    if not gone:
        return _failed(f"wedged: SIGKILL did not end process {process.pid}", wedged=True)
    if not in_time:
        return _failed(f"no end within {limit_s:.0f} s; it was stopped", tail=output.tail)
    return _judge(output, process.returncode)


def _write(process: "subprocess.Popen[bytes]", line: bytes) -> None:
    """Hand the worker its job, or an empty line: its last message is kept, and it can go on."""
    assert process.stdin
    with suppress(BrokenPipeError):  # it has died; its exit code shows why
        process.stdin.write(line + b"\n")
        process.stdin.flush()


@dataclass
class _Output(Generic[T]):
    """A worker's output: messages from its pipe, the last lines of anything else."""

    on_record: Callable[[T], None]
    parse: Callable[[Json], T | Done | Failed]
    records: list[T] = field(default_factory=list)
    last: Done | Failed | None = None
    garbage: str | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    rest: bytes = b""
    acknowledge: Callable[[], None] = lambda: None

    def from_pipe(self, data: bytes) -> None:
        """Take bytes of the pipe, cut anywhere."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            self.garbage = "a line without an end"
        for line in lines:
            self._line(line)

    def from_stdout(self, data: bytes) -> None:
        """Take bytes of stdout or stderr, kept only to explain a failure."""
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
            self.on_record(message)
            self.acknowledge()


def _listen(process: "subprocess.Popen[bytes]", pipe: int, *, output: _Output[T], until: float) -> bool:
    """Read everything until the pipe is closed at the other end or garbage comes; False when time is up."""
    assert process.stdout
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ, output.from_pipe)
        selector.register(process.stdout, selectors.EVENT_READ, output.from_stdout)
        while selector.get_map() and output.garbage is None:
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


def _judge(output: _Output[T], code: int) -> Outcome:
    """The outcome of a worker that has ended with this exit code."""
    if output.garbage is not None:
        return _failed(f"the worker wrote something unreadable: {output.garbage}", tail=output.tail)
    if output.last is not None:
        return output.last
    if code < 0:
        named = -code in list(signal.Signals)  # most real-time signals have no name
        name = signal.Signals(-code).name if named else f"signal {-code}"
        hint = "perhaps for memory: raise the container's limit, see dmesg" if -code == signal.SIGKILL else ""
        return _failed(f"the worker was killed by {name}", hint=hint, tail=output.tail)
    return _failed(f"the worker exited with code {code} before it had finished", tail=output.tail)


def _failed(reason: str, *, hint: str = "", tail: Sequence[str] = (), wedged: bool = False) -> Failed:
    words = "\n  ".join(part for part in (hint, *tail) if part)
    return Failed(reason, words, int(Exit.BROKEN), wedged=wedged)
