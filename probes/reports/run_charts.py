"""What each plot shows, as values: measured points with their errors apart from predicted lines. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from probes.core.quoting import terminal
from probes.core.unknown import Unknown
from probes.records.rows import Block, Label, Measurement, Pass, Reads, Request, Scenario, Stop
from probes.records.schema import ProbeReport
from probes.records.stats import summarize
from probes.reports import crossover, run_findings
from probes.reports.canvas import (
    DASHED,
    DOTTED,
    PHONE,
    Sheet,
    bytes_axis,
    legend_below,
    panels_of,
    plain_log_y,
    plot_of,
    svg_of,
)
from probes.reports.crossover import fit, points_of
from probes.reports.document import Plot
from probes.reports.figures import Rate, rate, size, span
from probes.reports.palette import light
from probes.reports.run_findings import Controls, all_records, best_gb_per_s, by_model, pick
from probes.reports.run_headline import why_missing
from probes.reports.svg import HALO

STEPS = 60  # of a drawn line
FAMILIES = (  # panel title, how its paths begin
    ("Between host and VRAM", ("h2d", "d2h", "zero_copy")),
    ("Within VRAM", ("vram",)),
    ("Within host memory", ("h2h",)),
)


@dataclass(frozen=True)
class Trace:
    """One path of `transfer`: measured rates by size (bytes), and the model's line where its fit is good."""

    path: str
    points: tuple[tuple[int, Rate], ...]
    fitted: tuple[tuple[float, float], ...]  # bytes, GB/s; empty where there is no fit
    no_fit: str  # why


@dataclass(frozen=True)
class BandwidthPanel:
    """Paths of one order of magnitude."""

    title: str
    traces: tuple[Trace, ...]


@dataclass(frozen=True)
class Cell:
    """One block of device memory in the order of allocation, with its read rate and both labels."""

    first_bytes: int
    last_bytes: int
    read: Rate
    by_timing: Label
    by_counters: Label
    disagree: bool


@dataclass(frozen=True)
class ResidencyChart:
    """Where blocks are, between the read rates (GB/s) of the controls of known place."""

    cells: tuple[Cell, ...]
    controls: run_findings.Controls | Unknown
    limit_bytes: int | None  # the cap that the probe set itself; None where it set none
    ended: str


@dataclass(frozen=True)
class ScenarioPanel:
    """Wall-clock times of a pass in every scenario of one model, element type and batch; the link's limit."""

    title: str
    bars: tuple[Pass, ...]
    link_s: float | None  # computed: spilled bytes over the link's measured bandwidth
    link_told: str


@dataclass(frozen=True)
class BreakEvenChart:
    """k* over size: a predicted line with its error, and measured points."""

    predicted: tuple[crossover.BreakEven, ...]
    measured: tuple[crossover.BreakEven, ...]


@dataclass(frozen=True)
class Charts:
    """Everything that is drawn; a chart that can't be drawn gives the reason."""

    bandwidth: tuple[BandwidthPanel, ...] | Unknown
    residency: ResidencyChart | Unknown
    scenarios: tuple[ScenarioPanel, ...] | Unknown
    break_even: BreakEvenChart | Unknown


def charts(report: ProbeReport) -> Charts:
    """The charts of a report."""
    records = all_records(report)
    measured = pick(records, Measurement)
    return Charts(
        bandwidth=_bandwidth(measured) or Unknown(why_missing(report, "transfer")),
        residency=_residency(pick(records, Block), pick(records, Request), pick(records, Stop))
        or Unknown(why_missing(report, "spill")),
        scenarios=_scenarios(pick(records, Pass), best_gb_per_s(records, "h2d_pinned"))
        or Unknown(why_missing(report, "scenarios")),
        break_even=_break_even(report, measured, pick(records, Reads)),
    )


def spread(first: float, last: float) -> tuple[float, ...]:
    """Places for a line from first to last, evenly spaced on a logarithmic axis."""
    return tuple(first * (last / first) ** (i / (STEPS - 1)) for i in range(STEPS))


