"""What each plot of a throughput report shows, as values. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from probes.records.stats import median
from probes.shared.unknown import Unknown
from probes.throughput.direct import knee
from probes.throughput.direct.figures import latency_s, throughput
from probes.throughput.direct.saturation import saturation
from probes.throughput.direct.scanned import DirectScan, Series
from probes.throughput.document import ThroughputReport
from probes.throughput.served import servedcurve
from probes.throughput.served.orderstats import Percentile
from probes.throughput.served.servedscan import Level, ServedScan

MOST_PANELS = 6  # ways whose saturation is drawn; the tables have all
SHARES = ("compute", "memory", "link", "host")


@dataclass(frozen=True)
class Dot:
    """A measured value over inputs at once, with its interval."""

    inputs: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """One way of the direct half, or the service. `knee`: the batch at which throughput stops growing."""

    name: str
    dots: tuple[Dot, ...]
    served: bool = False
    knee: float | None = None


@dataclass(frozen=True)
class SharesPanel:
    """Shares of a trial's time by batch: each resource's, and the utilisation that a driver reports."""

    title: str
    shares: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    utilisation: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RateDot:
    """One open-loop level: percentiles of latency from when requests were due, and the naive p99, seconds."""

    rate_per_s: float
    percentiles: tuple[Percentile, ...]
    naive_p99_s: float


@dataclass(frozen=True)
class LoadChart:
    """The service under load: answers over callers, latency over rate."""

    callers: tuple[Dot, ...]  # answers a second
    knee: float | None
    rates: tuple[RateDot, ...]
    slo_s: float | None


@dataclass(frozen=True)
class ScanCharts:
    """Everything that is drawn; a chart that can't be drawn gives the reason."""

    throughput: tuple[Line, ...] | Unknown
    latency: tuple[Line, ...] | Unknown
    shares: tuple[SharesPanel, ...] | Unknown
    load: LoadChart | Unknown


NO_DIRECT = Unknown("no model was called directly: run `throughput` without --url")
NO_SERVED = Unknown("no server was asked: run `throughput` with --url")


def scan_charts(report: ThroughputReport) -> ScanCharts:
    """The charts of a report."""
    direct, served = report.direct, report.served
    series = [one for one in direct.series if one.rows] if direct else []
    levels = [level for level in served.of("closed") if level.latency_s] if served else []
    neither = NO_DIRECT if direct is None else Unknown("no way was measured")
    return ScanCharts(
        throughput=(*map(_throughput, series), *_served(served, levels, _per_s)) or neither,
        latency=(*map(_latency, series), *_served(served, levels, _p50)) or neither,
        shares=tuple(_shares(report, one) for one in series[:MOST_PANELS]) or neither,
        load=_load(served) if served and served.levels else NO_SERVED,
    )


def _throughput(series: Series) -> Line:
    dots = []
    for row in sorted(series.rows, key=lambda row: row.batch):
        found = throughput(row)
        error = found.error or 0.0
        dots.append(Dot(row.batch, found.mean, found.mean - error, found.mean + error))
    bend = knee.of_series(series)
    return Line(series.way.label, tuple(dots), knee=bend.batch if isinstance(bend, knee.Knee) else None)


def _latency(series: Series) -> Line:
    rows = sorted(series.rows, key=lambda row: row.batch)
    dots = ((row.batch, *latency_s(row)) for row in rows)
    return Line(series.way.label, tuple(Dot(batch, middle, middle, p95) for batch, middle, p95 in dots))


def _served(
    served: ServedScan | None, levels: list[Level], dot: Callable[[Level, int], Dot]
) -> tuple[Line, ...]:
    if served is None or not levels:
        return ()
    dots = tuple(dot(level, served.settings.rows) for level in levels)
    return (Line("served, closed loop", dots, served=True),)


def _per_s(level: Level, rows: int) -> Dot:
    found = servedcurve.throughput(level)
    value, error = rows * found.value, rows * (found.error or 0.0)
    return Dot(rows * level.callers, value, value - error, value + error)


def _p50(level: Level, rows: int) -> Dot:
    middle = median(level.latency_s)
    found = servedcurve.latencies(level)
    high = middle if isinstance(found, Unknown) else found[1].value
    return Dot(rows * level.callers, middle, middle, high)


def _shares(report: ThroughputReport, series: Series) -> SharesPanel:
    rows = sorted(series.rows, key=lambda row: row.batch)
    found = [(row.batch, saturation(row, series.way, report.ceilings)) for row in rows]
    lines = []
    for name in SHARES:
        known = [(batch, getattr(one, name)) for batch, one in found]
        points = tuple((batch, share) for batch, share in known if isinstance(share, float))
        if any(share for _, share in points):
            lines.append((name, points))
    busy = ((row.batch, row.busy_percent) for row in rows)
    known_busy = tuple((batch, value / 100) for batch, value in busy if not isinstance(value, Unknown))
    return SharesPanel(series.way.label, tuple(lines), known_busy)


def _load(served: ServedScan) -> LoadChart | Unknown:
    closed = tuple(_per_s(level, 1) for level in served.of("closed") if level.answered)
    rates = []
    for level in served.of("open"):
        found, naive = servedcurve.latencies(level), servedcurve.naive_latencies(level)
        if not isinstance(found, Unknown) and not isinstance(naive, Unknown) and level.rate_per_s:
            rates.append(RateDot(level.rate_per_s, found, naive[-1].value))
    if not closed and not rates:
        return Unknown("no request was answered")
    bend = servedcurve.knee(served.of("closed"))
    return LoadChart(
        closed, None if isinstance(bend, Unknown) else bend.callers, tuple(rates), served.settings.slo_s
    )


def name_of_model(direct: DirectScan | None, served: ServedScan | None) -> str:
    """What was measured, for a title."""
    if direct is not None and not isinstance(direct.model, Unknown):
        return direct.model.name
    return served.by.model or served.by.url if served else "a model"
