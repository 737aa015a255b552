import math
import re
from dataclasses import replace

import made_reports as make
import pytest

from probes.core.unknown import Unknown
from probes.records.rows import Request, Stop
from probes.records.stats import summarize
from probes.reports.figures import rate, span, with_error
from probes.reports.run_charts import charts
from probes.reports.run_headline import headline


@pytest.mark.parametrize(
    ("value", "error", "told"),
    [
        (4.85204, 0.00637, "4.8520 ± 0.0064"),
        (1234.4, 23.0, "1234 ± 23"),
        (0.94, 0.1, "0.94 ± 0.10"),
        (5.0, 0.0, "5 ± 0"),
        (5.0, None, "5 (one sample: no error)"),
    ],
)
def test_value_is_reported_to_the_place_of_its_error(value: float, error: float | None, told: str) -> None:
    assert with_error(value, error) == told


def test_time_takes_the_unit_that_reads_best() -> None:
    assert span(4.85e-3, 6.4e-6) == "4.8500 ± 0.0064 ms"
    assert span(7.5e-6, bare=True) == "7.5 µs"
    assert span(3e-10, bare=True) == "0.3 ns"


def test_rate_has_the_relative_error_of_its_time() -> None:
    times = ((0.25, 0.275, 0.225, 0.25), (0.25, 0.3, 0.25))
    told, found = summarize(times), rate(10**9, times)
    assert found.value == pytest.approx(4.0)
    assert told.error is not None
    assert found.error == pytest.approx(told.error / told.median * found.value)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("report", [make.full_report(), make.cpu_report(), make.broken_report()])
def test_answer_is_three_sentences(report) -> None:
    said = headline(report)
    assert len(said) == 3
    for sentence in said:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert len(re.findall(r"[.!?](?= [A-Z]|$)", sentence)) == 1, sentence


def test_answer_follows_from_the_figures() -> None:
    inputs, full, fastest = headline(make.full_report())
    assert inputs.startswith("Copy large inputs into VRAM before use, even those that are read only once")
    assert "it spills silently: of 4 GiB granted as device memory, 1.50 GiB reads at" in full
    assert "31% of the weights" in fastest
    assert "streaming those through two VRAM buffers is fastest: 6." in fastest


def test_a_copy_slower_than_reading_in_place_is_not_advised() -> None:
    slow = {**make.PATHS, "h2d_pinned": (5e-6, 20e9)}
    said = headline(make.made(make.ran("transfer", *make.transfers(slow))))[0]
    assert "if they are read 3 times or more, and else leave them" in said


def test_refusal_that_was_not_expected_is_said_to_be_so() -> None:
    records = [r for r in make.spill_records() if not isinstance(r, Request | Stop)]
    inside = [r for r in records if getattr(r, "index", 0) < 10 or getattr(r, "control", False)]
    refused = Request("oversize", 5 * make.GIB, 0, 4 * make.GIB, None, granted=False, message="out of memory")
    run = make.ran("spill", *inside, refused, Stop("refused", 3 * make.GIB, "no more"))
    said = headline(make.made(run))[1]
    assert "the driver refuses" in said
    assert "NOT what is expected" in said


def test_answer_without_a_gpu_says_what_is_unknown_and_why() -> None:
    inputs, full, fastest = headline(make.cpu_report())
    assert "no GPU to copy to (this torch is a CPU build)" in inputs
    assert "12 GB/s" not in inputs  # reads plus writes: twice the payload
    assert "24 GB/s" in inputs
    assert "unknown (`spill` was waived: no GPU to measure)" in full
    assert "unknown (`scenarios` was waived" in fastest


def test_bandwidth_chart_keeps_measured_points_and_model_apart() -> None:
    panels = charts(make.full_report()).bandwidth
    assert not isinstance(panels, Unknown)
    assert [panel.title for panel in panels] == ["Between host and VRAM", "Within VRAM"]
    trace = next(t for t in panels[0].traces if t.path == "h2d_pinned")
    assert [n_bytes for n_bytes, _ in trace.points] == list(make.SIZES)
    assert trace.points[-1][1].value == pytest.approx(50.0, rel=0.01)
    assert len(trace.fitted) > len(trace.points)
    n_bytes, fitted = trace.fitted[30]
    assert fitted == pytest.approx(n_bytes / (5e-6 + n_bytes / 50e9) / 1e9, rel=0.02)


