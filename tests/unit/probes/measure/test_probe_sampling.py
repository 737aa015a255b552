"""How often an operation runs and behind which waits, on a bench that answers from a script."""

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat

import pytest
from probe_fakes import FakeBench, FakeOperation

from probes.core.unknown import Unknown
from probes.measure import sampling
from probes.measure.sampling import Effort, Samples
from probes.measure.workbench import Clocked

US = 1e-6
TEN = Effort(samples=10, at_least=2, budget_s=1000.0)


def endless(script: Iterable[float]) -> Iterator[float]:
    readings = list(script)
    return chain(readings, repeat(readings[-1]))


@dataclass
class Scripted(FakeBench):
    """Readings per operation come from scripts, the last one again and again; the wall's move the clock."""

    walls: Iterable[float] = (1.0,)
    devices: Iterable[float] = (1.0,)
    queues: Iterable[float] = (3e-6,)
    ahead: Callable[[float], bool] = lambda _lead_s: True
    clock_s: float = 1000.0
    leads: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)
    in_turns: bool = False
    walls_taken: int = 0

    def __post_init__(self) -> None:
        self.walls, self.devices, self.queues = map(endless, (self.walls, self.devices, self.queues))

    def wall_s(self, operations: list[FakeOperation]) -> float:  # type: ignore[override]
        self._do(operations)
        self.walls_taken += 1
        seconds = next(self.walls)  # type: ignore[call-overload]
        self.clock_s += seconds
        return float(seconds)

    def device_s(self, operations: list[FakeOperation], *, lead_s: float) -> Clocked | None:  # type: ignore[override]
        self._do(operations)
        self.leads.append(lead_s)
        self.batches.append(len(operations))
        seconds = next(self.devices) * len(operations)  # type: ignore[call-overload]
        return Clocked(seconds, self.ahead(lead_s))

    def queue_s(self, operation: FakeOperation) -> float:
        operation()
        return float(next(self.queues))  # type: ignore[call-overload]

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.clock_s += seconds


def sampled(bench: Scripted, effort: Effort = TEN, *, queued: bool = True) -> Samples:
    """Samples of three operations that take turns and are counted."""
    calls: list[int] = []
    operations = [FakeOperation(0.0, lambda i=i: calls.append(i)) for i in range(3)]
    found = sampling.sample(bench, operations, effort=effort, queued=queued, now=lambda: bench.clock_s)
    assert calls == [i % 3 for i in range(found.taken)]
    return found


@pytest.mark.parametrize(
    ("walls", "count"),
    [
        ([1.0], 3),
        ([2.0, 1.0, 1.2, 1.0], 3),  # within a fifth of the fastest one
        ([2.0, 1.0, 1.21, 1.0], 4),
        ([1.0, 1.0, 9.0, 9.0, 1.0], 5),
        (range(1, 99), 12),  # it never settles
    ],
)
def test_warm_ups_go_on_until_an_operation_has_settled_and_not_for_ever(
    walls: Iterable[float], count: int
) -> None:
    bench = Scripted(has_gpu=False, walls=walls)
    found = sampled(bench, queued=False)
    assert len(found.wall_s) == 10
    assert bench.walls_taken == found.taken == count + 10


def test_a_device_without_a_clock_is_measured_by_the_wall_s_alone() -> None:
    found = sampled(Scripted(has_gpu=False, walls=[0.5]))
    assert isinstance(found.device_s, Unknown)
    assert (found.batch, found.wall_s, found.host_bound) == (1, (0.5,) * 10, False)


def test_what_blocks_the_host_needs_no_wait_and_no_batch() -> None:
    bench = Scripted(walls=[0.5], devices=[9.0, *[1e-6] * 9, 2e-6], ahead=lambda _: False)
    found = sampled(bench, queued=False)
    assert found == Samples(1, (*[1e-6] * 9, 2e-6), (0.5,) * 10, host_bound=False, taken=3 + 11 + 10)
    assert bench.leads == [0.0] * 11


@pytest.mark.parametrize(
    ("devices", "batches"),
    [
        ([4000 * US], [1, 1]),  # one look is enough; the other is the first of the row, which doesn't count
        ([3900 * US], [1, 1, 1, 1]),
        ([200e-6], [1, 1, 1, 1]),  # just long enough
        ([100 * US], [1, 1, 1, 3, 3, 3, 3]),
        ([100 * US, 50 * US, 80 * US, 100 * US], [1, 1, 1, 5, 5, 5, 5]),  # the fastest of three decides
        (
            [100 * US, 95 * US, 90 * US, *[21 * US] * 3, *[5.1 * US] * 3, US],
            [1] * 3 + [3] * 3 + [12] * 3 + [48],  # three steps at most
        ),
        ([0.1 * US], [1, 1, 1, 256, 256, 256, 256]),  # a queue holds no more
        ([0.0], [1, 1, 1, 256, 256, 256, 256]),
    ],
)
def test_a_batch_grows_in_steps_until_a_sample_takes_200_us(devices: list[float], batches: list[int]) -> None:
    bench = Scripted(devices=devices)
    found = sampled(bench)
    assert bench.batches == batches + batches[-1:] * 10
    assert found.batch == batches[-1]
    assert found.device_s == pytest.approx([devices[-1]] * 10)
    assert found.taken == 3 + 3 + sum(bench.batches) + 10


