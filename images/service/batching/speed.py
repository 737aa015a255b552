"""How fast the device computes now, next to how fast it does while no request is refused. Values only."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from math import log2

_OLD = 0.8  # weight of what was known before in what is usual
_RECENT = 0.5  # and in the slowdown: it must be noticed within a few batches
_LEAST = 0.25  # of the places, however slow the device has become
_MOST_KINDS = 256  # of batches to remember; reloaded models bring new ones


@dataclass
class Speed:
    """Refusals, and whoever sends what is refused, take CPUs from the computing of what was admitted.

    So fewer requests are let in while some are refused: as many as take no longer than a full house
    takes otherwise. What is usual is learnt for each size of batch, in steps of the square root of 2: a
    token of a small batch takes longer.
    """

    slowdown: float = 1.0  # seconds of recent batches over the usual ones; 1 while nothing is refused
    _usual: dict[tuple[Hashable, int], float] = field(default_factory=dict)  # seconds of a token

    @property
    def room(self) -> float:
        """The share of all places that may be taken now."""
        return max(_LEAST, min(1.0, 1 / self.slowdown))

    def note(self, group: Hashable, tokens: int, seconds: float, *, refusing: bool) -> None:
        """A batch of so many tokens, padding included, was computed. `refusing`: some had no place."""
        key, now = (group, round(2 * log2(tokens))), seconds / tokens
        usual = self._usual.get(key)
        if refusing:
            if usual is not None:
                self.slowdown += (1 - _RECENT) * (now / usual - self.slowdown)
            return
        self.slowdown = 1.0
        if len(self._usual) >= _MOST_KINDS:
            self._usual.clear()
        self._usual[key] = now if usual is None else _OLD * usual + (1 - _OLD) * now
