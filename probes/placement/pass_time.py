"""What a whole pass takes the host that launches it, of which a sum over operations knows only a part.

Between two operations a model runs Python of its own, as long as torch's part again (decision 58).
`host_time` calls the module on a device. Its weights needn't fit there: all are views of one buffer.
"""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map

from probes.placement.operation_times import Operands, TensorLike, launching_s, same_random_numbers
from probes.placement.trace import Prepare, as_it_was

PASSES: Final = 5  # timed: what users see is the usual pass, not the quickest


def host_time(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    prepare: Prepare | None = None,
) -> float | None:
    """Seconds of the host to hand a pass over to an idle device, the median of some; None: it can't be run.

    The inputs are what the module is called with, on any device; the module is as it was before afterwards.
    The device needs room for the activations, the buffers, and the largest weight.
    """
    try:
        with (
            as_it_was(module),
            same_random_numbers(device),
            torch.inference_mode(),
            warnings.catch_warnings(),  # a loop's weights aren't one piece of memory
        ):
            warnings.simplefilter("ignore")
            _borrow(module, device)
            given, named = tree_map(partial(_there, device=device), (tuple(args), dict(kwargs)))
            if prepare is not None:
                named, _ = prepare(module, named)
            run = partial(module, *given, **named)
            run()
            return median(launching_s(run, device) for _ in range(PASSES))
    except Exception:  # torch's and the module's own, of any kind
        return None


def _borrow(module: nn.Module, device: torch.device) -> None:
    """Let all weights be views of one buffer, and copy the other tensors. `as_it_was` undoes it."""
    operands = Operands(device)
    parameters = {id(p): p for p in module.parameters()}.values()
    made = {
        id(p): nn.Parameter(operands.weight(_like(p)), requires_grad=False)
        for p in sorted(parameters, key=lambda p: p.nbytes, reverse=True)  # the buffer fits the first
    }
    made |= {id(b): _there(b, device) for b in module.buffers()}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: made[id(old)] for name, old in held.items() if old is not None})
        if isinstance(part, nn.RNNBase):
            part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]


def _like(tensor: torch.Tensor) -> TensorLike:
    return TensorLike(tuple(tensor.shape), tensor.stride(), tensor.dtype, weight=True)


def _there(value: object, device: torch.device) -> object:
    """A tensor on the device: without numbers, where it has none."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros_like(value, device=device) if value.is_meta else value.to(device)
