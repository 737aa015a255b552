"""Percentiles' intervals, stability, goodput, the knee, and which level comes next."""

import math
import random
from dataclasses import replace

import pytest

from probes.core.codec import decode, encode
from probes.core.unknown import Unknown
from probes.records.stats import effective_n
from probes.throughput.served import level as stability
from probes.throughput.served import results
from probes.throughput.served.results import (
    ClientSide,
    Count,
    Level,
    Loop,
    ServedBy,
    ServedScan,
    ServedSettings,
    Window,
)

SETTINGS = ServedSettings(
    rows=1, slo_s=0.05, window_s=1.0, windows=3, most_windows=10, tolerance=0.1, limit_s=30.0,
    most_callers=64, most_connections=512, keep_alive=True, rates_per_s=(), seed=1,
)  # fmt: skip
BY = ServedBy("http://127.0.0.1:8000/v2/models/m/infer", "m", "weir 1", "pytorch", "x FP32[1, 4]", 100)


def level(
    callers: int, per_s: float, *, loop: Loop = "closed", latency_s: float = 0.01, rate: float | None = None
) -> Level:
    """Three alike windows of a second."""
    n = round(3 * per_s)
    return Level(
        loop, callers, rate, 3.0, n,
        tuple(3 * i / max(n, 1) for i in range(n)), (0.0,) * n if loop == "open" else (), (latency_s,) * n,
        0, None, (), (Window(1.0, round(per_s), round(per_s), latency_s),) * 3, "",
        ClientSide(0.1, 0.0, 0.0, 0, ""),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n", "share", "low", "high"),
    [
        (100, 0.5, 40, 61),  # tabulated: W. J. Conover, Practical Nonparametric Statistics, binomial table
        (10, 0.5, 2, 9),
        (5, 0.5, 0, 6),  # 2 x 1/32 > 5 %: none
        (100, 0.99, 97, 101),
    ],
)
def test_the_ranks_that_enclose_a_quantile(n: int, share: float, low: int, high: int) -> None:
    assert results.ranks(n, share) == (low, high)


@pytest.mark.parametrize(("n", "share"), [(30, 0.5), (200, 0.9), (700, 0.99)])
def test_the_chosen_ranks_cover_at_least_95_percent_by_exact_sums(n: int, share: float) -> None:
    low, high = results.ranks(n, share)
    inside = sum(math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(low, high))
    assert 0.95 <= inside < 0.985


@pytest.mark.thorough
def test_an_interval_covers_the_true_quantile_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(200):
        found = results.percentile([rng.expovariate(1.0) for _ in range(300)], 0.9)
        assert isinstance(found.low, float)
        assert isinstance(found.high, float)
        hits += found.low <= math.log(10) <= found.high
    assert 183 <= hits <= 200


def test_correlated_samples_have_a_wider_interval() -> None:
    rng = random.Random(4)
    alone = [rng.random() for _ in range(400)]
    repeated = [value for value in alone[:100] for _ in range(4)]
    wide, narrow = results.percentile(repeated, 0.5), results.percentile(alone, 0.5)
    assert wide.high - wide.low > 1.5 * (narrow.high - narrow.low)  # type: ignore[operator]
    assert 40 < effective_n(repeated) < 140


def test_a_sample_too_small_for_p99_has_no_upper_end() -> None:
    found = results.percentile([float(i % 7) for i in range(50)], 0.99)
    assert isinstance(found.high, Unknown)
    assert "too few" in found.high.reason
    one = results.percentile([1.0], 0.5)
    assert (one.value, isinstance(one.low, Unknown), isinstance(one.high, Unknown)) == (1.0, True, True)


def test_windows_agree_within_the_tolerance_of_their_mean() -> None:
    steady = [Window(1.0, 100, 100, 0.01)] * 3
    judge = stability.disagreement
    assert judge(steady, "closed", needed=3, tolerance=0.1) == ""
    assert "2 of 3" in judge(steady[:2], "closed", needed=3, tolerance=0.1)
    slower = [*steady[:2], Window(1.0, 100, 80, 0.01)]
    assert "throughput" in judge(slower, "closed", needed=3, tolerance=0.1)
    assert judge([*slower, *steady], "closed", needed=3, tolerance=0.1) == ""
    later = [Window(1.0, 100, 100, at) for at in (0.01, 0.02, 0.03)]
    assert "latency rises" in judge(later, "closed", needed=3, tolerance=0.1)
    assert "without" in judge([*steady, Window(1.0, 5, 0, None)], "closed", needed=3, tolerance=0.1)


def test_an_open_loop_is_judged_by_the_share_that_is_answered() -> None:
    scattered = [Window(1.0, n, n, 0.01) for n in (80, 120, 100)]
    assert stability.disagreement(scattered, "open", needed=3, tolerance=0.1) == ""
    assert stability.disagreement(scattered, "closed", needed=3, tolerance=0.1)
    behind = [Window(1.0, 100, n, 0.01) for n in (100, 75, 60)]
    assert "throughput" in stability.disagreement(behind, "open", needed=3, tolerance=0.1)


