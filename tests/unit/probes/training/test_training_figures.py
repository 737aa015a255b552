"""Means, efficiencies, what bounds an epoch, and which failure explains the others."""

import math

import pytest
from made_runs import SETTINGS, epoch, rank, run

from probes.core.unknown import Unknown
from probes.records.watch import Energy
from probes.training import figures
from probes.training.report import Fault, Run, Watched, report_of

NONE = Unknown("no watch ran beside it")


def test_a_mean_has_the_standard_error_of_repetitions_and_the_first_epoch_stands_apart() -> None:
    report = report_of((run(1, 1.0), run(1, 2.0), run(1, 3.0, first_s=8.0)))
    (case,) = figures.cases_of(report)
    assert figures.epoch_s(case) == figures.Mean(2.0, pytest.approx(1 / math.sqrt(3)), 3)
    first = figures.first_s(case)
    assert isinstance(first, figures.Mean)
    assert first.value == 6.0
    assert figures.rate(case) == figures.Mean(
        pytest.approx((80 + 40 + 80 / 3) / 3), pytest.approx(16.0, rel=0.1), 3
    )


def test_a_run_with_one_epoch_has_no_time_after_the_first() -> None:
    (case,) = figures.cases_of(report_of((Run("x", (rank(0, 1, epoch(0)),), NONE),)))
    for figure in (figures.epoch_s, figures.rate, figures.parts, figures.bound_of, figures.energy_j):
        assert isinstance(figure(case), Unknown)


def test_strong_and_weak_efficiency_are_t1_over_n_tn_for_equally_many_samples() -> None:
    report = report_of(
        (run(1, 4.0, samples=80), run(2, 2.5, samples=80), run(2, 5.0, samples=80, scaling="weak"))
    )
    alone, strong, weak = cases = figures.cases_of(report)
    # each rank has 80 samples in an epoch here: 160 in all, in 2.5 s, and 80 in 4 s alone
    assert figures.efficiency(strong, cases).value == pytest.approx((4.0 / 80) / (2 * 2.5 / 160))  # type: ignore[union-attr]
    assert figures.efficiency(weak, cases).value == pytest.approx(4.0 / 5.0)  # type: ignore[union-attr]
    assert isinstance(figures.efficiency(alone, cases), Unknown)
    assert "one process" in str(figures.efficiency(strong, (strong, weak)))


@pytest.mark.parametrize(
    ("parts", "cause", "of"),
    [
        ([{}, {}], "compute", None),
        ([{"data_s": 0.6}, {"data_s": 0.7}], "data", None),
        ([{"exchange_s": 0.6}, {"exchange_s": 0.6}], "exchange", None),
        ([{"waiting_s": 0.8}, {}], "straggler", "compute"),
        ([{"waiting_s": 0.8}, {"data_s": 0.8}], "straggler", "data"),
        ([{"waiting_s": 0.6}, {"waiting_s": 0.6}], "uneven", None),
    ],
)
def test_the_bound_is_what_the_slowest_ranks_time_went_into_most(
    parts: list[dict[str, float]], cause: str, of: str | None
) -> None:
    ranks = tuple(rank(at, 2, epoch(0), epoch(1, **each)) for at, each in enumerate(parts))
    (case,) = figures.cases_of(report_of((Run("x", ranks, NONE),)))
    bound = figures.bound_of(case)
    assert isinstance(bound, figures.Cost)
    assert (bound.cause, bound.of) == (cause, of)
    assert bound.rank == (1 if cause == "straggler" else None)
    assert sum(cost.share for cost in figures.costs(case)) == pytest.approx(1.0)


def test_energy_is_the_mean_power_of_all_cards_times_the_epoch() -> None:
    energies = (Energy(50.0, 1.0, 5.0, "counter"), Energy(80.0, 1.0, 0.5, "counter"))
    watched = tuple(Watched("n1", "card", energies, (), 0.25) for _ in range(2))
    (case,) = figures.cases_of(report_of((Run("x", run(1, 1.0).ranks, watched),)))
    assert figures.energy_j(case) == figures.Mean(pytest.approx(320.0), None, 1)


@pytest.mark.parametrize(("code", "asked"), [(129, True), (130, True), (143, True), (4, False)])
def test_a_run_that_a_signal_ended_was_ended_on_purpose(code: int, asked: bool) -> None:
    ended = Run("x", (rank(0, 1, fault=Fault(3, "ended", code)),), NONE)
    assert figures.was_interrupted(ended) is asked


def test_the_fault_that_explains_the_others_is_named() -> None:
    gone = Fault(6, "another rank is gone: RuntimeError: Connection closed by peer", 4)
    nan = Fault(7, "the loss is nan", 4)
    silent = Run("x", (rank(0, 2, fault=gone),), NONE)
    assert figures.cause_of(silent).startswith("rank 1 left no report, in step 6 or later: killed")
    told = Run("x", (rank(0, 2, fault=gone), rank(1, 2, fault=nan)), NONE)
    assert figures.cause_of(told) == "rank 1, step 7: the loss is nan"
    assert not figures.cases_of(report_of((silent, told)))
    asked = Fault(6, "ended by SIGTERM in compute", 143)
    by_somebody = Run("x", (rank(0, 2, fault=gone), rank(1, 2, fault=asked)), NONE)
    assert figures.cause_of(by_somebody) == "rank 1, step 6: ended by SIGTERM in compute"
    ended = Fault(3, "ended by SIGINT in compute", 130)
    assert figures.was_interrupted(Run("x", (rank(0, 1, fault=ended),), NONE))
    assert not figures.was_interrupted(told)


def test_settings_that_differ_in_anything_but_epochs_are_different_cases() -> None:
    runs = (run(1, 1.0), run(1, 1.0, epochs=5), run(1, 1.0, batch=16), run(1, 1.0, scaling="weak"))
    assert [len(case.runs) for case in figures.cases_of(report_of(runs))] == [3, 1]
    assert SETTINGS.epochs == 2
