"""Straight lines through the peaks of trials, one for each phase of a step: what other sizes take. Pure.

What a phase takes at its peak is close to a straight line over the size; that of a whole step is the highest
of those, which is none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MOST: Final = 10**9  # of a size: where a line rises by next to nothing


@dataclass(frozen=True)
class Line:
    """Bytes at size 0, and for each step of the size."""

    start: float
    rise: float

    def at(self, size: int) -> float:
        """Bytes at a size."""
        return self.start + self.rise * size

    def last(self, budget: int) -> int:
        """The largest size at which it is within a budget; 0 where there is none."""
        if self.rise <= 0:
            return MOST if self.start <= budget else 0
        return max(min(int((budget - self.start) // self.rise), MOST), 0)


def through(low: int, low_peaks: Sequence[int], high: int, high_peaks: Sequence[int]) -> tuple[Line, ...]:
    """The lines through the peaks at two sizes, phase by phase. None falls."""
    return tuple(_line(low, before, high, after) for before, after in zip(low_peaks, high_peaks, strict=True))


def _line(low: int, before: int, high: int, after: int) -> Line:
    rise = max((after - before) / (high - low), 0.0)
    return Line(after - rise * high, rise)


def last(lines: Sequence[Line], budget: int) -> int:
    """The largest size at which every phase is within a budget."""
    return min(line.last(budget) for line in lines)


def highest(lines: Sequence[Line], size: int) -> int:
    """Bytes that a size takes."""
    return round(max(line.at(size) for line in lines))
