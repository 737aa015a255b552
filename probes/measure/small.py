"""How long small work takes: a part of the probe `transfer`, for the constants of launches in plans."""

from collections.abc import Iterator
from typing import get_args

from probes.errors import Unsupported
from probes.measure import sampling
from probes.measure.workbench import Workbench
from probes.records.schema import Clock, Small, SmallWork

# Twice two clocks for each of three: 0.4 s in all. What is compiled for `unpack` takes longer the first time.
EFFORT = sampling.Effort(samples=50, at_least=5, budget_s=0.08)


def run(bench: Workbench) -> Iterator[Small]:
    """Each kind of small work that this device does; none without a GPU."""
    for name in get_args(SmallWork) if bench.has_gpu else ():
        try:
            operation = bench.small(name)
        except Unsupported:
            continue
        leads: Clock = "wall" if name == "layers" else "device"
        found = sampling.sample(bench, [operation], effort=EFFORT, queued=True, leads=leads)
        yield Small(name, found.device_s, found.wall_s)
