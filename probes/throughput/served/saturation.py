"""Is the server saturated? Yes, no or can't tell, by the levels of the closed loop. Pure.

Levels have 1, 2, 4, ... callers. Below saturation twice as many callers get nearly twice as many answers;
beyond it they get no more, and wait (P. J. Denning, J. P. Buzen, 1978). So the rule is about growth, and
about the 95 % interval of a growth, never about the figure alone:

- An interval comes from how far apart the windows of each level are. Their relative deviations are pooled
  over all levels, as in an analysis of variance: the three windows of one level alone have two degrees of
  freedom, and Student's t is 4.3. The ratio of two levels of k and m windows is known up to a factor of
  exp(t s sqrt(1/k + 1/m)).
- **yes, from N callers on**: each later level, at least `FLAT` of them, brings less than `MARGIN` more than
  N does, at the upper end of its interval. N is the smallest such level. The margin is 10 %, as the windows
  of a settled level may differ by that (the default of --tolerance): a scan doesn't see a smaller gain.
- **no**: from the last level but one to the last, throughput grows by more than `GROWTH` (5 %, as for the
  knee and the end of the scan), at the lower end of the interval.
- **can't tell**, in any other case, and where one of these may have made the figures:
  - more than `FAILED` (1 %) of requests failed, at the lower end of Wilson's interval, in a level that the
    answer rests on. Refusals (429) are none of these: that is how a saturated server answers;
  - the client limited such a level (`ClientSide.bound_by`), and the answer would be yes;
  - other programs used `BESIDE` (10 %) or more of the machine's processors, or a hypervisor withheld as
    much, in a level that a yes rests on, and the server is on this machine: without them a server that the
    processors limit would do about that much more, which is the margin. A no is spoiled only where they used
    so much less in the last level than in the one before; otherwise it says what they used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes.core.unknown import Unknown
from probes.records.stats import student_95
from probes.throughput.served.results import (
    FLAT,
    GROWTH,
    Answer,
    Conditions,
    Level,
    ServedScan,
    Verdict,
    bad_ends,
    best,
    counted_windows,
    throughput,
    wilson,
)

MARGIN = 0.1
FAILED = 0.01
BESIDE = 0.1
FEWEST = FLAT + 1  # levels
MOST_LOG = 50.0  # half of an interval: beyond it nothing is known, and exp() has an end


@dataclass(frozen=True)
class Scatter:
    """How far windows are from their level's mean, relative to it: a standard deviation, and its freedom."""

    deviation: float
    freedom: int

    def half(self, *windows: int) -> float:
        """Half of the 95 % interval of a ratio of means of so many windows each, in natural logarithms."""
        half = (
            student_95(self.freedom) * self.deviation * math.sqrt(sum(1 / max(count, 1) for count in windows))
        )
        return min(half, MOST_LOG)


@dataclass(frozen=True)
class Growth:
    """One throughput over another, with its 95 % interval: 1.2 is a fifth more."""

    ratio: float
    low: float
    high: float


def scatter(levels: Sequence[Level]) -> Scatter | Unknown:
    """The scatter of windows, pooled over levels."""
    squares, freedom = [], 0
    for level in levels:
        rates = _rates(level)
        if len(rates) > 1 and (mean := math.fsum(rates) / len(rates)):
            squares += [(rate / mean - 1) ** 2 for rate in rates]
            freedom += len(rates) - 1
    if not freedom:
        return Unknown("no level has two windows")
    return Scatter(math.sqrt(math.fsum(squares) / freedom), freedom)


def _rates(level: Level) -> list[float]:
    windows = level.windows[len(level.windows) - counted_windows(level) :]
    return [window.answered / window.seconds for window in windows]


