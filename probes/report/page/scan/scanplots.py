"""Every plot of a throughput report with title and caption, drawn and ready for the page."""

from probes.report.page.canvas import plot_of
from probes.report.page.html import Plot
from probes.report.page.scan import scandraw
from probes.report.page.scan.scancharts import Line, LoadChart, SharesPanel, scan_charts
from probes.throughput.document import ThroughputReport


def draw_scan(report: ThroughputReport) -> tuple[Plot, ...]:
    """The four plots, each drawn for a desk and for a phone."""
    found = scan_charts(report)
    return (
        plot_of(
            ("throughput", "Throughput over batch size"),
            found.throughput,
            paint=scandraw.throughput,
            words=lambda lines: (_THROUGHPUT, _ends_of_lines(lines)),
        ),
        plot_of(
            ("latency", "Latency over batch size"),
            found.latency,
            paint=scandraw.latency,
            words=lambda lines: (_LATENCY, _ends_of_lines(lines)),
        ),
        plot_of(
            ("saturation", "Which resource is saturated?"),
            found.shares,
            paint=scandraw.shares,
            words=lambda panels: (_SHARES, _ends_of_shares(panels)),
        ),
        plot_of(
            ("load", "The service under load"),
            found.load,
            paint=scandraw.load,
            words=lambda chart: (_LOAD, _load_in_words(chart)),
        ),
    )


_THROUGHPUT = (
    "Shapes: measured, mean ± standard error. Vertical lines: the knee. Stars: through the service, by its "
    "callers' inputs under way. Lines between shapes only guide the eye."
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
