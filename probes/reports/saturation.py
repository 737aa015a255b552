"""A served scan's answer in sentences: saturated or not, under which conditions, do two scans agree. Pure."""

from collections.abc import Callable, Sequence
from statistics import fmean

from probes.core.unknown import Unknown
from probes.reports.compare import Difference, differences
from probes.reports.figures import with_error
from probes.throughput.served.results import (
    Conditions,
    Level,
    ServedScan,
    Verdict,
    knee,
    throughput,
)
from probes.throughput.served.saturation import (
    BESIDE,
    MARGIN,
    growth,
    judge,
    most_answers,
    scatter,
)

TENTH = 0.05  # of a processor: what is less isn't shown as a figure
STEP = 2  # the scan doubles its callers: answers that begin a level apart agree


def condition_findings(served: ServedScan) -> tuple[str, ...]:
    """Who used the processors while the server was loaded; nothing for a report that is older than that."""
    known = [one for level in served.levels if isinstance(one := level.conditions, Conditions)]
    if not known:
        reasons = [one.reason for level in served.levels if isinstance(one := level.conditions, Unknown)]
        return (f"What other programs used is unknown: {reasons[0]}.",) if reasons else ()
    sentences = [_sharing(served, known), _others(known), _server(known)]
    return tuple(sentence for sentence in sentences if sentence)


def _sharing(served: ServedScan, known: Sequence[Conditions]) -> str:
    if served.by.same_machine is not True:
        return ""
    client = max(one.client_cpus for one in known)
    return (
        f"Client and server share this machine's {_cpus(known)}, of which the client used "
        f"{'up to ' if client >= TENTH else ''}{_amount(client)}."
    )


def _amount(cpus: float) -> str:
    return f"{cpus:.1f}" if cpus >= TENTH else "less than 0.1"


def _cpus(known: Sequence[Conditions]) -> str:
    return f"{known[0].cpus} CPU{'s' if known[0].cpus != 1 else ''}"


def _others(known: Sequence[Conditions]) -> str:
    used = [one for one in known if isinstance(one.other_cpus, float)]
    stolen = max(one.stolen_cpus for one in known)
    withheld = f" The hypervisor withheld up to {stolen:.1f} more." if stolen >= TENTH else ""
    if not used:
        reason = next(one.other_cpus.reason for one in known if isinstance(one.other_cpus, Unknown))
        together = _spread([max(one.used_cpus - one.client_cpus, 0.0) for one in known])
        busiest = max(known, key=lambda one: one.used_cpus)
        return (
            f"What other programs used is unknown: {reason}. With the server they used {together} of the "
            f"client's {_cpus(known)}{_names(busiest)}.{withheld}"
        )
    shares = [float(one.other_cpus) for one in used if not isinstance(one.other_cpus, Unknown)]
    busiest = next(one for one in used if one.other_cpus == max(shares))
    shown = _names(busiest) if max(shares) >= TENTH else ""
    return f"Other programs used {_spread(shares)} of the client's {_cpus(known)}{shown}.{withheld}"


def _names(seen: Conditions) -> str:
    """The programs that used the most, by the names that they have given themselves."""
    names = ", ".join(f'"{one.name}" {one.cpus:.1f}' for one in seen.others)
    return f" (most: {names})" if names else ""


def _spread(cpus: Sequence[float]) -> str:
    least, most = (f"{one:.1f}" for one in (min(cpus), max(cpus)))
    return most if least == most else f"{least} to {most}"


def _server(known: Sequence[Conditions]) -> str:
    used = [(float(one.server_cpus), one) for one in known if not isinstance(one.server_cpus, Unknown)]
    if not used:
        reason = next(one.server_cpus.reason for one in known if isinstance(one.server_cpus, Unknown))
        return f"The server's own processor time is unknown: {reason}."
    most, one = max(used, key=lambda pair: pair[0])
    return f"The server used {'up to ' if most >= TENTH else ''}{_amount(most)} CPUs, by {one.server_by}."


def knee_finding(served: ServedScan, verdict: Verdict) -> str:
    """From how many callers on requests wait for each other, in agreement with the verdict."""
    bend = knee(served.of("closed"))
    if isinstance(bend, Unknown):
        return f"The knee is unknown: {bend.reason}."
    where = between([level.callers for level in served.of("closed")], bend.callers)
    plural = "" if where == "at 1" else "s"
    how = f"the knee: the most answers are {with_error(bend.callers, bend.error)} times those of one caller"
    so_far = "" if verdict.answer == "yes" else "By the most answers that were seen, "
    begin = "requests begin" if so_far else "Requests begin"
    return f"{so_far}{begin} to wait for each other {where} caller{plural} ({how})."


def between(measured: Sequence[int], value: float) -> str:
    """`at 4`, or `between 4 and 8`: where a value is among what was measured."""
    below = max((one for one in measured if one <= value * 1.005), default=None)
    above = min((one for one in measured if one >= value * 0.995), default=None)
    if below is None or above is None:
        return f"at {above if below is None else below}"
    return f"at {below}" if below == above else f"between {below} and {above}"


