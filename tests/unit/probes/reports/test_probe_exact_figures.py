"""Figures worked out by hand, and judgements at their exact thresholds: statistics, places, advice."""

import math
from dataclasses import replace

import pytest

from probes.core.unknown import Unknown
from probes.records import stats
from probes.records.rows import Block, Measurement, Noise, Request
from probes.reports import run_findings
from probes.reports.crossover import BreakEven
from probes.reports.run_findings import Controls


@pytest.mark.parametrize(
    ("fraction", "value"),
    [(0.0, 1.0), (0.25, 1.75), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0), (-1.0, 1.0), (2.0, 4.0)],
)
def test_quantiles_are_between_their_neighbours_and_within_the_samples(fraction: float, value: float) -> None:
    assert stats.quantile([4.0, 2.0, 1.0, 3.0], fraction) == pytest.approx(value)


def test_autocorrelation_is_that_of_neighbours_over_the_spread() -> None:
    assert stats.lag1([1.0, 2.0]) is None
    assert stats.lag1([1.0, 2.0, 3.0]) == 0.0
    assert stats.lag1([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0.25)
    assert stats.lag1([2.0, 2.0, 2.0]) is None


def test_error_of_a_median_is_half_the_distance_of_the_quantiles_beside_it() -> None:
    assert stats.error_of_median([1.0]) is None
    assert stats.error_of_median([1.0, 2.0]) == pytest.approx(0.5 / math.sqrt(2))
    correlated = 3 * 0.5 / math.sqrt(4 * 0.75 / 1.25)
    assert stats.error_of_median([1.0, 2.0, 3.0, 4.0]) == pytest.approx(correlated)


def test_anticorrelated_samples_count_as_no_more_than_independent_ones() -> None:
    assert stats.error_of_median([1.0, 2.0, 1.0, 2.0]) == pytest.approx(0.5)


def test_deviation_divides_by_one_less_than_the_count() -> None:
    assert stats.deviation([1.0]) is None
    assert stats.deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert stats.deviation([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt(7))


@pytest.mark.parametrize(
    ("processes", "factor"),
    [(2, 1.30), (3, 0.87), (4, 0.65), (5, 0.61), (6, 1.2533 / math.sqrt(6)), (9, 1.2533 / 3)],
)
def test_error_between_processes_is_their_deviation_times_a_known_factor(
    processes: int, factor: float
) -> None:
    medians = [float(n) for n in range(processes)]
    between = stats.deviation(medians)
    assert between is not None
    assert stats.summarize([[one] for one in medians]).error == pytest.approx(factor * between)


def test_processes_that_agree_err_by_what_is_within_them() -> None:
    told = stats.summarize([[1.0, 2.0, 1.0, 2.0]] * 4)
    assert (told.between, told.within, told.error) == (0.0, pytest.approx(0.5), pytest.approx(0.25))


def test_tails_and_the_least_are_those_of_all_samples_together() -> None:
    told = stats.summarize([[float(n) for n in range(51)], [float(n) for n in range(51, 101)]])
    assert (told.n, told.p5, told.p95, told.least) == (101, pytest.approx(5), pytest.approx(95), 0.0)


FIRM = stats.Summary(
    n=10, processes=2, median=1.0, error=0.02, within=0.02, between=0.0, p5=1.0, p95=1.5, least=1.0, lag1=0.5
)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"n": 9}, ["n=9"]),
        ({"n": 9, "lag1": 0.9}, ["n=9"]),
        ({"processes": 1}, ["one process"]),
        ({"error": 0.021}, ["error 2.1%"]),
        ({"error": 0.05, "median": 2.0}, ["error 2.5%"]),
        ({"error": None, "lag1": None}, []),
        ({"lag1": 0.51}, ["lag1 0.51"]),
        ({"p95": 1.6}, ["p95 1.6x"]),
        ({"p95": 4.0, "median": 2.0}, ["p95 2.0x"]),
    ],
)
def test_doubts_begin_above_their_thresholds(changes: dict[str, object], reasons: list[str]) -> None:
    found = stats.doubts(replace(FIRM, **changes))  # type: ignore[arg-type]
    assert [doubt.reason for doubt in found] == reasons


@pytest.mark.parametrize(
    ("read", "known", "label"),
    [
        (30.0, Controls(30.0, 10.0), "vram"),
        (29.9, Controls(29.9, 10.0), "unclear"),
        (20.0, Controls(100.0, 4.0), "host"),
        (20.1, Controls(100.0, 4.0), "vram"),
        (3.0, Controls(100.0, 9.0), "host"),
        (2.9, Controls(100.0, 9.0), "paged"),
    ],
)
def test_labels_by_timing_change_at_their_thresholds(read: float, known: Controls, label: str) -> None:
    assert run_findings.label_by_timing(read, known) == label


