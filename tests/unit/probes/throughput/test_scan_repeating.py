"""The trials of a batch size, on a device with a simulated clock."""

from itertools import groupby

import pytest
from scan_fakes import FakeDevice

from probes.core.unknown import Unknown
from probes.records.stats import median
from probes.throughput.direct.results import BatchRow, joules_per_input, latest, throughput
from probes.throughput.direct.trials import Repeats, SeriesEnd, rows

BATCHES = tuple(2**power for power in range(8))


def scan(
    device: FakeDevice, *, trials: int = 20, longest_s: float = 1e9, aim: float = 0.0
) -> tuple[list[BatchRow], SeriesEnd]:
    found = list(rows(device, BATCHES, Repeats(trials, longest_s, aim), device, now=device.clock))
    assert isinstance(found[-1], SeriesEnd)
    visits = [one for one in found if isinstance(one, BatchRow)]
    assert len(visits) == len(found) - 1
    return list(latest(visits)), found[-1]


def test_every_batch_size_has_its_trials_and_every_trial_fresh_inputs() -> None:
    device = FakeDevice()
    found, end = scan(device)
    assert [row.batch for row in found] == list(BATCHES)
    assert {len(row.wall_s) for row in found} == {20}
    assert end == SeriesEnd("finished")
    assert device.draws == len(device.trials)  # warm-ups included


def test_throughput_is_the_devices_own() -> None:
    found, _ = scan(FakeDevice(knee=16, pass_s=0.01))
    rates = {row.batch: throughput(row).mean for row in found}
    assert rates[1] == pytest.approx(100)
    assert rates[16] == rates[128] == pytest.approx(1600)


def test_refused_memory_ends_the_way_with_a_reason_and_keeps_its_rows() -> None:
    found, end = scan(FakeDevice(room=20))
    assert [row.batch for row in found] == [1, 2, 4, 8, 16]
    assert (end.end, end.reason) == ("out of memory", "batch 32: 32 inputs were refused")


def test_a_batch_size_that_would_take_too_long_is_not_begun() -> None:
    device = FakeDevice(knee=1, pass_s=0.1)  # 20 trials of batch 4: 8 s
    found, end = scan(device, longest_s=5.0)
    assert [row.batch for row in found] == [1, 2]
    assert end.end == "too long"
    assert "batch 4" in end.reason
    assert device.trials.count(4) <= 12  # warm-ups at most
    assert 8 not in device.trials


@pytest.mark.parametrize(
    ("seconds", "limit_s", "said"),
    [
        (2.4, 2.0, "would take about 2.4 s, more than 2 s"),
        (2.0004, 2.0, "would take about 2.0004 s, more than 2 s"),
        (0.7, 0.5, "would take about 1 s, more than 0.5 s"),
        (8.0, 5.0, "would take about 8 s, more than 5 s"),
    ],
)
def test_no_time_is_said_to_be_more_than_itself(seconds: float, limit_s: float, said: str) -> None:
    device = FakeDevice(pass_s=seconds / 20)  # twenty trials
    _, end = scan(device, longest_s=limit_s)
    assert said in end.reason


def test_even_the_first_batch_size_may_take_too_long() -> None:
    device = FakeDevice(pass_s=100.0)
    assert scan(device, longest_s=5.0)[0] == []
    assert len(device.trials) == 2


def test_energy_is_counted_over_passes_of_their_own() -> None:
    found, _ = scan(FakeDevice(knee=16, pass_s=0.01, watts=300.0))
    for row in found:
        assert joules_per_input(row) == pytest.approx(300 / throughput(row).mean, rel=0.01)
        assert row.busy_percent == 100.0
    assert found[0].powered > 50  # 0.6 s of 10 ms


def test_trials_have_the_clocks_of_lasting_work_and_not_those_of_a_burst() -> None:
    class Bursting(FakeDevice):
        def next_s(self, batch: int) -> float:
            return super().next_s(batch) * (0.9 if self.now_s < 0.3 else 1.0)

    found, _ = scan(Bursting(watts=300.0, pass_s=0.01))
    assert min(found[0].wall_s) == max(found[0].wall_s) == pytest.approx(0.01)


def test_without_a_gauge_no_pass_is_run_for_it() -> None:
    device = FakeDevice()
    found, _ = scan(device)
    assert found[0].joules == Unknown("no gauge")
    assert device.trials.count(1) == 20 + 2 * 3  # two visits, each with its warm-ups


