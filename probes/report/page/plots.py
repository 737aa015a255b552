"""Every plot of a report with title and caption, drawn and ready for the page; or why it is missing."""

from probes.records.schema import Pass, ProbeReport
from probes.records.stats import summarize
from probes.report.page import draw
from probes.report.page.canvas import plot_of
from probes.report.page.charts import (
    BandwidthPanel,
    BreakEvenChart,
    ResidencyChart,
    ScenarioPanel,
    charts,
)
from probes.report.page.html import Plot
from probes.report.quantities import size

BANDWIDTH = "bandwidth", "Bandwidth over size"
RESIDENCY = "residency", "Where device memory really is"
SCENARIOS = "scenarios", "A model larger than VRAM, run in several ways"
BREAK_EVEN = "break-even", "How often must data be read for a copy to pay?"


def draw_plots(report: ProbeReport) -> tuple[Plot, ...]:
    """The four plots, each drawn for a desk and for a phone."""
    found = charts(report)
    return (
        plot_of(BANDWIDTH, found.bandwidth, paint=draw.bandwidth, words=_bandwidth_words),
        plot_of(RESIDENCY, found.residency, paint=draw.residency, words=_residency_words),
        plot_of(SCENARIOS, found.scenarios, paint=draw.scenarios, words=_scenario_words),
        plot_of(BREAK_EVEN, found.break_even, paint=draw.break_even, words=_break_even_words),
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


def _milliseconds(one: Pass) -> str:
    summary = summarize(one.times_s)
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
