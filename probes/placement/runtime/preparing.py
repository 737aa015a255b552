"""What a model, or one card's part of it, needs before it is placed: blocks by the plan, lanes, a handle."""

from collections.abc import Sequence

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, find_blocks, placed_already
from probes.placement.plan_file import first_flaw
from probes.placement.runtime.buffers import StorageOptions
from probes.placement.runtime.builder import Builder
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.handle import Handle
from probes.placement.runtime.hooks import PackedOperations
from probes.placement.runtime.host_memory import ForwardHook, PlannedBytes
from probes.placement.runtime.packed_tables import can_be_table
from probes.placement.runtime.streams import CudaStreams, HostStreams, Streams
from probes.placement.runtime.turns import Turns
from probes.placement.runtime.weight_sources import ModelWeights, ParameterOrigins, bfloat16_target
from probes.placement.types import CardsPlan, Plan, Tier


def require_plan(plan: object) -> None:
    """Raise PlacementError for anything else."""
    if not isinstance(plan, Plan | CardsPlan):
        raise PlacementError(
            f"a model is placed by a Plan, not by a {type(plan).__name__}",
            "make one with plan(), or read its file with read_plan()",
        )


def streams_of(device: torch.device | str | None) -> Streams:
    """The lanes of a device, of the current GPU by default, of the CPU where there is none."""
    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise PlacementError(
            f"{device!r} isn't a device: {first_line(error)}", "name cuda, cuda:1 or cpu"
        ) from None
    if wanted.type == "cpu":
        return HostStreams()
    if wanted.type != "cuda":
        raise PlacementError(f"models can be placed on cuda (AMD's GPUs too) and cpu, not on {wanted}")
    if (wanted.index or 0) >= torch.cuda.device_count():
        raise PlacementError(
            f"there is no {wanted}: torch sees {torch.cuda.device_count()} GPUs", "name another, or cpu"
        )
    return CudaStreams(
        torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    )


def new_handle(
    model: nn.Module,
    plan: Plan,
    source: ModelWeights,
    lanes: Streams,
    *,
    pinned: bool,
    work: PackedOperations | None,
    turns: Turns | None = None,
) -> Handle:
    """The handle of a model, or of one card's part, of which nothing has been placed yet.

    Passes of handles with the same `turns` come one after the other.
    """
    fast = plan.objective == "fast"
    engine = Engine(
        lanes, ahead=plan.rings.ahead, fast=fast, work=work or PackedOperations(), turns=turns or Turns()
    )
    homes = ParameterOrigins()
    settling = Builder(
        model, lanes, source, homes, plan.rings, pinned, StorageOptions.of(plan), PlannedBytes.of(plan)
    )
    return Handle(model, plan, engine, homes, settling)


def planned_blocks(model: nn.Module, plan: Plan, parts: Sequence[Plan] = ()) -> list[tuple[Block, Tier]]:
    """The model's blocks in the plan's order, each with its tier. Raises PlacementError for another model.

    `parts`: the plans of several cards, of which `plan` has all blocks.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise PlacementError(
                "a scripted or compiled model can't be placed", "place the model it was made of"
            )
        if isinstance(module.__dict__.get("forward"), ForwardHook):
            raise placed_already()
    for one in (plan, *parts):
        _require_sound(one)
    tiers = {block.name: block for block in plan.blocks}
    found = {block.name: block for block in find_blocks(model, tiers, becomes=bfloat16_target(plan))}
    strange = sorted(tiers.keys() - found.keys()) or sorted(found.keys() - tiers.keys())
    if strange:
        whose = "plan" if strange[0] in tiers else "model"
        raise _other_model(f"only the {whose} has {', '.join(strange[:4])}")
    for name, block in found.items():
        kept = sum(b.numel() * b.element_size() for module in block.modules for b in module.buffers())
        own = block.given_bytes
        if not own <= tiers[name].weight_bytes <= own + kept:
            raise _other_model(f"{name} has {own:,} bytes, {tiers[name].weight_bytes:,} were planned")
        if not block.called and tiers[name].tier != "resident":
            raise PlacementError(
                f"{name} is used while other blocks are called: it can only be resident",
                "plan again",
            )
        if block.written and tiers[name].tier != "resident":
            raise PlacementError(
                f"calls of {name} write to {block.written}, which is lost elsewhere: it can only be resident",
                "plan again; or let the module have no max_norm, if it is an embedding",
            )
        if tiers[name].table and not can_be_table(block):
            raise _other_model(
                f"{name} isn't one bfloat16 matrix whose rows can be looked up while it is packed"
            )
    return [(found[name], block.tier) for name, block in tiers.items()]


def _require_sound(plan: Plan) -> None:
    if why := first_flaw(plan):
        raise PlacementError(f"the plan can't be followed: {why}", "make it again with plan()")


def _other_model(why: str) -> PlacementError:
    return PlacementError(f"this isn't the model that was planned: {why}", "plan again for this model")


def cpu_modules(blocks: Sequence[tuple[Block, Tier]]) -> list[nn.Module]:
    """The modules that compute on the host, with those below them."""
    tops = [module for block, tier in blocks if tier == "cpu" for module in block.modules]
    return [module for top in tops for module in top.modules()]
