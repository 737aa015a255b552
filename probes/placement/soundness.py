"""What is wrong with a plan that no planner makes: a plan is a file that anybody can edit. Pure."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Final

from probes.placement.values import TIERS, BlockPlan, Plan
from probes.shared.units import binary_bytes

MOST_BUFFERS: Final = 1_000  # of a ring: planners use a few
MOST: Final = 2**63  # bytes, and any other whole number: what a machine's word holds


def flaw(plan: Plan) -> str:
    """The first thing that makes the plan impossible to follow, as a clause; empty for a sound plan.

    A plan without budgets, made by hand, only says where blocks go: nothing of it is compared with them.
    """
    return next(_flaws(plan), "")


def _flaws(plan: Plan) -> Iterator[str]:
    names = Counter(block.name for block in plan.blocks)
    yield from (f"it has {name!r} twice" for name, times in names.items() if times > 1)
    for block in plan.blocks:
        if block.tier not in TIERS:
            yield f"{block.name!r} has the tier {block.tier!r}; known are {', '.join(TIERS)}"
        if block.kept and (not plan.bfloat16_becomes or block.tier in ("in_place", "cpu")):
            yield f"{block.name!r} is {block.tier} and kept as bfloat16, and nothing converts it"
    yield from _numbers(plan, "plan")
    rings = plan.rings
    if not all(count <= MOST_BUFFERS for count in (rings.slots, rings.scratches, rings.ahead)):
        said = f"{rings.slots:,} slots, {rings.scratches:,} scratch buffers and {rings.ahead:,} blocks ahead"
        yield f"{said} aren't each from 0 to {MOST_BUFFERS:,}"
    yield from _over_budget(plan)


def _numbers(value: object, where: str) -> Iterator[str]:
    """Numbers below zero, too large for any machine, or none at all (NaN), and where they are."""
    if isinstance(value, tuple):
        for item in value:
            name = item.name if isinstance(item, BlockPlan) else "notes"
            yield from _numbers(item, f"block {name!r}")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, int) and not 0 <= value < MOST:
        said = f"{value:,}" if -MOST <= value < MOST else "a number beyond 64 bits"
        yield f"{where} is {said}, not a whole number from 0 to 2^63"
    elif isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        yield f"{where} is {value}, not a time in seconds"


def _over_budget(plan: Plan) -> Iterator[str]:
    """What the plan's own figures add up to, against its budgets and each other."""
    use, host = plan.vram, plan.host
    if not plan.vram_budget and not plan.host_budget:
        return
    taken = use.total - use.context
    if taken > plan.vram_budget:
        yield _beyond("of VRAM", taken, plan.vram_budget)
    if host.pinned + host.pageable > plan.host_budget:
        yield _beyond("of host memory", host.pinned + host.pageable, plan.host_budget)
    blocks = sum(block.vram_bytes for block in plan.blocks)
    if blocks > use.weights:
        counted = binary_bytes(use.weights)
        yield f"its blocks take {binary_bytes(blocks)} of VRAM, and it counts {counted} for them"
    kept = sum(block.host_bytes for block in plan.blocks)
    if kept > host.pinned + host.pageable:
        counted = binary_bytes(host.pinned + host.pageable)
        yield f"its blocks take {binary_bytes(kept)} of host memory, and it counts {counted}"
    rings = plan.rings
    for what, buffers, counted_bytes in (
        ("slots", rings.slots * rings.slot_bytes, use.slots),
        ("scratch buffers", rings.scratches * rings.scratch_bytes, use.scratch),
    ):
        if buffers > counted_bytes:
            counted = binary_bytes(counted_bytes)
            yield f"its {what} take {binary_bytes(buffers)} of VRAM, and it counts {counted} for them"
    for block in plan.blocks:
        least = {"resident": block.weight_bytes, "packed": block.weight_bytes // 2}.get(block.tier, 0)
        if block.vram_bytes < least:
            yield (
                f"{block.name!r} is {block.tier} with {block.weight_bytes:,} bytes of weights in "
                f"{block.vram_bytes:,} bytes of VRAM"
            )


def _beyond(what: str, taken: int, budget: int) -> str:
    return f"it takes {binary_bytes(taken)} {what}, more than its budget of {binary_bytes(budget)}"
