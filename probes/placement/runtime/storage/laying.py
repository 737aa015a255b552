"""How a block's bytes are arranged in its tier: as they are, packed, in pieces, or as rows of a table."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final

import torch

from probes.placement.models.modules import Block, Entry
from probes.placement.packing.estimate import DENSE_FROM
from probes.placement.packing.forms import ALIGNMENT, PackedForm
from probes.placement.packing.packed import Packed, as_it_is, form
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.blocks.blockstore import (
    Cuts,
    Stored,
    lay_out,
    memory_order,
    raw_bytes,
    raw_view,
)
from probes.placement.runtime.blocks.homes import Homes
from probes.placement.runtime.blocks.packedtables import is_multiplied, room_of
from probes.placement.runtime.blocks.wires import Wire
from probes.placement.runtime.storage.valuesource import PackedValues, Source, own_values
from probes.placement.values import Plan, Tier

PACKED: Final = ("packed", "streamed_packed")


@dataclass(frozen=True)
class Storing:
    """What a plan says of how blocks are stored, besides their tiers."""

    fast: bool  # few rows are multiplied with packed weights
    dense: Collection[str] = ()  # names of blocks that are packed with 3-bit codes
    kept: Collection[str] = ()  # and of those that are converted for each call
    tables: Collection[str] = ()  # and of those that stay packed

    @staticmethod
    def of(plan: Plan) -> "Storing":
        """What this plan says."""
        return Storing(
            plan.objective == "fast",
            {block.name for block in plan.blocks if block.dense},
            {block.name for block in plan.blocks if block.kept},
            {block.name for block in plan.blocks if block.table},
        )

    def is_compared(self, block: Block) -> bool:
        """Whether products with the whole table are needed, which are read in place, to compare with."""
        return block.name in self.tables and not self.fast and is_multiplied(block.entries[0])


@dataclass(eq=False)
class Settled:
    """One block on its way."""

    block: Block
    tier: Tier
    stored: Stored
    packed: tuple[PackedValues | None, ...] = ()  # of each entry
    wire: Wire | None = None
    memory: torch.Tensor | None = None  # its bytes, wherever the tier keeps them
    original: torch.Tensor | None = None  # of a table, its bytes unpacked, in host memory


def laid(block: Block, tier: Tier, storing: Storing, source: Source, homes: Homes, *, most: int) -> Settled:
    """The block as its tier has it, packed already if it is to be. `most` is as for `arranged`."""
    if tier not in PACKED and block.name not in storing.kept:
        return Settled(block, tier, lay_out(block))
    found: list[PackedValues | None] = []
    for entry in block.entries:
        dense = block.name in storing.dense and prod(entry.shape) >= DENSE_FROM
        values = source.packed(entry, dense=dense) if tier in PACKED else None
        found.append(values)
        if source.again:
            homes.later(entry, partial(own_values, source, entry))
        elif values is not None:  # the values are kept twice no longer than necessary
            homes.later(entry, partial(_unpacked, entry, values.outline))
    return arranged(block, tier, found, storing, most=most)


def arranged(
    block: Block, tier: Tier, found: Sequence[PackedValues | None], storing: Storing, *, most: int
) -> Settled:
    """The block as its tier has it, from what was packed of its entries; none were for an empty `found`.

    At most `most` bytes of a packed block that streams are copied at once; 0: it is copied as a whole.
    Tensors that are converted for each call have a form as well, where they aren't packed.
    """
    most = most if tier == "streamed_packed" else 0
    forms: list[PackedForm | None] = []
    cuts: list[Cuts] = []
    found = tuple(found or [None] * len(block.entries))
    for entry, values in zip(block.entries, found, strict=True):
        packed = values.outline if values else None
        forms.append(form(packed) if packed else _as_given(block, entry, storing))
        cuts.append(_cuts(entry, packed, most) if most and (packed or forms[-1] is None) else ())
    return Settled(block, tier, _stored(block, forms, cuts, storing, most=most), found)


def _as_given(block: Block, entry: Entry, storing: Storing) -> PackedForm | None:
    """The form of a tensor that is kept with the bits that the model has."""
    if not entry.converts or block.name not in storing.kept:
        return None
    return as_it_is(tuple(entry.shape[d] for d in memory_order(entry)))


def _stored(
    block: Block, forms: Sequence[PackedForm | None], cuts: Sequence[Cuts], storing: Storing, *, most: int
) -> Stored:
    """Where each tensor is in the block's bytes: in pieces, if they take no more than the unpacked block."""
    stored = lay_out(block, forms)
    cut = replace(lay_out(block, forms, cuts), most=most)
    several = stored.is_unpacked or len(cut.pieces) > 1
    if most and several and cut.n_bytes <= raw_bytes(block):  # else calls read it from its slot
        stored = cut
    if block.name in storing.tables and forms[0] is not None:
        stored = replace(stored, table=True, room=room_of(block.entries[0]))
    return stored


def _cuts(entry: Entry, packed: Packed | None, most: int) -> Cuts:
    """The parts of an entry that is larger than a slot."""
    if packed is not None:
        return [(first, form(part)) for first, part in packed.cut(most)]
    step = max(most // entry.dtype.itemsize // ALIGNMENT, 1) * ALIGNMENT
    return [(first, None) for first in range(0, prod(entry.shape), step)]


def _unpacked(entry: Entry, packed: Packed) -> torch.Tensor:
    flat = torch.empty(entry.given_bytes, dtype=torch.uint8, device=packed.device)
    unpack(packed, flat.view(entry.given).view(packed.shape))
    return raw_view(entry, flat, entry.given)
