"""When to take samples: at whole multiples of the interval after the start, however long one takes. Pure."""

from dataclasses import dataclass


@dataclass
class Deadlines:
    """The next deadline on a clock that never goes back. One that has passed meanwhile is skipped."""

    start_s: float
    interval_s: float
    next: int = 0

    @property
    def at_s(self) -> float:
        """The next deadline."""
        return self.start_s + self.next * self.interval_s

    def taken(self, now_s: float) -> None:
        """A sample was finished: the next deadline is the first one after now."""
        passed = int((now_s - self.start_s) / self.interval_s)
        self.next = max(self.next, passed) + 1