def test_a_counter_that_begins_again_is_unknown_and_not_negative() -> None:
    class Wrapping(FakeDevice):
        def joules(self) -> float | Unknown:
            return -self.now_s

    found, _ = scan(Wrapping(watts=1.0))
    assert found[0].joules == Unknown("the energy counter began again")


def test_warm_ups_go_on_while_passes_are_slower_than_the_fastest() -> None:
    class Cold(FakeDevice):
        def next_s(self, batch: int) -> float:
            slow = 5.0 if 2 <= self.trials.count(batch) <= 6 else 1.0
            return slow * super().next_s(batch)

    found, _ = scan(Cold())
    assert max(found[0].wall_s) == pytest.approx(0.01)


def test_noisy_trials_are_repeated_until_their_error_is_small_and_quiet_ones_are_not() -> None:
    noisy, _ = scan(FakeDevice(noise=0.12, seed=3), aim=0.02)
    counts = [len(row.wall_s) for row in noisy]
    assert max(counts) > 20
    for row in noisy:
        share = throughput(row).share
        assert share is not None
        assert share <= 0.02
    quiet, _ = scan(FakeDevice(noise=0.01), aim=0.02)
    assert {len(row.wall_s) for row in quiet} == {20}


def test_more_trials_end_where_time_or_patience_does() -> None:
    hopeless, _ = scan(FakeDevice(pass_s=0.001, noise=0.3, seed=1), aim=0.0001)
    assert {len(row.wall_s) for row in hopeless} == {20 * 20}
    slow, _ = scan(FakeDevice(pass_s=1.0, knee=1e9, noise=0.3, seed=1), aim=0.0001)
    assert {len(row.wall_s) for row in slow} == {20 * 4}
    hurried, _ = scan(FakeDevice(knee=1e9, pass_s=0.1, noise=0.3, seed=1), aim=0.0001, longest_s=3.0)
    assert all(20 <= len(row.wall_s) <= 50 for row in hurried)
    never, _ = scan(FakeDevice(noise=0.3, seed=1))
    assert {len(row.wall_s) for row in never} == {20}


def test_a_drift_of_the_machine_hits_all_batch_sizes_alike() -> None:
    class Tiring(FakeDevice):
        def next_s(self, batch: int) -> float:
            return super().next_s(batch) * (1 + 2e-3 * len(self.trials))

    found, _ = scan(Tiring(knee=1e9, pass_s=0.01))
    times = [median(row.wall_s) for row in found]
    assert max(times) / min(times) < 1.02  # 16 % slower at the end of the way up, were there no way down
    middle = [sum(row.wall_s) / len(row.wall_s) for row in found]
    assert max(middle) / min(middle) < 1.02


def test_a_noisy_row_is_measured_again_at_other_times_and_not_only_longer() -> None:
    class Spell(FakeDevice):
        """Twice as slow for a while, as next to another program."""

        def next_s(self, batch: int) -> float:
            return super().next_s(batch) * (2.0 if 30 <= len(self.trials) < 60 else 1.0)

    device = Spell(noise=0.01, seed=2)
    found, _ = scan(device, aim=0.02)
    visits = [batch for batch, _ in groupby(device.trials)]
    assert visits[:15] == [1, 2, 4, 8, 16, 32, 64, 128, 64, 32, 16, 8, 4, 2, 1]
    assert set(visits[15:]) == {4, 8, 16}  # whose trials fell into the spell
    for row in found:
        share = throughput(row).share
        assert share is not None
        assert share <= 0.02
        assert throughput(row).mean <= row.batch / 0.0098  # the slow trials stay in


def test_memory_that_is_refused_later_keeps_every_row() -> None:
    class Shrinking(FakeDevice):
        def at(self, batch: int):
            self.room = 64 if 128 in self.trials else self.room
            return super().at(batch)

    found, end = scan(Shrinking())
    assert [(row.batch, len(row.wall_s)) for row in found] == [(batch, 10) for batch in BATCHES]
    assert (end.end, end.reason) == ("out of memory", "batch 128, measured again: 128 inputs were refused")


def test_a_first_pass_that_loads_kernels_does_not_count_as_too_long() -> None:
    class Loading(FakeDevice):
        def next_s(self, batch: int) -> float:
            return super().next_s(batch) + (0.5 if len(self.trials) == 1 else 0.0)

    found, end = scan(Loading(pass_s=0.001), trials=100, longest_s=3.0)
    assert end.end == "finished"
    assert [row.batch for row in found] == list(BATCHES)
