"""What samples amount to, added up one by one in bounded memory. Pure.

A watch of hours adds up as one of seconds: curves keep at most MOST_STEPS steps, whose length doubles when
they are full, and errors of intervals are counted in a histogram.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from probes.core.unknown import Unknown
from probes.records.watch import (
    CARD_GAUGES,
    MACHINE_GAUGES,
    CardSample,
    CardWatch,
    Energy,
    Look,
    Pace,
    ProcessUse,
    Sample,
    Slowdown,
    Slowdowns,
    Track,
)

MOST_STEPS = 600
ERROR_STEP_S = 1e-4  # of the histogram: a tenth of the smallest bar
MOST_ERROR_STEPS = 10_000
MOST_PROCESSES = 256
COUNTER_LAG_S = 0.1  # how old an energy counter may be when it is read; NVML documents none
_NEVER = Unknown("it was never known")


@dataclass
class _Step:
    """Sum and number of the values within one step of a curve."""

    total: float = 0.0
    count: int = 0


class Curve:
    """One gauge over time."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._least, self._most = math.inf, -math.inf
        self._area, self._known_s = 0.0, 0.0
        self._why = ""

    def add(self, value: float | Unknown, span_s: float, step: int) -> None:
        """A value that is taken to have held for `span_s`, in the step with this number."""
        while len(self._steps) <= step:
            self._steps.append(_Step())
        if isinstance(value, Unknown):
            self._why = value.reason
            return
        self._least, self._most = min(self._least, value), max(self._most, value)
        self._area += value * span_s
        self._known_s += span_s
        self._steps[step].total += value
        self._steps[step].count += 1

    def halve(self) -> None:
        """Make one step of each two neighbours."""
        steps = self._steps + [_Step()] * (len(self._steps) % 2)
        pairs = zip(steps[::2], steps[1::2], strict=True)
        self._steps = [_Step(a.total + b.total, a.count + b.count) for a, b in pairs]

    def track(self, gauge: str) -> Track:
        """Return the summary: minimum, mean, maximum and curve."""
        known = self._most > -math.inf
        why = Unknown(self._why) if self._why else _NEVER
        mean = self._area / self._known_s if self._known_s else self._least
        return Track(
            gauge=gauge,
            known_s=self._known_s,
            least=self._least if known else why,
            mean=mean if known else why,
            most=self._most if known else why,
            curve=tuple(step.total / step.count if step.count else None for step in self._steps)
            if known
            else (),
        )


class EnergyTotal:
    """Energy from power by trapezoids, and from a card's own counter where it has one."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._joules = self._variance = self._covers_s = 0.0
        self._counter: tuple[float, float] | None = None  # when it was first read, and what it was then
        self._latest: tuple[float, float] | None = None
        self._broken = False
        self._why = "no power was ever known"

    def add(self, at_s: float, power: float | Unknown, counter: float | Unknown) -> None:
        """Power in W and the counter in J at one moment."""
        if isinstance(power, Unknown):
            self._why, self._last = power.reason, None
        else:
            if self._last:
                span_s, change = at_s - self._last[0], power - self._last[1]
                self._joules += (power + self._last[1]) / 2 * span_s
                self._covers_s += span_s
                # power may have changed anywhere between the two: uniform, so variance change^2 / 12
                self._variance += (change * span_s) ** 2 / 12
            self._last = (at_s, power)
        if not isinstance(counter, Unknown):
            self._broken |= self._latest is not None and counter < self._latest[1]
            self._counter = self._counter or (at_s, counter)
            self._latest = (at_s, counter)

    def goes_on(self) -> None:
        """Time that nobody watched follows, in which the counter goes on or begins anew."""
        self._last, self._broken = None, True

    def energy(self) -> Energy | Unknown:
        """The counter's figure where it ran from the first sample to the last, else the trapezoids'."""
        by_counter = self._by_counter()
        if by_counter and by_counter.covers_s >= self._covers_s:
            return by_counter
        if not self._covers_s:
            return by_counter or Unknown(self._why)
        source = "power between samples, by trapezoids"
        return Energy(self._joules, math.sqrt(self._variance), self._covers_s, source)

    def _by_counter(self) -> Energy | None:
        if self._counter is None or self._latest is None or self._broken:
            return None
        covers_s = self._latest[0] - self._counter[0]
        if covers_s <= 0:
            return None
        joules = self._latest[1] - self._counter[1]
        lag = joules / covers_s * COUNTER_LAG_S * math.sqrt(2 / 12)  # at both ends, uniform
        return Energy(joules, lag, covers_s, "the card's own counter")


class SlowdownTimes:
    """How long each reason for a slowdown was seen."""

    def __init__(self) -> None:
        self._known_s = self._any_s = 0.0
        self._seconds: dict[str, float] = {}
        self._why = _NEVER

    def add(self, reasons: tuple[str, ...] | Unknown, span_s: float) -> None:
        """The reasons at the end of a span, taken to have held all of it."""
        if isinstance(reasons, Unknown):
            self._why = reasons
            return
        self._known_s += span_s
        self._any_s += span_s if reasons else 0.0
        for reason in reasons:
            self._seconds[reason] = self._seconds.get(reason, 0.0) + span_s

    def shares(self) -> Slowdowns | Unknown:
        """Shares of the time for which the reasons were known."""
        if not self._known_s:
            return self._why
        ordered = sorted(self._seconds.items(), key=lambda item: -item[1])
        return Slowdowns(
            any_share=self._any_s / self._known_s,
            known_s=self._known_s,
            reasons=tuple(Slowdown(reason, seconds / self._known_s) for reason, seconds in ordered),
        )


class ProcessPeaks:
    """The most that each process held."""

    def __init__(self) -> None:
        self._most: dict[tuple[int, str], ProcessUse] = {}
        self._why: Unknown | None = None
        self._seen = False

    def add(self, uses: tuple[ProcessUse, ...] | Unknown) -> None:
        """The processes of one sample. Beyond MOST_PROCESSES, new ones aren't kept."""
        if isinstance(uses, Unknown):
            self._why = uses
            return
        self._seen = True
        for use in uses:
            key = (use.pid, use.name)
            old = self._most.get(key)
            if old or len(self._most) < MOST_PROCESSES:
                self._most[key] = _larger(old, use) if old else use

    def found(self) -> tuple[ProcessUse, ...] | Unknown:
        """All of them, the largest first."""
        if not self._seen and self._why:
            return self._why
        return tuple(sorted(self._most.values(), key=lambda use: -_or_zero(use.vram_bytes)))


