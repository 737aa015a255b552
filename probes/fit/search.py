"""Search for the largest size that fits when each try costs a process: few tries along a measured line. Pure.

What each phase of a step takes is close to a straight line over the size, so tries that fit say where the
limit is: by their peaks, and the rise for each step of the size, predicted until two tries have measured it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Final

from probes.fit.report import Axis, Largest

FAR: Final = 4  # one more try is at least this share (a quarter) beyond the largest size that fits
TIMES: Final = 3  # tries at each side of the edge: one that moves in half of them shows in 2 of 3 searches
BELOW: Final = (256, 64)  # and, where steps are small, tries are these shares below it
SMALL_STEPS: Final = 100  # from this size on
MOST_CONTRADICTIONS: Final = 3  # then the edge is known to be none, and the search goes no further
APART: Final = 10  # two sizes measure a rise if they are at least this share (a tenth) apart
TRUSTED: Final = 3  # tries between two bounds by the line, before they are halved
DOWN: Final = (16, 2)  # first guess too large: a sixteenth less, then half, then 1


# ---- lines through measured peaks ----------------------------------------------------------------------

LARGEST_ON_LINE: Final = 10**9  # of a size: where a line rises by next to nothing


@dataclass(frozen=True)
class Line:
    """Bytes at size 0, and for each step of the size."""

    start: float
    rise: float

    def at(self, size: int) -> float:
        """Return the bytes that a size needs."""
        return self.start + self.rise * size

    def last(self, budget: int) -> int:
        """The largest size at which it is within a budget; 0 where there is none."""
        if self.rise <= 0:
            return LARGEST_ON_LINE if self.start <= budget else 0
        return max(min(int((budget - self.start) // self.rise), LARGEST_ON_LINE), 0)


def lines_through(
    low: int, low_peaks: Sequence[int], high: int, high_peaks: Sequence[int]
) -> tuple[Line, ...]:
    """The lines through the peaks at two sizes, phase by phase. None falls."""
    return tuple(_line(low, before, high, after) for before, after in zip(low_peaks, high_peaks, strict=True))


def _line(low: int, before: int, high: int, after: int) -> Line:
    rise = max((after - before) / (high - low), 0.0)
    return Line(after - rise * high, rise)


def largest_on_lines(lines: Sequence[Line], budget: int) -> int:
    """The largest size at which every phase is within a budget."""
    return min(line.last(budget) for line in lines)


def peak_on_lines(lines: Sequence[Line], size: int) -> int:
    """Bytes that a size takes."""
    return round(max(line.at(size) for line in lines))


# ---- the search ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """Whether a size fits, and the bytes that each phase took at its peak if that is known."""

    fits: bool
    peaks: tuple[int, ...] = ()


Try = Callable[[int], Tried | None]  # None: it isn't known, and the search ends


@dataclass(frozen=True)
class Hint:
    """What was predicted. `guess` is None where nothing was; the first two sizes are tried then."""

    guess: int | None = None
    rise: int | None = None  # bytes that each further step of the size takes


def search(fits: Try, hint: Hint, axis: Axis, *, most: int, budget: int) -> Largest:
    """The largest size from 1 to `most` that fits.

    Assumes that fit is monotonic in size, and then checks it: at a size further on, twice more at both sides
    of the edge, and where steps are small at some sizes below. A size that fits at or above one that fails is
    a contradiction: the answer is then the largest size below which nothing failed, and isn't exact.
    """
    tries: list[tuple[int, Tried]] = []
    while True:
        known = _known(tries)
        size = _next(known, hint, most=most, budget=budget)
        size = _doubtful(tries, known, most) if size is None else size
        tried = None if size is None else fits(size)
        if size is None or tried is None:
            return summary([(size, tried.fits) for size, tried in tries], axis, most=most)
        tries.append((size, tried))


def _known(tries: Sequence[tuple[int, Tried]]) -> dict[int, Tried]:
    """Each size as it was first tried; one that failed once doesn't fit."""
    failed = {size for size, tried in tries if not tried.fits}
    return {size: Tried(False) if size in failed else tried for size, tried in reversed(tries)}


