"""What every reader of a card offers, and rates from counters."""

from typing import Protocol

from probes.records.samples import CardSample, WatchedCard
from probes.shared.unknown import Unknown


class CardReader(Protocol):
    """One card, read again and again. A card that vanishes has unknown values from then on."""

    @property
    def card(self) -> WatchedCard:
        """Which card it is."""

    def sample(self, at_s: float, *, closing: bool = False) -> CardSample:
        """The card at this moment, on a clock that never goes back. `closing`: the last one of a watch."""


class Rate:
    """How fast a counter grows, between one reading and the next."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def of(self, counter: float | Unknown, at_s: float) -> float | Unknown:
        """Per second since the last reading."""
        if isinstance(counter, Unknown):
            self._last = None
            return counter
        last, self._last = self._last, (counter, at_s)
        if last is None or at_s <= last[1]:
            return Unknown("a rate needs two readings, and this is the first")
        if counter < last[0]:
            return Unknown("the counter began again")
        return (counter - last[0]) / (at_s - last[1])