def test_fit_of_a_path_that_counts_twice_passes_through_its_points() -> None:
    panels = charts(make.full_report()).bandwidth
    assert not isinstance(panels, Unknown)
    trace = next(t for t in panels[1].traces if t.path == "vram_copy")
    assert trace.fitted[-1][1] == pytest.approx(trace.points[-1][1].value, rel=0.02)


def test_path_that_nobody_knows_gets_a_panel_of_its_own() -> None:
    panels = charts(make.made(make.ran("transfer", *make.transfers({"peer_copy": (1e-6, 1e9)})))).bandwidth
    assert not isinstance(panels, Unknown)
    assert [panel.title for panel in panels] == ["Other paths"]


def test_residency_map_holds_every_block_but_the_controls_in_order() -> None:
    chart = charts(make.full_report()).residency
    assert not isinstance(chart, Unknown)
    assert [cell.by_timing for cell in chart.cells] == ["vram"] * 10 + ["host"] * 6
    assert [cell.disagree for cell in chart.cells].index(True) == 10
    assert chart.cells[-1].last_bytes == 4 * make.GIB
    assert all(a.last_bytes == b.first_bytes for a, b in zip(chart.cells, chart.cells[1:], strict=False))


def test_link_limit_is_the_spilled_bytes_at_the_measured_bandwidth() -> None:
    panels = charts(make.full_report()).scenarios
    assert not isinstance(panels, Unknown)
    assert len(panels) == 2
    assert panels[0].link_s == pytest.approx(320 * make.MIB / 50e9, rel=0.01)
    assert [bar.scenario for bar in panels[0].bars][:2] == ["resident", "streamed"]


def test_link_limit_is_left_out_where_the_link_was_not_measured() -> None:
    panels = charts(make.made(make.ran("scenarios", *make.passes()))).scenarios
    assert not isinstance(panels, Unknown)
    assert panels[0].link_s is None


def test_break_even_chart_has_prediction_and_measurement_as_two_series() -> None:
    chart = charts(make.full_report()).break_even
    assert not isinstance(chart, Unknown)
    assert [one.n_bytes for one in chart.measured] == list(make.SIZES[1:])
    largest = chart.measured[-1]
    assert largest.reads == pytest.approx((1 / 50) / (1 / 45 - 1 / 3200), rel=0.05)
    assert all(math.isfinite(one.reads) for one in chart.predicted)


def test_chart_that_cannot_be_drawn_says_why() -> None:
    found = charts(make.cpu_report())
    assert found.residency == Unknown("`spill` was waived: no GPU to measure")
    assert found.scenarios == Unknown("`scenarios` was waived: no GPU to measure")
    assert found.break_even == Unknown("the probe `breakeven` was not run")


def test_memory_that_is_read_in_place_as_fast_as_vram_has_no_break_even() -> None:
    alike = {
        **make.PATHS,
        "h2d_then_read": (12e-6 + 4 * 9e-6, 1 / (1 / 50e9 + 4 / 45e9)),
        "vram_reread": (9e-6, 45e9),
        "zero_copy_read": (8e-6, 47e9),
    }
    found = charts(make.made(make.ran("transfer", *make.transfers(alike)))).break_even
    assert isinstance(found, Unknown)
    assert "a copy never pays" in found.reason


def test_one_sample_has_no_error_and_no_crash() -> None:
    rows = tuple(
        replace(m, device_s=m.samples_s[:1], wall_s=m.wall_s[:1]) for m in make.transfers(make.PATHS)
    )
    panels = charts(make.made(make.ran("transfer", *rows))).bandwidth
    assert not isinstance(panels, Unknown)
    assert panels[0].traces[0].points[0][1].error is None
