"""Which tier each layer of a scenario's model goes to. Pure.

All ways have the same VRAM for weights and the buffers that they pass through.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from probes.measure.stacks import DTYPE_BYTES, STREAM_BUFFERS, Shape, StackPlan
from probes.placement.packing.format import estimate
from probes.placement.planner.pools import spread
from probes.placement.types import (
    IN_VRAM,
    BlockPlan,
    HostUse,
    PassTime,
    Plan,
    PrefetchPool,
    Tier,
    VramUse,
    Workload,
)
from probes.records.rows import Scenario

_SPILLED: Final[Mapping[Scenario, Tier]] = MappingProxyType(
    {"zero_copy_weights": "in_place", "zero_copy_all": "in_place", "streamed": "streamed"}
)


def packed_bytes(shape: Shape) -> int:
    """Predicted bytes of one layer's weights when they are packed."""
    return estimate(shape.dtype, shape.layer_bytes // DTYPE_BYTES[shape.dtype])


def budget_bytes(plan: StackPlan) -> int:
    """VRAM for weights and buffers, which the streamed way uses up."""
    resident = plan.layers - len(plan.spilled) + STREAM_BUFFERS
    return resident * plan.shape.layer_bytes + plan.shape.fixed_bytes


def layer_tiers(plan: StackPlan, scenario: Scenario) -> tuple[Tier, ...]:
    """The tier of each layer, in order. Not for `placed`, which the planner decides."""
    if scenario == "packed":
        return _packed(plan)
    spilled = _SPILLED.get(scenario, "resident")
    return tuple(spilled if index in plan.spilled else "resident" for index in range(plan.layers))


def _packed(plan: StackPlan) -> tuple[Tier, ...]:
    """As many layers as fit stay packed in VRAM, the others are streamed packed."""
    each = packed_bytes(plan.shape)
    room = (plan.layers - len(plan.spilled)) * plan.shape.layer_bytes  # next to the decode buffers
    stay = min(room // each, plan.layers)
    if stay < plan.layers:
        stay = max(room // each - STREAM_BUFFERS, 0)
    moving = spread(plan.layers, plan.layers - stay)
    return tuple("streamed_packed" if index in moving else "packed" for index in range(plan.layers))


def bytes_outside_vram(blocks: Sequence[tuple[Tier, int]]) -> int:
    """The weights, unpacked, of blocks that aren't in VRAM."""
    return sum(n_bytes for tier, n_bytes in blocks if tier not in IN_VRAM)


def same_places(one: Plan, other: Plan) -> bool:
    """Whether a model that one plan has placed is where the other one puts it."""
    tiers = [[(block.name, block.tier) for block in plan.blocks] for plan in (one, other)]
    return tiers[0] == tiers[1] and one.rings == other.rings and one.objective == other.objective


def fixed_plan(model: str, blocks: Sequence[tuple[str, Tier, int]]) -> Plan:
    """A plan that only says where blocks go: nothing is predicted."""
    return Plan(
        model=model,
        machine="this one",
        constants="none: the tiers are given",
        objective="exact",
        workload=Workload(),
        vram_budget=0,
        host_budget=0,
        blocks=tuple(BlockPlan(name, tier, n_bytes, 0, 0, 0, 0.0) for name, tier, n_bytes in blocks),
        rings=PrefetchPool(slots=STREAM_BUFFERS, scratches=1, ahead=STREAM_BUFFERS),
        vram=VramUse(0, 0, 0, 0, 0, 0, 0, 0),
        host=HostUse(0, 0, 0),
        time=PassTime(0.0, 0.0, 0.0, "link"),
    )
