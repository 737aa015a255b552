"""Plans made by hand: a tier for each block that is named, resident for the others."""

from torch import nn

from probes.placement.models.modules import find_blocks
from probes.placement.types import BlockPlan, HostUse, PassTime, Plan, PrefetchPool, Tier, VramUse, Workload


def plan_of(model: nn.Module, tiers: dict[str, Tier]) -> Plan:
    blocks = tuple(
        BlockPlan(
            block.name, tiers.get(block.name, "resident"), block.n_bytes, 0, 0, block.n_bytes + 4096, 0.0
        )
        for block in find_blocks(model)
    )
    return Plan(
        model="model",
        machine="test",
        constants="none",
        objective="exact",
        workload=Workload(),
        vram_budget=0,
        host_budget=0,
        blocks=blocks,
        rings=PrefetchPool(),
        vram=VramUse(0, 0, 0, 0, 0, 0, 0, 0),
        host=HostUse(0, 0, 0),
        time=PassTime(0.0, 0.0, 0.0, "launch"),
    )