def _bandwidth(rows: Sequence[Measurement]) -> tuple[BandwidthPanel, ...]:
    names = sorted({row.name for row in rows})
    known = tuple(start for _, starts in FAMILIES for start in starts)
    families = (*FAMILIES, ("Other paths", tuple(n for n in names if not n.startswith(known))))
    panels = [
        BandwidthPanel(title, tuple(_trace(rows, name) for name in names if name.startswith(starts)))
        for title, starts in families
    ]
    return tuple(panel for panel in panels if panel.traces)


def _trace(rows: Sequence[Measurement], name: str) -> Trace:
    of_path = sorted((row for row in rows if row.name == name), key=lambda row: row.payload_bytes)
    points = tuple((row.payload_bytes, rate(row.moved_bytes, row.times_s)) for row in of_path)
    fitted = fit(points_of(of_path, name))
    if isinstance(fitted, Unknown):
        return Trace(name, points, (), fitted.reason)
    weight = of_path[0].moved_bytes / of_path[0].payload_bytes
    line = tuple(
        (n_bytes, n_bytes * weight / fitted.seconds(n_bytes) / 1e9)
        for n_bytes in spread(of_path[0].payload_bytes, of_path[-1].payload_bytes)
    )
    return Trace(name, points, line, "")


def _residency(
    blocks: Sequence[Block], requests: Sequence[Request], stops: Sequence[Stop]
) -> ResidencyChart | None:
    cells, held = [], 0
    for placed in sorted(run_findings.label_blocks(blocks), key=lambda p: p.block.index):
        block = placed.block
        if block.asked != "vram" or block.control:
            continue
        read = rate(block.n_bytes, [block.read_s])
        labels = (placed.by_timing, placed.by_counters, placed.disagree)
        cells.append(Cell(held, held + block.n_bytes, read, *labels))
        held += block.n_bytes
    if not cells:
        return None
    limits = [request.cap_bytes for request in requests if request.cap_bytes is not None]
    ended = _ended(stops[-1]) if stops else ""
    return ResidencyChart(tuple(cells), run_findings.controls(blocks), max(limits, default=None), ended)


def _ended(stop: Stop) -> str:
    """The first sentence of the driver's answer is what a caption can hold; the tables have the rest."""
    note = stop.note.split(". ", maxsplit=1)[0].rstrip(".")
    return f"The probe stopped at {size(stop.held_bytes)}, {stop.cause}: {note}."


SCENARIO_ORDER: tuple[Scenario, ...] = (
    "resident",
    "placed",
    "packed",
    "streamed",
    "zero_copy_weights",
    "zero_copy_all",
)


def _scenarios(passes: Sequence[Pass], link: float | None) -> tuple[ScenarioPanel, ...]:
    panels = []
    for (model, dtype, rows), ways in by_model(passes).items():
        spilled = max(one.spilled_bytes for one in ways.values())
        known = link is not None and spilled > 0
        panels.append(
            ScenarioPanel(
                title=f"{model}, {dtype}, batch {rows}",
                bars=tuple(ways[name] for name in SCENARIO_ORDER if name in ways),
                link_s=spilled / link / 1e9 if link and known else None,
                link_told=f"{size(spilled)} at {link:.3g} GB/s" if known else "",
            )
        )
    return tuple(panels)


def _break_even(
    report: ProbeReport, rows: Sequence[Measurement], reads: Sequence[Reads]
) -> BreakEvenChart | Unknown:
    seen = [crossover.measured(reads, n_bytes) for n_bytes in sorted({row.payload_bytes for row in reads})]
    measured = tuple(one for one in seen if isinstance(one, crossover.BreakEven) and math.isfinite(one.reads))
    advice = crossover.adviser(rows)
    predicted: tuple[crossover.BreakEven, ...] = ()
    if isinstance(advice, crossover.Adviser):
        sizes = [row.payload_bytes for row in rows if row.name in crossover.PATHS]
        places = (advice.at(round(n)) for n in spread(min(sizes), max(sizes)))
        predicted = tuple(one for one in places if math.isfinite(one.reads))
    if predicted or measured:
        return BreakEvenChart(predicted, measured)
    if isinstance(advice, Unknown):
        return Unknown(why_missing(report, "breakeven"))
    return Unknown("reading in place is as fast as VRAM at every size, so a copy never pays")


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
SCENARIO_STYLES: dict[Scenario, tuple[str, str]] = {  # colour, in words
    "resident": ("muted", "all in VRAM"),
    "streamed": ("blue", "weights streamed"),
    "packed": ("green", "weights packed"),
    "placed": ("amber", "placed by plan"),
    "zero_copy_weights": ("vermillion", "weights in place"),
    "zero_copy_all": ("purple", "weights, inputs in place"),
}
MOST_LETTERS = {"desk": 48, "phone": 18}  # cells of a row in which a letter still fits
GIB = 2**30
ROOM = {"desk": 1.85, "phone": 2.2}  # of the longest bar: the column of figures is right of it


