"""What samples amount to: energy, shares of time, percentiles, curves; in bounded memory."""

import math

import pytest
from watch_samples import sample

from probes.core.unknown import Unknown
from probes.records.watch import Energy, ProcessUse, Slowdowns, Track
from probes.watch.totals import MOST_STEPS, EnergyTotal, Intervals, WatchTotals
from probes.watch.watcher import Deadlines

NONE = Unknown("no counter")


def area(points: list[tuple[float, float | Unknown]]) -> Energy | Unknown:
    found = EnergyTotal()
    for at_s, power in points:
        found.add(at_s, power, NONE)
    return found.energy()


def test_constant_power_has_no_error() -> None:
    found = area([(at / 4, 100.0) for at in range(41)])
    assert isinstance(found, Energy)
    assert (found.joules, found.error_j, found.covers_s) == (pytest.approx(1000), 0.0, pytest.approx(10))


def test_a_jump_between_samples_is_within_three_errors_wherever_it_was() -> None:
    for jump in (0.01, 0.12, 0.24):
        true = 100 * (1 + jump) + 300 * (9 - jump)
        found = area([(at / 4, 100.0 if at / 4 <= 1 + jump else 300.0) for at in range(41)])
        assert isinstance(found, Energy)
        assert abs(found.joules - true) < 3 * found.error_j < 0.03 * true


def test_time_without_power_has_no_energy_and_is_not_covered() -> None:
    found = area([(0.0, 100.0), (1.0, 100.0), (2.0, Unknown("lost")), (3.0, 100.0), (4.0, 100.0)])
    assert isinstance(found, Energy)
    assert (found.joules, found.covers_s) == (200.0, 2.0)


def test_power_that_was_never_known_has_the_reason() -> None:
    assert area([(0.0, Unknown("no sensor")), (1.0, Unknown("no sensor"))]) == Unknown("no sensor")


def test_the_cards_own_counter_is_preferred() -> None:
    found = EnergyTotal()
    for at in range(11):
        found.add(at, 100.0, 7000.0 + 110.0 * at)
    energy = found.energy()
    assert isinstance(energy, Energy)
    assert (energy.joules, energy.source) == (1100.0, "the card's own counter")


def test_a_counter_that_begins_again_is_not_used() -> None:
    found = EnergyTotal()
    for at, counter in enumerate((500.0, 600.0, 10.0)):
        found.add(at, 100.0, counter)
    energy = found.energy()
    assert isinstance(energy, Energy)
    assert (energy.joules, energy.source[:5]) == (200.0, "power")


def test_a_counter_that_stops_early_yields_to_power() -> None:
    found = EnergyTotal()
    for at in range(5):
        found.add(at, 100.0, 500.0 + at if at < 2 else NONE)
    energy = found.energy()
    assert isinstance(energy, Energy)
    assert energy.covers_s == 4


def tallied(*samples: object) -> WatchTotals:
    tally = WatchTotals(0.25, 1)
    for one in samples:
        tally.add(one)  # type: ignore[arg-type]
    return tally


def test_the_share_of_slowed_time_is_of_the_time_that_it_was_known() -> None:
    reasons = [(), ("power cap",), ("power cap", "hot"), Unknown("lost"), ()]
    slow = tallied(*(sample(at / 4, slow=one) for at, one in enumerate(reasons))).cards()[0].slowdowns
    assert isinstance(slow, Slowdowns)
    assert slow.any_share == pytest.approx(2 / 3)
    assert {one.reason: round(one.share, 3) for one in slow.reasons} == {"power cap": 0.667, "hot": 0.333}


def test_slowdowns_that_were_never_known_are_unknown_and_not_zero() -> None:
    lost = Unknown("no driver")
    assert tallied(sample(0.0, slow=lost), sample(0.25, slow=lost)).cards()[0].slowdowns == lost


def track(tally: WatchTotals, gauge: str) -> Track:
    return next(one for one in tally.cards()[0].tracks if one.gauge == gauge)


def test_a_gauge_has_extremes_a_mean_over_time_and_gaps() -> None:
    tally = tallied(
        sample(0.0, power_w=10.0), sample(0.25, power_w=10.0), sample(0.5), sample(0.75, power_w=40.0)
    )
    found = track(tally, "power_w")
    assert (found.least, found.mean, found.most, found.known_s) == (10.0, 25.0, 40.0, 0.5)
    assert found.curve == (10.0, 10.0, None, 40.0)


def test_a_gauge_that_was_never_there_has_no_figures() -> None:
    found = track(tallied(sample(0.0), sample(0.25)), "fan_percent")
    assert found.curve == ()
    assert isinstance(found.most, Unknown)


@pytest.mark.thorough
def test_a_watch_of_a_day_takes_no_more_memory_than_one_of_minutes() -> None:
    tally = WatchTotals(0.25, 1)
    for at in range(20_000):
        tally.add(sample(at * 4.3, power_w=float(at % 7)))
    found = track(tally, "power_w")
    assert len(found.curve) <= MOST_STEPS
    assert tally.step_s * MOST_STEPS > tally.duration_s
    assert found.mean == pytest.approx(3.0, rel=0.01)


def test_each_process_has_the_most_that_it_held() -> None:
    def use(vram: int) -> ProcessUse:
        return ProcessUse(7, "python", vram, Unknown("?"), Unknown("?"))

    found = tallied(sample(0.0, uses=(use(5),)), sample(0.25, uses=(use(9),)), sample(0.5, uses=(use(2),)))
    (held,) = found.cards()[0].processes  # type: ignore[misc]
    assert held.vram_bytes == 9


def test_the_error_of_an_interval_is_by_its_deadlines() -> None:
    found = Intervals(0.25)
    for at in range(1000):
        late = 0.004 if at == 500 else 0.0
        found.add(at * 0.25 + late, late)
    pace = found.pace(NONE)
    assert pace.error_p99_s == pytest.approx(0.0, abs=1e-4)
    assert pace.error_most_s == pytest.approx(0.004)
    assert pace.skipped == 0


def test_late_samples_and_skipped_deadlines_are_counted_apart() -> None:
    found = Intervals(0.25)
    found.add(0.0, 0.0)
    found.add(0.25 + 0.13, 0.13)  # late, on its own deadline
    found.add(1.0, 0.0)  # two deadlines were skipped
    found.add(1.1, None)  # the last sample has none
    pace = found.pace(NONE)
    assert (pace.samples, pace.skipped, pace.error_most_s) == (4, 2, pytest.approx(0.13))


@pytest.mark.parametrize(("share", "expected"), [(0.98, 0.02), (1.0, 0.0)])
def test_a_percentile_is_never_too_low(share: float, expected: float) -> None:
    found = Intervals(0.25)
    late = 0.0
    for at in range(1001):
        late = 0.02 if at > share * 1000 and at % 2 else 0.0
        found.add(at * 0.25 + late, late)
    p99 = found.pace(NONE).error_p99_s
    assert isinstance(p99, float)
    assert expected <= p99 <= expected + 1e-4 or math.isclose(p99, expected)


def test_deadlines_are_whole_multiples_and_those_that_passed_are_skipped() -> None:
    due = Deadlines(10.0, 0.25)
    due.taken(10.01)
    assert due.at_s == 10.25
    due.taken(10.2501)
    assert due.at_s == 10.5
    due.taken(12.3)
    assert due.at_s == 12.5
