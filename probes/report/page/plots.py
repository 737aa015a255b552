"""Every plot of a report with title and caption, drawn and ready for the page; or why it is missing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from probes.records.schema import Pass, ProbeReport, Unknown
from probes.records.stats import summarize
from probes.report.page import draw
from probes.report.page.canvas import DESK, PHONE, Sheet
from probes.report.page.charts import (
    BandwidthPanel,
    BreakEvenChart,
    ResidencyChart,
    ScenarioPanel,
    charts,
)
from probes.report.page.html import Plot
from probes.report.page.svg import embed
from probes.report.quantities import size

C = TypeVar("C")


@dataclass(frozen=True)
class _Words:
    """The words about a plot. The alternative text is for those who can't see it."""

    name: str
    title: str
    caption: str
    alternative: str


def draw_plots(report: ProbeReport) -> tuple[Plot, ...]:
    """The four plots, each drawn for a desk and for a phone."""
    found = charts(report)
    return (
        _plot(found.bandwidth, draw.bandwidth, _bandwidth_words),
        _plot(found.residency, draw.residency, _residency_words),
        _plot(found.scenarios, draw.scenarios, _scenario_words),
        _plot(found.break_even, draw.break_even, _break_even_words),
    )


def _plot(chart: C | Unknown, paint: Callable[[C, Sheet], str], words: Callable[[C | None], _Words]) -> Plot:
    if isinstance(chart, Unknown):
        said = words(None)
        return Plot(said.name, said.title, "", (), chart.reason)
    said = words(chart)
    drawn = tuple(
        (
            sheet.name,
            embed(
                paint(chart, sheet),
                name=f"{said.name}-{sheet.name}",
                title=said.title,
                description=said.alternative,
            ),
        )
        for sheet in (DESK, PHONE)
    )
    return Plot(said.name, said.title, said.caption, drawn, "")


def _bandwidth_words(chart: tuple[BandwidthPanel, ...] | None) -> _Words:
    traces = [trace for panel in chart or () for trace in panel.traces]
    refused = [f"{trace.path} ({trace.no_fit})" for trace in traces if trace.no_fit]
    rates = "; ".join(f"{t.path} {t.points[-1][1]} GB/s at {size(t.points[-1][0])}" for t in traces)
    return _Words(
        "bandwidth",
        "Bandwidth over size",
        "Shapes: measured, median ± standard error. Pale bars: p5 to p95 of the samples. "
        "Lines: the model t(S) = α\u00a0+\u00a0S\u2060/\u2060β, fitted piece by piece to the medians."
        + (f" No line, because no fit is good enough: {', '.join(refused)}." if refused else ""),
        f"Measured bandwidth by path and size. At the largest sizes: {rates}.",
    )


def _residency_words(chart: ResidencyChart | None) -> _Words:
    cells = chart.cells if chart else ()
    outside = sum(cell.by_timing in ("host", "paged") for cell in cells)
    disagree = sum(cell.disagree for cell in cells)
    signals = (
        f"The two signals disagree on {disagree} of {len(cells)} blocks."
        if disagree
        else ("Nowhere do the two signals contradict each other.")
    )
    return _Words(
        "residency",
        "Where device memory really is",
        "Measured: each block of device memory, read again after all were allocated, mean ± standard error. "
        f"{signals} " + (chart.ended if chart else ""),
        f"{len(cells)} blocks of device memory; by timing {outside} are outside VRAM. {signals}",
    )


def _scenario_words(chart: tuple[ScenarioPanel, ...] | None) -> _Words:
    links = dict.fromkeys(panel.link_told for panel in chart or () if panel.link_told)
    rates = f" ({', '.join(links)})" if links else ""
    missing = chart is not None and all(panel.link_s is None for panel in chart)
    return _Words(
        "scenarios",
        "A model larger than VRAM, run in four ways",
        "Bars: measured, wall clock, median ± standard error. Dashed line: computed, the bytes in system RAM "
        f"at the link's measured bandwidth{rates}; no way that moves all of them in each pass can be faster."
        + (" The link's bandwidth is unknown here (it was not measured)." if missing else ""),
        "; ".join(
            f"{panel.title}: " + ", ".join(f"{one.scenario} {_milliseconds(one)}" for one in panel.bars)
            for panel in chart or ()
        ),
    )


def _milliseconds(one: Pass) -> str:
    summary = summarize(one.times_s)
    return f"{summary.median * 1e3:.4g} ms (n={summary.n})"


def _break_even_words(chart: BreakEvenChart | None) -> _Words:
    count = len(chart.measured) if chart else 0
    return _Words(
        "break-even",
        "How often must data be read for a copy to pay?",
        "k* is the number of full reads from which copying a buffer to VRAM first is faster than reading it "
        "in place. Line and band: predicted from single transfers (the rows of `transfer`), with its error. "
        + (
            f"Points: measured at {count} sizes, ± standard error."
            if count
            else "It was not measured in this run: the line is only a prediction."
        ),
        f"Predicted break-even over buffer size, and {count} measured points.",
    )
