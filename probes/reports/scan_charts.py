"""The plots of a throughput report: what each shows, as values, and how it is drawn."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.core.quoting import terminal
from probes.core.unknown import Unknown
from probes.records.stats import median
from probes.reports.canvas import (
    DASHED,
    DOTTED,
    Sheet,
    counts_axis,
    legend_below,
    panels_of,
    plain_log_y,
    plot_of,
    svg_of,
)
from probes.reports.document import Plot
from probes.reports.palette import light
from probes.reports.saturation import between
from probes.reports.svg import HALO
from probes.throughput.direct import knee
from probes.throughput.direct.knee import saturation
from probes.throughput.direct.results import Series, latency_s, throughput
from probes.throughput.report import ThroughputReport
from probes.throughput.served import results
from probes.throughput.served.results import Level, Percentile, ServedScan

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
        speed = throughput(row)
        error = speed.error or 0.0
        dots.append(Dot(row.batch, speed.mean, speed.mean - error, speed.mean + error))
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
    rows = served.settings.rows
    dots = tuple(dot(level, rows) for level in levels)
    bend = results.knee(served.of("closed"))
    at = None if isinstance(bend, Unknown) or dot is not _per_s else rows * bend.callers
    return (Line("served, closed loop", dots, served=True, knee=at),)


def _per_s(level: Level, rows: int) -> Dot:
    speed = results.throughput(level)
    value, error = rows * speed.value, rows * (speed.error or 0.0)
    return Dot(rows * level.callers, value, value - error, value + error)


def _p50(level: Level, rows: int) -> Dot:
    middle = median(level.latency_s)
    percentiles = results.latencies(level)
    high = middle if isinstance(percentiles, Unknown) else percentiles[1].value
    return Dot(rows * level.callers, middle, middle, high)


def _shares(report: ThroughputReport, series: Series) -> SharesPanel:
    rows = sorted(series.rows, key=lambda row: row.batch)
    saturations = [(row.batch, saturation(row, series.way, report.ceilings)) for row in rows]
    lines = []
    for name in SHARES:
        known = [(batch, getattr(one, name)) for batch, one in saturations]
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
        percentiles, naive = results.latencies(level), results.naive_latencies(level)
        if not isinstance(percentiles, Unknown) and not isinstance(naive, Unknown) and level.rate_per_s:
            rates.append(RateDot(level.rate_per_s, percentiles, naive[-1].value))
    if not closed and not rates:
        return Unknown("no request was answered")
    bend = results.knee(served.of("closed"))
    return LoadChart(
        closed, None if isinstance(bend, Unknown) else bend.callers, tuple(rates), served.settings.slo_s
    )


STYLES = (("blue", "o"), ("vermillion", "s"), ("green", "^"), ("purple", "D"), ("amber", "P"), ("muted", "X"))
OF_SHARE = dict(zip(SHARES, STYLES, strict=False))
OF_PERCENTILE = (("p50", "blue", "o"), ("p90", "purple", "D"), ("p99", "vermillion", "s"))


def draw_throughput(lines: Sequence[Line], sheet: Sheet) -> str:
    """Inputs per second over inputs at once."""
    return _over_inputs(lines, sheet, "inputs per second", 1.0)


def latency(lines: Sequence[Line], sheet: Sheet) -> str:
    """Time from call to answer over inputs at once."""
    return _over_inputs(lines, sheet, "median time, ms (bar: to p95, served to p90)", 1e3)


def _over_inputs(lines: Sequence[Line], sheet: Sheet, label: str, factor: float) -> str:
    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        for i, line in enumerate(lines):
            _line(axes, line, i, factor)
        counts_axis(axes, "inputs at once: batch size, or under way")
        plain_log_y(axes, label)
        legend_below(axes, columns=1 if sheet.panels == 1 else 2)

    rows = math.ceil(len(lines) / sheet.panels)
    return svg_of(paint, sheet, 4.6 + 0.22 * rows)


def _line(axes: Axes, line: Line, place: int, factor: float) -> None:
    name, shape = STYLES[place % len(STYLES)]
    colour = light("ink" if line.served else name)
    filled = place < len(STYLES) and not line.served
    values = [factor * dot.value for dot in line.dots]
    axes.errorbar(
        [dot.inputs for dot in line.dots],
        values,
        yerr=_bars(line.dots, factor),
        fmt="*" if line.served else shape,
        markersize=9 if line.served else 6,
        color=colour,
        linestyle=DASHED if line.served else DOTTED,
        linewidth=1.0,
        markerfacecolor=colour if filled or line.served else light("paper"),
        label=terminal(line.name),
    )
    if line.knee is not None:
        dashes = DASHED if line.served else "solid"
        axes.axvline(line.knee, color=colour, linestyle=dashes, linewidth=0.9, alpha=0.6)


def _bars(dots: Sequence[Dot], factor: float) -> list[list[float]]:
    low = [max(factor * (dot.value - dot.low), 0.0) for dot in dots]
    return [low, [max(factor * (dot.high - dot.value), 0.0) for dot in dots]]


def shares(panels: Sequence[SharesPanel], sheet: Sheet) -> str:
    """How near each resource is to its ceiling, and beside it what drivers call utilisation."""
    return panels_of(panels, sheet, _draw_shares, 4.2)


def _draw_shares(axes: Axes, panel: SharesPanel) -> None:
    for name, points in panel.shares:
        colour, shape = OF_SHARE[name]
        xs, ys = [batch for batch, _ in points], [100 * share for _, share in points]
        axes.plot(xs, ys, marker=shape, color=light(colour), linestyle=DOTTED, linewidth=1.0, label=name)
    if panel.utilisation:
        xs, ys = [batch for batch, _ in panel.utilisation], [100 * share for _, share in panel.utilisation]
        axes.plot(
            xs, ys, marker="x", color=light("muted"), linestyle=DASHED, linewidth=1.0, label="utilisation"
        )
    axes.axhline(100, color=light("ink"), linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("% of a trial, at the ceiling")
    axes.set_title(terminal(panel.title))
    counts_axis(axes, "batch size")
    if panel.shares or panel.utilisation:
        legend_below(axes, columns=3)


def load(chart: LoadChart, sheet: Sheet) -> str:
    """Answers over callers, and latency over rate."""
    panels = [paint for paint, dots in ((_callers, chart.callers), (_rates, chart.rates)) if dots]
    return panels_of(panels, sheet, lambda axes, paint: paint(axes, chart), 4.7)


def _callers(axes: Axes, chart: LoadChart) -> None:
    axes.errorbar(
        [dot.inputs for dot in chart.callers],
        [dot.value for dot in chart.callers],
        yerr=_bars(chart.callers, 1.0),
        fmt="o",
        color=light("blue"),
        linestyle=DOTTED,
        linewidth=1.0,
    )
    if chart.knee is not None:
        axes.axvline(chart.knee, color=light("ink"), linestyle=DASHED, linewidth=1.0)
        place = (chart.knee, 0.03)
        where = between([dot.inputs for dot in chart.callers], chart.knee)
        axes.annotate(f" knee {where} callers", place, xycoords=("data", "axes fraction"), gid=HALO)
    axes.set_title("Closed loop")
    axes.set_ylabel("answers per second")
    axes.set_ylim(bottom=0)
    counts_axis(axes, "callers")


def _rates(axes: Axes, chart: LoadChart) -> None:
    rates = [dot.rate_per_s for dot in chart.rates]
    for at, (name, colour, shape) in enumerate(OF_PERCENTILE):
        percentiles = [dot.percentiles[at] for dot in chart.rates]
        low = [0.0 if isinstance(p.low, Unknown) else max(p.value - p.low, 0.0) for p in percentiles]
        high = [0.0 if isinstance(p.high, Unknown) else max(p.high - p.value, 0.0) for p in percentiles]
        axes.errorbar(
            rates,
            [1e3 * p.value for p in percentiles],
            yerr=[[1e3 * x for x in low], [1e3 * x for x in high]],
            fmt=shape,
            color=light(colour),
            linestyle=DOTTED,
            linewidth=1.0,
            label=name,
        )
    naive = [1e3 * dot.naive_p99_s for dot in chart.rates]
    axes.plot(
        rates, naive, marker="x", color=light("muted"), linestyle=DASHED, linewidth=1.0, label="naive p99"
    )
    if chart.slo_s is not None:
        axes.axhline(1e3 * chart.slo_s, color=light("ink"), linewidth=1.0)
        place = (0.01, 1e3 * chart.slo_s)
        axes.annotate(f"SLO {1e3 * chart.slo_s:g} ms", place, xycoords=("axes fraction", "data"), gid=HALO,
                      va="bottom")  # fmt: skip
    axes.set_title("Open loop")
    axes.set_xlabel("requests per second, asked for")
    plain_log_y(axes, "latency, ms")
    legend_below(axes, columns=4)


def draw_scan(report: ThroughputReport) -> tuple[Plot, ...]:
    """The four plots, each drawn for a desk and for a phone."""
    drawn = scan_charts(report)
    return (
        plot_of(
            ("throughput", "Throughput over batch size"),
            drawn.throughput,
            paint=draw_throughput,
            words=lambda lines: (_THROUGHPUT, _ends_of_lines(lines)),
        ),
        plot_of(
            ("latency", "Latency over batch size"),
            drawn.latency,
            paint=latency,
            words=lambda lines: (_LATENCY, _ends_of_lines(lines)),
        ),
        plot_of(
            ("saturation", "Which resource is saturated?"),
            drawn.shares,
            paint=shares,
            words=lambda panels: (_SHARES, _ends_of_shares(panels)),
        ),
        plot_of(
            ("load", "The service under load"),
            drawn.load,
            paint=load,
            words=lambda chart: (_LOAD, _load_in_words(chart)),
        ),
    )


_THROUGHPUT = (
    "Shapes: measured, mean ± standard error. Vertical lines: the knee, where two lines through them meet. "
    "Stars: through the service, by its callers' inputs under way; the broken line is their knee. Lines "
    "between shapes only guide the eye."
)
_LATENCY = (
    "Shapes: the median time from call to end, bars to the 95th percentile. Stars: through the service, from "
    "sending to answer, bars to the 90th."
)
_SHARES = (
    "Each share is the time that a resource would need alone, at this machine's measured ceiling, of what a "
    "trial took; 100 % can't go faster. Utilisation is what drivers report: the time in which any "
    "kernel runs, which says nothing of saturation."
)
_LOAD = (
    "Closed loop: each caller asks again once answered; mean ± standard error between windows. Open loop: "
    "requests at random times, latency from when each was due, with 95 % intervals. Naive p99 counts from "
    "sending and leaves out a request's wait for a connection."
)


def _ends_of_lines(lines: tuple[Line, ...]) -> str:
    return "; ".join(
        f"{line.name}: {line.dots[0].value:.4g} at {line.dots[0].inputs}, "
        f"{line.dots[-1].value:.4g} at {line.dots[-1].inputs}"
        for line in lines
        if line.dots
    )


def _ends_of_shares(panels: tuple[SharesPanel, ...]) -> str:
    return "; ".join(
        f"{panel.title}: " + ", ".join(f"{name} {points[-1][1]:.0%}" for name, points in panel.shares)
        for panel in panels
    )


def _load_in_words(chart: LoadChart) -> str:
    closed = [f"{dot.inputs} callers {dot.value:.4g} answers/s" for dot in chart.callers]
    opened = [f"{dot.rate_per_s:.4g}/s p99 {dot.percentiles[-1].value * 1e3:.4g} ms" for dot in chart.rates]
    return "; ".join([*closed, *opened])
