"""Does work in a fork of this process, which must have no other threads; its answer comes through a pipe."""

import json
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from probes.errors import ProbeError
from probes.fit.question import Built, Taken, Trial
from probes.records.schema import Failed
from probes.run.child import die_with
from probes.shared.codec import decode, encode, load
from probes.shared.unknown import Unknown

MOST_ANSWER: Final = 1 << 20  # bytes
MOST_WORDS: Final = 300  # characters of an error


@dataclass(frozen=True)
class Answer:
    """What a fork says, or why it can't."""

    trial: Trial | None = None
    taken: Taken | Unknown | None = None
    name: str = ""
    built: Built | None = None
    notes: tuple[str, ...] = ()
    refused: Failed | None = None
    failed: str = ""  # the class of an error that nothing here expects, and what it says


@dataclass(frozen=True)
class Fork:
    """How a fork ended: its answer, or its exit code (below 0: a signal); neither if it was out of time."""

    answer: Answer | None
    code: int | None


def forked(work: Callable[[], Answer], limit_s: float) -> Fork:
    """Do the work in a fork of this process, for at most so many seconds."""
    reading, writing = os.pipe()
    parent = os.getpid()
    text: bytes | None = None
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_fork(work, writing, parent)
    os.close(writing)
    try:
        text = _heard(reading, time.monotonic() + limit_s)
    finally:
        os.close(reading)
        if text is None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if text is None:
        return Fork(None, None)
    if not text:
        return Fork(None, os.waitstatus_to_exitcode(status))
    return Fork(decode(Answer, load(text), "answer"), None)


def _in_fork(work: Callable[[], Answer], writing: int, parent: int) -> None:
    code = 1
    try:
        die_with(parent)  # else an interrupted search would leave a trial behind, with its memory
        os.write(writing, _answered(work))
        code = 0
    finally:  # whatever happened: nothing of the parent's may run here
        os._exit(code)


def _answered(work: Callable[[], Answer]) -> bytes:
    """The answer as it is sent, of an error too."""
    try:
        return _sent(work())
    except ProbeError as error:
        return _sent(Answer(refused=Failed(error.message, error.hint, int(error.exit_code), wedged=False)))
    except Exception as error:  # of a library, or a fault of ours: the parent says it
        return _sent(Answer(failed=f"{type(error).__name__}: {str(error)[:MOST_WORDS]}"))


def _sent(answer: Answer) -> bytes:
    return json.dumps(encode(answer), allow_nan=False).encode()


def _heard(reading: int, until: float) -> bytes | None:
    """All that comes until the other end is closed; None when time is up."""
    text = b""
    while len(text) < MOST_ANSWER:
        ready, _, _ = select.select([reading], [], [], max(until - time.monotonic(), 0))
        if not ready:
            return None
        data = os.read(reading, 1 << 16)
        if not data:
            break
        text += data
    return text