def agreement(a: ServedScan, b: ServedScan) -> list[str]:
    """Whether the answers of two scans agree, within what, and in which conditions they differ. Markdown."""
    verdicts = judge(a), judge(b)
    lines = [f"A: {verdicts[0].sentence}", f"B: {verdicts[1].sentence}", _agree(a, b, verdicts)]
    unlike = [*differences(a, b, _SETTINGS), *_unlike_conditions(a, b)]
    found = "; ".join(map(str, unlike)) or "none of those recorded"
    return [*lines, f"Conditions that differ (A / B): {found}."]


def _agree(a: ServedScan, b: ServedScan, verdicts: tuple[Verdict, Verdict]) -> str:
    first, second = (verdict.answer for verdict in verdicts)
    ratio, apart = _ratio(a, b)
    if first != second:
        return f"The answers differ: {first} and {second}.{ratio}"
    if first == "can't tell":
        return f"Neither scan can tell, so there is nothing to agree on.{ratio}"
    starts = [verdict.callers or 1 for verdict in verdicts]
    far = first == "yes" and max(starts) > STEP * min(starts)
    if far:
        return f"Both say yes, but from {starts[0]} and from {starts[1]} callers on.{ratio}"
    if apart:
        return f"Both say {first}, but their throughput differs by more than {MARGIN:.0%}.{ratio}"
    within = f", within a factor of {STEP} in callers" if first == "yes" else ""
    return f"The answers agree: {first}{within}.{ratio}"


def _ratio(a: ServedScan, b: ServedScan) -> tuple[str, bool]:
    """How many times A's answers B gives where each stands for its scan; whether that is surely another."""
    levels = most_answers(a), most_answers(b)
    of_a, of_b = scatter(a.of("closed")), scatter(b.of("closed"))
    if not (levels[0] and levels[1]) or isinstance(of_a, Unknown) or isinstance(of_b, Unknown):
        return "", False
    found = growth(levels[0], levels[1], of_a, of_b)
    apart = found.low > 1 + MARGIN or found.high < 1 / (1 + MARGIN)
    rates = [f"{throughput(level).value:.4g}" for level in levels if level]
    text = (
        f" B gives {found.ratio:.2f} times A's answers a second ({rates[1]} and {rates[0]}; 95 % interval "
        f"{found.low:.2f} to {found.high:.2f})."
    )
    return text, apart


def _tried(served: ServedScan) -> str:
    return " ".join(str(level.callers) for level in served.of("closed")) or "none"


_SETTINGS: tuple[tuple[str, Callable[[ServedScan], str]], ...] = (
    ("address", lambda served: served.by.url),
    ("server", lambda served: served.by.server or "unnamed"),
    ("request", lambda served: served.by.request),
    ("inputs in a request", lambda served: str(served.settings.rows)),
    ("connections", lambda served: "kept" if served.settings.keep_alive else "new"),
    ("callers tried", _tried),
    ("window", lambda served: f"{served.settings.window_s:g} s"),
    ("windows at most", lambda served: str(served.settings.most_windows)),
    ("tolerance", lambda served: f"{served.settings.tolerance:g}"),
    ("timeout", lambda served: f"{served.settings.limit_s:g} s"),
    (
        "client and server on one machine",
        lambda served: "unknown" if isinstance(served.by.same_machine, Unknown)
        else "yes" if served.by.same_machine else "no",
    ),
    ("limited by the client", lambda served: "yes" if any(map(_bound, served.of("closed"))) else "no"),
)  # fmt: skip


def _bound(level: Level) -> bool:
    return bool(level.client.bound_by)


def _unlike_conditions(a: ServedScan, b: ServedScan) -> tuple[Difference, ...]:
    """Averages over the closed loop that are a tenth of the machine's processors apart, or unknown in one."""
    found = []
    for what, read in _CONDITIONS:
        (of_a, cpus), (of_b, _) = _mean(a, read), _mean(b, read)
        if of_a is None and of_b is None:
            continue
        if of_a is None or of_b is None or abs(of_a - of_b) >= BESIDE * cpus:
            shown = ["unknown" if one is None else f"{one:.1f}" for one in (of_a, of_b)]
            found.append(Difference(what, *shown))
    return tuple(found)


_CONDITIONS: tuple[tuple[str, Callable[[Conditions], float | Unknown]], ...] = (
    ("CPUs that other programs used", lambda one: one.other_cpus),
    ("CPUs that the hypervisor withheld", lambda one: one.stolen_cpus),
    ("CPUs that the client used", lambda one: one.client_cpus),
)


def _mean(served: ServedScan, read: Callable[[Conditions], float | Unknown]) -> tuple[float | None, int]:
    known = [one for level in served.of("closed") if isinstance(one := level.conditions, Conditions)]
    values = [value for one in known if not isinstance(value := read(one), Unknown)]
    return (fmean(values) if values else None), max((one.cpus for one in known), default=1)