def test_a_wait_outlasts_the_queueing_twice_by_the_middle_one_of_three_looks() -> None:
    bench = Scripted(devices=[4e-3], queues=[5e-6, 1e-6, 3e-6, 99e-6])
    sampled(bench)
    assert bench.leads == pytest.approx([6e-6] * 12)
    short = Scripted(devices=[100 * US], queues=[3e-6])
    sampled(short)
    assert short.leads == pytest.approx([6e-6] * 3 + [18e-6] * 14)  # for each operation of a batch


def test_a_wait_is_doubled_only_as_long_as_that_helps() -> None:
    helped = Scripted(devices=[4e-3], ahead=lambda lead_s: lead_s > 40e-6)
    assert not sampled(helped).host_bound
    assert helped.leads == pytest.approx([6e-6, 12e-6, 24e-6, 48e-6] + [48e-6] * 11)
    hopeless = Scripted(devices=[4e-3], ahead=lambda _: False)
    assert sampled(hopeless).host_bound
    assert hopeless.leads == pytest.approx([6e-6, 12e-6, 24e-6, 48e-6] + [6e-6] * 12)


@pytest.mark.parametrize(("late", "host_bound"), [(0, False), (1, False), (2, True)])
def test_a_row_is_host_bound_where_more_than_one_sample_of_twenty_had_to_wait(
    late: int, host_bound: bool
) -> None:
    """What came before the row, however late, doesn't count."""
    answers = iter([*[False] * 5, True, *[False] * late])
    bench = Scripted(devices=[4e-3], ahead=lambda _: next(answers, True))
    found = sampled(bench, Effort(samples=20, at_least=2, budget_s=1000.0))
    assert found.host_bound is host_bound


@pytest.mark.parametrize(
    ("effort", "count"),
    [
        (Effort(10, 2, 0.75), 4),  # a budget that is just used up isn't exceeded
        (Effort(10, 2, 0.74), 3),
        (Effort(10, 5, 0.25), 5),
        (Effort(10, 2, 99.0), 10),
    ],
)
def test_samples_end_with_the_budget_once_there_are_enough(effort: Effort, count: int) -> None:
    assert len(sampled(Scripted(has_gpu=False, walls=[0.25]), effort).wall_s) == count


def test_pauses_come_every_ten_samples_and_make_up_for_what_is_early() -> None:
    bench = Scripted(has_gpu=False, walls=[0.0])
    found = sampled(bench, Effort(samples=50, at_least=2, budget_s=0.01, spread_s=0.5))
    assert len(found.wall_s) == 50
    assert bench.rests == pytest.approx([0.1] * 4)  # from 0.1 s on; at the start nothing is early
    slow = Scripted(has_gpu=False, walls=[0.02])
    assert len(sampled(slow, Effort(samples=50, at_least=2, budget_s=9.0, spread_s=0.5)).wall_s) == 50
    assert slow.rests == []


def test_pauses_are_no_part_of_the_budget_but_slow_samples_are() -> None:
    bench = Scripted(has_gpu=False, walls=[2**-7])
    effort = Effort(samples=50, at_least=2, budget_s=12 * 2**-7, spread_s=2.0)
    assert len(sampled(bench, effort).wall_s) == 13
    assert bench.rests == pytest.approx([0.4 - 10 * 2**-7])


def test_the_clock_beside_the_leading_one_gets_a_quarter() -> None:
    assert Effort(50, 20, 0.5, spread_s=0.25).cut(4) == Effort(50, 5, 0.125)
    assert Effort(50, 7, 0.5).cut(4).at_least == 2
    bench = Scripted(devices=[4e-3], walls=[0.25])
    found = sampled(bench, Effort(samples=50, at_least=8, budget_s=4.0, spread_s=0.0))
    assert len(found.wall_s) == 5  # 1 s for it


