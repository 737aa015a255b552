"""The peers that a placed model is compared with: everything in VRAM, and accelerate's device_map."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from probes.errors import LibraryMissing, Unsupported
from probes.placement.values import Plan

MARGIN: Final = 0.12  # of the cap, left to accelerate for activations and the layer on its way


@contextmanager
def resident(module: nn.Module) -> Iterator[None]:
    """Everything in VRAM, without a cap. Raises Unsupported without a GPU."""
    if not torch.cuda.is_available():
        raise Unsupported(
            "nothing can be resident in VRAM: there is no GPU", "run it without --compare resident"
        )
    torch.cuda.reset_peak_memory_stats()
    module.to("cuda")
    yield


@contextmanager
def accelerated(module: nn.Module, plan: Plan) -> Iterator[None]:
    """accelerate's device_map with its defaults: what fits in VRAM, the rest on the host.

    Raises LibraryMissing without accelerate, and Unsupported without a GPU.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.hooks import remove_hook_from_submodules
    except ImportError as error:
        raise LibraryMissing(f"--compare accelerate needs {error.name}", "pip install accelerate") from error
    if not torch.cuda.is_available():
        raise Unsupported("accelerate's device_map needs a GPU to compare with", "run it without --compare")
    whole = {
        type(module.get_submodule(block.name)).__name__
        for block in plan.blocks
        if _is_module(module, block.name)
    }
    room = {0: int(plan.vram_budget * (1 - MARGIN)), "cpu": plan.host_budget}
    devices = infer_auto_device_map(module, max_memory=room, no_split_module_classes=sorted(whole))
    dispatch_model(module, devices, main_device=0, force_hooks=True)
    try:
        yield
    finally:
        remove_hook_from_submodules(module)


def _is_module(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return False
    return True
