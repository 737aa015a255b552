"""Draws the four charts as SVG. Filled and open shapes are measured, lines without shapes are models."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from probes.records.schema import Label, Pass, Scenario
from probes.records.stats import summarize
from probes.report.answers import took_s
from probes.report.page.canvas import (
    DASHED,
    DOTTED,
    PHONE,
    Sheet,
    bytes_axis,
    legend_below,
    panels_of,
    plain_log_y,
    svg_of,
)
from probes.report.page.charts import (
    BandwidthPanel,
    BreakEvenChart,
    Cell,
    ResidencyChart,
    ScenarioPanel,
    Trace,
)
from probes.report.page.palette import light
from probes.report.page.svg import HALO
from probes.report.quantities import size, span
from probes.report.residency import Controls
from probes.shared.quoting import terminal

# path -> colour, shape, filled. A direction has a colour, its faster form is filled.
PATHS: dict[str, tuple[str, str, bool]] = {
    "h2d_pinned": ("blue", "o", True),
    "h2d_then_read": ("purple", "D", False),
    "h2d_pageable": ("blue", "o", False),
    "d2h_pinned": ("vermillion", "s", True),
    "d2h_pageable": ("vermillion", "s", False),
    "zero_copy_read": ("green", "^", True),
    "zero_copy_write": ("green", "v", False),
    "vram_read": ("blue", "o", True),
    "vram_reread": ("purple", "D", False),
    "vram_write": ("vermillion", "s", True),
    "vram_copy": ("green", "^", True),
    "h2h_read": ("blue", "o", True),
    "h2h_write": ("vermillion", "s", True),
    "h2h_copy": ("green", "^", True),
}
OTHER_PATHS = (("purple", "D", True), ("amber", "P", True), ("muted", "X", True), ("purple", "D", False))
LABELS: dict[Label, tuple[str, str, str]] = {  # colour, letter, in words
    "vram": ("blue", "V", "VRAM"),
    "host": ("vermillion", "H", "host memory"),
    "paged": ("purple", "P", "evicted or paged"),
    "unclear": ("muted", "?", "unclear"),
}
SCENARIOS: dict[Scenario, tuple[str, str]] = {  # colour, in words
    "resident": ("muted", "all in VRAM"),
    "streamed": ("blue", "weights streamed"),
    "packed": ("green", "weights packed"),
    "placed": ("amber", "placed by plan"),
    "zero_copy_weights": ("vermillion", "weights in place"),
    "zero_copy_all": ("purple", "weights, inputs in place"),
}
MOST_LETTERS = {"desk": 48, "phone": 18}  # cells of a row in which a letter still fits
GIB = 2**30
ROOM = {"desk": 1.85, "phone": 2.2}  # of the longest bar: its label is next to it


def bandwidth(panels: Sequence[BandwidthPanel], sheet: Sheet) -> str:
    """Rate over size: points with standard errors, pale bars from p5 to p95, lines of the fits."""

    def paint(axes: Axes, panel: BandwidthPanel) -> None:
        for i, trace in enumerate(sorted(panel.traces, key=_place)):
            _trace(axes, trace, PATHS.get(trace.path) or OTHER_PATHS[i % len(OTHER_PATHS)])
        axes.set_title(terminal(panel.title))
        bytes_axis(axes, "size of one buffer")
        plain_log_y(axes, "bandwidth, GB/s")
        legend_below(axes, columns=2)

    return panels_of(panels, sheet, paint, 4.9)


def _place(trace: Trace) -> int:
    return list(PATHS).index(trace.path) if trace.path in PATHS else len(PATHS)


def _trace(axes: Axes, trace: Trace, style: tuple[str, str, bool]) -> None:
    colour, shape, filled = light(style[0]), style[1], style[2]
    sizes = [n_bytes for n_bytes, _ in trace.points]
    rates = [measured for _, measured in trace.points]
    axes.vlines(sizes, [r.low for r in rates], [r.high for r in rates], color=colour, alpha=0.25, linewidth=4)
    if trace.fitted:
        axes.plot([x for x, _ in trace.fitted], [y for _, y in trace.fitted], color=colour, linewidth=1.2)
    else:  # no model: a thin line between the points, only to guide the eye
        axes.plot(sizes, [r.value for r in rates], color=colour, linewidth=0.9, linestyle=DOTTED)
    axes.errorbar(
        sizes,
        [r.value for r in rates],
        yerr=[r.error or 0.0 for r in rates],
        fmt=shape,
        color=colour,
        markerfacecolor=colour if filled else light("paper"),
        label=terminal(trace.path) + ("" if trace.fitted else " (no fit)"),
    )


def residency(chart: ResidencyChart, sheet: Sheet) -> str:
    """Read rate of every block where it was allocated; under it the label by each of the two signals."""

    def paint(figure: Figure) -> None:
        rates, signals = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
        _block_rates(rates, chart)
        for row, name in enumerate(("by_counters", "by_timing")):
            _signal_row(signals, chart.cells, name, row, letters=len(chart.cells) <= MOST_LETTERS[sheet.name])
        signals.set_yticks([0, 1], ["by the driver's\naccounts", "by timing"])
        signals.set_ylim(-0.5, 1.5)
        signals.set_xlim(left=0)
        signals.tick_params(axis="y", length=0)
        signals.grid(visible=False)
        signals.spines[["left"]].set_visible(False)
        signals.set_xlabel("device memory granted so far, GiB")
        shown = [label for label in LABELS if any(label in (c.by_timing, c.by_counters) for c in chart.cells)]
        patches = [Patch(color=light(LABELS[n][0]), label=f"{LABELS[n][1]}  {LABELS[n][2]}") for n in shown]
        columns = 2 if sheet is PHONE else 4
        signals.legend(handles=patches, loc="upper left", bbox_to_anchor=(0.0, -0.62), ncols=columns)

    return svg_of(paint, sheet, 4.8)


def _block_rates(axes: Axes, chart: ResidencyChart) -> None:
    for label, (name, _, _) in LABELS.items():
        cells = [cell for cell in chart.cells if cell.by_timing == label]
        if not cells:
            continue
        middles = [(cell.first_bytes + cell.last_bytes) / 2 / GIB for cell in cells]
        widths = [0.88 * (cell.last_bytes - cell.first_bytes) / GIB for cell in cells]
        rates = [cell.read.value for cell in cells]
        axes.bar(middles, rates, width=widths, color=light(name), alpha=0.3)
        axes.errorbar(
            middles,
            rates,
            xerr=[width / 2 for width in widths],
            yerr=[cell.read.error or 0.0 for cell in cells],
            fmt="none",
            color=light(name),
            capsize=0,
        )
    lowest = min(cell.read.low for cell in chart.cells)
    plain_log_y(axes, "read again at, GB/s")
    if isinstance(chart.controls, Controls):
        lowest = min(lowest, chart.controls.host_gb_per_s)
        highest = _control(axes, chart.controls.vram_gb_per_s, "control in VRAM")
        _control(axes, chart.controls.host_gb_per_s, "control in pinned host memory")
        axes.set_ylim(top=highest * 4)
    axes.set_ylim(bottom=lowest / 5)
    if chart.limit_bytes is not None:
        axes.axvline(chart.limit_bytes / GIB, color=light("ink"), linestyle=DASHED, linewidth=1.2)
        axes.annotate(
            f"cap {size(chart.limit_bytes)} ",
            (chart.limit_bytes / GIB, 0.03),
            xycoords=("data", "axes fraction"),
            ha="right",
            gid=HALO,
        )


def _control(axes: Axes, gb_per_s: float, label: str) -> float:
    axes.axhline(gb_per_s, color=light("ink"), linestyle=DOTTED, linewidth=1.2)
    axes.annotate(
        f"{label}: {gb_per_s:.4g} GB/s",
        (0.01, gb_per_s),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=9.5,
        gid=HALO,
    )
    return gb_per_s


def _signal_row(axes: Axes, cells: Sequence[Cell], signal: str, row: int, *, letters: bool) -> None:
    labels: list[Label] = [c.by_timing if signal == "by_timing" else c.by_counters for c in cells]
    middles = [(cell.first_bytes + cell.last_bytes) / 2 / GIB for cell in cells]
    widths = [0.92 * (cell.last_bytes - cell.first_bytes) / GIB for cell in cells]
    starts = [middle - width / 2 for middle, width in zip(middles, widths, strict=True)]
    colours = [light(LABELS[label][0]) for label in labels]
    axes.barh([row] * len(cells), widths, left=starts, height=0.8, color=colours)
    if letters:
        style = {"ha": "center", "va": "center_baseline", "color": light("paper"), "fontsize": 9.5}
        for middle, label in zip(middles, labels, strict=True):
            axes.text(middle, row, LABELS[label][1], **style)


def scenarios(panels: Sequence[ScenarioPanel], sheet: Sheet) -> str:
    """Wall-clock times of a pass as bars with standard errors; the time that the link needs as a line."""

    def paint(axes: Axes, panel: ScenarioPanel) -> None:
        _bars(axes, panel.bars[::-1])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        longest = max(map(took_s, panel.bars))
        axes.set_xlim(0, longest * 1e3 * ROOM[sheet.name])
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(terminal(panel.title))
        axes.set_xlabel("wall-clock time of a forward pass, ms")
        if panel.link_s is not None:
            label = f"link's limit, computed: {span(panel.link_s, bare=True)}"
            axes.axvline(panel.link_s * 1e3, color=light("ink"), linestyle=DASHED, linewidth=1.2, label=label)
            legend_below(axes, columns=1, drop=0.26)

    return panels_of(panels, sheet, paint, 3.3)


def _bars(axes: Axes, passes: Sequence[Pass]) -> None:
    """One bar each, from below, with its figure next to it."""
    measured = [summarize(one.times_s) for one in passes]
    places, times = range(len(passes)), [summary.median * 1e3 for summary in measured]
    colours = [light(SCENARIOS[one.scenario][0]) for one in passes]
    axes.barh(places, times, height=0.62, color=colours, alpha=0.85)
    errors = [(summary.error or 0.0) * 1e3 for summary in measured]
    axes.errorbar(times, places, xerr=errors, fmt="none", color=light("ink"), capsize=3)
    for place, summary in zip(places, measured, strict=True):
        axes.annotate(
            span(summary.median, summary.error),
            (summary.median * 1e3, place),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            gid=HALO,
        )
    axes.set_yticks(places, [SCENARIOS[one.scenario][1] for one in passes])


def break_even(chart: BreakEvenChart, sheet: Sheet) -> str:
    """k* over size: a line with its error band where predicted, points with errors where measured."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        if chart.predicted:
            sizes = [one.n_bytes for one in chart.predicted]
            reads = [one.reads for one in chart.predicted]
            errors = [one.error for one in chart.predicted]
            low = [max(r - e, r / 10) for r, e in zip(reads, errors, strict=True)]
            high = [r + e for r, e in zip(reads, errors, strict=True)]
            axes.fill_between(sizes, low, high, color=light("blue"), alpha=0.18, lw=0)
            axes.plot(sizes, reads, color=light("blue"), label="predicted, with its error")
        axes.errorbar(
            [one.n_bytes for one in chart.measured],
            [one.reads for one in chart.measured],
            yerr=[one.error for one in chart.measured],
            fmt="o",
            color=light("vermillion"),
            label="measured, ± standard error" if chart.measured else None,
        )
        bytes_axis(axes, "size of the buffer")
        plain_log_y(axes, "full reads to break even, k*")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.4), max(high, 2.5))
        axes.axhline(1, color=light("ink"), linestyle=DOTTED, linewidth=1.2)
        where = {"transform": axes.transAxes, "ha": "right", "color": light("muted")}
        axes.text(0.99, 0.96, "above: copy to VRAM first", va="top", **where)
        axes.text(0.99, 0.04, "below: read in place", va="bottom", **where)
        legend_below(axes, columns=1 if sheet is PHONE else 2)

    return svg_of(paint, sheet, 4.2)
