"""What a block's bytes look like in one flat buffer, and the buffers on the device that hold them.

A block is laid out the same way in host memory, in a staging buffer and in a file, so it crosses the link in
one copy, or in several where a staging buffer holds only a piece of it. A tensor keeps the order of its
dimensions in memory: a library may choose another product, and round otherwise, for one that is stored
transposed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import (
    ALIGNMENT,
    PackedForm,
    aligned,
    is_table,
    piece_bytes,
)
from probes.placement.packing.packed import Packed, as_it_is, form, packed_in
from probes.placement.runtime.streams import Event
from probes.placement.types import BlockPlan

# Buffers on the device


class DeviceArena:
    """One allocation on the device, handed out piece by piece, each aligned as the caching allocator's."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        try:
            self._bytes = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            raise PlacementError(
                f"{binary_bytes(n_bytes)} on {device} were refused: {first_line(error)}",
                "plan again with a smaller vram",
            ) from error
        self.used = 0

    @property
    def whole(self) -> torch.Tensor:
        """The allocation, as bytes."""
        return self._bytes

    @property
    def taken(self) -> int:
        """Bytes of the allocation."""
        return int(self._bytes.numel())

    def take(self, n_bytes: int) -> torch.Tensor:
        """Return the next `n_bytes` of the allocation."""
        begin = self.used
        self.used += aligned(n_bytes)
        return self._bytes[begin : begin + n_bytes]


class Occupant(Protocol):
    """What a buffer holds: a moving block, or a piece of one."""

    index: int

    @property
    def depth(self) -> int:
        """Calls of the block that are under way."""


@dataclass(eq=False)
class DeviceBuffer:
    """A staging or decode buffer: what it holds, and which events allow it to be overwritten.

    An event that is None needs no waiting.
    """

    memory: torch.Tensor
    events: tuple[Event, Event, Event]
    holds: Occupant | None = None
    filled: Event | None = None  # its content is whole
    computed: Event | None = None  # the compute stream has read it
    unpacked: Event | None = None  # its content has been unpacked elsewhere

    def forget(self) -> None:
        """Drop the events: everything has been waited for."""
        self.filled = self.computed = self.unpacked = None


# A block's bytes


@dataclass(frozen=True)
class StoredUnit:
    """What is unpacked at once, or copied if it is raw: an entry, or its weights `first` to `last`."""

    offset: int  # in the block's buffer
    n_bytes: int
    form: PackedForm | None
    first: int
    last: int

    def write(self, source: torch.Tensor, flat: torch.Tensor, unpack: Callable[..., Any]) -> None:
        """Write its weights, whose bytes are in `source`, to their place in the entry's flat values."""
        target = flat[self.first : self.last]
        if self.form is None:
            target.copy_(source.view(flat.dtype), non_blocking=True)
        else:
            unpack(packed_in(self.form, source), target.view(self.form.shape))


@dataclass(frozen=True)
class StoredPiece:
    """The units of a block that are copied together, and the bytes of its buffer that they are in."""

    begin: int
    end: int
    units: tuple[tuple["StoredEntry", StoredUnit], ...]


