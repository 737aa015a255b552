import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.records import stats

times = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=2, max_size=50)


def test_figures_of_a_known_set() -> None:
    told = stats.summarize([[4.0, 1.0, 3.0, 2.0], [5.0, 2.0, 4.0, 3.0], [9.0, 9.0, 9.0]])
    assert (told.n, told.processes, told.median, told.least) == (11, 3, 3.5, 1.0)
    assert told.between == pytest.approx(stats.deviation([2.5, 3.5, 9.0]))
    assert told.error == pytest.approx(0.87 * told.between)
    assert told.p5 <= 2.0
    assert told.p95 == 9.0


def test_one_process_has_only_the_error_within_it_and_one_sample_none() -> None:
    told = stats.summarize([[1.0, 3.0, 2.0, 4.0]])
    assert told.between is None
    assert told.error == told.within == pytest.approx(0.75)  # a quarter of the samples either way
    one = stats.summarize([[2.0]])
    assert (one.error, one.within, one.lag1, one.p5, one.p95) == (None, None, None, 2.0, 2.0)


@pytest.mark.parametrize("times", [[], [[]], [[1.0], []]])
def test_no_samples_are_refused(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"no samples"):
        stats.summarize(times)


@given(st.lists(times, min_size=1, max_size=4))
def test_order_of_quantiles_holds(processes: list[list[float]]) -> None:
    told = stats.summarize(processes)
    longest = max(max(samples) for samples in processes)
    assert told.least <= told.p5 <= told.p95 <= longest
    assert told.least <= told.median <= longest
    assert told.error is None or told.error >= 0


def coverage(draw: random.Random, processes: int, *, correlated: float = 0.0, between: float = 0.0) -> float:
    """How often the true value is within the error, of 500 rows of 40 samples each."""
    inside = 0
    for _ in range(500):
        row = []
        for _ in range(processes):
            middle, last, samples = draw.gauss(10, between), 0.0, []
            for _ in range(40):
                last = correlated * last + math.sqrt(1 - correlated**2) * draw.gauss(0, 1)
                samples.append(middle + last)
            row.append(samples)
        told = stats.summarize(row)
        assert told.error is not None
        inside += abs(told.median - 10) <= told.error
    return inside / 500


@pytest.mark.thorough
@pytest.mark.parametrize("correlated", [0.0, 0.4])
def test_error_within_a_process_covers_two_times_in_three_also_where_samples_correlate(
    correlated: float,
) -> None:
    assert 0.58 <= coverage(random.Random(1), 1, correlated=correlated) <= 0.75


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, 3, 6])
def test_error_between_processes_covers_two_times_in_three(processes: int) -> None:
    """Processes that differ by more than their samples do: what one process alone doesn't see."""
    assert 0.63 <= coverage(random.Random(2), processes, between=3.0) <= 0.76


def test_error_of_correlated_samples_is_larger_than_that_of_independent_ones() -> None:
    drift = [10 + math.sin(i / 8) for i in range(100)]
    mixed = random.Random(3).sample(drift, len(drift))
    steady, drifting = stats.error_of_median(mixed), stats.error_of_median(drift)
    assert steady is not None
    assert drifting is not None
    assert drifting > 3 * steady


@given(times)
def test_autocorrelation_stays_between_minus_one_and_one(samples: list[float]) -> None:
    found = stats.lag1(samples)
    assert found is None or -1.0000001 <= found <= 1.0000001


def test_a_drift_correlates_and_an_alternation_anticorrelates() -> None:
    drift, zigzag = stats.lag1([float(i) for i in range(50)]), stats.lag1([1.0, 2.0] * 25)
    assert drift is not None
    assert drift > 0.9
    assert zigzag is not None
    assert zigzag < -0.9


def test_steady_samples_raise_no_doubt() -> None:
    steady = [1.0 + 0.001 * (-1) ** i for i in range(100)]
    assert stats.doubts(stats.summarize([steady, steady])) == ()


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([[1.0, 1.0, 1.0]] * 2, "n=6"),
        ([[1.0] * 20], "one process"),
        ([[1.0] * 20, [1.2] * 20], "error"),
        ([[1.0 + i / 1000 for i in range(100)]] * 2, "lag1"),
        ([[1.0] * 18 + [2.0] * 2] * 2, "p95"),
    ],
)
def test_each_doubt_is_raised_by_what_it_is_about(samples: list[list[float]], reason: str) -> None:
    found = stats.doubts(stats.summarize(samples))
    assert any(doubt.reason.startswith(reason) for doubt in found)
    assert all(doubt.remedy for doubt in found)


def test_a_row_that_the_host_held_up_says_so() -> None:
    told = stats.summarize([[1.0] * 20] * 2)
    assert [doubt.reason for doubt in stats.doubts(told, host_bound=True)] == ["host-bound"]


def test_one_process_that_is_off_does_not_move_the_figure() -> None:
    assert stats.summarize([[1.0] * 5, [1.5] * 5, [1.01] * 5]).median == 1.01
