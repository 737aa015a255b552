"""What is drawn of a scan is what was measured: every value with its bar, under its name, inside the axes."""

from dataclasses import replace

import made_scans
import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from test_scan_shown import served, whole

from probes.core.unknown import Unknown
from probes.reports import scan_charts as scandraw
from probes.reports.canvas import DESK
from probes.reports.html import render_page
from probes.reports.scan import scan_document
from probes.reports.scan_charts import Dot, Line, ScanCharts, scan_charts
from probes.throughput.direct.results import DirectScan, latency_s

pytestmark = pytest.mark.thorough  # a second each


def charts() -> ScanCharts:
    return scan_charts(whole())


def heights(axes: Axes) -> list[list[float]]:
    return [
        [float(y) for y in one.lines[0].get_ydata()]
        for one in axes.containers
        if isinstance(one, ErrorbarContainer)
    ]


def ends(axes: Axes) -> list[list[tuple[float, float]]]:
    """From where to where the bars reach."""
    return [
        [(float(segment[0][1]), float(segment[1][1])) for segment in bar.get_segments()]
        for one in axes.containers
        if isinstance(one, ErrorbarContainer)
        for bar in one.lines[2]
    ]


def names(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


@pytest.mark.parametrize(
    ("draw", "factor", "label"),
    [(scandraw.draw_throughput, 1.0, "inputs per second"), (scandraw.latency, 1e3, "median time, ms")],
)
def test_rates_and_times_are_drawn_over_inputs_with_their_bars(
    figures: list[Figure], draw, factor: float, label: str
) -> None:
    lines = charts().throughput
    assert not isinstance(lines, Unknown)
    draw(lines, DESK)
    [axes] = figures[0].axes
    assert axes.get_ylabel().startswith(label)
    assert names(axes) == [line.name for line in lines]
    assert heights(axes) == [[pytest.approx(factor * dot.value) for dot in line.dots] for line in lines]
    assert ends(axes) == [
        [(pytest.approx(factor * dot.low), pytest.approx(factor * dot.high)) for dot in line.dots]
        for line in lines
    ]


def test_no_two_ways_look_alike_and_the_service_looks_like_none(figures: list[Figure]) -> None:
    count = 2 * len(scandraw.STYLES)
    dots = (Dot(1, 1.0, 0.5, 2.0), Dot(2, 2.0, 1.5, 3.0))
    lines = [Line(f"way {at}", dots) for at in range(count)] + [Line("served", dots, served=True)]
    scandraw.draw_throughput(lines, DESK)
    drawn = [one.lines[0] for one in figures[0].axes[0].containers]
    looks = {(line.get_color(), line.get_marker(), str(line.get_markerfacecolor())) for line in drawn}
    assert len(looks) == count + 1


def test_a_load_is_drawn_with_every_percentile_and_its_interval(figures: list[Figure]) -> None:
    chart = charts().load
    assert not isinstance(chart, Unknown)
    few = Unknown("too few samples")
    first, *others = chart.rates
    open_ended = tuple(replace(one, low=few, high=few) for one in first.percentiles)
    scandraw.load(replace(chart, rates=(replace(first, percentiles=open_ended), *others)), DESK)
    callers, rates = figures[0].axes
    assert heights(callers) == [[dot.value for dot in chart.callers]]
    assert names(rates) == ["naive p99", "p50", "p90", "p99"]
    for at, (drawn, bars) in enumerate(zip(heights(rates), ends(rates), strict=True)):
        known = [dot.percentiles[at] for dot in chart.rates]
        assert drawn == pytest.approx([1e3 * one.value for one in known])
        assert bars[0] == pytest.approx((1e3 * known[0].value, 1e3 * known[0].value))
        for (low, high), one in zip(bars[1:], known[1:], strict=True):
            assert low == pytest.approx(1e3 * (one.value if isinstance(one.low, Unknown) else one.low))
            assert high == pytest.approx(1e3 * (one.value if isinstance(one.high, Unknown) else one.high))


def test_shares_are_drawn_from_nothing_to_beyond_the_ceiling(figures: list[Figure]) -> None:
    panels = charts().shares
    assert not isinstance(panels, Unknown)
    scandraw.shares(panels, DESK)
    for panel, axes in zip(panels, figures[0].axes, strict=True):
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > 100
        assert names(axes)[: len(panel.shares)] == [name for name, _ in panel.shares]


def test_times_are_in_the_order_of_batches_under_the_name_of_their_way() -> None:
    report = whole()
    assert report.direct is not None
    [series, *_] = report.direct.series
    shuffled = replace(series, rows=series.rows[::-1])
    scan = DirectScan(report.direct.model, (shuffled,))
    lines = scan_charts(replace(report, direct=scan, served=None)).latency
    assert not isinstance(lines, Unknown)
    assert lines[0].name == series.way.label
    rows = sorted(series.rows, key=lambda row: row.batch)
    assert [(dot.inputs, dot.value, dot.high) for dot in lines[0].dots] == [
        (row.batch, *latency_s(row)) for row in rows
    ]


def test_a_chart_of_nothing_says_what_was_not_run() -> None:
    nothing = scan_charts(replace(whole(), direct=None, served=None))
    assert "without --url" in str(nothing.throughput)
    assert "with --url" in str(nothing.load)
    empty = DirectScan(made_scans.direct().model, ())
    assert "no way" in str(scan_charts(replace(whole(), direct=empty, served=None)).throughput)


def test_the_service_has_the_knee_line_that_the_caption_promises(figures: list[Figure]) -> None:
    drawn = scan_charts(replace(whole(), direct=None))
    assert not isinstance(drawn.throughput, Unknown)
    assert [line.knee for line in drawn.throughput] == [2.5]
    scandraw.draw_throughput(drawn.throughput, DESK)
    upright = [line for line in figures[0].axes[0].lines if list(line.get_xdata()) == [2.5, 2.5]]
    assert len(upright) == 1
    assert not isinstance(drawn.latency, Unknown)
    assert [line.knee for line in drawn.latency] == [None]


def test_a_knee_between_two_levels_is_named_by_both(figures: list[Figure]) -> None:
    chart = charts().load
    assert not isinstance(chart, Unknown)
    scandraw.load(chart, DESK)
    texts = [text.get_text() for text in figures[0].axes[0].texts]
    assert texts == [" knee between 2 and 4 callers"]


def test_a_scan_of_a_cpu_is_not_titled_by_the_gpu_that_is_not_there() -> None:
    assert scan_document(replace(whole(), served=None)).title == "made on a made CPU, 2 CPUs: throughput"
    served_only = scan_document(replace(whole(), direct=None)).title
    assert served_only == "m, served at http://127.0.0.1:8000: throughput"


def test_the_page_of_a_scan_is_titled_by_model_and_machine() -> None:
    page = render_page(scan_document(whole()), (), raw="{}", name="scan.json")
    assert "<h1" in page
    assert "None" not in page.partition("<section")[0]
    assert served().by.url in page
