"""What is drawn is what the charts hold: every value with its error, under its name, inside the axes."""

from collections.abc import Callable

import made_reports as make
import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from probes.core.unknown import Unknown
from probes.reports import canvas
from probes.reports import run_charts as draw
from probes.reports.canvas import DESK, PHONE
from probes.reports.run_charts import charts, draw_plots
from probes.reports.run_findings import Controls, took_s

GIB = 2**30
pytestmark = pytest.mark.thorough  # a second each

FOUND = charts(make.full_report())


def points(axes: Axes) -> dict[str, list[float]]:
    """The heights of measured points and of lines by their names in the legend."""
    handles, names = axes.get_legend_handles_labels()
    lines = [one.lines[0] if isinstance(one, ErrorbarContainer) else one for one in handles]
    return {name: [float(y) for y in line.get_ydata()] for name, line in zip(names, lines, strict=True)}


def lengths(axes: Axes, *, across: bool = False) -> list[list[float]]:
    """How long the bars of errors are, of each series that has some."""
    at = 0 if across else 1
    return [
        [float(segment[1][at] - segment[0][at]) for segment in bar.get_segments()]
        for one in axes.containers
        if isinstance(one, ErrorbarContainer)
        for bar in one.lines[2]
    ]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


@pytest.mark.parametrize("sheet", [DESK, PHONE])
def test_a_drawing_has_the_width_of_its_sheet_in_points(figures: list[Figure], sheet: canvas.Sheet) -> None:
    assert not isinstance(FOUND.break_even, Unknown)
    assert f'width="{sheet.width_in * 72:g}pt"' in draw.break_even(FOUND.break_even, sheet)
    assert figures[0].dpi == 72


def test_bandwidths_are_drawn_with_errors_in_the_order_of_the_colours(figures: list[Figure]) -> None:
    panels = FOUND.bandwidth
    assert not isinstance(panels, Unknown)
    draw.bandwidth(panels, DESK)
    for panel, axes in zip(panels, figures[0].axes, strict=True):
        assert axes.get_title(loc="left") == panel.title
        traces = sorted(panel.traces, key=lambda trace: list(draw.PATHS).index(trace.path))
        names = [trace.path + ("" if trace.fitted else " (no fit)") for trace in traces]
        assert legend(axes) == names
        assert list(points(axes).values()) == [[rate.value for _, rate in trace.points] for trace in traces]
        errors = [[2 * (rate.error or 0.0) for _, rate in trace.points] for trace in traces]
        for drawn, known in zip(lengths(axes), errors, strict=True):
            assert drawn == pytest.approx(known)


def test_a_break_even_is_drawn_with_errors_and_with_the_line_of_one_read(figures: list[Figure]) -> None:
    chart = FOUND.break_even
    assert not isinstance(chart, Unknown)
    draw.break_even(chart, DESK)
    [axes] = figures[0].axes
    predicted, measured = points(axes).values()
    assert predicted == [one.reads for one in chart.predicted]
    assert measured == [one.reads for one in chart.measured]
    assert lengths(axes) == [pytest.approx([2 * one.error for one in chart.measured])]
    low, high = axes.get_ylim()
    assert low <= 0.4 < 2.5 <= high
    assert low < min(predicted + measured) < max(predicted + measured) < high
    assert texts(axes) == ["above: copy to VRAM first", "below: read in place"]
    assert len(legend(axes)) == 2


def test_blocks_of_memory_are_drawn_where_they_lie_with_both_controls(figures: list[Figure]) -> None:
    chart = FOUND.residency
    assert not isinstance(chart, Unknown)
    assert isinstance(chart.controls, Controls)
    draw.draw_residency(chart, DESK)
    rates, signals = figures[0].axes
    bars = [bar for one in rates.containers if isinstance(one, BarContainer) for bar in one]
    middles = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in bars]
    cells = [((one.first_bytes + one.last_bytes) / 2 / GIB, one.read.value) for one in chart.cells]
    assert sorted(middles) == [pytest.approx(cell) for cell in sorted(cells)]
    across = sorted(length for one in lengths(rates, across=True) for length in one if length)
    assert across == pytest.approx(sorted(bar.get_width() for bar in bars))
    controls = (chart.controls.vram_gb_per_s, chart.controls.host_gb_per_s)
    low, high = rates.get_ylim()
    assert all(low < rate < high for rate in (*controls, *(one.read.low for one in chart.cells)))
    assert [text for text in texts(rates) if text.startswith("control in")] == [
        f"control in VRAM: {controls[0]:.4g} GB/s",
        f"control in pinned host memory: {controls[1]:.4g} GB/s",
    ]
    assert texts(signals) == [
        draw.LABELS[label][1]
        for labels in ([one.by_counters for one in chart.cells], [one.by_timing for one in chart.cells])
        for label in labels
    ]
    assert rates.get_position().height > 2 * signals.get_position().height
    assert legend(signals)


def test_passes_are_drawn_by_their_names_with_the_limit_of_the_link(figures: list[Figure]) -> None:
    panels = FOUND.scenarios
    assert not isinstance(panels, Unknown)
    draw.scenarios(panels, DESK)
    for panel, axes in zip(panels, figures[0].axes, strict=True):
        named = [label.get_text() for label in axes.get_yticklabels()]
        assert named == [draw.SCENARIO_STYLES[one.scenario][1] for one in panel.bars[::-1]]
        assert len(texts(axes)) == len(panel.bars)
        assert panel.link_s is not None
        assert [name for name in legend(axes) if name.startswith("link's limit")]
        assert axes.get_lines()[-1].get_xdata()[0] == pytest.approx(panel.link_s * 1e3)
    unlinked = charts(make.made(make.ran("scenarios", *make.passes()))).scenarios
    assert not isinstance(unlinked, Unknown)
    draw.scenarios(unlinked, DESK)
    assert not any(legend(axes) for axes in figures[1].axes)


@pytest.mark.parametrize("of", [make.full_report, make.cpu_report])
def test_each_plot_says_in_words_what_it_shows_or_why_there_is_none(of: Callable[[], object]) -> None:
    for plot in draw_plots(of()):  # type: ignore[arg-type]
        assert plot.title
        if plot.drawn:
            assert [sheet for sheet, _ in plot.drawn] == ["desk", "phone"]
            assert plot.caption
            assert "None" not in plot.caption
        else:
            assert plot.missing


def test_axes_have_ticks_for_the_range_that_is_shown(figures: list[Figure]) -> None:
    """They were chosen for the blocks alone, before the controls widened the axis: labels upon labels."""
    assert not isinstance(FOUND.residency, Unknown)
    draw.draw_residency(FOUND.residency, DESK)
    axes = figures[0].axes[0]
    low, high = axes.get_ylim()
    assert 2 <= sum(low <= tick <= high for tick in axes.get_yticks()) <= 8


def test_figures_of_bars_stand_beyond_every_bar_error_and_line(figures: list[Figure]) -> None:
    panels = FOUND.scenarios
    assert not isinstance(panels, Unknown)
    draw.scenarios(panels, DESK)
    for axes, panel in zip(figures[0].axes, panels, strict=True):
        assert axes.get_xlim()[1] > 1.8 * max([panel.link_s or 0.0, *map(took_s, panel.bars)]) * 1e3
        assert {text.get_position()[0] for text in axes.texts} == {1.0}
        assert {text.get_horizontalalignment() for text in axes.texts} == {"right"}
