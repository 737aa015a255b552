"""How often and how long to repeat: warm-ups, batches of short operations, two clocks, a time budget."""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from probes.core.unknown import Unknown
from probes.measure.workbench import Clocked, Operation, Workbench
from probes.records.rows import Clock
from probes.records.stats import median

WARMUPS = 3
MOST_WARMUPS = 12
STEADY = 1.2  # a warm-up within this factor of the fastest one shows that the operation has settled
TRIALS = 3  # readings behind each decision, of which the fastest or the middle one counts
# Device events resolve about half a microsecond, and what surrounds a sample adds a few more:
# a sample of this length errs by about a percent.
SAMPLE_S = 200e-6
MUCH = 20.0  # times that: one reading is enough to see that the operation needs no batch
SAFETY = 1.2  # aim above it: the estimate comes from shorter batches, which look slower per operation
LONGEST_BATCH = 256  # a device's queue takes about a thousand commands before it blocks the host
LEAD_MARGIN = 2.0  # the wait in front outlasts the queueing of a batch by this factor
MOST_LEAD = 16.0  # times that, before an operation counts as one that the host can't keep ahead of
FEW_BEHIND = 0.05  # of the samples of a row may be taken while the device had run out of work
# A device's wait counts ticks of a clock that differs by card: 2 GHz on an H200, perhaps 100 MHz on gfx11.
# The first try takes 1 ms on the slowest of them.
FIRST_TICKS, CALIBRATION_S = 100_000, 2e-3
WAKE_S = 0.05  # an idle card needs it to raise its clocks
# an ordinary machine's, to estimate how long a run takes; the observed pace corrects them
LINK_BYTES_PER_S, VRAM_BYTES_PER_S = 20e9, 400e9


