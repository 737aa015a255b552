"""What a served scan keeps: its settings, and of each level every request in the windows that count.

Derived figures aren't stored, except for the answer: percentiles, throughput, goodput and the knee are
functions here, as is which level is measured next.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probes.core.unknown import Unknown
from probes.records.stats import deviation, effective_n, quantile

Loop = Literal["closed", "open"]


OLDER = Unknown("the report is older than this figure")


@dataclass(frozen=True)
class ServedSettings:
    """What the served half was asked for. Rates are requests a second; none: shares of what was reached."""

    rows: int  # inputs of one request
    slo_s: float | None  # goodput counts answers within it
    window_s: float
    windows: int  # that must agree
    most_windows: int
    tolerance: float  # relative
    limit_s: float  # for one answer
    most_callers: int  # of the closed loop
    most_connections: int  # of the open loop
    keep_alive: bool
    rates_per_s: tuple[float, ...]
    seed: int


@dataclass(frozen=True)
class ServedBy:
    """Which server and model answered, by their own account."""

    url: str
    model: str
    server: str
    platform: str
    request: str  # what was sent, in words
    request_bytes: int
    facts: tuple[tuple[str, ...], ...] = ()  # name and value of what the model says of itself
    same_machine: bool | Unknown = OLDER  # whether its address is one of the client's machine


@dataclass(frozen=True)
class Window:
    """One window of a level, also of those that don't count."""

    seconds: float
    arrived: int  # due in it
    answered: int  # good answers that came in it
    median_s: float | None  # of those answers; None without any


@dataclass(frozen=True)
class Count:
    """How many requests ended in one way."""

    what: str
    requests: int


@dataclass(frozen=True)
class ClientSide:
    """What the client itself cost. `late_s` are the middle and 99 % of its delays in sending, seconds.

    `queued`: requests of an open loop that waited because all connections were busy; that is the server's
    doing, and counts as latency.
    """

    busy_share: float  # of the time, the client's event loop
    late_median_s: float
    late_p99_s: float
    queued: int
    bound_by: str  # why the client may have limited this level; empty where it didn't


@dataclass(frozen=True)
class ProgramUse:
    """The processor time of all processes of one name, in processors: 1.5 is one and a half at all times."""

    name: str
    cpus: float


@dataclass(frozen=True)
class Conditions:
    """Who used the processors of the client's machine during a level, each on average, in processors.

    `other_cpus`: programs that are neither the client nor the server. Interrupts belong to no program, and
    aren't in it. `server_cpus`: by its /metrics, which may be on another machine, or by its processes here.
    """

    tag: ClassVar[str] = "conditions"
    cpus: int  # that the machine has
    used_cpus: float  # by all programs together
    client_cpus: float
    server_cpus: float | Unknown
    server_by: str  # where that is from; empty where it is unknown
    other_cpus: float | Unknown
    stolen_cpus: float  # that a hypervisor gave to other machines
    others: tuple[
        ProgramUse, ...
    ]  # which used the most, three at most; those that ended meanwhile are missing


@dataclass(frozen=True)
class Level:
    """One concurrency (closed loop) or rate (open loop), measured until windows agree.

    The three lists belong together, one entry for each good answer in order of time. Closed loop: answers
    that came in the windows that count, latency from sending; `waited_s` is empty. Open loop: requests due
    in them, latency from when they were due; less `waited_s` it is from when they were sent.
    """

    loop: Loop
    callers: int  # closed: who ask; open: connections at most
    rate_per_s: float | None  # asked for; None in a closed loop
    seconds: float  # of the windows that count
    answered: int  # good answers that came in them
    due_s: tuple[float, ...]  # from the begin of the windows that count
    waited_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    refused: int  # 429, due in them
    refused_median_s: float | None
    failed: tuple[Count, ...]  # any other end, by what it was
    windows: tuple[Window, ...]
    unstable: str  # why no windows agreed; empty where they did
    client: ClientSide
    conditions: Conditions | Unknown = OLDER

    @property
    def asked(self) -> int:
        """Requests of the windows that count, however they ended."""
        return len(self.latency_s) + self.refused + sum(one.requests for one in self.failed)


Answer = Literal["yes", "no", "can't tell"]


@dataclass(frozen=True)
class Verdict:
    """The answer, by `saturation.judge`. `callers`: from how many on, or up to how many not."""

    answer: Answer
    sentence: str
    callers: int | None


@dataclass(frozen=True)
class ServedScan:
    """The served half of a scan. `ended` says why there are no more levels.

    `saturated` is there for those who read the file; Weir itself judges the levels again.
    """

    tag: ClassVar[str] = "served"
    by: ServedBy
    settings: ServedSettings
    levels: tuple[Level, ...]
    ended: str
    complete: bool = True  # false: interrupted, or the server went away
    saturated: Verdict | None = None  # null: the scan didn't end, or the report is older

    def of(self, loop: Loop) -> tuple[Level, ...]:
        """The levels of one loop."""
        return tuple(level for level in self.levels if level.loop == loop)


