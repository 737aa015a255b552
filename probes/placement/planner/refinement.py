"""Plans again with what a pass of a placed model took, block by block. Pure.

Where a block took another time than planned, its options get the ratio: of copies and unpacking for the tiers
that copy and unpack, of computing and of the host for all. A block that was neither copied nor unpacked gets
the median ratio of those that were. Blocks of a kind are told apart where their ratios differ by a step.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import Final, NamedTuple

from probes.placement.models.description import ModelDescription
from probes.placement.planner.costs import Option
from probes.placement.planner.kinds import Kind, merge_kinds
from probes.placement.planner.machine import Constants, with_host
from probes.placement.planner.plan import PlanningTask, all_versions, plan_task
from probes.placement.planner.simulation import Assignment, pass_seconds
from probes.placement.types import BlockPlan, Bound, PassTime, Plan

STEP: Final = math.log(1.5)  # between ratios that are told apart
LAUNCHING: Final = 1.15  # ratio of a block's time on the GPU to its host's, up to which the GPU waited for it
LEAST_S: Final = 1e-6  # below which a time says nothing
CONFIRMED: Final = 0.05  # share of the pass by which a refined plan's interval reaches to both sides


@dataclass(frozen=True)
class BlockTime:
    """Seconds that a block took in one pass. `compute_s`: all of its calls, without waiting for weights."""

    copy_s: float = 0.0
    unpack_s: float = 0.0
    compute_s: float = 0.0
    host_s: float = 0.0


class Ratios(NamedTuple):
    """What a block took over what was planned."""

    copy: float
    unpack: float
    compute: float
    host: float
    in_place: float  # where it computes while it is read over the link
    cpu: float


def refine_plan(
    model: ModelDescription, machine: Constants, plan: Plan, seen: Mapping[str, BlockTime], wall_s: float
) -> Plan | None:
    """The plan for the same budgets and workload, after a pass that took `wall_s`, its blocks as `seen`.

    `model` is as described before. None where no block is `plan`'s, or nothing fits.
    """
    names = {block.name for block in plan.blocks}
    model = replace(model, becomes=plan.bfloat16_becomes)
    machine, _ = with_host(machine, plan.host_budget)
    versions = all_versions(model, plan.vram_budget)
    version = next((v for v in versions if {block.name for block in v.blocks} == names), None)
    if version is None:
        return None
    task = PlanningTask(version, machine, plan.workload, plan.objective, plan.captured)
    planned = {block.name: block for block in plan.blocks}
    blocks = [planned[block.name] for block in task.model.blocks]
    task.kinds = corrected(task.kinds, blocks, plan, seen)
    task.counted = merge_kinds(task.kinds)
    before = as_planned(task.kinds, blocks, plan)
    took = pass_seconds(Assignment(before), plan.rings, replayed=plan.captured)
    made = plan_task(task, plan.vram_budget, plan.host_budget)
    if made is None or took <= 0:
        return None
    seconds = (
        made.time.middle_s * wall_s / took
    )  # with what is between blocks, and what the simulation doesn't know
    return replace(
        made,
        time=confirmed(seconds, made.time.bound),
        notes=(*made.notes, "planned with the times of a measured pass"),
    )


def confirmed(seconds: float, bound: Bound) -> PassTime:
    """The time of a pass that was measured, or planned by one."""
    return PassTime(seconds, seconds * (1 - CONFIRMED), seconds * (1 + CONFIRMED), bound)


def as_planned(kinds: Sequence[Kind], blocks: Sequence[BlockPlan], plan: Plan) -> tuple[Option, ...]:
    """The options that a plan has chosen, in call order."""
    chosen = {place: option_of(kind, blocks[place], plan) for kind in kinds for place in kind.places}
    return tuple(chosen[place] for place in range(len(blocks)))


def option_of(kind: Kind, block: BlockPlan, plan: Plan) -> Option:
    """The option of a block's kind that its plan has chosen: in the fewest pieces that fit the slots."""
    way = (block.tier, block.dense, block.kept, block.table)
    like = [option for option in kind.options if option.way[:4] == way]
    fitting = [option for option in like if option.slot_bytes <= max(plan.rings.slot_bytes, 0)]
    return min(fitting or like or kind.options, key=lambda option: option.pieces)


def corrected(
    kinds: Sequence[Kind], blocks: Sequence[BlockPlan], plan: Plan, seen: Mapping[str, BlockTime]
) -> tuple[Kind, ...]:
    """The kinds with what was seen of their blocks; those that took another time are kinds of their own."""
    ratios = {
        place: _ratios(seen.get(blocks[place].name, BlockTime()), option_of(kind, blocks[place], plan))
        for kind in kinds
        for place in kind.places
    }
    copy, unpack, compute, host, in_place, cpu = map(_middle, zip(*ratios.values(), strict=True))
    usual = [copy or in_place, unpack, compute, host, in_place or copy, cpu]  # both are the link's
    result = []
    for kind in kinds:
        alike: dict[tuple[int, ...], list[tuple[int, list[float]]]] = defaultdict(list)
        for place in kind.places:
            own = [ratio or middle or 1.0 for ratio, middle in zip(ratios[place], usual, strict=True)]
            alike[tuple(round(math.log(ratio) / STEP) for ratio in own)].append((place, own))
        for members in alike.values():
            means = Ratios(*map(geometric_mean, zip(*(own for _, own in members), strict=True)))
            options = tuple(_scaled(option, means) for option in kind.options)
            result.append(replace(kind, places=tuple(place for place, _ in members), options=options))
    return tuple(result)


def _ratios(seen: BlockTime, option: Option) -> tuple[float | None, ...]:
    """In the order of `Ratios`; None where the plan had nothing of it."""
    compute_s = seen.compute_s
    if compute_s <= LAUNCHING * seen.host_s:  # the GPU waited for the host: what it needs isn't seen
        compute_s = min(compute_s, option.compute_s)
    in_place = option.tier == "in_place"
    return (
        _ratio(seen.copy_s, option.copy_s),
        _ratio(seen.unpack_s, option.unpack_s),
        None if in_place else _ratio(compute_s, option.compute_s),
        _ratio(seen.host_s, option.launch_s),
        _ratio(compute_s, option.compute_s) if in_place else None,
        _ratio(seen.compute_s, option.cpu_s),
    )


def _ratio(seen_s: float, planned_s: float) -> float | None:
    return seen_s / planned_s if min(seen_s, planned_s) > LEAST_S else None


def _middle(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio]
    return median(known) if known else None


def _scaled(option: Option, ratios: Ratios) -> Option:
    copy, unpack, compute, host, in_place, cpu = ratios
    return replace(
        option,
        copy_s=copy * option.copy_s,
        shared_s=(in_place if option.tier == "in_place" else 1.0) * option.shared_s,
        unpack_s=unpack * option.unpack_s,
        parts=tuple((copy * copied, unpack * unpacked) for copied, unpacked in option.parts),
        compute_s=(in_place if option.tier == "in_place" else compute) * option.compute_s,
        cpu_s=cpu * option.cpu_s,
        launch_s=host * option.launch_s,
    )
