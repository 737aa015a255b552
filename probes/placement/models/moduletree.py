"""What a model consists of, from its module tree. It may be on meta: nothing is read from its weights."""

from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from probes.errors import CheckpointUnreadable, ModelUnknown
from probes.placement.models.description import BlockDescription, ModelDescription, TensorDescription, Use
from probes.placement.models.modules import Block, Entry, find_blocks, is_divisible
from probes.placement.models.ranges import FIRST_BEYOND, FIRST_EXACT, FIRST_KEPT, Ranges
from probes.placement.models.reading import from_config

# Besides products: torch computes such a layer in inference by a function of its own, with two norms, two
# sums, attention (four kernels) and two copies at most.
ENCODER_KERNELS: Final = 10

Module: TypeAlias = nn.Module  # for modules that don't import torch


def described(model: Module) -> ModelDescription:
    """The model's blocks, in the order of definition, with what its configuration says if it has one.

    Raises PlacementError for parameters that can't be placed.
    """
    blocks = tuple(_block(block) for block in find_blocks(model))
    name = type(model).__name__
    known = _known(model, name)
    if known is not None:
        blocks = _informed(blocks, known)
    notes = () if known else ("the order of calls is that of definition; attention isn't counted",)
    in_memory = not any(parameter.is_meta for parameter in model.parameters())
    positions = known.positions if known else None
    return ModelDescription(
        name, blocks, "module tree", notes=notes, in_memory=in_memory, positions=positions
    )


def ranges(model: Module) -> Ranges | None:
    """What float16 does to the bfloat16 parameters; None where one of them has no values yet."""
    found = Ranges()
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.bfloat16:
            if parameter.is_meta:
                return None
            found = found.plus(_ranges(parameter.detach(), name))
    return found


def _ranges(values: torch.Tensor, name: str) -> Ranges:
    exponents = (values.contiguous().view(torch.int16) >> 7) & 255
    beyond = (exponents >= FIRST_BEYOND) & (exponents < 255)
    return Ranges(
        values.numel(),
        int(((exponents >= FIRST_KEPT) & (exponents < FIRST_EXACT)).sum()),
        int(((exponents > 1) & (exponents < FIRST_KEPT)).sum()),
        name if bool(beyond.any()) else "",
    )


def _block(block: Block) -> BlockDescription:
    tensors = tuple(_tensor(entry) for entry in block.entries)
    lookups = any(isinstance(owner, nn.Embedding) for entry in block.entries for owner, _ in entry.owners)
    looked_up = lookups and any(tensor.use == "product" for tensor in tensors)
    kind = type(block.modules[0]) if len(block.modules) == 1 else None
    return BlockDescription(
        block.name,
        tensors,
        operations=int(kind is nn.Linear),
        kernels=ENCODER_KERNELS if kind is nn.TransformerEncoderLayer else 0,
        looked_up=looked_up,
        anytime=not block.called or bool(block.written),
        divisible=is_divisible(block),
    )


def _tensor(entry: Entry) -> TensorDescription:
    return TensorDescription(entry.name, entry.shape, str(entry.dtype).removeprefix("torch."), _use(entry))


def _use(entry: Entry) -> Use:
    if len(entry.shape) < 2:
        return "elementwise"
    if all(isinstance(owner, nn.Embedding) for owner, _ in entry.owners):
        return "lookup"
    return "product"


def _known(model: nn.Module, name: str) -> ModelDescription | None:
    """By a configuration as transformers' models have it."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    try:
        return from_config({**config.to_dict(), "architectures": [name]}, name=name, where=f"{name}.config")
    except (CheckpointUnreadable, ModelUnknown):
        return None


def _informed(blocks: tuple[BlockDescription, ...], known: ModelDescription) -> tuple[BlockDescription, ...]:
    """The tree's blocks with what the configuration says of those that have the same name and size."""
    said = {block.name: block for block in known.blocks}
    made = []
    for block in blocks:
        fact = said.get(block.name)
        if fact is None or _numbers(fact) != _numbers(block):
            made.append(block)
            continue
        uses = {tensor.name: tensor for tensor in fact.tensors}
        calls = {name: place for place, name in enumerate(uses)}  # modules may define parts in another order
        tensors = tuple(
            replace(
                tensor,
                use=uses[tensor.name].use,
                active=uses[tensor.name].active,
                inputs_first=uses[tensor.name].inputs_first,
            )
            if tensor.name in uses
            else tensor
            for tensor in sorted(block.tensors, key=lambda tensor: calls.get(tensor.name, len(calls)))
        )
        made.append(replace(fact, tensors=tensors, anytime=block.anytime, divisible=block.divisible))
    return tuple(made)


def _numbers(block: BlockDescription) -> int:
    return sum(tensor.numbers for tensor in block.tensors)