def test_throughput_has_the_error_of_its_windows_only_of_those_that_count() -> None:
    windows = (Window(1.0, 0, 10, 0.1), *(Window(1.0, n, n, 0.01) for n in (90, 100, 110)))
    found = results.throughput(replace(level(1, 100), windows=windows))
    assert found.value == 100
    assert found.error == pytest.approx(1.32 * 10 / math.sqrt(3))
    assert results.throughput(replace(level(1, 100), windows=windows[1:2], seconds=1.0)).error is None


def test_goodput_counts_what_was_refused_or_failed_as_not_good() -> None:
    found = results.goodput(replace(level(1, 100), refused=50, failed=(Count("reset", 50),)), 0.05)
    assert (found.per_s, found.share) == (100, 0.75)
    assert 0.7 < found.low < 0.75 < found.high < 0.8
    assert results.goodput(level(1, 100), 0.005).per_s == 0


def test_wilsons_interval_is_within_0_and_1() -> None:
    assert results.wilson(0, 0) == (0.0, 0.0, 1.0)
    assert results.wilson(10, 10)[1:] == (pytest.approx(0.7225, abs=1e-3), 1.0)
    assert results.wilson(0, 10)[1:] == (0.0, pytest.approx(0.2775, abs=1e-3))


def test_the_knee_is_where_the_two_bounds_cross() -> None:
    found = results.knee([level(1, 10), level(2, 20), level(4, 38), level(8, 40), level(16, 40)])
    assert not isinstance(found, Unknown)
    assert found.callers == pytest.approx(4)


def test_there_is_no_knee_while_throughput_grows() -> None:
    found = results.knee([level(1, 10), level(2, 20), level(4, 40)])
    assert isinstance(found, Unknown)
    assert "still grows at 4" in found.reason
    assert isinstance(results.knee([]), Unknown)


def test_callers_double_until_throughput_stops_growing_twice() -> None:
    seen: list[Level] = []
    while (callers := results.next_callers(seen, SETTINGS)[0]) is not None:
        seen.append(level(callers, min(10 * callers, 40)))
    assert [one.callers for one in seen] == [1, 2, 4, 8, 16]
    assert "than 4 don't raise" in results.next_callers(seen, SETTINGS)[1]


def test_callers_stop_at_the_most_and_where_nothing_is_answered() -> None:
    grows = [level(n, 10 * n) for n in (1, 2, 4, 8)]
    assert results.next_callers(grows, replace(SETTINGS, most_callers=8)) == (
        None,
        "more callers than 8 weren't asked for",
    )
    dead = replace(level(2, 0), failed=(Count("connection reset", 7),))
    assert "connection reset 7" in results.next_callers([level(1, 10), dead], SETTINGS)[1]


def test_rates_rise_as_shares_of_the_best_or_as_asked() -> None:
    rates = results.open_rates([level(1, 10), level(2, 50)], SETTINGS)
    assert rates == tuple(share * 50 for share in results.SHARES) == tuple(sorted(rates))
    assert results.open_rates([], replace(SETTINGS, rates_per_s=(5.0, 2.0))) == (2.0, 5.0)
    assert results.open_rates([level(1, 0)], SETTINGS) == ()


def test_a_server_that_falls_behind_is_saturated() -> None:
    fine = level(9, 50, loop="open", rate=50.0)
    assert results.saturated(fine) == ""
    behind = replace(fine, windows=(Window(1.0, 100, 60, 0.5),) * 3)
    assert "60%" in results.saturated(behind)


def test_a_few_requests_still_under_way_are_no_saturation() -> None:
    slow = level(1, 0.5, loop="open", rate=0.5)
    assert (
        results.saturated(replace(slow, windows=(Window(6.0, 3, 3, 1.0),) * 2 + (Window(6.0, 3, 2, 1.0),)))
        == ""
    )
    assert "58%" in results.saturated(
        replace(slow, windows=(Window(6.0, 4, 3, 1.0),) * 2 + (Window(6.0, 4, 1, 1.0),))
    )


def test_the_rate_within_an_slo_is_the_highest_whose_p99_surely_holds() -> None:
    levels = [
        level(9, 200, loop="open", rate=200.0, latency_s=0.02),
        level(9, 400, loop="open", rate=400.0, latency_s=0.04),
        level(9, 500, loop="open", rate=500.0, latency_s=0.2),
        replace(level(9, 450, loop="open", rate=450.0, latency_s=0.02), refused=1),
    ]
    found = results.within_slo(ServedScan(BY, SETTINGS, tuple(levels), ""))
    assert isinstance(found, Level)
    assert found.rate_per_s == 400.0
    few = ServedScan(BY, SETTINGS, (level(9, 5, loop="open", rate=5.0),), "")
    assert isinstance(results.within_slo(few), Unknown)  # 15 answers say nothing of p99


def test_a_served_scan_survives_its_file() -> None:
    whole = ServedScan(BY, SETTINGS, (level(1, 3), level(9, 5, loop="open", rate=5.0)), "done")
    assert decode(ServedScan, encode(whole)) == whole
