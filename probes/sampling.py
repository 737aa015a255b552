"""How often and how long to repeat: warm-ups, batches of short operations, two clocks, a time budget."""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from probes.report import Unknown
from probes.stats import median
from probes.workbench import Operation, Workbench

WARMUPS = 3
MOST_WARMUPS = 12
STEADY = 1.2  # a warm-up within this factor of the fastest one shows that the operation has settled
TRIALS = 3  # readings behind each decision, of which the fastest or the middle one counts
# Device events resolve about half a microsecond, and what surrounds a sample adds a few more:
# a sample of this length errs by about a percent.
SAMPLE_S = 200e-6
SAFETY = 1.2  # aim above it: the estimate comes from shorter batches, which look slower per operation
LONGEST_BATCH = 256  # a device's queue takes about a thousand commands before it blocks the host
LEAD_MARGIN = 2.0  # the wait in front outlasts the queueing of a batch by this factor
# an ordinary machine's, to foretell how long a run takes; the pace that is seen corrects them
LINK_BYTES_PER_S, VRAM_BYTES_PER_S = 20e9, 400e9


@dataclass(frozen=True)
class Effort:
    """How much to invest in one row. Full samples unless the row has used up its budget before."""

    samples: int
    at_least: int
    budget_s: float  # per clock, pauses not counted
    spread_s: float = 0.0  # by the device's clock, with pauses in between, over no less than this

    def cut(self, factor: int) -> "Effort":
        """A fraction of the time and of the least samples, for what is only looked at beside."""
        return Effort(self.samples, max(self.at_least // factor, 2), self.budget_s / factor)


QUICK = Effort(samples=100, at_least=10, budget_s=0.12)
QUICK_HOST = Effort(samples=100, at_least=5, budget_s=0.1)
FULL = Effort(samples=100, at_least=20, budget_s=4.0)
# A link has slow spells: on an H200 of a shared host about 0.1 s at a time, in which a copy of 4 MiB takes up
# to a quarter longer. A hundred samples in a row are over in a fraction of that, and all within one or none.
QUICK_SPREAD_S, FULL_SPREAD_S = 0.2, 0.6
GROUP = 10  # samples between pauses


def cost_s(effort: Effort, one_s: float, *, device: bool) -> float:
    """Seconds that `sample` takes, about, with an operation of this length; `device`: by two clocks. Pure."""
    efforts = [effort, effort.cut(4)] if device else [effort]
    lengths = [max(one_s, SAMPLE_S) if device else one_s, one_s]
    return sum(
        max(min(e.samples * length, max(e.budget_s, e.at_least * length)), e.spread_s)
        for e, length in zip(efforts, lengths, strict=False)
    )


@dataclass(frozen=True)
class Samples:
    """Seconds per operation by each clock, in order of measurement."""

    batch: int
    device_s: tuple[float, ...] | Unknown
    wall_s: tuple[float, ...]


def sample(
    bench: Workbench,
    operations: Sequence[Operation],
    *,
    effort: Effort,
    queued: bool,
    now: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Time the operations, in rotation. `queued`: they can be handed over before they run (not pageable)."""
    rotation = itertools.cycle(operations)
    with _no_collection():
        _warm_up(bench, rotation)
        queue_s = _queue_s(bench, rotation) if queued else 0.0
        batch = _batch(bench, rotation, queue_s) if queued else 1

        def device() -> float | None:
            return _device_s(bench, rotation, batch=batch, queue_s=queue_s)

        device()  # the first sample after the warm-up pays for the batch's first use
        device_s = _repeat(device, effort=effort, now=now, pause=bench.rest)
        # where the device's clock leads, the wall's only shows what the software adds
        wall_effort = effort.cut(4) if queued and device_s else effort
        wall_s = _repeat(
            lambda: bench.wall_s(_take(rotation, 1)), effort=wall_effort, now=now, pause=bench.rest
        )
    return Samples(batch, device_s or Unknown("this device has no clock of its own"), wall_s)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector may not run while a batch is handed over: the device would run dry."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _warm_up(bench: Workbench, rotation: Iterator[Operation]) -> None:
    """Repeat until an operation is about as fast as the fastest so far; clocks and caches have settled."""
    taken = [bench.wall_s(_take(rotation, 1)) for _ in range(WARMUPS)]
    while taken[-1] > STEADY * min(taken) and len(taken) < MOST_WARMUPS:
        taken.append(bench.wall_s(_take(rotation, 1)))


def _queue_s(bench: Workbench, rotation: Iterator[Operation]) -> float:
    return LEAD_MARGIN * median([bench.queue_s(next(rotation)) for _ in range(TRIALS)])


def _batch(bench: Workbench, rotation: Iterator[Operation], queue_s: float) -> int:
    """How many operations make a sample long enough for the clock.

    One operation alone tells too little: a hiccup or the cost of the clock itself can be longer than it.
    So it goes up in steps, and the fastest of a few readings decides.
    """
    batch = 1
    for _ in range(TRIALS):
        readings = [_device_s(bench, rotation, batch=batch, queue_s=queue_s) for _ in range(TRIALS)]
        known = [reading for reading in readings if reading is not None]
        if not known:
            return 1
        one_s = max(min(known), 1e-9)
        if one_s * batch >= SAMPLE_S or batch == LONGEST_BATCH:
            break
        batch = min(LONGEST_BATCH, math.ceil(SAFETY * SAMPLE_S / one_s))
    return batch


def _device_s(bench: Workbench, rotation: Iterator[Operation], *, batch: int, queue_s: float) -> float | None:
    total_s = bench.device_s(_take(rotation, batch), lead_s=queue_s * batch)
    return None if total_s is None else total_s / batch


def _take(rotation: Iterator[Operation], count: int) -> list[Operation]:
    return list(itertools.islice(rotation, count))


def _repeat(
    measure: Callable[[], float | None],
    *,
    effort: Effort,
    now: Callable[[], float],
    pause: Callable[[float], None],
) -> tuple[float, ...]:
    """Samples until there are enough or the budget is spent; none at all where there is no clock."""
    taken: list[float] = []
    began_s = now()
    paused_s = 0.0
    while len(taken) < effort.samples:
        if len(taken) >= effort.at_least and now() - began_s - paused_s > effort.budget_s:
            break
        early_s = effort.spread_s * len(taken) / effort.samples - (now() - began_s)
        if early_s > 0 and len(taken) % GROUP == 0:
            pause(early_s)
            paused_s += early_s
        value = measure()
        if value is None:
            break
        taken.append(value)
    return tuple(taken)
