"""Places a model that is already built."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from probes.errors import PlacementError
from probes.machine.torchfacts import first_line
from probes.placement.models.modules import Block, find_blocks, placed_already
from probes.placement.runtime.blocks.homes import Homes
from probes.placement.runtime.blocks.hostside import Guard, OnHost
from probes.placement.runtime.blocks.lanes import CudaLanes, HostLanes, Lanes
from probes.placement.runtime.blocks.moving import Arithmetic
from probes.placement.runtime.capture import Recorder
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.handle import Called, Handle, WholePass
from probes.placement.runtime.settling import ModuleSource, Settling, Source
from probes.placement.soundness import flaw
from probes.placement.values import Plan, Tier


def place(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device | str | None = None,
    pinned: bool = True,
    capture: bool = False,
) -> Handle:
    """Bring each block of `model` to the tier that `plan` gives it; calls of `model` work as before.

    The model's own host memory is released as its blocks go elsewhere. `device` is the current GPU by
    default, and the CPU where there is none: every block then computes there. Without `pinned` host memory
    stays pageable, and copies are slower. With `capture` calls of the model become CUDA graphs when they come
    for the third time with the same shapes; what such a call returns is overwritten by the next one.
    Weights are only read: what a forward writes to its own weights is lost where they move.

    Raises PlacementError where the model isn't the planned one, can't be placed, or memory is refused. The
    model is then as before.
    """
    lanes = lanes_of(device)
    with torch.inference_mode(False), torch.no_grad():
        return settle(model, plan, ModuleSource(lanes.device), lanes, pinned=pinned, capture=capture)


def lanes_of(device: torch.device | str | None) -> Lanes:
    """The lanes of a device, of the current GPU by default, of the CPU where there is none."""
    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise PlacementError(
            f"{device!r} isn't a device: {first_line(error)}", "name cuda, cuda:1 or cpu"
        ) from None
    if wanted.type == "cpu":
        return HostLanes()
    if wanted.type != "cuda":
        raise PlacementError(f"models can be placed on cuda (AMD's GPUs too) and cpu, not on {wanted}")
    if (wanted.index or 0) >= torch.cuda.device_count():
        raise PlacementError(
            f"there is no {wanted}: torch sees {torch.cuda.device_count()} GPUs", "name another, or cpu"
        )
    return CudaLanes(
        torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
    )


def settle(
    model: nn.Module,
    plan: Plan,
    source: Source,
    lanes: Lanes,
    *,
    pinned: bool = True,
    capture: bool = False,
    work: Arithmetic | None = None,
) -> Handle:
    """Place a model whose values come from `source`. Raises PlacementError, and undoes all then."""
    blocks = planned_blocks(model, plan)
    homes = Homes()
    fast = plan.objective == "fast"
    engine = Engine(lanes, ahead=plan.rings.ahead, fast=fast, work=work or Arithmetic())
    settling = Settling(model, lanes, source, homes, plan.rings, pinned, fast)
    handle = Handle(model, plan, engine, homes, settling)
    try:
        settling.take_over(blocks, engine)
        homes.move_buffers(model, lanes.device, _on_host(blocks))
        if capture:
            settling.require_capturable("place it without capture")
            handle.recorder = Recorder(engine)
        _guard(blocks, engine, homes)
        trainable = any(entry.trains for block, _ in blocks for entry in block.entries)
        make = partial(WholePass, engine=engine, model=model, trainable=trainable, recorder=handle.recorder)
        homes.guard(model, make)
        homes.refuse_changes(model)
        engine.begin()
    except BaseException:
        handle.remove()
        raise
    return handle


def planned_blocks(model: nn.Module, plan: Plan) -> list[tuple[Block, Tier]]:
    """The model's blocks in the plan's order, each with its tier. Raises PlacementError for another model."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise PlacementError(
                "a scripted or compiled model can't be placed", "place the model it was made of"
            )
        if isinstance(module.__dict__.get("forward"), Guard):
            raise placed_already()
    _require_sound(plan)
    tiers = {block.name: block for block in plan.blocks}
    found = {block.name: block for block in find_blocks(model, tiers)}
    strange = sorted(tiers.keys() - found.keys()) or sorted(found.keys() - tiers.keys())
    if strange:
        whose = "plan" if strange[0] in tiers else "model"
        raise _another(f"only the {whose} has {', '.join(strange[:4])}")
    for name, block in found.items():
        kept = sum(b.numel() * b.element_size() for module in block.modules for b in module.buffers())
        if not block.n_bytes <= tiers[name].weight_bytes <= block.n_bytes + kept:
            raise _another(f"{name} has {block.n_bytes:,} bytes, {tiers[name].weight_bytes:,} were planned")
        if not block.called and tiers[name].tier != "resident":
            raise PlacementError(
                f"{name} is used while other blocks are called: it can only be resident",
                "plan again",
            )
    return [(found[name], block.tier) for name, block in tiers.items()]


def _require_sound(plan: Plan) -> None:
    if why := flaw(plan):
        raise PlacementError(f"the plan can't be followed: {why}", "make it again with plan()")


def _another(why: str) -> PlacementError:
    return PlacementError(f"this isn't the model that was planned: {why}", "plan again for this model")


def _on_host(blocks: Sequence[tuple[Block, Tier]]) -> list[nn.Module]:
    """The modules that compute on the host, with those below them."""
    tops = [module for block, tier in blocks if tier == "cpu" for module in block.modules]
    return [module for top in tops for module in top.modules()]


def _guard(blocks: Sequence[tuple[Block, Tier]], engine: Engine, homes: Homes) -> None:
    moving = {id(one.stored.block): one for one in engine.moving}
    for block, tier in blocks:
        for module in block.modules:
            if id(block) in moving:
                homes.guard(module, partial(Called, engine=engine, one=moving[id(block)]))
            elif tier == "cpu":
                homes.guard(module, partial(OnHost, device=engine.lanes.device))
