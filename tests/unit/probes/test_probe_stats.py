import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes import stats

times = st.lists(st.floats(min_value=1e-6, max_value=1e3), min_size=2, max_size=50)


def test_figures_of_a_known_set() -> None:
    told = stats.summarize([4.0, 1.0, 3.0, 2.0])
    assert (told.n, told.mean, told.median, told.least) == (4, 2.5, 2.5, 1.0)
    assert told.sem == pytest.approx(math.sqrt(5 / 3) / 2)
    assert told.p5 == pytest.approx(1.15)
    assert told.p95 == pytest.approx(3.85)


def test_one_sample_has_no_standard_error() -> None:
    told = stats.summarize([2.0])
    assert (told.sem, told.lag1, told.p5, told.p95) == (None, None, 2.0, 2.0)


def test_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        stats.summarize([])


@given(times)
def test_order_of_quantiles_holds(samples: list[float]) -> None:
    told = stats.summarize(samples)
    assert told.least <= told.p5 <= told.median <= told.p95 <= max(samples)


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
    assert stats.doubts(stats.summarize(steady)) == ()


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([1.0, 1.0, 1.0], "n=3"),
        ([1.0, 2.0] * 10, "SEM"),
        ([1.0 + i / 1000 for i in range(100)], "lag1"),
        ([1.0] * 18 + [2.0] * 2, "p95"),
    ],
)
def test_each_doubt_is_raised_by_what_it_is_about(samples: list[float], reason: str) -> None:
    found = stats.doubts(stats.summarize(samples))
    assert any(doubt.reason.startswith(reason) for doubt in found)
    assert all(doubt.remedy for doubt in found)


def test_settled_figure_ignores_a_slow_spell_and_evens_out_two_times() -> None:
    """Ten parts of ten samples, which take one of two times by turns; three parts are slow."""
    calm = [8.0, 16.0] * 50
    value, error = stats.settled(calm)
    assert (value, error) == (12.0, 0.0)
    slow = [s * 1.25 if 20 <= i < 50 else s for i, s in enumerate(calm)]
    value, error = stats.settled(slow)
    assert value == 12.0
    assert error > 0


def test_settled_figure_of_few_samples_is_their_median() -> None:
    assert stats.settled([3.0, 1.0, 2.0])[0] == 2.0
    assert stats.settled([3.0]) == (3.0, 0.0)
    with pytest.raises(ValueError, match="no samples"):
        stats.settled([])
