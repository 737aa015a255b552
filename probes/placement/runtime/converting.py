"""Weights that compute in another dtype than the model's: what is lost, what is refused, and the way back."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from probes.errors import PlacementError
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.packed import Packed
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.blocks.blockstore import raw_view
from probes.placement.values import Plan

_BECOMES = {"float16": torch.float16, "float32": torch.float32}
_BITS = {2: torch.int16, 4: torch.int32}
_FIRST_BEYOND = 143  # the biased exponent of 2^16 in bfloat16; float16 ends below it


def becomes(plan: Plan) -> torch.dtype | None:
    """What bfloat16 is converted to, if it is."""
    return _BECOMES.get(plan.bfloat16_becomes)


def entrances(model: nn.Module, blocks: Iterable[tuple[Block, object]]) -> list[nn.Module]:
    """Where inputs of another dtype may come in: the blocks, which any method may call, and the model."""
    found = [*(module for block, _ in blocks for module in block.modules), model]
    return list({id(module): module for module in found}.values())


@dataclass(frozen=True, eq=False)
class Correction:
    """The numbers that a conversion changes: where they are, and what they were.

    From bfloat16 to float16 these are numbers below 2^-17 with bits that float16 doesn't hold, to float32
    only those that aren't numbers. So it is small as a rule, and the converted values need no copy.
    """

    places: tuple[torch.Tensor, ...]
    values: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor, dtype: torch.dtype) -> "Correction":
        """What converting these values changes."""
        bits = _BITS[values.dtype.itemsize]
        plain = values.contiguous()
        lost = plain.view(bits) != plain.to(dtype).to(values.dtype).view(bits)
        places = lost.nonzero(as_tuple=True)  # of a single number, too, as if it had a dimension
        return Correction(places, torch.atleast_1d(plain)[places])

    def undo(self, entry: Entry, converted: torch.Tensor) -> torch.Tensor:
        """The values as the model had them, in host memory."""
        found = raw_view(entry, torch.empty(entry.given_bytes, dtype=torch.uint8, device="cpu"), entry.given)
        found.copy_(converted)
        torch.atleast_1d(found)[self.places] = self.values
        return found


def require_range(values: torch.Tensor, wanted: torch.dtype) -> None:
    """Raise OverflowError where a finite number would become infinite, as 70,000 does in float16."""
    if not wanted.is_floating_point or torch.finfo(wanted).max >= torch.finfo(values.dtype).max:
        return
    lost = values.isfinite() & values.to(wanted).isinf()
    if lost.any():
        worst = float(values[lost].abs().max())
        raise OverflowError(f"{int(lost.sum()):,} of its numbers don't fit into {wanted}, up to {worst:.4g}")


def require_entry(entry: Entry, values: torch.Tensor) -> None:
    """Raise PlacementError, naming the parameter, where what it computes in doesn't hold the values."""
    if entry.dtype is torch.float16 and entry.converts:
        try:
            require_range(values, entry.dtype)
        except OverflowError as error:
            raise refusal(entry.name, error) from error


def require_packed(entry: Entry, packed: Packed) -> None:
    """The same of packed values, which are unpacked only where their exponents leave a doubt."""
    if entry.dtype is not torch.float16 or not entry.converts:
        return
    if packed.table:
        largest, others = max(packed.table), packed.parts["exponents"]
    else:
        largest, others = packed.base + 15, (packed.parts["values"] >> 7) & 255
    if largest >= _FIRST_BEYOND or bool((others >= _FIRST_BEYOND).any()):
        require_entry(entry, unpack(packed.to("cpu")))


def refusal(name: str, why: object) -> PlacementError:
    """The error for a tensor with a number that is too large."""
    return PlacementError(
        f"{name} can't be converted: {why}",
        "plan with compute='float32' (--compute float32), or build the model in float32, which holds all of "
        "them, or in the checkpoint's own dtype",
    )
