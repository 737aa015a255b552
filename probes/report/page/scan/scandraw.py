"""Draws the charts of a throughput report as SVG. Shapes are measured; lines between them guide the eye."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from probes.report.page.canvas import (
    DASHED,
    DOTTED,
    Sheet,
    counts_axis,
    legend_below,
    panels_of,
    plain_log_y,
    svg_of,
)
from probes.report.page.palette import light
from probes.report.page.scan.scancharts import SHARES, Dot, Line, LoadChart, SharesPanel
from probes.report.page.svg import HALO
from probes.shared.quoting import terminal
from probes.shared.unknown import Unknown

STYLES = (("blue", "o"), ("vermillion", "s"), ("green", "^"), ("purple", "D"), ("amber", "P"), ("muted", "X"))
OF_SHARE = dict(zip(SHARES, STYLES, strict=False))
OF_PERCENTILE = (("p50", "blue", "o"), ("p90", "purple", "D"), ("p99", "vermillion", "s"))


def throughput(lines: Sequence[Line], sheet: Sheet) -> str:
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
        axes.axvline(line.knee, color=colour, linewidth=0.9, alpha=0.6)


def _bars(dots: Sequence[Dot], factor: float) -> list[list[float]]:
    low = [max(factor * (dot.value - dot.low), 0.0) for dot in dots]
    return [low, [max(factor * (dot.high - dot.value), 0.0) for dot in dots]]


def shares(panels: Sequence[SharesPanel], sheet: Sheet) -> str:
    """How near each resource is to its ceiling, and beside it what drivers call utilisation."""
    return panels_of(panels, sheet, _shares, 4.2)


def _shares(axes: Axes, panel: SharesPanel) -> None:
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
        axes.annotate(f" knee {chart.knee:.3g}", place, xycoords=("data", "axes fraction"), gid=HALO)
    axes.set_title("Closed loop")
    axes.set_ylabel("answers per second")
    axes.set_ylim(bottom=0)
    counts_axis(axes, "callers")


def _rates(axes: Axes, chart: LoadChart) -> None:
    rates = [dot.rate_per_s for dot in chart.rates]
    for at, (name, colour, shape) in enumerate(OF_PERCENTILE):
        found = [dot.percentiles[at] for dot in chart.rates]
        low = [0.0 if isinstance(p.low, Unknown) else max(p.value - p.low, 0.0) for p in found]
        high = [0.0 if isinstance(p.high, Unknown) else max(p.high - p.value, 0.0) for p in found]
        axes.errorbar(
            rates,
            [1e3 * p.value for p in found],
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
