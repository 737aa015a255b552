"""What follows from measured levels: throughput, percentiles, goodput, knee, the rate within an SLO. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes.records.stats import deviation
from probes.shared.unknown import Unknown
from probes.throughput.served.orderstats import PERCENTILES, Percentile, percentile
from probes.throughput.served.servedscan import Level, ServedScan

# Half-width of an interval that covers two times in three, in standard errors, by Student's t: k windows have
# k - 1 degrees of freedom.
STUDENT = {2: 1.84, 3: 1.32, 4: 1.20, 5: 1.14, 6: 1.11}
Z = 1.96  # of a normal distribution, for 95 %
GROWTH = 0.05  # less than this over half as many callers is none
NO_ANSWERS = Unknown("no good answer")


@dataclass(frozen=True)
class PerSecond:
    """A rate and its standard error, from the scatter of windows; the error is unknown for one window."""

    value: float
    error: float | None


@dataclass(frozen=True)
class Goodput:
    """Good answers within the SLO, a second; and their share of all requests, with a 95 % interval."""

    per_s: float
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class ServedKnee:
    """From how many callers on requests wait for each other: the best throughput times a lone latency."""

    callers: float
    error: float | None


def counted_windows(level: Level) -> int:
    """How many of the last windows are those that count."""
    left, count = level.seconds, 0
    for window in reversed(level.windows):
        if left <= window.seconds / 2:
            break
        left -= window.seconds
        count += 1
    return count


def throughput(level: Level) -> PerSecond:
    """Good answers a second."""
    windows = level.windows[len(level.windows) - counted_windows(level) :]
    apart = deviation([window.answered / window.seconds for window in windows])
    factor = STUDENT.get(len(windows), 1.0)
    error = None if apart is None else factor * apart / math.sqrt(len(windows))
    return PerSecond(level.answered / level.seconds, error)


def latencies(level: Level) -> tuple[Percentile, ...] | Unknown:
    """p50, p90 and p99 of good answers: in an open loop from when they were due."""
    return _percentiles(level.latency_s)


def naive_latencies(level: Level) -> tuple[Percentile, ...] | Unknown:
    """The same from when they were sent, which leaves out the wait of requests that couldn't be sent."""
    return _percentiles(since_sent(level))


def since_sent(level: Level) -> tuple[float, ...]:
    """Latencies from the moment of sending, seconds."""
    if level.loop == "closed":
        return level.latency_s
    return tuple(whole - wait for whole, wait in zip(level.latency_s, level.waited_s, strict=True))


def _percentiles(samples: Sequence[float]) -> tuple[Percentile, ...] | Unknown:
    return tuple(percentile(samples, share) for share in PERCENTILES) if samples else NO_ANSWERS


def goodput(level: Level, slo_s: float) -> Goodput:
    """Answers within the SLO. What was refused or failed is not within it."""
    within = sum(latency <= slo_s for latency in level.latency_s)
    share, low, high = wilson(within, level.asked)
    return Goodput(within / level.seconds, share, low, high)


def wilson(hits: int, tries: int) -> tuple[float, float, float]:
    """A share and its 95 % interval by E. B. Wilson's score (1927), which holds near 0 and 1 as well."""
    if not tries:
        return 0.0, 0.0, 1.0
    share, z2 = hits / tries, Z * Z / tries
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / tries + z2 / tries / 4) / (1 + z2)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def best(levels: Sequence[Level]) -> Level | None:
    """The level of the highest throughput; None where nothing was answered."""
    answered = [level for level in levels if level.answered]
    return max(answered, key=lambda level: level.answered / level.seconds, default=None)


def knee(levels: Sequence[Level]) -> ServedKnee | Unknown:
    """Where the two limits of a closed loop cross: N callers get at most N / R(1), and at most the best.

    (P. J. Denning, J. P. Buzen, The Operational Analysis of Queueing Network Models, 1978: N* = X_max R_1.)
    """
    fastest, alone = best(levels), next((level for level in levels if level.callers == 1), None)
    if fastest is None or alone is None or not alone.answered:
        return Unknown("no answered level of one caller")
    if fastest.callers == max(level.callers for level in levels) and fastest is not alone:
        doubled = [level for level in levels if level.callers == fastest.callers // 2]
        if doubled and throughput(fastest).value > (1 + GROWTH) * throughput(doubled[0]).value:
            return Unknown(f"throughput still grows at {fastest.callers} callers")
    top, one = throughput(fastest), throughput(alone)
    callers = top.value / one.value
    error = None
    if top.error is not None and one.error is not None:
        error = callers * math.hypot(top.error / top.value, one.error / one.value)
    return ServedKnee(callers, error)


def within_slo(served: ServedScan) -> Level | Unknown:
    """The open-loop level of the highest rate whose p99, at its interval's upper end, is within the SLO."""
    slo_s = served.settings.slo_s
    if slo_s is None:
        return Unknown("no SLO was given: --slo-ms")
    fits = [level for level in served.of("open") if _holds(level, slo_s)]
    return max(fits, key=lambda level: level.rate_per_s or 0.0, default=Unknown("at no rate that was tried"))


def _holds(level: Level, slo_s: float) -> bool:
    found = latencies(level)
    if isinstance(found, Unknown) or level.refused or level.failed:
        return False
    high = found[-1].high
    return isinstance(high, float) and high <= slo_s