def bandwidth(panels: Sequence[BandwidthPanel], sheet: Sheet) -> str:
    """Rate over size: points with standard errors, pale bars from p5 to p95, lines of the fits."""

    def paint(axes: Axes, panel: BandwidthPanel) -> None:
        for i, trace in enumerate(sorted(panel.traces, key=_place)):
            _draw_trace(axes, trace, PATHS.get(trace.path) or OTHER_PATHS[i % len(OTHER_PATHS)])
        axes.set_title(terminal(panel.title))
        bytes_axis(axes, "size of one buffer")
        plain_log_y(axes, "bandwidth, GB/s")
        legend_below(axes, columns=2)

    return panels_of(panels, sheet, paint, 4.9)


def _place(trace: Trace) -> int:
    return list(PATHS).index(trace.path) if trace.path in PATHS else len(PATHS)


def _draw_trace(axes: Axes, trace: Trace, style: tuple[str, str, bool]) -> None:
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


def draw_residency(chart: ResidencyChart, sheet: Sheet) -> str:
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
    axes.set_yscale("log")
    if isinstance(chart.controls, Controls):
        lowest = min(lowest, chart.controls.host_gb_per_s)
        highest = _control(axes, chart.controls.vram_gb_per_s, "control in VRAM")
        _control(axes, chart.controls.host_gb_per_s, "control in pinned host memory")
        axes.set_ylim(top=highest * 4)
    axes.set_ylim(bottom=lowest / 5)
    plain_log_y(axes, "read again at, GB/s")
    if chart.limit_bytes is not None:
        axes.axvline(chart.limit_bytes / GIB, color=light("ink"), linestyle=DASHED, linewidth=1.2)
        axes.annotate(
            f"cap {size(chart.limit_bytes)}",
            (chart.limit_bytes / GIB, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-5, 0),
            textcoords="offset points",
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
        longest_ms = max([(panel.link_s or 0.0) * 1e3, *map(_end_ms, panel.bars)])
        axes.set_xlim(0, longest_ms * ROOM[sheet.name])
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(terminal(panel.title))
        axes.set_xlabel("wall-clock time of a forward pass, ms")
        if panel.link_s is not None:
            label = f"link's limit, computed: {span(panel.link_s, bare=True)}"
            axes.axvline(panel.link_s * 1e3, color=light("ink"), linestyle=DASHED, linewidth=1.2, label=label)
            legend_below(axes, columns=1, drop=0.26)

    return panels_of(panels, sheet, paint, 3.3)


def _end_ms(row: Pass) -> float:
    """Where a bar with its error bar ends."""
    summary = summarize(row.times_s)
    return (summary.median + (summary.error or 0.0)) * 1e3


def _bars(axes: Axes, passes: Sequence[Pass]) -> None:
    """One bar each, from below; the figures stand in a column at the right, where no line passes."""
    measured = [summarize(one.times_s) for one in passes]
    places, times = range(len(passes)), [summary.median * 1e3 for summary in measured]
    colours = [light(SCENARIO_STYLES[one.scenario][0]) for one in passes]
    axes.barh(places, times, height=0.62, color=colours, alpha=0.85)
    errors = [(summary.error or 0.0) * 1e3 for summary in measured]
    axes.errorbar(times, places, xerr=errors, fmt="none", color=light("ink"), capsize=3)
    for place, summary in zip(places, measured, strict=True):
        axes.annotate(
            span(summary.median, summary.error),
            (1.0, place),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="center",
            fontsize=9.5,
            gid=HALO,
        )
    axes.set_yticks(places, [SCENARIO_STYLES[one.scenario][1] for one in passes])


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
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.4), max(high, 2.5))
        plain_log_y(axes, "full reads to break even, k*")
        axes.axhline(1, color=light("ink"), linestyle=DOTTED, linewidth=1.2)
        where = {"transform": axes.transAxes, "ha": "right", "color": light("muted")}
        axes.text(0.99, 0.96, "above: copy to VRAM first", va="top", **where)
        axes.text(0.99, 0.04, "below: read in place", va="bottom", **where)
        legend_below(axes, columns=1 if sheet is PHONE else 2)

    return svg_of(paint, sheet, 4.2)


