"""What samples amount to, added up one by one in bounded memory. Pure.

A watch of hours adds up as one of seconds: curves keep at most MOST_STEPS steps, whose length doubles when
they are full, and errors of intervals are counted in a histogram.
"""

from collections.abc import Iterable

from probes.records.samples import CARD_GAUGES, MACHINE_GAUGES, CardSample, Look, Sample
from probes.records.watched import CardWatch, Pace, Track
from probes.shared.unknown import Unknown
from probes.watch.tallies.totals import MOST_STEPS, Curve, Holders, Intervals, PowerArea, SlowTime


class _Curves:
    """The curves of all gauges of one place."""

    def __init__(self, gauges: Iterable[str]) -> None:
        self.curves = {name: Curve() for name in gauges}

    def add(self, look: Look, span_s: float, step: int) -> None:
        for name, curve in self.curves.items():
            curve.add(look.get(name), span_s, step)

    def tracks(self) -> tuple[Track, ...]:
        return tuple(curve.track(name) for name, curve in self.curves.items() if name != "energy_j")


class _Card:
    """What one card's samples amount to."""

    def __init__(self) -> None:
        self.curves = _Curves(gauge.name for gauge in CARD_GAUGES)
        self._power, self._slow, self._holders = PowerArea(), SlowTime(), Holders()

    def add(self, sample: CardSample, at_s: float, span_s: float, step: int) -> None:
        look = sample.look
        self.curves.add(look, span_s, step)
        self._power.add(at_s, look.get("power_w"), look.get("energy_j"))
        self._slow.add(sample.slowdowns, span_s)
        self._holders.add(sample.processes)

    def watched(self) -> CardWatch:
        return CardWatch(
            tracks=self.curves.tracks(),
            energy=self._power.energy(),
            slowdowns=self._slow.shares(),
            saturation=(),
            processes=self._holders.found(),
        )


class Tally:
    """Adds up the samples of one watch."""

    def __init__(self, interval_s: float, cards: int) -> None:
        self._intervals = Intervals(interval_s)
        self._machine = _Curves(gauge.name for gauge in MACHINE_GAUGES)
        self._cards = [_Card() for _ in range(cards)]
        self._last_s: float | None = None
        self.step_s = interval_s
        self.duration_s = 0.0

    def add(self, sample: Sample) -> None:
        """One sample, in order of time."""
        at_s = sample.at_s
        span_s = 0.0 if self._last_s is None else max(at_s - self._last_s, 0.0)
        self._last_s = self.duration_s = at_s
        while at_s >= MOST_STEPS * self.step_s:
            self._halve()
        step = int(at_s / self.step_s)
        self._intervals.add(at_s, sample.late_s)
        self._machine.add(sample.machine, span_s, step)
        for card, found in zip(self._cards, sample.cards, strict=False):
            card.add(found, at_s, span_s, step)

    def _halve(self) -> None:
        self.step_s *= 2
        for place in (self._machine, *(card.curves for card in self._cards)):
            for curve in place.curves.values():
                curve.halve()

    def pace(self, own_cpu_share: float | Unknown) -> Pace:
        """How well the samples kept their times."""
        return self._intervals.pace(own_cpu_share)

    def machine(self) -> tuple[Track, ...]:
        """The machine's gauges."""
        return self._machine.tracks()

    def cards(self) -> tuple[CardWatch, ...]:
        """The cards."""
        return tuple(card.watched() for card in self._cards)
