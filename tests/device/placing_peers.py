"""What others do with the same model, cap and inputs: accelerate twice, and naive `.to()`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from placing_case import BUDGET
from placing_measure import differing_bits, free, wall_s
from placing_models import square
from torch import nn

MARGIN = 512 << 20  # of the cap, for a peer's activations and the layer on its way


@contextmanager
def accelerated(
    model: nn.Module, budget: int, *, pinned: bool, whole: tuple[str, ...] = (), margin: int = MARGIN
) -> Iterator[nn.Module]:
    """The model (on the host) dispatched by accelerate: as many layers as fit in VRAM, the rest on the host.

    `pinned`: the weights on the host are handed over as pinned tensors, which accelerate doesn't do itself.
    `whole`: classes of modules that mustn't be split. `margin`: bytes of the budget that get no weights.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.hooks import remove_hook_from_submodules

    room = {0: budget - margin, "cpu": 1 << 40}
    devices = infer_auto_device_map(model, max_memory=room, no_split_module_classes=list(whole))
    options = {}
    if pinned:
        host = {name for name, device in devices.items() if device == "cpu"}
        options["state_dict"] = {
            name: tensor.pin_memory()
            for name, tensor in model.state_dict().items()
            if any(name == one or name.startswith(f"{one}.") for one in host)
        }
    dispatched = dispatch_model(model, devices, main_device=0, force_hooks=True, **options)
    try:
        yield dispatched
    finally:
        remove_hook_from_submodules(dispatched)


def naive(layers: list[nn.Module], budget: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """`.to("cuda")` before and `.to("cpu")` after each layer that doesn't fit; those that do stay in VRAM."""
    room = budget - MARGIN
    stay = []
    for layer in layers:
        room -= sum(p.numel() * p.element_size() for p in layer.parameters())
        stay.append(room > 0)
        if stay[-1]:
            layer.to("cuda")

    def one(x: torch.Tensor) -> torch.Tensor:
        for layer, stays in zip(layers, stay, strict=True):
            if stays:
                x = layer(x)
            else:
                x = layer.to("cuda")(x)
                layer.to("cpu")
        return x

    return one


def peers(group: Any) -> None:
    """40 layers of 8192 x 8192 bfloat16, batch 1, by each peer and by us, in one process."""
    bench = group.bench(square(40))
    bench.resident(1)
    reference = bench.reference(1)
    found = {"all resident": reference.best_s}
    for objective in ("fast", "exact"):
        found[f"ours, {objective}"] = bench.measure(bench.plan(1, objective), with_device=False).best_s
    one = bench.one_pass(1)
    for pinned in (False, True):
        with group.vram.capped(BUDGET), accelerated(bench.module, BUDGET, pinned=pinned):
            found["accelerate, pinned state dict" if pinned else "accelerate"] = wall_s(one, samples=3)
            bits = differing_bits(one().cpu(), reference.output)
        group.board.bar(f"accelerate{', pinned' if pinned else ''}: differing bits", bits, 0, "elements")
        bench.module.to("cpu")
        free()
    with group.vram.capped(BUDGET), torch.inference_mode():
        x = bench.model.inputs(1, bench.device)["input"]
        run = naive(list(bench.module), BUDGET)
        found["naive .to()"] = wall_s(lambda: run(x), samples=3)
    bench.module.to("cpu")
    for name, seconds in found.items():
        group.board.figure(
            f"40 layers, batch 1: {name}", seconds * 1e3, "ms", over_ours=seconds / found["ours, exact"]
        )
    group.board.waive("diffusers' group offloading", "this bench doesn't implement it")
