"""The time of a plan that exists: on other constants, or as eager passes where it was made for graphs. Pure."""

from dataclasses import replace

from probes.errors import UsageError
from probes.placement.models.description import BlockDescription, ModelDescription
from probes.placement.planner.constants import Constants
from probes.placement.planner.costs import Option, Pass, option
from probes.placement.planner.planning import ordered, work_of
from probes.placement.planner.timeline import Timeline, simulate
from probes.placement.values import BlockPlan, Plan


def timeline(model: ModelDescription, made: Plan, machine: Constants, *, captured: bool) -> Timeline:
    """The pass of a plan in the tiers that it gives, with the costs of `machine`.

    Raises UsageError for a plan of another model, and for a tier that the machine hasn't.
    """
    model = replace(model, becomes=made.bfloat16_becomes)
    chosen = chosen_in(model, made, machine, work_of(made.workload, made.objective, captured=captured))
    return simulate(chosen, made.rings, replayed=captured)


def chosen_in(model: ModelDescription, made: Plan, machine: Constants, work: Pass) -> tuple[Option, ...]:
    """The option of each block of the plan, in call order."""
    planned = {block.name: block for block in made.blocks}
    for blocks in (ordered(model.blocks), ordered(model.divided().blocks)):
        if [block.name for block in blocks] == list(planned):
            return tuple(_option(block.computed(model.becomes), planned[block.name], machine, work) for block in blocks)
    raise UsageError(f"the plan is not of {model.name}: its blocks have other names", "plan the model again")


def _option(block: BlockDescription, planned: BlockPlan, machine: Constants, work: Pass) -> Option:
    found = option(block, machine, work, planned)
    if found is None:
        raise UsageError(f"{machine.name} has no tier {planned.tier} for {planned.name}", "plan the model again")
    return found
