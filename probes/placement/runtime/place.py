"""`place`: places a model that is already built, on one GPU or several."""

from pathlib import Path
from typing import TypeAlias, overload

import torch
from torch import nn

from probes.core.errors import PlacementError, UsageError
from probes.placement.planner.api import resolve_machine
from probes.placement.planner.machine import Constants
from probes.placement.runtime.builder import require_plan
from probes.placement.runtime.handle import Handle
from probes.placement.runtime.multi_gpu import CardsHandle, Devices, place_on_cards, streams_of_cards
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.streams import Streams, streams_of
from probes.placement.runtime.weight_sources import ModelWeights, ModuleWeights
from probes.placement.types import CardsPlan, Plan

Refine: TypeAlias = bool | Constants | str | Path


@overload
def place(
    model: nn.Module,
    plan: Plan,
    *,
    device: torch.device | str | None = None,
    pinned: bool = True,
    capture: bool = False,
    refine: Refine = False,
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
    refine: Refine = False,
) -> Handle | CardsHandle:
    """Bring each block of `model` to the tier that `plan` gives it; calls of `model` work as before.

    The model's own host memory is released as its blocks go elsewhere. `device` is the current GPU by
    default, and the CPU where there is none: every block then computes there. For a plan over several cards
    it is a list of GPUs, by default the first ones. Without `pinned` host memory
    stays pageable, and copies are slower. With `capture` calls of the model become CUDA graphs when they come
    for the third time with the same shapes; what such a call returns is overwritten by the next one.
    With `refine` the first call does its pass several times, undoing what it wrote: blocks are timed, planned
    again with that, and placed again; the quicker of both plans is kept. `refine` is the
    machine, as `plan` takes it, or True for the one that the plan names.
    Where the plan says that bfloat16 becomes another dtype, because the GPU has no units for it, parameters,
    buffers and inputs of the model are converted, and outputs have that dtype.
    Weights are only read: what a forward writes to its own weights is lost where they move.

    Raises PlacementError where the model isn't the planned one, can't be placed, or memory is refused. The
    model is then as before.
    """
    require_plan(plan)
    machine = machine_to_refine_by(plan, refine)
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
            model,
            plan,
            ModuleWeights(streams.device),
            streams,
            pinned=pinned,
            capture=capture,
            refine=machine,
        )


def machine_to_refine_by(plan: Plan | CardsPlan, refine: Refine) -> Constants | None:
    """The machine that a plan is made for again; None where it isn't. Raises PlacementError and as `plan`."""
    if refine is False:
        return None
    if isinstance(plan, CardsPlan) or not plan.vram_budget:
        raise PlacementError(
            "only a plan for one card and with a budget can be refined", "place it without refine"
        )
    try:
        return resolve_machine(plan.machine if refine is True else refine)
    except UsageError as error:
        raise PlacementError(
            f"the plan can't be refined: {error.message}",
            "give the machine that it was made for: refine=REPORT",
        ) from error


def place_model(
    model: nn.Module,
    plan: Plan,
    source: ModelWeights,
    streams: Streams,
    *,
    pinned: bool = True,
    capture: bool = False,
    work: PackedOperations | None = None,
    refine: Constants | None = None,
) -> Handle:
    """Place a model whose values come from `source`. Raises PlacementError, and undoes all then."""
    handle = Handle(model, plan, source, streams, pinned=pinned, capture=capture, work=work, refine=refine)
    try:
        handle.place()
    except BaseException:
        handle.remove()
        raise
    return handle