def growth(before: Level, after: Level, of: Scatter, other: Scatter | None = None) -> Growth:
    """The throughput of `after` over that of `before`; `other`: the scatter of `after`, of another scan."""
    ratio = throughput(after).value / throughput(before).value
    counts = len(_rates(before)), len(_rates(after))
    half = math.hypot(of.half(counts[0]), other.half(counts[1])) if other else of.half(*counts)
    return Growth(ratio, ratio * math.exp(-half), ratio * math.exp(half))


def judge(served: ServedScan) -> Verdict:
    """Whether the server is saturated, by the rule above."""
    levels = served.of("closed")
    if why := _unusable(levels):
        return _verdict("can't tell", why)
    apart = scatter(levels)
    if isinstance(apart, Unknown):
        return _verdict("can't tell", apart.reason)
    last = growth(levels[-2], levels[-1], apart)
    if last.low > 1 + GROWTH:
        return _rising(served, levels, last)
    at = _flat_from(levels, apart)
    if at is None:
        return _undecided(served, levels, last)
    if reasons := [*_failing(levels[at:]), *_client(levels[at:]), *_beside(served, levels[at:])]:
        return _but(f"throughput stops rising at {_callers(levels[at])}", reasons)
    return _saturated(levels[at:], apart)


def _unusable(levels: Sequence[Level]) -> str:
    if not levels:
        return "no level was measured"
    if dead := [level for level in levels if level.answered <= 0]:
        return f"with {_callers(dead[0])} at once no answer was good: {bad_ends(dead[0])}"
    if len(levels) < FEWEST:
        tried = " and ".join(str(level.callers) for level in levels)
        return (
            f"only {tried} {'caller was' if tried == '1' else 'callers were'} tried, and {FEWEST} levels "
            "are needed: --most-callers 4 or more"
        )
    return ""


def _flat_from(levels: Sequence[Level], apart: Scatter) -> int | None:
    """The first level after which throughput surely doesn't grow by as much as the margin."""
    for at in range(len(levels) - FLAT):
        if all(growth(levels[at], later, apart).high < 1 + MARGIN for later in levels[at + 1 :]):
            return at
    return None


def _rising(served: ServedScan, levels: Sequence[Level], last: Growth) -> Verdict:
    before, after = levels[-2:]
    if reasons := [*_failing(levels[-2:]), *_eased(served, before, after)]:
        return _but(f"throughput still rises at {_callers(after)}", reasons)
    limited = 2 * after.callers > served.settings.most_callers
    tried = "--most-callers allows" if limited else "were tried"
    others = [f"; meanwhile {reason.partition(':')[0]}" for reason in _beside(served, levels[-2:])]
    return _verdict(
        "no",
        f"throughput still rises at {_callers(after)}, by {last.ratio - 1:.0%} over {before.callers} "
        f"(95 % interval: {last.low - 1:.0%} to {last.high - 1:.0%}), the most that {tried}{''.join(others)}",
        after.callers,
    )


def _undecided(served: ServedScan, levels: Sequence[Level], last: Growth) -> Verdict:
    before, after = levels[-2:]
    if last.high < 1 + MARGIN:
        why = (
            f"throughput stopped rising at {_callers(before)}, and only {after.callers} were tried beyond; "
            f"{FLAT} levels are needed: a larger --most-callers"
        )
    else:
        why = (
            f"the figures scatter: from {before.callers} to {_callers(after)} throughput changed by "
            f"{last.low - 1:+.0%} to {last.high - 1:+.0%} (95 % interval)"
        )
    return _verdict("can't tell", "; ".join([why, *_failing(levels[-2:]), *_beside(served, levels[-2:])]))


def _saturated(flat: Sequence[Level], apart: Scatter) -> Verdict:
    first, *later = flat
    most = max(growth(first, level, apart).high for level in later) - 1
    gain = f"at most {most:.0%} more" if most >= 0.005 else "no more"
    refused, asked = sum(level.refused for level in flat), sum(level.asked for level in flat)
    refusing = f"; it refused {refused / asked:.0%} of these requests (429)" if refused else ""
    return _verdict(
        "yes",
        f"from {_callers(first)} on: {per_second(first, apart)} there, and up to {later[-1].callers} callers "
        f"get {gain} (95 % interval){refusing}",
        first.callers,
    )


