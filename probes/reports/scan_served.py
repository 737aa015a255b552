"""The served part of a throughput report: its tables, and what they show, in sentences. Pure."""

from collections.abc import Sequence

from probes.core.unknown import Unknown
from probes.reports.document import Table
from probes.reports.figures import span, with_error
from probes.reports.saturation import condition_findings, knee_finding
from probes.throughput.served import results
from probes.throughput.served.results import Level, Percentile, ServedScan, bad_ends
from probes.throughput.served.saturation import judge

_INTERVAL = (
    "Brackets: 95 % intervals from order statistics; `>` and `<`: the sample is too small for that end. "
)
_CLOSED_NOTE = (
    "Each caller asks again as soon as it is answered, so a slow server is asked less: these latencies leave "
    "out the wait of those who would have come meanwhile. " + _INTERVAL + "Throughput: mean ± standard error "
    "between windows."
)
_OPEN_NOTE = (
    "Requests come at random times (Poisson), whether or not earlier ones were answered. Latency counts from "
    "when a request was due; naive p99 from when it was sent, which leaves out its wait for a connection. "
    + _INTERVAL
)


def served_tables(served: ServedScan) -> tuple[Table, ...]:
    """The closed loop and the open loop, those that have levels."""
    tables = (_closed(served), _open(served), _odd(served))
    return tuple(table for table in tables if table.rows)


def level_line(level: Level) -> str:
    """One level as it is measured."""
    percentiles = results.latencies(level)
    who = callers(level.callers) if level.loop == "closed" else f"{level.rate_per_s:.4g} requests/s"
    if isinstance(percentiles, Unknown):
        return f"{level.loop} loop, {who}: no good answer; {bad_ends(level)}"
    middle, _, p99 = percentiles
    doubts = "".join(f"; {doubt}" for doubt in doubts_of(level))
    return (
        f"{level.loop} loop, {who}: {_per_s(level)} answers/s, p50 {span(middle.value, bare=True)}, "
        f"p99 {span(p99.value, bare=True)} (n={len(level.latency_s)}){doubts}"
    )


def callers(count: int) -> str:
    """Return the words for a number of callers."""
    return f"{count} caller{'s' if count != 1 else ''}"


def doubts_of(level: Level) -> tuple[str, ...]:
    """Why not to trust a level too far."""
    unstable = (f"unstable: {level.unstable}",) if level.unstable else ()
    bound = (f"client-bound: {level.client.bound_by}",) if level.client.bound_by else ()
    return (*unstable, *bound)


def served_findings(served: ServedScan) -> tuple[str, ...]:
    """What follows from the levels, in sentences: first, whether the server is saturated."""
    verdict = judge(served)
    sentences = [verdict.sentence]
    fastest = results.best(served.of("closed"))
    if fastest:
        speed = results.throughput(fastest)
        inputs = f", {speed.value * served.settings.rows:.4g} inputs/s" if served.settings.rows > 1 else ""
        sentences.append(
            f"Most answers: {with_error(speed.value, speed.error)} a second{inputs}, "
            f"at {callers(fastest.callers)}."
        )
    sentences.append(knee_finding(served, verdict))
    sentences += _slo(served)
    sentences += condition_findings(served)
    sentences.append(f"The scan ended: {served.ended}.")
    return tuple(sentences)


def _slo(served: ServedScan) -> list[str]:
    limit = served.settings.slo_s
    if limit is None or not served.of("open"):
        return []
    fits = results.within_slo(served)
    if isinstance(fits, Unknown):
        return [f"No rate that was tried keeps its p99 within {span(limit, bare=True)} for sure."]
    return [
        f"Up to {fits.rate_per_s:.4g} requests a second, 99 % are answered within {span(limit, bare=True)}, "
        "counted from when they were due."
    ]


def _closed(served: ServedScan) -> Table:
    return Table(
        "Served, closed loop",
        (_CLOSED_NOTE,),
        ("callers", "answers/s", *(_inputs(served)), "p50", "p90", "p99", *_slo_header(served), "n",
         "refused", "failed", "doubts"),
        tuple(
            (str(level.callers), _per_s(level), *_inputs_cell(served, level), *_latencies(level),
             *_slo_cell(served, level), *_ends(level))
            for level in served.of("closed")
        ),
        frozenset({"failed", "doubts"}),
    )  # fmt: skip


