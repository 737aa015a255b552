"""The log: one JSON object a line, with the ids of the request that a line belongs to."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from service.web.tracing import CURRENT

_HELD_S = 0.5  # that a line waits at most for others


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON; `extra={"data": {...}}` adds keys."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": at, "level": record.levelname, "message": record.getMessage()}
        if trace := CURRENT.get():
            line |= trace.fields
        line |= getattr(record, "data", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Gathered(logging.StreamHandler[TextIO]):
    """Writes a line at once if none was written in the last half second, else soon, together with others.

    Whatever collects a container's log wakes at each write and takes a CPU from a pass, which needs all of
    them. Warnings are written at once, and so is everything where no event loop runs. Flush it at the end.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._now = now
        self._lines: list[str] = []
        self._written_s = -_HELD_S
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
        left_s = self._written_s + _HELD_S - self._now()
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
