"""The log: one JSON object a line, with the ids of the request that a line belongs to."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from traceback import walk_tb
from typing import TextIO

from service.api.tracing import CURRENT_TRACE

MAX_DELAY_S = 0.5  # that a line waits at most for others


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON; `extra={"data": {...}}` adds keys."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": at, "level": record.levelname, "message": record.getMessage()}
        if trace := CURRENT_TRACE.get():
            line |= trace.fields
        line |= getattr(record, "data", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class BufferedHandler(logging.StreamHandler[TextIO]):
    """Writes a line at once if none was written in the last half second, else soon, together with others.

    Whatever collects a container's log wakes at each write and takes a CPU from a pass, which needs all of
    them. Warnings are written at once, and so is everything where no event loop runs. Flush it at the end.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._now = now
        self._lines: list[str] = []
        self._written_s = -MAX_DELAY_S
        self._due = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record now or soon."""
        try:
            self._lines.append(self.format(record) + self.terminator)
            if record.levelno > logging.INFO or not self._due_soon():
                self.flush()
        except Exception:  # as logging's own handlers have it: a log doesn't end what it reports
            self.handleError(record)

    def flush(self) -> None:
        """Write all lines."""
        self.acquire()
        try:
            text = "".join(self._lines)
            self._lines.clear()
            if text:
                self._written_s = self._now()
                self.stream.write(text)
            super().flush()
        finally:
            self.release()

    def _due_soon(self) -> bool:
        """Whether the event loop will flush; it is asked to, unless it has been."""
        left_s = self._written_s + MAX_DELAY_S - self._now()
        if left_s <= 0:
            return False
        if not self._due:
            try:
                asyncio.get_running_loop().call_later(left_s, self._flush_on_time)
            except RuntimeError:  # no loop in this thread
                return False
            self._due = True
        return True

    def _flush_on_time(self) -> None:
        self._due = False
        with contextlib.suppress(OSError, ValueError):  # nobody reads the log any more: where to say it?
            self.flush()


PERIOD_S = 60.0
MAX_TEXTS = 8  # different texts of one place in a period


@dataclass
class _Period:
    """What one place in the code has logged since a time, and how often it wasn't let through."""

    since_s: float
    passed: set[str] = field(default_factory=set)
    left_out: int = 0


class RepeatFilter(logging.Filter):
    """Lets each warning and each traceback pass once in PERIOD_S, and at most MOST of one place in the code.

    So another fault, or the end of one, is seen as well. The first one after a period states how many were
    left out. There are only as many places as there is code. What is no warning, and errors without a
    traceback, always pass: no caller can repeat those.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._periods: dict[str, _Period] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record passes."""
        raised_at = _raised_at(record)
        if record.levelno < logging.WARNING or (record.levelno >= logging.ERROR and not raised_at):
            return True
        now, place, text = self._now(), raised_at or f"{record.pathname}:{record.lineno}", _text(record)
        period = self._periods.get(place)
        if period and now - period.since_s < PERIOD_S:
            if text in period.passed or len(period.passed) == MAX_TEXTS:
                period.left_out += 1
                return False
            period.passed.add(text)
            return True
        self._periods[place] = _Period(now, {text})
        if period and period.left_out:
            record.msg = (
                f"{record.msg} ({period.left_out} more like this in the {now - period.since_s:.0f} s before)"
            )
        return True


def _raised_at(record: logging.LogRecord) -> str:
    """What the record's exception is and where it was raised; empty without one."""
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    kind, _, traceback = record.exc_info
    lines = [f"{at.f_code.co_filename}:{line}" for at, line in walk_tb(traceback)]
    return f"{kind.__name__} {lines[-1] if lines else ''}"


def _text(record: logging.LogRecord) -> str:
    """What the record says, and its exception."""
    try:
        return f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
    except Exception:  # the wrong arguments, or an exception that can't be shown: the handler reports it
        return str(record.msg)