def _open(served: ServedScan) -> Table:
    return Table(
        "Served, open loop",
        (_OPEN_NOTE,),
        ("asked/s", "answers/s", "p50", "p90", "p99", "naive p99", *_slo_header(served), "n", "queued",
         "refused", "failed", "doubts"),
        tuple(
            (f"{level.rate_per_s:.4g}", _per_s(level), *_latencies(level), _naive(level),
             *_slo_cell(served, level), _ends(level)[0], str(level.client.queued), *_ends(level)[1:])
            for level in served.of("open")
        ),
        frozenset({"failed", "doubts"}),
    )  # fmt: skip


def _odd(served: ServedScan) -> Table:
    """What the client cost: how busy it was, and how late it sent."""
    return Table(
        "What the client cost, and who used the processors",
        (
            "A client that is busy or late measures itself. Late: between when a request was due, or its "
            "caller answered, and when it was sent, though a connection was free. CPUs: processors of the "
            "client's machine in use on average, those of the server wherever it runs; other: by programs "
            "that are neither.",
        ),
        (
            "level",
            "client busy",
            "late, p50",
            "late, p99",
            "windows",
            "client CPUs",
            "server CPUs",
            "other CPUs",
        ),
        tuple(
            (
                callers(level.callers) if level.loop == "closed" else f"{level.rate_per_s:.4g}/s",
                f"{level.client.busy_share:.1%}",
                span(level.client.late_median_s, bare=True),
                span(level.client.late_p99_s, bare=True),
                str(len(level.windows)),
                *_processors(level),
            )
            for level in served.levels
        ),
        frozenset({"level"}),
    )


def _processors(level: Level) -> tuple[str, str, str]:
    seen = level.conditions
    if isinstance(seen, Unknown):
        return ("?",) * 3
    known = (seen.client_cpus, seen.server_cpus, seen.other_cpus)
    client, server, other = ("?" if isinstance(cpus, Unknown) else f"{cpus:.2f}" for cpus in known)
    return client, server, other


def _per_s(level: Level) -> str:
    speed = results.throughput(level)
    return with_error(speed.value, speed.error)


def _inputs(served: ServedScan) -> tuple[str, ...]:
    return ("inputs/s",) if served.settings.rows > 1 else ()


def _inputs_cell(served: ServedScan, level: Level) -> tuple[str, ...]:
    rows = served.settings.rows
    return (f"{rows * results.throughput(level).value:.4g}",) if rows > 1 else ()


def _latencies(level: Level) -> tuple[str, ...]:
    percentiles = results.latencies(level)
    return ("none",) * 3 if isinstance(percentiles, Unknown) else tuple(map(interval, percentiles))


def _naive(level: Level) -> str:
    percentiles = results.naive_latencies(level)
    return "none" if isinstance(percentiles, Unknown) else span(percentiles[-1].value, bare=True)


def interval(percentile: Percentile) -> str:
    """`12.3 ms [11.9, 12.8]`: all in the unit of the figure."""
    shown = span(percentile.value, bare=True)
    factor = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[shown.split(" ")[1]]
    low = "<" if isinstance(percentile.low, Unknown) else f"{percentile.low * factor:.3g}"
    high = ">" if isinstance(percentile.high, Unknown) else f"{percentile.high * factor:.3g}"
    return f"{shown} [{low}, {high}]"


def _slo_header(served: ServedScan) -> Sequence[str]:
    limit = served.settings.slo_s
    return () if limit is None else (f"good/s within {span(limit, bare=True)}",)


def _slo_cell(served: ServedScan, level: Level) -> Sequence[str]:
    if served.settings.slo_s is None:
        return ()
    goodput = results.goodput(level, served.settings.slo_s)
    return (f"{goodput.per_s:.4g} ({goodput.share:.1%} [{100 * goodput.low:.1f}, {100 * goodput.high:.1f}])",)


def _ends(level: Level) -> tuple[str, str, str, str]:
    refusal = level.refused_median_s
    refused = f"{level.refused}" + (f", p50 {span(refusal, bare=True)}" if refusal is not None else "")
    failed = ", ".join(f"{one.requests} {one.what}" for one in level.failed) or "0"
    return str(len(level.latency_s)), refused, failed, "; ".join(doubts_of(level))
