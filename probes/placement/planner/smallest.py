"""The smallest budgets that work, for a model that no placement fits. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from probes.placement.planner.costs.blockbytes import cache_bytes
from probes.placement.planner.searching.feasible import fits
from probes.placement.planner.searching.placed import Limits
from probes.placement.planner.task import Task
from probes.shared.units import binary_bytes

MIB: Final = 2**20


def smallest_budgets(task: Task, vram: int, host: int | None) -> tuple[str, str]:
    """What to say when nothing fits: the smallest budgets that work, each with the other as it is."""
    limits, model = task.limits(vram, host), task.model
    loading = model.loading_bytes
    weights, budget = binary_bytes(task.weight_bytes), binary_bytes(vram)
    said = f"{model.name} of {weights} can't be placed in {budget} of VRAM"
    if host is not None:
        said += f" and {binary_bytes(host)} of host memory"
    caches = sum(cache_bytes(kind.block, task.work) * len(kind.places) for kind in task.kinds)
    most = 8 * task.weight_bytes + caches + 2**34
    ways = []
    limits, also = replace(limits, host=max(limits.host, 0)), limits.host < 0
    if _fits(task, replace(limits, vram=most)):
        least = _least(lambda n: _fits(task, replace(limits, vram=n)), most)
        ways.append(_smallest_vram(task, least) + f" --host {loading // MIB}MiB" * also)
    if _fits(task, replace(limits, host=most, pinned=most)):
        share = task.machine.pinned_share
        least = _least(
            lambda n: _fits(task, replace(limits, host=n, pinned=int(n * share))), int(most / share)
        )
        mib = -(-(least + loading) // MIB)
        ways.append(f"the smallest host memory that works is {binary_bytes(mib * MIB)}: --host {mib}MiB")
    return said, "; or ".join(ways)


def _fits(task: Task, limits: Limits) -> bool:
    return limits.vram >= 0 and fits(task.counted, limits)


def _smallest_vram(task: Task, least: int) -> str:
    """`least` bytes for weights, rings and cache as a budget, or as a card."""
    around, machine = task.around, task.machine
    budget = least + around.activations + around.workspace + around.loose_rounding
    mib = -(-budget // MIB)
    card = mib * MIB + around.context
    if card > machine.vram_bytes:
        return (
            f"the smallest card that works has {binary_bytes(card)}; {machine.name} has "
            f"{binary_bytes(machine.vram_bytes)}"
        )
    return f"the smallest budget that works is {binary_bytes(mib * MIB)}: --vram {mib}MiB"


def _least(works: Callable[[int], bool], high: int) -> int:
    """The smallest number that works, to a thousandth; `high` does."""
    if works(0):
        return 0
    low = 0
    while high - low > max(MIB, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high