def _doubtful(tries: Sequence[tuple[int, Tried]], known: Mapping[int, Tried], most: int) -> int | None:
    """The next size that may contradict the edge which was found; None where enough were tried."""
    low, times = _low(known), Counter(size for size, _ in tries)
    if low == most or len(_contradictions([(s, t.fits) for s, t in tries])) >= MOST_CONTRADICTIONS:
        return None
    below = [low - 1, *(low - low // share for share in BELOW)] if low >= SMALL_STEPS else []
    further = min(low + max(low // FAR, 2), most)
    wanted = [
        (further, 1),
        *((side, n) for n in range(2, TIMES + 1) for side in (low, low + 1)),
        *((size, 1) for size in below),
    ]
    return next((size for size, often in wanted if size and times[size] < often), None)


def _next(known: Mapping[int, Tried], hint: Hint, *, most: int, budget: int) -> int | None:
    """The size to try next; None when neighbours are known, of which one fits and one doesn't."""
    low, high = _low(known), _high(known)
    if low == most or high == low + 1:
        return None
    if not low:
        return _first(known, hint, most, high)
    line = _along(known, hint, budget)
    if high is None:
        upwards = sum(1 for size in known if size <= low)
        ahead = low + 2 ** (upwards - 1) if line is None or upwards > TRUSTED else line
        if hint.guess is None and low == 1:
            ahead = 2
        return min(max(ahead, low + 1), most)
    if line is not None and line >= high > 2 * low:  # what it takes isn't a straight line this far
        return isqrt(low * high)
    between = sum(1 for size in known if size != 1) - 1
    if line is None or between > TRUSTED:
        return (low + high) // 2
    return min(max(line, low + 1), high - 1)


def _first(known: Mapping[int, Tried], hint: Hint, most: int, high: int | None) -> int:
    """Where nothing fits yet: the guess, a little less, half of it, 1."""
    if high is None:
        return min(max(hint.guess or 1, 1), most)
    share = DOWN[len(known) - 1] if len(known) <= len(DOWN) else high
    return max(high - max(high // share, 1), 1) if share != high else 1


def _along(known: Mapping[int, Tried], hint: Hint, budget: int) -> int | None:
    """The largest size by lines through what fits; None where nothing says how steep they are."""
    low = _low(known)
    peaks = {size: t.peaks for size, t in known.items() if t.fits and size <= low and t.peaks}
    if low not in peaks:
        return None
    below = [size for size in peaks if size <= low - max(low // APART, 1)]
    if below and len(peaks[max(below)]) == len(peaks[low]):
        return largest_on_lines(lines_through(max(below), peaks[max(below)], low, peaks[low]), budget)
    return low + (budget - max(peaks[low])) // hint.rise if hint.rise else None


def _high(known: Mapping[int, Tried]) -> int | None:
    """The smallest size that failed."""
    return min((size for size, tried in known.items() if not tried.fits), default=None)


def _low(known: Mapping[int, Tried]) -> int:
    """The largest size that fits below every one that failed; 0 where there is none."""
    high = _high(known)
    return max((s for s, tried in known.items() if tried.fits and (high is None or s < high)), default=0)


def summary(tries: Sequence[tuple[int, bool]], axis: Axis, *, most: int) -> Largest:
    """The result of a set of tries: each size that was tried, and whether it fitted."""
    known = _known([(size, Tried(fits)) for size, fits in tries])
    low, high, contradictory = _low(known), _high(known), _contradictions(tries)
    edge = (high is not None and high - low == 1) or (high is None and low == most)
    return Largest(axis, low, high, exact=edge and not contradictory, contradictions=contradictory)


def _contradictions(tries: Sequence[tuple[int, bool]]) -> tuple[tuple[int, int], ...]:
    """Sizes that failed, each with one as large or larger that fitted."""
    bad, good = ({size for size, fits in tries if fits is which} for which in (False, True))
    return tuple(sorted((b, g) for b in bad for g in good if b <= g))
