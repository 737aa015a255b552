"""A block's bytes in one piece: where each tensor, raw or packed, is in a flat buffer.

The same arrangement serves the buffer on the host, a slot in VRAM and a file, so a block crosses the link in
one copy. A tensor keeps the order of its dimensions in memory: a library may choose another product, and
round otherwise, for one that is stored transposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from probes.placement.models.modules import Block, Entry
from probes.placement.packing.forms import PackedForm, aligned
from probes.placement.packing.packed import Packed, packed_in


@dataclass(frozen=True, eq=False)
class Item:
    """One entry of a block in the buffer, raw or packed."""

    entry: Entry
    offset: int
    n_bytes: int
    form: PackedForm | None  # None: raw

    def bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its part of a buffer."""
        return buffer[self.offset : self.offset + self.n_bytes]

    def raw(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's values as a view of a buffer that holds them raw."""
        return raw_view(self.entry, self.bytes(buffer))

    def given(self, buffer: torch.Tensor) -> torch.Tensor:
        """The model's own values as a view of a buffer that holds them unpacked."""
        return raw_view(self.entry, self.bytes(buffer)[: self.entry.given_bytes], self.entry.given)

    def packed(self, buffer: torch.Tensor) -> Packed:
        """The packed tensor with its parts in that buffer."""
        assert self.form
        return packed_in(self.form, self.bytes(buffer))


@dataclass(frozen=True, eq=False)
class Stored:
    """A block laid out: its items, and the bytes of the buffer that holds them.

    A table stays packed: it has `room` behind its one item, for the piece that a product unpacks.
    """

    block: Block
    items: tuple[Item, ...]
    table: bool = False
    room: int = 0  # bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of a buffer for the block, each tensor aligned, and its room."""
        return sum(aligned(item.n_bytes) for item in self.items) + self.room

    @property
    def is_unpacked(self) -> bool:
        """Whether calls need it unpacked as a whole."""
        return not self.table and any(item.form for item in self.items)


def lay_out(block: Block, forms: Sequence[PackedForm | None] | None = None) -> Stored:
    """Where each tensor of a block goes. `forms` are those of its entries, None for one that stays raw."""
    items = []
    offset = 0
    for entry, form in zip(block.entries, forms or [None] * len(block.entries), strict=True):
        n_bytes = form.n_bytes if form else entry.n_bytes
        items.append(Item(entry, offset, n_bytes, form))
        offset += aligned(n_bytes)
    return Stored(block, tuple(items))


def raw_bytes(block: Block) -> int:
    """Bytes of the block unpacked, each tensor aligned: what a scratch buffer needs."""
    return sum(aligned(entry.n_bytes) for entry in block.entries)


def raw_view(entry: Entry, n_bytes: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The parameter's values as a view of its bytes, in the order that its dimensions have in memory.

    `dtype`: that of the bytes, where it isn't the one that calls compute with.
    """
    order = memory_order(entry)
    stored = n_bytes.view(dtype or entry.dtype).view([entry.shape[d] for d in order])
    return stored.permute([order.index(d) for d in range(len(order))])


def as_stored(entry: Entry, values: torch.Tensor) -> torch.Tensor:
    """The values with the dimensions in the order of memory, contiguous: what is packed or copied."""
    return values.permute(memory_order(entry)).contiguous()


def memory_order(entry: Entry) -> tuple[int, ...]:
    """The dimensions from the slowest to the quickest; as they are for a tensor with gaps or overlaps."""
    plain = tuple(range(len(entry.shape)))
    order = tuple(sorted(plain, key=lambda d: (-entry.stride[d], d)))
    expected = 1
    for dimension in reversed(order):
        if entry.shape[dimension] > 1:
            if entry.stride[dimension] != expected:
                return plain
            expected *= entry.shape[dimension]
    return order
