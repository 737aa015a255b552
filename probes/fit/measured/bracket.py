"""Search for the largest size that fits when each try costs a process: few tries from a good guess. Pure."""

from collections.abc import Callable, Mapping
from typing import Final

from probes.fit.question import Axis, Largest

FAR: Final = 4  # the last try is at least this share (a quarter) beyond the largest size that fits

Try = Callable[[int], bool | None]  # whether a size fits; None: it isn't known, and the search ends


def search(fits: Try, guess: int, axis: Axis, *, most: int) -> Largest:
    """The largest size from 1 to `most` that fits, found from a guess.

    The search takes it that every size up to the largest fits and none beyond. It then tries one more size
    further on; a size that fits above one that doesn't is a contradiction, and is reported.
    """
    known: dict[int, bool] = {}

    def ask(size: int) -> bool | None:
        if size not in known:
            found = fits(size)
            if found is None:
                return None
            known[size] = found
        return known[size]

    ended = _narrow(ask, known, min(max(guess, 1), most), most)
    if ended and _low(known) < most:
        ask(min(_low(known) + max(_low(known) // FAR, 2), most))
    return summary(known, axis, most=most)


def _narrow(ask: Try, known: Mapping[int, bool], size: int, most: int) -> bool:
    """Ask until neighbours are known, of which one fits and one doesn't. False when an answer was missing."""
    step = 1
    while True:
        answer = ask(size)
        if answer is None:
            return False
        low, high = _low(known), _high(known)
        if high is not None and high - low == 1:
            return True
        if low == most:
            return True
        if high is None:  # nothing failed yet: further and further up
            size, step = min(low + step, most), 2 * step
        elif low == 0:  # nothing fits yet: down
            size, step = max(high - step, 1), 2 * step
        else:
            size = (low + high) // 2


def _high(known: Mapping[int, bool]) -> int | None:
    """The smallest size that failed."""
    return min((size for size, fits in known.items() if not fits), default=None)


def _low(known: Mapping[int, bool]) -> int:
    """The largest size that fits below every one that failed; 0 where there is none."""
    high = _high(known)
    return max((size for size, fits in known.items() if fits and (high is None or size < high)), default=0)


def summary(known: Mapping[int, bool], axis: Axis, *, most: int) -> Largest:
    """What a set of answers says."""
    low, high = _low(known), _high(known)
    exact = (high is not None and high - low == 1) or (high is None and low == most)
    found = [(bad, good) for bad in known for good in known if bad < good and known[good] and not known[bad]]
    return Largest(axis, low, high, exact=exact, contradictions=tuple(sorted(found)))