CONFIDENCE = 0.95
PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Percentile:
    """A quantile and its interval; an end that the sample is too small for is unknown."""

    share: float
    value: float
    low: float | Unknown
    high: float | Unknown


def percentile(samples: Sequence[float], share: float) -> Percentile:
    """The quantile of samples in order of time. Raises ValueError for none."""
    ordered = sorted(samples)
    n = max(1, math.floor(effective_n(samples)))
    low, high = ranks(n, share)
    few = Unknown(f"too few samples: as many as {n} independent ones")
    scale = len(ordered) / n
    return Percentile(
        share,
        quantile(ordered, share),
        few if low < 1 else ordered[max(0, math.floor((low - 1) * scale))],
        few if high > n else ordered[min(len(ordered), math.ceil(high * scale)) - 1],
    )


def ranks(n: int, share: float, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """The 1-based ranks of n sorted samples that enclose a quantile; 0 and n + 1 are beyond the sample.

    Each side misses with at most half of what is left of the confidence.
    """
    tail = (1 - confidence) / 2
    low = _most_below(n, share, tail)
    return low, n + 1 - _most_below(n, 1 - share, tail)


def _most_below(n: int, share: float, tail: float) -> int:
    """The largest rank k such that fewer than k of n are below with probability <= tail; 0: none."""
    rank, total = 0, 0.0
    start = max(0, math.floor(n * share - 12 * math.sqrt(n * share * (1 - share)) - 12))
    for count in range(start, n + 1):
        total += _binomial(n, count, share)
        if total > tail:
            break
        rank = count + 1
    return rank


def _binomial(n: int, count: int, share: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    return math.exp(ways + count * math.log(share) + (n - count) * math.log1p(-share))


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
    """Return the good answers a second."""
    windows = level.windows[len(level.windows) - counted_windows(level) :]
    apart = deviation([window.answered / window.seconds for window in windows])
    factor = STUDENT.get(len(windows), 1.0)
    error = None if apart is None else factor * apart / math.sqrt(len(windows))
    return PerSecond(level.answered / level.seconds, error)


def latencies(level: Level) -> tuple[Percentile, ...] | Unknown:
    """p50, p90 and p99 of good answers: in an open loop from when they were due."""
    return _percentiles(level.latency_s)


def naive_latencies(level: Level) -> tuple[Percentile, ...] | Unknown:
    """p50, p90 and p99 from sending, which leaves out the wait of requests for a connection."""
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


SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)  # of the best closed-loop throughput
FLAT = 2  # levels in a row without growth
KEPT_UP = 0.9  # of the arrivals answered while they came: below it the queue grows without end
UNDER_WAY = 3  # requests that a server which keeps up may have at a level's end, however few arrived


def next_callers(levels: Sequence[Level], settings: ServedSettings) -> tuple[int | None, str]:
    """How many callers ask next: twice as many; None with the reason once throughput doesn't grow."""
    if not levels:
        return 1, ""
    last = levels[-1]
    if not last.answered:
        return None, f"with {last.callers} calling at once no answer was good: {bad_ends(last)}"
    if _flat(levels) >= FLAT:
        return None, f"more callers than {_best_callers(levels)} don't raise throughput"
    if 2 * last.callers > settings.most_callers:
        return None, f"more callers than {settings.most_callers} weren't asked for"
    return 2 * last.callers, ""


def _best_callers(levels: Sequence[Level]) -> int:
    found = best(levels[: len(levels) - FLAT])
    return found.callers if found else 0


def _flat(levels: Sequence[Level]) -> int:
    """How many of the last levels in a row are no faster than one before them."""
    top, flat = 0.0, 0
    for level in levels:
        speed = throughput(level).value
        flat = 0 if speed > (1 + GROWTH) * top else flat + 1
        top = max(top, speed)
    return flat


def open_rates(closed: Sequence[Level], settings: ServedSettings) -> tuple[float, ...]:
    """The rates of the open loop, rising: those asked for, else shares of the best throughput."""
    if settings.rates_per_s:
        return tuple(sorted(settings.rates_per_s))
    fastest = best(closed)
    return () if fastest is None else tuple(share * throughput(fastest).value for share in SHARES)


def saturated(level: Level) -> str:
    """Why a higher rate would say nothing more; empty where it would."""
    arrived = sum(window.arrived for window in level.windows) or 1
    answered = sum(window.answered for window in level.windows)
    if not level.latency_s:
        return f"at {level.rate_per_s:.4g}/s no answer was good: {bad_ends(level)}"
    if arrived - answered > max((1 - KEPT_UP) * arrived, UNDER_WAY):
        return f"at {level.rate_per_s:.4g}/s the server answered {answered / arrived:.0%} of what arrived"
    return ""


def bad_ends(level: Level) -> str:
    """How requests ended that weren't answered well."""
    refused = [f"refused (429) {level.refused}"] if level.refused else []
    return ", ".join([*refused, *(f"{one.what} {one.requests}" for one in level.failed)]) or "none ended"