@pytest.mark.parametrize(
    ("one_s", "seconds"),
    [(1e-3, 0.05), (0.03, 0.6), (0.1, 1.0)],  # all samples; the budget; the least samples
)
def test_a_row_costs_its_samples_or_its_budget_or_the_least_samples(one_s: float, seconds: float) -> None:
    assert sampling.cost_s(Effort(50, 10, 0.6), one_s, device=False) == pytest.approx(seconds)
    spread = Effort(50, 10, 0.6, spread_s=0.7)
    assert sampling.cost_s(spread, one_s, device=False) == pytest.approx(max(seconds, 0.7))


def test_two_clocks_cost_a_row_each_and_the_device_s_no_less_than_its_batches() -> None:
    effort = Effort(50, 10, 0.6, spread_s=0.2)
    assert sampling.cost_s(effort, 0.03, device=True) == pytest.approx(0.6 + 0.15)
    assert sampling.cost_s(effort, 0.03, device=True, leads="wall") == pytest.approx(0.15 + 0.6)
    assert sampling.cost_s(effort, 1e-6, device=True) == pytest.approx(0.2 + 50e-6)
    assert sampling.cost_s(effort, 1e-6, device=True, leads="wall") == pytest.approx(50 * 200e-6 + 0.2)


def test_rows_get_the_samples_and_the_spread_that_the_documentation_names() -> None:
    """docs/probes.md: 50 samples, over 0.05 s (quick), 0.2 s and 0.4 s (full)."""
    efforts = (sampling.QUICK, sampling.QUICK_HOST, sampling.FULL)
    assert [effort.samples for effort in efforts] == [50] * 3
    assert [effort.spread_s for effort in efforts] == [0.0] * 3
    assert (sampling.QUICK_SPREAD_S, sampling.FULL_SPREAD_S, sampling.HOST_SPREAD_S) == (0.05, 0.2, 0.4)


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        sampled(Scripted(has_gpu=False))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("rate", "ticks"),
    [
        (1e9, [100_000, 50_000_000, 2_000_000, 2_000_000, 2_000_000]),
        (10.0, [100_000, 1, 1, 1, 1]),  # at least one tick
    ],
)
def test_calibration_wakes_the_card_for_50_ms_and_reads_2_ms_three_times(
    rate: float, ticks: list[int]
) -> None:
    asked: list[int] = []

    def sleep(count: int) -> float:
        asked.append(count)
        return count / rate

    assert sampling.ticks_per_s(sleep) == pytest.approx(rate)
    assert asked == ticks


@dataclass
class PacedBench(Scripted):
    """Passes of 7 ms at a pace that changes with each turn, as those of a BERT on an H200 do (by a sixth).

    The first after a turn takes longer by an eighth.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_turns = True
        self.draw = random.Random(self.seed)
        self.rest(0.0)

    def rest(self, seconds: float) -> None:
        super().rest(seconds)
        self.pace, self.cold = 7e-3 * math.exp(self.draw.gauss(0, 0.17)), 1.13

    def wall_s(self, operations: list[FakeOperation]) -> float:  # type: ignore[override]
        self.walls = endless([self.pace * self.cold])
        self.cold = 1.0
        return super().wall_s(operations)


def test_a_process_in_turns_is_seen_at_many_of_its_paces_and_never_right_after_the_other() -> None:
    """Three turns of ten passes each said no more than three passes: their middle erred by 12 %."""
    effort = Effort(samples=50, at_least=6, budget_s=0.4)
    found = [sampled(PacedBench(seed=seed), effort, queued=False).wall_s for seed in range(60)]
    assert statistics.stdev(math.log(statistics.median(one)) for one in found) < 0.1
    paces = [len(set(one)) for one in found]
    assert min(paces) >= 6, "turns, each with its own pace and none of its first sample"
    assert all(len(one) >= 2 * many for one, many in zip(found, paces, strict=True))


def test_in_turns_the_other_side_comes_after_ten_samples_and_after_some_time() -> None:
    quick, slow = ClockBench(2**-10), ClockBench(2**-5)
    for bench in (quick, slow):
        bench.in_turns = True
        one = sampling._repeat(
            bench.sample,
            effort=Effort(50, 5, 10.0),
            now=lambda b=bench: b.clock_s,
            pause=bench.rest,
            in_turns=True,
        )
        assert len(one) == 50
    assert len(quick.rests) == 4
    assert len(slow.rests) >= 50 * 2**-5 / (sampling.TURN_S + 2**-5) - 1


@dataclass
class ClockBench:
    """Operations that take this long, by a clock of its own. The other side's turn takes a second."""

    one_s: float
    clock_s: float = 0.0
    in_turns: bool = False
    rests: list[float] = field(default_factory=list)

    def sample(self) -> float:
        self.clock_s += self.one_s
        return self.one_s

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.clock_s += 1.0
