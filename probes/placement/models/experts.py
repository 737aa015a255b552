"""Finds the experts of a model: weights of which each input row needs some, chosen by a router.

They come in two forms. *Fused*: tensors whose first dimension counts the experts, as transformers 5 has them.
*Listed*: a list of equal modules, one for each expert, as its older versions and many others have them. Both
are found by their name, `experts`, and by their shapes; how many a row chooses, by what routers call it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import nn

NAME: Final = "experts"
_CHOSEN: Final = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "k",
)

Module: TypeAlias = nn.Module  # for modules that don't import torch


@dataclass(frozen=True, eq=False)
class ExpertsModule:
    """A module that holds experts, and no other weights."""

    name: str
    module: nn.Module
    count: int
    chosen: int  # for an input row; `count` where nothing says how many

    @property
    def listed(self) -> bool:
        """Whether each expert is a module of its own."""
        return isinstance(self.module, nn.ModuleList | nn.ModuleDict)


def find_experts(model: nn.Module) -> tuple[ExpertsModule, ...]:
    """The experts in a model, in the order of definition; none of them is inside another."""
    return tuple(
        ExpertsModule(name, module, count, _chosen(model, name, count))
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == NAME and (count := count_experts(module))
    )


def count_experts(module: nn.Module) -> int:
    """How many experts a module consists of; 0 where it is something else."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        shapes = {_shapes(expert) for expert in module.children()}
        return len(list(module.children())) if len(shapes) == 1 and shapes != {()} else 0
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not own or any(True for child in module.children() for _ in child.parameters()):
        return 0
    counts = {parameter.shape[0] if parameter.dim() > 1 else 0 for parameter in own}
    fused = any(parameter.dim() > 2 for parameter in own)
    return counts.pop() if fused and len(counts) == 1 else 0


def _shapes(expert: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(parameter.shape), parameter.dtype) for name, parameter in expert.named_parameters()
    )


def _chosen(model: nn.Module, name: str, count: int) -> int:
    """How many experts a row chooses: what the module around them, its router or a config says."""
    for owner in _owners(model, name):
        for key in _CHOSEN:
            value = getattr(owner, key, None)
            if type(value) is int and 1 <= value <= count:
                return value
    return count


def _owners(model: nn.Module, name: str) -> Iterator[Any]:
    around = model.get_submodule(name.rpartition(".")[0])
    yield around
    yield from around.children()
    for owner in (around, model):
        config = getattr(owner, "config", None)
        yield config
        yield getattr(config, "text_config", None)