def _larger(old: ProcessUse, new: ProcessUse) -> ProcessUse:
    return replace(
        new,
        vram_bytes=_most_of(old.vram_bytes, new.vram_bytes),
        gtt_bytes=_most_of(old.gtt_bytes, new.gtt_bytes),
        evicted_bytes=_most_of(old.evicted_bytes, new.evicted_bytes),
    )


def _most_of(old: int | Unknown, new: int | Unknown) -> int | Unknown:
    if isinstance(old, Unknown):
        return new
    return old if isinstance(new, Unknown) else max(old, new)


def _or_zero(figure: int | Unknown) -> int:
    return 0 if isinstance(figure, Unknown) else figure


class Intervals:
    """The errors of the intervals between samples, in a histogram."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._steps: Counter[int] = Counter()
        self._most_s = 0.0
        self._last: tuple[float, float] | None = None
        self.samples = self.skipped = 0

    def goes_on(self, interval_s: float) -> None:
        """Samples of another watch follow."""
        self._interval_s, self._last = interval_s, None

    def add(self, at_s: float, late_s: float | None) -> None:
        """A sample's time, and by how much it missed its deadline if it had one."""
        self.samples += 1
        if late_s is None:
            return
        last, self._last = self._last, (at_s, late_s)
        if last is None:
            return
        between_deadlines_s = (at_s - late_s) - (last[0] - last[1])
        self.skipped += max(round(between_deadlines_s / self._interval_s) - 1, 0)
        error_s = abs(late_s - last[1])
        self._most_s = max(self._most_s, error_s)
        self._steps[min(int(error_s / ERROR_STEP_S), MOST_ERROR_STEPS)] += 1

    def pace(self, own_cpu_share: float | Unknown) -> Pace:
        """Percentiles, each at the upper edge of its step of the histogram, so never too low."""
        some = bool(self._steps)
        none = Unknown("fewer than two samples")
        return Pace(
            samples=self.samples,
            skipped=self.skipped,
            error_p50_s=self._percentile(0.5) if some else none,
            error_p99_s=self._percentile(0.99) if some else none,
            error_most_s=self._most_s if some else none,
            own_cpu_share=own_cpu_share,
        )

    def _percentile(self, share: float) -> float:
        left = math.ceil(share * self._steps.total())
        for step in sorted(self._steps):
            left -= self._steps[step]
            if left <= 0:
                return min((step + 1) * ERROR_STEP_S, self._most_s)
        return self._most_s


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
        self.power, self._slow, self._holders = EnergyTotal(), SlowdownTimes(), ProcessPeaks()

    def add(self, sample: CardSample, at_s: float, span_s: float, step: int) -> None:
        look = sample.look
        self.curves.add(look, span_s, step)
        self.power.add(at_s, look.get("power_w"), look.get("energy_j"))
        self._slow.add(sample.slowdowns, span_s)
        self._holders.add(sample.processes)

    def watched(self) -> CardWatch:
        return CardWatch(
            tracks=self.curves.tracks(),
            energy=self.power.energy(),
            slowdowns=self._slow.shares(),
            saturation=(),
            processes=self._holders.found(),
        )


class WatchTotals:
    """Adds up the samples of a watch, or of several of the same cards, one after another."""

    def __init__(self, interval_s: float, cards: int) -> None:
        self._intervals = Intervals(interval_s)
        self._machine = _Curves(gauge.name for gauge in MACHINE_GAUGES)
        self._cards = [_Card() for _ in range(cards)]
        self._last_s: float | None = None
        self._begun_s = 0.0
        self.step_s = interval_s
        self.duration_s = 0.0

    def goes_on(self, interval_s: float) -> None:
        """Another watch's samples follow: its time begins where the last one's ended."""
        self._begun_s = self.duration_s
        self._intervals.goes_on(interval_s)
        for card in self._cards:
            card.power.goes_on()

    def add_all(self, samples: Iterable[Sample]) -> None:
        """Samples, in order of time."""
        for sample in samples:
            self.add(sample)

    def add(self, sample: Sample) -> None:
        """One sample, in order of time."""
        at_s = self._begun_s + sample.at_s
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
