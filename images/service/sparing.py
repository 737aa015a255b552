"""A log that callers can't flood: what they can repeat is logged a few times a minute, with a count."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from traceback import walk_tb

PERIOD_S = 60.0
MOST = 8  # different texts of one place in a period


@dataclass
class _Period:
    """What one place in the code has logged since a time, and how often it wasn't let through."""

    since_s: float
    passed: set[str] = field(default_factory=set)
    left_out: int = 0


class Sparing(logging.Filter):
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
            if text in period.passed or len(period.passed) == MOST:
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