BANDWIDTH = "bandwidth", "Bandwidth over size"
RESIDENCY = "residency", "Where device memory really is"
SCENARIOS = "scenarios", "A model larger than VRAM, run in several ways"
BREAK_EVEN = "break-even", "How often must data be read for a copy to pay?"


def draw_plots(report: ProbeReport) -> tuple[Plot, ...]:
    """The four plots, each drawn for a desk and for a phone."""
    drawn = charts(report)
    return (
        plot_of(BANDWIDTH, drawn.bandwidth, paint=bandwidth, words=_bandwidth_words),
        plot_of(RESIDENCY, drawn.residency, paint=draw_residency, words=_residency_words),
        plot_of(SCENARIOS, drawn.scenarios, paint=scenarios, words=_scenario_words),
        plot_of(BREAK_EVEN, drawn.break_even, paint=break_even, words=_break_even_words),
    )


def _bandwidth_words(chart: tuple[BandwidthPanel, ...]) -> tuple[str, str]:
    traces = [trace for panel in chart for trace in panel.traces]
    refused = [f"{trace.path} ({trace.no_fit})" for trace in traces if trace.no_fit]
    rates = "; ".join(f"{t.path} {t.points[-1][1]} GB/s at {size(t.points[-1][0])}" for t in traces)
    return (
        "Shapes: measured, median ± standard error. Pale bars: p5 to p95 of the samples. "
        "Lines: the model t(S) = α + S/β, fitted piece by piece to the medians."
        + (f" No line, because no fit is good enough: {', '.join(refused)}." if refused else ""),
        f"Measured bandwidth by path and size. At the largest sizes: {rates}.",
    )


def _residency_words(chart: ResidencyChart) -> tuple[str, str]:
    cells = chart.cells
    outside = sum(cell.by_timing in ("host", "paged") for cell in cells)
    disagree = sum(cell.disagree for cell in cells)
    signals = (
        f"The two signals disagree on {disagree} of {len(cells)} blocks."
        if disagree
        else "Nowhere do the two signals contradict each other."
    )
    return (
        "Measured: each block of device memory, read again after all were allocated, mean ± standard error. "
        f"{signals} {chart.ended}",
        f"{len(cells)} blocks of device memory; by timing {outside} are outside VRAM. {signals}",
    )


def _scenario_words(chart: tuple[ScenarioPanel, ...]) -> tuple[str, str]:
    links = dict.fromkeys(panel.link_told for panel in chart if panel.link_told)
    rates = f" ({', '.join(links)})" if links else ""
    missing = all(panel.link_s is None for panel in chart)
    return (
        "Bars: measured, wall clock, median ± standard error. Dashed line: computed, the bytes in system RAM "
        f"at the link's measured bandwidth{rates}; no way that moves all of them in each pass can be faster."
        + (" The link's bandwidth is unknown here (it was not measured)." if missing else ""),
        "; ".join(
            f"{panel.title}: " + ", ".join(f"{one.scenario} {_milliseconds(one)}" for one in panel.bars)
            for panel in chart
        ),
    )


def _milliseconds(row: Pass) -> str:
    summary = summarize(row.times_s)
    return f"{summary.median * 1e3:.4g} ms (n={summary.n})"


def _break_even_words(chart: BreakEvenChart) -> tuple[str, str]:
    count = len(chart.measured)
    return (
        "k* is the number of full reads from which copying a buffer to VRAM first is faster than reading it "
        "in place. Line and band: predicted from single transfers (the rows of `transfer`), with its error. "
        + (
            f"Points: measured at {count} sizes, ± standard error."
            if count
            else "It was not measured in this run: the line is only a prediction."
        ),
        f"Predicted break-even over buffer size, and {count} measured points.",
    )
