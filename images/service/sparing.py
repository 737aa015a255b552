"""A log that callers can't flood: their mistakes are logged once a minute, with a count."""

import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0


class Sparing(logging.Filter):
    """Lets a warning pass once in PERIOD_S, with any arguments; errors always pass.

    The next one states how many were left out. Texts are those of programs, so they are few.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._passed: dict[
            str, tuple[float, int]
        ] = {}  # when a text passed, and how often it hasn't since then

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record passes."""
        if record.levelno >= logging.ERROR:
            return True
        now, text = self._now(), str(record.msg)
        last_s, left_out = self._passed.get(text, (-PERIOD_S, 0))
        if now - last_s < PERIOD_S:
            self._passed[text] = (last_s, left_out + 1)
            return False
        self._passed[text] = (now, 0)
        if left_out:
            record.msg = f"{text} ({left_out} more like this in the {now - last_s:.0f} s before)"
        return True
