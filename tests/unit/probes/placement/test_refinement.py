"""Plans again with what a pass took: ratios by block, the rest as before."""

from dataclasses import replace
from functools import cache

import pytest

from probes.placement.models.description import BlockDescription, ModelDescription, TensorDescription
from probes.placement.planner.kinds import merge_kinds
from probes.placement.planner.machine import profile
from probes.placement.planner.plan import PlanningTask, make_plan
from probes.placement.planner.refinement import BlockTime, as_planned, refine_plan
from probes.placement.types import Plan, Workload

pytestmark = pytest.mark.thorough  # each searches for plans
MIB = 1 << 20
MACHINE = profile("h200")
LAYERS = tuple(
    BlockDescription(f"{i}", (TensorDescription(f"{i}.weight", (4096, 4096), "bfloat16"),)) for i in range(16)
)
MODEL = ModelDescription("drawn", LAYERS, "drawn")


@cache
def planned(captured: bool = True, batch: int = 256) -> Plan:
    return make_plan(
        MODEL,
        MACHINE,
        vram=450 * MIB,
        host=None,
        workload=Workload(batch),
        objective="exact",
        captured=captured,
    ).plan


def as_the_plan_says(plan: Plan) -> dict[str, BlockTime]:
    task = PlanningTask(MODEL, MACHINE, plan.workload, plan.objective, plan.captured)
    names = [block.name for block in task.model.blocks]
    blocks = {block.name: block for block in plan.blocks}
    options = as_planned(task.kinds, [blocks[name] for name in names], plan)
    return {
        name: BlockTime(o.copy_s, o.unpack_s, o.compute_s, o.launch_s)
        for name, o in zip(names, options, strict=True)
    }


def tiers(plan: Plan) -> dict[str, str]:
    return {block.name: block.tier for block in plan.blocks}


@pytest.mark.parametrize("captured", [False, True])
def test_a_pass_that_goes_as_planned_changes_nothing_but_is_scaled_to_what_was_measured(
    captured: bool,
) -> None:
    plan = planned(captured)
    again = refine_plan(MODEL, MACHINE, plan, as_the_plan_says(plan), 1.25 * plan.time.middle_s)
    assert again
    assert tiers(again) == tiers(plan)
    assert again.time.middle_s == pytest.approx(1.25 * plan.time.middle_s, rel=0.02)
    assert again.time.low_s > 0.9 * again.time.middle_s
    assert "measured pass" in again.notes[-1]


def test_a_block_that_is_copied_five_times_as_slowly_stays_in_vram() -> None:
    plan = planned()
    seen = as_the_plan_says(plan)
    slow = next(name for name, taken in seen.items() if taken.copy_s)
    seen[slow] = replace(seen[slow], copy_s=5 * seen[slow].copy_s)
    again = refine_plan(MODEL, MACHINE, plan, seen, plan.time.middle_s)
    assert again
    assert tiers(again)[slow] in ("resident", "packed")
    assert set(tiers(again).values()) - {"resident", "packed"}


def test_a_block_that_computes_slowly_in_place_is_not_slower_elsewhere() -> None:
    plan = planned(batch=1)
    blocks = tuple(
        replace(block, tier="in_place", dense=False, table=False, kept=False) if block.name == "3" else block
        for block in plan.blocks
    )
    plan = replace(plan, blocks=blocks)
    seen = as_the_plan_says(plan)
    seen["3"] = replace(seen["3"], compute_s=20 * seen["3"].compute_s, host_s=0.0)
    again = refine_plan(MODEL, MACHINE, plan, seen, 2 * plan.time.middle_s)
    assert again
    assert tiers(again)["3"] != "in_place"


def test_where_the_gpu_waited_for_the_host_its_time_is_not_taken_for_computing() -> None:
    plan = planned(captured=False, batch=1)
    seen = {
        name: replace(taken, compute_s=1e-3, host_s=1e-3) for name, taken in as_the_plan_says(plan).items()
    }
    again = refine_plan(MODEL, MACHINE, plan, seen, 16e-3)
    assert again
    assert again.time.bound == "launch"
    assert again.time.middle_s <= 16.1e-3


def test_a_plan_of_other_blocks_is_not_refined() -> None:
    plan = planned()
    other = replace(plan, blocks=plan.blocks[1:])
    assert refine_plan(MODEL, MACHINE, other, {}, 1.0) is None


def test_blocks_of_which_nothing_is_known_get_what_the_others_took() -> None:
    """All copies take three times as long: what streams next would, too, so nothing has to move."""
    plan = planned()
    seen = {name: replace(t, copy_s=3 * t.copy_s) for name, t in as_the_plan_says(plan).items()}
    again = refine_plan(MODEL, MACHINE, plan, seen, 3 * plan.time.middle_s)
    assert again
    moving = [sum(block.wire_bytes for block in one.blocks) for one in (plan, again)]
    assert moving[1] <= 1.01 * moving[0]
    task = PlanningTask(MODEL, MACHINE, plan.workload, plan.objective, plan.captured)
    assert len(merge_kinds(task.kinds)) == 1
