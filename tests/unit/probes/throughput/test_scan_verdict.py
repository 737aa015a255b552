"""The first sentence of a direct scan: whether the device is saturated, on rows whose truth is known."""

from dataclasses import replace

import made_scans as make
import pytest

from probes.core.unknown import Unknown
from probes.reports.scan import direct_findings
from probes.throughput.ceilings import Ceiling, Ceilings
from probes.throughput.direct.results import BatchRow, DirectScan, Series, Way

BATCHES = (1, 2, 4, 8, 16, 32)
LAUNCHED = Unknown("no device clock")


def flat(flop_share: float, *, operations: int = 20, memory_share: float = 0.0) -> Series:
    """A CPU whose throughput ends growing at batch 4, at these shares of its ceilings."""
    rows = []
    for batch in BATCHES:
        took = 0.01 * max(batch, 4)
        made = make.row(batch, took)
        assert not isinstance(made.work, Unknown)
        work = replace(
            made.work,
            flop=1e11 * flop_share * took,
            op_bytes=1e10 * memory_share * took,
            operations=operations,
        )
        rows.append(replace(made, work=work))
    return make.series(*rows)


def said(*series: Series, ceilings=None) -> str:
    scan = DirectScan(make.direct().model, series)
    return direct_findings(scan, make.ceilings() if ceilings is None else ceilings)[0]


def test_a_device_near_a_ceiling_is_saturated_and_the_ceiling_is_named() -> None:
    found = said(flat(0.93))
    assert found.startswith(
        "Is the CPU saturated? Yes: compute is at 93% of its ceiling. From batch 4 on it does "
    )
    assert said(flat(0.1, memory_share=0.85)).startswith(
        "Is the CPU saturated? Yes: memory bandwidth is at 85%"
    )


def test_half_of_a_ceiling_is_called_a_part() -> None:
    assert "saturated? In part: compute limits it, at 60% of its ceiling" in said(flat(0.6))


def test_throughput_that_is_flat_far_below_every_ceiling_is_not_called_saturation() -> None:
    found = said(flat(0.2, memory_share=0.1))
    assert "saturated? No, the model's operations are too small" in found
    assert "compute is at 20% of its ceiling, memory bandwidth is at 10%" in found


def test_a_device_that_waits_for_the_host_is_not_called_saturated() -> None:
    assert "saturated? No, it waits for the host" in said(flat(0.1, operations=1_000_000))


def test_throughput_that_still_grows_is_not_called_saturated_and_says_how_to_go_on() -> None:
    few = make.row(1, 0.01).work  # operations: their number doesn't grow with the batch
    growing = make.series(*(replace(make.row(batch, 0.01), work=few) for batch in BATCHES))
    assert "saturated? Not yet: at batch 32, the largest measured, throughput still grows by 100%" in said(
        growing
    )
    assert "(for larger batches: --max-batch)" in said(growing)
    assert "(close other programs)" in said(
        replace(growing, end="out of memory", hint="close other programs")
    )


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_batch_sizes_answer_nothing(count: int) -> None:
    found = said(replace(flat(0.9), rows=flat(0.9).rows[:count]))
    assert "saturated? Unknown: " in found
    assert "are too few for a knee" in found


def test_without_ceilings_the_answer_is_unknown_with_the_reason() -> None:
    found = said(flat(0.9), ceilings=Unknown("the worker was stopped"))
    assert "saturated? Unknown: no share of a ceiling is known: the worker was stopped." in found


def test_ceilings_that_another_program_has_spoilt_are_not_passed_off_as_sure() -> None:
    (cpu,) = make.ceilings().devices
    spoilt = Ceiling("made", 1e10, (1.0, 1.9, 0.9, 2.8, 1.0), "wall")
    found = said(flat(0.9), ceilings=Ceilings((replace(cpu, memory=spoilt),)))
    assert "The ceilings err by up to 4" in found
    assert "err by" not in said(flat(0.9))


def test_more_than_all_of_the_arithmetic_is_a_spoilt_ceiling_and_not_saturation() -> None:
    """On a busy machine a scan said that compute was at 375% of its ceiling, and left it at that."""
    found = said(flat(3.75))
    assert "saturated? Unknown: compute is at 375% of its ceiling, which is impossible" in found
    assert "Yes" in said(flat(1.02))


def test_each_device_is_judged_by_its_fastest_way_and_a_drivers_figure_is_put_right() -> None:
    def busy(row: BatchRow) -> BatchRow:
        return replace(row, busy_percent=97.0)

    slow = flat(0.2)
    fast = make.series(
        *(replace(busy(row), wall_s=tuple(s / 3 for s in row.wall_s)) for row in slow.rows),
        way=Way("gpu", "pytorch", "fp16", "copied"),
    )
    scan = DirectScan(make.direct().model, (slow, fast, flat(0.9)))
    first, second, *ways = direct_findings(scan, make.ceilings())
    assert first.startswith("Is the CPU saturated?")
    assert second.startswith("Is the GPU saturated?")
    assert "Fastest way: pytorch, fp16, inputs copied. Its driver calls it 97% busy" in second
    assert len(ways) == 3


def test_the_knee_is_named_by_batch_sizes_and_agrees_with_where_saturation_begins() -> None:
    """As a scan of a CPU was: the lines meet at 6.65, between two batch sizes, and the last one does less."""
    rates = {1: 91.2, 2: 99.6, 4: 126.6, 8: 121.2, 16: 68.2}
    told = _of_rates(rates)
    assert "hardly more than from batch 4 on (knee between 4 and 8), and less at batch 16: 68." in told
    assert "6.65" not in told


def test_a_knee_before_saturation_is_where_growth_slows() -> None:
    rates = {1: 100, 2: 198, 4: 380, 8: 450, 16: 520, 32: 600, 64: 605}
    told = _of_rates(rates)
    assert "hardly more than from batch 32 on (knee between 4 and 8, where growth slows)" in told


def _of_rates(rates: dict[int, float]) -> str:
    """The sentence of a way that does so many inputs a second at these batch sizes."""
    rows = (make.row(batch, batch / rate, flop=1e6) for batch, rate in rates.items())
    return direct_findings(DirectScan(make.direct().model, (make.series(*rows),)), make.ceilings())[-1]


def test_a_way_without_rows_is_not_judged() -> None:
    absent = Series(make.WAY, (), "absent", "no onnxruntime", "pip install onnxruntime")
    scan = DirectScan(make.direct().model, (absent,))
    assert direct_findings(scan, make.ceilings()) == (
        "cpu pytorch fp32 resident: not measured: no onnxruntime (pip install onnxruntime)",
    )


def test_a_model_whose_outputs_are_doubtful_is_said_once() -> None:
    doubted = make.series(*(replace(row, doubt="outputs hold NaN") for row in flat(0.9).rows))
    assert direct_findings(DirectScan(make.direct().model, (doubted,)), make.ceilings())[1].count("NaN") == 1