@dataclass(frozen=True, eq=False)
class StoredEntry:
    """One tensor of a block in its buffer, raw or packed."""

    entry: Entry
    offset: int
    n_bytes: int
    form: PackedForm | None  # of the whole; None: raw
    units: tuple[StoredUnit, ...]

    def bytes(self, buffer: torch.Tensor) -> torch.Tensor:
        """The entry's bytes of a buffer."""
        return buffer[self.offset : self.offset + self.n_bytes]

    def raw(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's values as a view of a buffer that holds them raw."""
        return raw_view(self.entry, self.bytes(buffer))

    def given(self, buffer: torch.Tensor) -> torch.Tensor:
        """The model's own values as a view of a buffer that holds them unpacked."""
        return raw_view(self.entry, self.bytes(buffer)[: self.entry.given_bytes], self.entry.given)

    def packed(self, buffer: torch.Tensor) -> Packed:
        """The packed tensor, which is one unit, with its parts in that buffer."""
        assert self.form
        assert len(self.units) == 1
        return packed_in(self.form, self.bytes(buffer))

    def unpacked(
        self, buffer: torch.Tensor, unpack: Callable[..., Any], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The values in memory of their own, where the entry's bytes are. `dtype`: as in `raw_view`."""
        dtype = dtype or self.entry.dtype
        flat = torch.empty(prod(self.entry.shape) * dtype.itemsize, dtype=torch.uint8, device=buffer.device)
        self.write(buffer, flat.view(dtype), unpack)
        return raw_view(self.entry, flat, dtype)

    def write(self, buffer: torch.Tensor, flat: torch.Tensor, unpack: Callable[..., Any]) -> None:
        """Write all weights, from the entry's bytes, into `flat`, of any dtype."""
        for unit in self.units:
            begin = unit.offset - self.offset
            unit.write(buffer[begin : begin + unit.n_bytes], flat, unpack)


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """A block laid out in one buffer.

    A table stays packed: it has `room` behind its one entry, for the piece that a product unpacks.
    """

    block: Block
    items: tuple[StoredEntry, ...]
    table: bool = False
    room: int = 0  # bytes
    most: int = 0  # bytes of a piece that is copied at once; 0: whole

    @property
    def n_bytes(self) -> int:
        """Bytes of a buffer for the block: each tensor aligned, and the table's room."""
        return sum(aligned(item.n_bytes) for item in self.items) + self.room

    @property
    def is_unpacked(self) -> bool:
        """Whether calls need it in a decode buffer: unpacked, or put together from its pieces."""
        return not self.table and (self.most > 0 or any(item.form for item in self.items))

    @property
    def pieces(self) -> tuple[StoredPiece, ...]:
        """The block as it is copied: whole, or in pieces of at most `most` bytes where its units allow it."""
        units = [(item, unit) for item in self.items for unit in item.units]
        if not self.most or len(units) < 2:
            return (StoredPiece(0, self.n_bytes, tuple(units)),)
        ends = [unit.offset for _, unit in units[1:]] + [self.n_bytes]
        pieces: list[StoredPiece] = []
        for (item, unit), end in zip(units, ends, strict=True):
            if pieces and end - pieces[-1].begin <= self.most:
                pieces[-1] = StoredPiece(pieces[-1].begin, end, (*pieces[-1].units, (item, unit)))
            else:
                pieces.append(StoredPiece(unit.offset, end, ((item, unit),)))
        return tuple(pieces)


Cuts = Sequence[tuple[int, PackedForm | None]]  # the parts of a tensor: their first weights and their forms


def lay_out(
    block: Block, forms: Sequence[PackedForm | None] | None = None, cuts: Sequence[Cuts] | None = None
) -> StoredBlock:
    """Lay a block out, one tensor behind the other.

    `forms` are those of its entries, None for one that stays raw. `cuts` are the parts of each entry, empty
    where it isn't cut.
    """
    items, count = [], len(block.entries)
    offset = 0
    for entry, whole, parts in zip(block.entries, forms or [None] * count, cuts or [()] * count, strict=True):
        weights = prod(entry.shape)
        if len(parts) < 2:
            n_bytes = whole.n_bytes if whole else entry.n_bytes
            units = [StoredUnit(offset, n_bytes, whole, 0, weights)]
        else:
            units, at = [], offset
            ends = [first for first, _ in parts[1:]] + [weights]
            for (first, part), last in zip(parts, ends, strict=True):
                n_bytes = part.n_bytes if part else (last - first) * entry.dtype.itemsize
                units.append(StoredUnit(at, n_bytes, part, first, last))
                at += aligned(n_bytes)
            n_bytes = units[-1].offset + units[-1].n_bytes - offset
        items.append(StoredEntry(entry, offset, n_bytes, whole, tuple(units)))
        offset += aligned(n_bytes)
    return StoredBlock(block, tuple(items))


def unpacked_bytes(block: Block) -> int:
    """Bytes of the block unpacked, each tensor aligned: what a decode buffer needs."""
    return sum(aligned(entry.n_bytes) for entry in block.entries)


def raw_view(entry: Entry, flat: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The parameter's values as a view of its bytes, in the order that its dimensions have in memory.

    Dimensions of size 1 have the parameter's own strides: a library knows channels_last by them.
    `dtype`: that of the bytes, where it isn't the one that calls compute with.
    """
    order = memory_order(entry)
    stored = flat.view(dtype or entry.dtype).view([entry.shape[d] for d in order])
    view = stored.permute([order.index(d) for d in range(len(order))])
    strides = zip(entry.shape, entry.stride, view.stride(), strict=True)
    return view.as_strided(entry.shape, [given if size == 1 else viewed for size, given, viewed in strides])


def room_for(entry: Entry, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for the parameter's values; `dtype` as in `raw_view`."""
    n_bytes = prod(entry.shape) * (dtype or entry.dtype).itemsize
    return raw_view(entry, torch.empty(n_bytes, dtype=torch.uint8, device=device), dtype)


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


# How a plan has blocks stored

PlannedBlock: TypeAlias = tuple[Block, BlockPlan]


def store_block(block: Block, plan: BlockPlan, packed: Sequence[Packed | None], *, most: int) -> StoredBlock:
    """Lay a block out, given the outline of each of its packed entries; None for one that isn't packed.

    At most `most` bytes are copied at once; 0: the block is copied as a whole. It is cut only where its
    pieces take no more than the unpacked block: else calls read it from its staging buffer.
    """
    forms: list[PackedForm | None] = []
    cuts: list[Cuts] = []
    for entry, outline in zip(block.entries, packed, strict=True):
        forms.append(form(outline) if outline else _given_form(entry) if plan.kept else None)
        cuts.append(_cuts(entry, outline, most) if most and (outline or forms[-1] is None) else ())
    stored = lay_out(block, forms)
    cut = replace(lay_out(block, forms, cuts), most=most)
    several = stored.is_unpacked or len(cut.pieces) > 1
    if most and several and cut.n_bytes <= unpacked_bytes(block):
        stored = cut
    if plan.table and forms[0] is not None:
        (entry,) = block.entries
        room = aligned(piece_bytes(entry.shape)) if is_multiplied(entry) else 0  # for a piece of it
        stored = replace(stored, table=True, room=room)
    return stored


def _given_form(entry: Entry) -> PackedForm | None:
    """The form of an entry that is kept as bfloat16 and converted for each call; None for any other."""
    return as_it_is(tuple(entry.shape[d] for d in memory_order(entry))) if entry.converts else None


def _cuts(entry: Entry, outline: Packed | None, most: int) -> Cuts:
    """The parts of an entry, of at most `most` bytes each where that is possible."""
    if outline is not None:
        return [(first, form(part)) for first, part in outline.cut(most)]
    step = max(most // entry.dtype.itemsize // ALIGNMENT, 1) * ALIGNMENT
    return [(first, None) for first in range(0, prod(entry.shape), step)]


def can_be_table(block: Block) -> bool:
    """Whether the block is one matrix whose rows can be unpacked one by one."""
    (first, *more) = block.entries
    dtype = str(first.dtype).removeprefix("torch.")
    plain = not first.converts and memory_order(first) == (0, 1)
    return not more and plain and is_table(first.shape, dtype)


def is_multiplied(entry: Entry) -> bool:
    """Whether products need the table as well: it isn't only looked up."""
    return not all(isinstance(owner, nn.Embedding) for owner, _ in entry.owners)