def block(asked: str, read_s: float, **changes: object) -> Block:
    made = Block(0, asked, False, 1 << 30, (read_s,) * 3, 0, 0)  # type: ignore[arg-type]
    return replace(made, **changes)  # type: ignore[arg-type]


def test_controls_are_the_middle_ones_of_each_place_and_no_other_blocks() -> None:
    vram = [block("vram", (1 << 30) / 1e9 / speed, control=True) for speed in (90, 100, 400)]
    host = [block("zero_copy", (1 << 30) / 1e9 / speed, control=True) for speed in (4, 5, 9)]
    found = run_findings.controls([*vram, *host, block("vram", 1.0), block("zero_copy", 1.0)])
    assert isinstance(found, Controls)
    assert (found.vram_gb_per_s, found.host_gb_per_s) == (pytest.approx(100), pytest.approx(5))
    assert isinstance(run_findings.controls(vram), Unknown)
    assert isinstance(run_findings.controls(host), Unknown)


def test_signals_disagree_only_where_both_speak() -> None:
    one = run_findings.LabelledBlock(block("vram", 1.0), 1.0, "vram", "host")
    assert one.disagree
    assert not replace(one, by_counters="vram").disagree
    assert not replace(one, by_counters="unclear").disagree
    assert not replace(one, by_timing="unclear").disagree


def test_first_reads_are_slow_beyond_three_times_the_later_ones() -> None:
    calm = run_findings.first_read_verdict([block("vram", 1.0, first_read_s=3.0)])
    assert "took 3.00 x as long" in str(calm)
    slow = [block("vram", 1.0, first_read_s=first) for first in (3.5, 8.0, 1.0)]
    told = str(run_findings.first_read_verdict([*slow, block("zero_copy", 1.0, first_read_s=99.0)]))
    assert "2 of 3 blocks (2.00 GiB) took up to 8 x" in told


@pytest.mark.parametrize(
    ("cap", "free", "who"), [(1, 10, "torch's cap"), (1, 9, "the driver"), (None, 10, "the driver")]
)
def test_a_cap_refuses_only_where_the_driver_had_room(cap: int | None, free: int, who: str) -> None:
    assert run_findings.refused_by(Request("block", 10, 0, free, cap, False, "")) == who


@pytest.mark.parametrize(
    ("reads", "error", "advice"),
    [
        (2.0, 0.0, "copy if they are read 3 times or more, and else leave them"),
        (5.5, 0.5, "copy if they are read 8 times or more (5 to 7 are too close to tell)"),
        (2.9, 0.1, "copy if they are read 4 times or more (3 are too close to tell)"),
        (0.95, 0.1, "copy if they are read 2 times or more (one read is too close to tell)"),
    ],
)
def test_advice_names_the_counts_of_reads_that_are_too_close(reads: float, error: float, advice: str) -> None:
    assert run_findings.reads_advice(BreakEven(1, reads, error), "copy") == advice


def test_never_worth_a_copy_has_no_count_of_reads() -> None:
    never = BreakEven(1, math.inf, math.inf)
    assert (run_findings.least_reads(never), run_findings.surely_reads(never)) == (None, None)


def row(*times: float, noise: Noise | None = None) -> Measurement:
    made = Measurement("vram_read", 1, 1, 1, "device", times, times)
    return replace(made, noise=noise) if noise else made


def test_a_percent_is_the_least_notable_difference() -> None:
    steady = row(100.0, 100.0, 100.0)
    assert run_findings.is_faster(steady, row(101.0, 101.0, 101.0)) is True
    assert run_findings.is_faster(row(101.0, 101.0, 101.0), steady) is False
    assert run_findings.is_faster(steady, row(100.9, 100.9, 100.9)) is None


def test_a_difference_within_three_errors_is_not_reported() -> None:
    error = 0.5 / math.sqrt(2)  # of two samples one apart
    assert run_findings.is_faster(row(0.0, 1.0), row(0.5 + 2.9 * error)) is None
    assert run_findings.is_faster(row(0.0, 1.0), row(0.5 + 3.1 * error)) is True


def test_a_disturbed_slower_row_is_judged_by_its_fastest_samples() -> None:
    slow = row(1.0, 2.0, 2.0, 2.0, 2.0)
    noisy = replace(slow, noise=Noise(("foreign: another process",), ()))
    fast = row(*[1.3] * 5)
    assert run_findings.is_faster(fast, slow) is True
    assert run_findings.is_faster(fast, noisy) is None
    assert run_findings.is_faster(fast, replace(slow, noise=Noise((run_findings.OWN_LOAD,), ()))) is True
    assert run_findings.is_faster(row(*[0.9] * 5), noisy) is True
