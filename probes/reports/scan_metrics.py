"""A throughput report as metrics in Prometheus' text exposition format. Unknown is left out. Pure."""

from collections.abc import Iterator
from datetime import datetime

from probes.core.unknown import Unknown
from probes.reports.prometheus import Labels, Metric, if_known, render_metrics
from probes.throughput.direct import knee
from probes.throughput.direct.knee import saturation
from probes.throughput.direct.results import joules_per_input, latency_s, throughput
from probes.throughput.report import ThroughputReport
from probes.throughput.served import results
from probes.throughput.served.results import Level, ServedScan
from probes.throughput.served.saturation import judge

HELP = {
    "weir_scan_info": "What was scanned and with what; always 1.",
    "weir_scan_started_timestamp_seconds": "When the scan began, Unix time.",
    "weir_scan_direct_inputs_per_second": "Inputs per second of the model, called directly: mean of trials.",
    "weir_scan_direct_error_inputs_per_second": "Standard error of that mean.",
    "weir_scan_direct_latency_seconds": "Time from call to end: median and 95th percentile.",
    "weir_scan_direct_saturation_ratio": "Time that a resource needs at its ceiling, over that of a trial.",
    "weir_scan_direct_joules_per_input": "The device's energy for one input.",
    "weir_scan_direct_knee_batch": "The batch size from which throughput doesn't grow.",
    "weir_scan_served_answers_per_second": "Good answers per second.",
    "weir_scan_served_error_answers_per_second": "Standard error of that, between windows.",
    "weir_scan_served_latency_seconds": "Latency of good answers; open loop: from when requests were due.",
    "weir_scan_served_latency_low_seconds": "Lower end of its 95 % interval.",
    "weir_scan_served_latency_high_seconds": "Upper end of its 95 % interval.",
    "weir_scan_served_naive_latency_seconds": "The same from when requests were sent.",
    "weir_scan_served_goodput_per_second": "Answers within the SLO per second.",
    "weir_scan_served_requests": "Requests of a level by how they ended.",
    "weir_scan_served_stable": "1 where windows agreed, else 0.",
    "weir_scan_served_client_busy_ratio": "Share of the time in which the client's loop was busy.",
    "weir_scan_served_saturated": "1 where the server is saturated, 0 where it isn't; left out: can't tell.",
    "weir_scan_served_other_cpus": "Processors of the client's machine that other programs used.",
    "weir_scan_served_knee_callers": "Callers from which on requests wait for each other.",
}


def scan_exposition(report: ThroughputReport) -> str:
    """All metrics of a report."""
    return render_metrics(_metrics(report), HELP)


def _metrics(report: ThroughputReport) -> Iterator[Metric]:
    facts = {"host": report.machine.host, "tool_version": report.tool_version}
    if report.direct and not isinstance(report.direct.model, Unknown):
        facts["model"] = report.direct.model.name
    if report.served:
        facts |= {"url": report.served.by.url, "served_model": report.served.by.model}
    yield Metric("weir_scan_info", tuple(facts.items()), 1)
    yield Metric(
        "weir_scan_started_timestamp_seconds", (), datetime.fromisoformat(report.started).timestamp()
    )
    yield from _direct(report)
    if report.served:
        yield from _served(report.served)


def _direct(report: ThroughputReport) -> Iterator[Metric]:
    for series in report.direct.series if report.direct else ():
        way = (("way", series.way.label),)
        for row in series.rows:
            labels: Labels = (*way, ("batch", str(row.batch)))
            speed = throughput(row)
            yield Metric("weir_scan_direct_inputs_per_second", labels, speed.mean)
            yield from if_known("weir_scan_direct_error_inputs_per_second", labels, speed.error)
            for quantile, seconds in zip(("0.5", "0.95"), latency_s(row), strict=True):
                yield Metric("weir_scan_direct_latency_seconds", (*labels, ("quantile", quantile)), seconds)
            on = saturation(row, series.way, report.ceilings)
            for name, share in (
                ("compute", on.compute),
                ("memory", on.memory),
                ("link", on.link),
                ("host", on.host),
            ):
                yield from if_known("weir_scan_direct_saturation_ratio", (*labels, ("resource", name)), share)
            yield from if_known("weir_scan_direct_joules_per_input", labels, joules_per_input(row))
        bend = knee.of_series(series)
        if isinstance(bend, knee.Knee):
            yield Metric("weir_scan_direct_knee_batch", way, bend.batch)


def _served(served: ServedScan) -> Iterator[Metric]:
    for level in served.levels:
        place = (
            ("callers", str(level.callers))
            if level.loop == "closed"
            else ("rate_per_second", f"{level.rate_per_s:.6g}")
        )
        yield from _level(served, level, (("loop", level.loop), place))
    answer = judge(served).answer
    if answer != "can't tell":
        yield Metric("weir_scan_served_saturated", (), int(answer == "yes"))
    bend = results.knee(served.of("closed"))
    if not isinstance(bend, Unknown):
        yield Metric("weir_scan_served_knee_callers", (), bend.callers)


def _level(served: ServedScan, level: Level, labels: Labels) -> Iterator[Metric]:
    speed = results.throughput(level)
    yield Metric("weir_scan_served_answers_per_second", labels, speed.value)
    yield from if_known("weir_scan_served_error_answers_per_second", labels, speed.error)
    latencies, naive = results.latencies(level), results.naive_latencies(level)
    for percentile in () if isinstance(latencies, Unknown) else latencies:
        at = (*labels, ("quantile", f"{percentile.share:g}"))
        yield Metric("weir_scan_served_latency_seconds", at, percentile.value)
        yield from if_known("weir_scan_served_latency_low_seconds", at, percentile.low)
        yield from if_known("weir_scan_served_latency_high_seconds", at, percentile.high)
    for percentile in () if isinstance(naive, Unknown) or level.loop == "closed" else naive:
        at = (*labels, ("quantile", f"{percentile.share:g}"))
        yield Metric("weir_scan_served_naive_latency_seconds", at, percentile.value)
    if served.settings.slo_s is not None:
        good = results.goodput(level, served.settings.slo_s)
        yield Metric("weir_scan_served_goodput_per_second", labels, good.per_s)
    ends = [("good", len(level.latency_s)), ("refused", level.refused)]
    ends += [(percentile.what, percentile.requests) for percentile in level.failed]
    for end, requests in ends:
        yield Metric("weir_scan_served_requests", (*labels, ("end", end)), requests)
    yield Metric("weir_scan_served_stable", labels, int(not level.unstable))
    yield Metric("weir_scan_served_client_busy_ratio", labels, level.client.busy_share)
    if not isinstance(level.conditions, Unknown):
        yield from if_known("weir_scan_served_other_cpus", labels, level.conditions.other_cpus)
