"""The log: JSON lines with the ids of their request (`JsonFormatter`), written in groups (`BufferedHandler`),
without repetitions (`RepeatFilter`).
"""

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

MAX_DELAY_S = 0.5  # of a line that waits for others
PERIOD_S = 60.0  # in which a repeated warning passes once
MAX_TEXTS = 8  # different texts of one place in the code that pass in a period


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON; `extra={"data": {...}}` adds keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its newline."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": at, "level": record.levelname, "message": record.getMessage()}
        if trace := CURRENT_TRACE.get():
            line |= trace.fields
        line |= getattr(record, "data", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class BufferedHandler(logging.StreamHandler[TextIO]):
    """Writes a line at once if none was written in the last MAX_DELAY_S, else with others after that time.

    Whatever collects a container's log wakes at each write, and takes a CPU from the model, which needs all
    of them. Warnings are written at once, and so is every line where no event loop runs. Flush it at the end.
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
            if record.levelno > logging.INFO or not self._schedule_flush():
                self.flush()
        except Exception:  # as in logging's own handlers: logging must not raise
            self.handleError(record)

    def flush(self) -> None:
        """Write all buffered lines."""
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

    def _schedule_flush(self) -> bool:
        """Have the event loop flush soon. Return False if the line is to be written now."""
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
        with contextlib.suppress(OSError, ValueError):  # nobody reads the log any more
            self.flush()


@dataclass
class _Period:
    """The texts of one place in the code that have passed since a time, and how many records were dropped."""

    since_s: float
    passed: set[str] = field(default_factory=set)
    dropped: int = 0


class RepeatFilter(logging.Filter):
    """Drops repeated warnings and tracebacks, so that callers can't fill the log.

    Each text passes once in PERIOD_S, and at most MAX_TEXTS of one place in the code; the first record after
    a period says how many were dropped. So another fault, or the end of one, is logged as well. Memory is
    bounded: there are only as many places as there is code. Records below WARNING, and errors without a
    traceback, always pass: no caller can cause those.
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
                period.dropped += 1
                return False
            period.passed.add(text)
            return True
        self._periods[place] = _Period(now, {text})
        if period and period.dropped:
            record.msg = (
                f"{record.msg} ({period.dropped} more like this in the {now - period.since_s:.0f} s before)"
            )
        return True


def _raised_at(record: logging.LogRecord) -> str:
    """Return the record's exception and where it was raised, or an empty string."""
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    kind, _, traceback = record.exc_info
    lines = [f"{at.f_code.co_filename}:{line}" for at, line in walk_tb(traceback)]
    return f"{kind.__name__} {lines[-1] if lines else ''}"


def _text(record: logging.LogRecord) -> str:
    """Return the record's message and its exception."""
    try:
        return f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}"
    except Exception:  # wrong arguments, or an exception without a text: the handler reports it
        return str(record.msg)
