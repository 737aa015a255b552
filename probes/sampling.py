"""How often and how long to repeat: warm-ups, batches of short operations, two clocks, a time budget."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from probes.report import Unknown
from probes.workbench import Operation, Workbench

WARMUPS = 3
# Device events resolve about half a microsecond: a sample of this length errs by a percent at most.
SAMPLE_S = 50e-6
LONGEST_BATCH = 64
LEAD_MARGIN = 1.5  # the wait in front outlasts the queueing of a batch by this factor


@dataclass(frozen=True)
class Effort:
    """How much to invest in one row. Full samples unless the row has used up its budget before."""

    samples: int
    at_least: int
    budget_s: float  # per clock


QUICK = Effort(samples=20, at_least=5, budget_s=1.0)
QUICK_HOST = Effort(samples=20, at_least=5, budget_s=0.3)
FULL = Effort(samples=100, at_least=20, budget_s=30.0)


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
    bench.wall_s(_take(rotation, WARMUPS))
    queue_s = bench.queue_s(next(rotation)) * LEAD_MARGIN if queued else 0.0
    one_s = bench.device_s(_take(rotation, 1), lead_s=queue_s)
    batch = _batch(one_s) if queued and one_s is not None else 1
    lead_s = queue_s * batch

    def device() -> float | None:
        total_s = bench.device_s(_take(rotation, batch), lead_s=lead_s)
        return None if total_s is None else total_s / batch

    device()  # the first sample after the warm-up pays for the batch's first use
    device_s = _repeat(device, effort=effort, now=now)
    wall_s = _repeat(lambda: bench.wall_s(_take(rotation, 1)), effort=effort, now=now)
    return Samples(batch, device_s or Unknown("this device has no clock of its own"), wall_s)


def _batch(one_s: float) -> int:
    """How many operations make a sample long enough for the clock."""
    return max(1, min(LONGEST_BATCH, math.ceil(SAMPLE_S / max(one_s, 1e-9))))


def _take(rotation: Iterator[Operation], count: int) -> list[Operation]:
    return list(itertools.islice(rotation, count))


def _repeat(
    measure: Callable[[], float | None], *, effort: Effort, now: Callable[[], float]
) -> tuple[float, ...]:
    """Samples until there are enough or the budget is spent; none at all where there is no clock."""
    taken: list[float] = []
    began = now()
    while len(taken) < effort.samples:
        if len(taken) >= effort.at_least and now() - began > effort.budget_s:
            break
        value = measure()
        if value is None:
            break
        taken.append(value)
    return tuple(taken)
