"""`place`: places a model that is already built, on one GPU or several."""

from typing import overload

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.placement.runtime.builder import cpu_modules, planned_blocks, require_plan
from probes.placement.runtime.handle import Handle, new_handle
from probes.placement.runtime.multi_gpu import CardsHandle, Devices, place_on_cards, streams_of_cards
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.streams import Streams, streams_of
from probes.placement.runtime.weight_sources import ModelWeights, ModuleWeights
from probes.placement.types import CardsPlan, Plan


@overload
def place(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device | str | None = None,
    pinned: bool = True,
    capture: bool = False,
) -> Handle: ...


@overload
def place(
    model: nn.Module, plan: CardsPlan, *, device: Devices = None, pinned: bool = True, capture: bool = False
) -> CardsHandle: ...


def place(
    model: nn.Module,
    plan: Plan | CardsPlan,
    *,
    device: Devices = None,
    pinned: bool = True,
    capture: bool = False,
) -> Handle | CardsHandle:
    """Bring each block of `model` to the tier that `plan` gives it; calls of `model` work as before.

    The model's own host memory is released as its blocks go elsewhere. `device` is the current GPU by
    default, and the CPU where there is none: every block then computes there. For a plan over several cards
    it is a list of GPUs, by default the first ones. Without `pinned` host memory
    stays pageable, and copies are slower. With `capture` calls of the model become CUDA graphs when they come
    for the third time with the same shapes; what such a call returns is overwritten by the next one.
    Where the plan says that bfloat16 becomes another dtype, because the GPU has no units for it, parameters,
    buffers and inputs of the model are converted, and outputs have that dtype.
    Weights are only read: what a forward writes to its own weights is lost where they move.

    Raises PlacementError where the model isn't the planned one, can't be placed, or memory is refused. The
    model is then as before.
    """
    require_plan(plan)
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(plan, CardsPlan):
            if capture:
                raise PlacementError(
                    "a pass over several cards can't be captured", "place it without capture, or on one card"
                )
            all_streams = streams_of_cards(len(plan.cards), device)
            return place_on_cards(
                model,
                plan,
                [ModuleWeights(streams.device) for streams in all_streams],
                all_streams,
                pinned=pinned,
            )
        if isinstance(device, list | tuple):
            raise PlacementError("the plan is for one card, a list of devices is given", "name one device")
        streams = streams_of(device)
        return place_model(
            model, plan, ModuleWeights(streams.device), streams, pinned=pinned, capture=capture
        )


def place_model(
    model: nn.Module,
    plan: Plan,
    source: ModelWeights,
    streams: Streams,
    *,
    pinned: bool = True,
    capture: bool = False,
    work: PackedOperations | None = None,
) -> Handle:
    """Place a model whose values come from `source`. Raises PlacementError, and undoes all then."""
    blocks = planned_blocks(model, plan)
    handle = new_handle(model, plan, source, streams, pinned=pinned, work=work)
    try:
        handle.convert_buffers()
        handle.take_over(blocks)
        handle.move_buffers(model, cpu_modules(blocks))
        if capture:
            handle.record_passes()
        handle.guard_passes(any(entry.trains for block, _ in blocks for entry in block.entries))
        handle.convert_inputs(blocks)
        handle.begin()
    except BaseException:
        handle.remove()
        raise
    return handle