def per_second(level: Level, apart: Scatter) -> str:
    """`6.9 ± 0.3 answers/s`, with half of the 95 % interval."""
    value = throughput(level).value
    half = value * math.expm1(apart.half(len(_rates(level))))
    digits = min(max(0, 1 - math.floor(math.log10(half or 0.01 * value))), 6)
    return f"{value:,.{digits}f} ± {half:,.{digits}f} answers/s"


def most_answers(served: ServedScan) -> Level | None:
    """The level that stands for a scan: where it is saturated the one from which on, else the fastest."""
    found = judge(served)
    levels = served.of("closed")
    if found.answer == "yes":
        return next(level for level in levels if level.callers == found.callers)
    return best(levels)


def _failing(levels: Sequence[Level]) -> list[str]:
    """The level of those with surely too many failures in which the most failed."""
    shares = []
    for level in levels:
        share, low, _ = wilson(sum(one.requests for one in level.failed), level.asked)
        if low > FAILED:
            shares.append((share, level))
    if not shares:
        return []
    share, level = max(shares, key=lambda pair: pair[0])
    ends = ", ".join(f"{one.what} {one.requests}" for one in level.failed)
    return [f"at {_callers(level)} {share:.0%} of requests failed: {ends}"]


def _client(levels: Sequence[Level]) -> list[str]:
    bound = [level for level in levels if level.client.bound_by]
    if not bound:
        return []
    return [f"the client may have been the limit: at {_callers(bound[0])} {bound[0].client.bound_by}"]


def _beside(served: ServedScan, levels: Sequence[Level]) -> list[str]:
    """Other programs and other virtual machines, where they take processors from the server."""
    if served.by.same_machine is not True:
        return []
    reasons = []
    known = [level.conditions for level in levels if isinstance(level.conditions, Conditions)]
    loaded = [(one.other_cpus, one) for one in known if isinstance(one.other_cpus, float)]
    if loaded:
        most, one = max(loaded, key=lambda pair: pair[0])
        if most >= BESIDE * one.cpus:
            reasons.append(f"other programs used up to {most:.1f} of {one.cpus} CPUs: end them and repeat")
    if known:
        one = max(known, key=lambda one: one.stolen_cpus)
        if one.stolen_cpus >= BESIDE * one.cpus:
            reasons.append(f"the hypervisor withheld up to {one.stolen_cpus:.1f} of {one.cpus} CPUs")
    return reasons


def _eased(served: ServedScan, before: Level, after: Level) -> list[str]:
    """Whether other programs used so much less in the later level that this may be the growth."""
    a, b = before.conditions, after.conditions
    if served.by.same_machine is not True or isinstance(a, Unknown) or isinstance(b, Unknown):
        return []
    if isinstance(a.other_cpus, Unknown) or isinstance(b.other_cpus, Unknown):
        return []
    if a.other_cpus + a.stolen_cpus - b.other_cpus - b.stolen_cpus < BESIDE * b.cpus:
        return []
    return [
        f"other programs used {a.other_cpus:.1f} CPUs while {_callers(before)} asked, and "
        f"{b.other_cpus:.1f} while {_callers(after)} did"
    ]


def _callers(level: Level) -> str:
    return f"{level.callers} caller{'s' if level.callers != 1 else ''}"


def _but(seen: str, reasons: Sequence[str]) -> Verdict:
    return _verdict("can't tell", f"{seen}, but {'; '.join(reasons)}")


def _verdict(answer: Answer, why: str, callers: int | None = None) -> Verdict:
    mark = "," if answer == "yes" else ":"
    return Verdict(answer, f"Saturated: {answer}{mark} {why}.", callers)