@dataclass(frozen=True)
class Effort:
    """How much one process invests in one row. Full samples unless the row has used up its budget before."""

    samples: int
    at_least: int
    budget_s: float  # per clock, pauses not counted
    spread_s: float = 0.0  # by the device's clock, with pauses in between, over no less than this

    def cut(self, factor: int) -> "Effort":
        """A fraction of the time and of the least samples, for the secondary clock."""
        return Effort(self.samples, max(self.at_least // factor, 2), self.budget_s / factor)


# Every round invests this much again: two in quick mode, three in full mode (`probes.records.rounds`).
QUICK = Effort(samples=50, at_least=5, budget_s=0.06)
QUICK_HOST = Effort(samples=50, at_least=3, budget_s=0.05)
FULL = Effort(samples=50, at_least=10, budget_s=0.6)
# A link has slow spells: on an H200 of a shared host about 0.1 s at a time, in which a copy of 4 MiB takes up
# to a quarter longer. Samples in a row are over in a fraction of that, and all within one or none.
# In quick mode that costs too much: there processes tell what a spell does.
QUICK_SPREAD_S, FULL_SPREAD_S = 0.05, 0.2
HOST_SPREAD_S = 0.4  # where a processor does part of the work, in full mode
GROUP = 10  # samples between pauses
# Where pauses are the other side's turns, one comes after this long as well. On an H200 passes that wait for
# Python run at another pace after most turns: many short ones say more than a few long ones.
TURN_S = 0.02


def cost_s(effort: Effort, one_s: float, *, device: bool, leads: Clock = "device") -> float:
    """Seconds that `sample` takes, about, with an operation of this length; `device`: by two clocks. Pure."""
    if not device:
        return _cost_s(effort, one_s)
    by_device, by_wall = _efforts(effort, leads)
    return _cost_s(by_device, max(one_s, SAMPLE_S)) + _cost_s(by_wall, one_s)


def _cost_s(effort: Effort, length_s: float) -> float:
    return max(
        min(effort.samples * length_s, max(effort.budget_s, effort.at_least * length_s)), effort.spread_s
    )


def _efforts(effort: Effort, leads: Clock) -> tuple[Effort, Effort]:
    """By the device's clock and the wall's: the leading one gets the whole budget, the other a fraction."""
    return (effort, effort.cut(4)) if leads == "device" else (effort.cut(4), effort)


@dataclass(frozen=True)
class Samples:
    """Seconds per operation by each clock, in order of measurement, of one process."""

    batch: int
    device_s: tuple[float, ...] | Unknown
    wall_s: tuple[float, ...]
    host_bound: bool  # the device ran out of work while it was handed more
    taken: int  # operations done in all: at least this many of the rotation were used


def sample(
    bench: Workbench,
    operations: Sequence[Operation],
    *,
    effort: Effort,
    queued: bool,
    leads: Clock = "device",
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time the operations, in rotation. `queued`: they can be handed over before they run (not pageable)."""
    rotation = _Rotation(operations)
    if bench.in_turns:  # pairs of processes say more than long ones
        effort = replace(effort, budget_s=effort.budget_s / 2)
    with no_collection():
        _warm_up(bench, rotation)
        clock = _DeviceClock(bench, rotation, _queue_s(bench, rotation) if queued else 0.0, queued=queued)
        if queued:
            clock.choose_batch()
        clock.read()  # the first sample after the warm-up pays for the batch's first use
        clock.behind = 0
        by_device, by_wall = _efforts(effort, leads) if queued else (effort, effort)
        device_s = _repeat(clock.read, effort=by_device, now=now, pause=bench.rest, in_turns=bench.in_turns)
        behind = clock.behind > FEW_BEHIND * len(device_s)
        wall_s = _repeat(
            lambda: bench.wall_s(rotation.take(1)),
            effort=by_wall if device_s else effort,
            now=now,
            pause=bench.rest,
            in_turns=bench.in_turns,
        )
    return Samples(
        batch=clock.batch,
        device_s=device_s or Unknown("this device has no clock"),
        wall_s=wall_s,
        host_bound=bool(device_s) and queued and behind,
        taken=rotation.taken,
    )


class _Rotation:
    """The operations one after another, again and again, counted."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = itertools.cycle(operations)
        self.taken = 0

    def take(self, count: int) -> list[Operation]:
        self.taken += count
        return list(itertools.islice(self._operations, count))


def ticks_per_s(timed_sleep: Callable[[int], float]) -> float:
    """The rate of the clock that counts a device's waits, measured once the card is awake.

    `timed_sleep` lets the device wait for so many ticks and returns the seconds that this took by its events.
    The highest rate seen counts: when the clock falls later, waits come out longer and never shorter.
    """
    rate = FIRST_TICKS / timed_sleep(FIRST_TICKS)
    for seconds in (WAKE_S, *[CALIBRATION_S] * TRIALS):
        ticks = max(int(seconds * rate), 1)
        rate = max(rate, ticks / timed_sleep(ticks))
    return rate


@contextmanager
def no_collection() -> Iterator[None]:
    """Holds off Python's garbage collector while a batch is handed over: the device would run out of work."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _warm_up(bench: Workbench, rotation: _Rotation) -> None:
    """Repeat until an operation is about as fast as the fastest so far; clocks and caches have settled."""
    taken = [bench.wall_s(rotation.take(1)) for _ in range(WARMUPS)]
    while taken[-1] > STEADY * min(taken) and len(taken) < MOST_WARMUPS:
        taken.append(bench.wall_s(rotation.take(1)))


def _queue_s(bench: Workbench, rotation: _Rotation) -> float:
    return LEAD_MARGIN * median([bench.queue_s(rotation.take(1)[0]) for _ in range(TRIALS)])


class _DeviceClock:
    """Samples by the device's clock, behind a wait that is made longer where the device ran out of work."""

    def __init__(self, bench: Workbench, rotation: _Rotation, queue_s: float, *, queued: bool) -> None:
        self._bench, self._rotation, self._queue_s, self._queued = bench, rotation, queue_s, queued
        self._longer = 1.0
        self.batch = 1
        self.behind = 0  # samples in which the device ran out of work

    def choose_batch(self) -> None:
        """How many operations make a sample long enough for the clock.

        A single operation isn't enough: a hiccup or the cost of the clock itself can be longer than it.
        So it goes up in steps, and the fastest of a few readings decides.
        """
        for _ in range(TRIALS):
            first_s = self.read()
            if first_s is None or first_s >= MUCH * SAMPLE_S:
                return
            more = (self.read() for _ in range(TRIALS - 1))
            one_s = max(min(first_s, *(reading for reading in more if reading is not None)), 1e-9)
            if one_s * self.batch >= SAMPLE_S or self.batch == LONGEST_BATCH:
                return
            self.batch = min(LONGEST_BATCH, math.ceil(SAFETY * SAMPLE_S / one_s))

    def read(self) -> float | None:
        """Seconds per operation; None where the device has no clock. Repeated while a longer wait helps."""
        while True:
            reading = self._once()
            if reading is None:
                return None
            if reading.ahead or not self._queued:
                break
            if self._longer >= MOST_LEAD:
                self.behind += 1
                break
            self._longer *= 2
        return reading.seconds / self.batch

    def _once(self) -> Clocked | None:
        if not self._bench.has_gpu:
            return None
        # a wait that has not helped at its longest isn't worth its time
        longer = self._longer if self._longer < MOST_LEAD else 1.0
        lead_s = self._queue_s * self.batch * longer
        return self._bench.device_s(self._rotation.take(self.batch), lead_s=lead_s)


def _repeat(
    measure: Callable[[], float | None],
    *,
    effort: Effort,
    now: Callable[[], float],
    pause: Callable[[float], None],
    in_turns: bool = False,
) -> tuple[float, ...]:
    """Samples until there are enough or the budget is spent; none where there is no clock."""
    taken: list[float] = []
    began_s = paused_at_s = now()
    paused_s = 0.0
    while len(taken) < effort.samples:
        at_s = now()
        if len(taken) >= effort.at_least and at_s - began_s - paused_s > effort.budget_s:
            break
        early_s = effort.spread_s * len(taken) / effort.samples - (at_s - began_s)
        over = len(taken) % GROUP == 0 or (in_turns and at_s - paused_at_s > TURN_S)
        if taken and over and (in_turns or early_s > 0):
            pause(max(early_s, 0.0))
            if in_turns and taken[-1] < TURN_S:
                measure()  # pays for what the other side has left in caches: up to a sixth
            paused_at_s = now() if in_turns else at_s + early_s
            paused_s += paused_at_s - at_s
        value = measure()
        if value is None:
            break
        taken.append(value)
    return tuple(taken)
