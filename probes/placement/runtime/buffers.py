"""A block's bytes in one flat buffer, and the buffers on the device."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import ALIGNMENT, PackedForm, aligned
from probes.placement.packing.packed import Packed, as_it_is, form, packed_in
from probes.placement.runtime.offloaded import MovingBlock, Piece
from probes.placement.runtime.packed_tables import is_multiplied, table_room
from probes.placement.runtime.streams import Event, Streams
from probes.placement.types import Plan


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
        """All of it."""
        return self._bytes

    @property
    def taken(self) -> int:
        """Bytes of the allocation."""
        return int(self._bytes.numel())

    def take(self, n_bytes: int) -> torch.Tensor:
        """The next piece."""
        begin = self.used
        self.used += aligned(n_bytes)
        return self._bytes[begin : begin + n_bytes]


@dataclass(eq=False)
class DeviceBuffer:
    """A slot or scratch buffer of a ring: what it holds, and what must be done before it may be overwritten.

    A mark that is None needs no waiting.
    """

    memory: torch.Tensor
    marks: tuple[Event, Event, Event]
    holds: "MovingBlock | Piece | None" = None  # a block, or in a slot a piece of one
    filled: Event | None = None  # its content is whole
    computed: Event | None = None  # the compute lane has read it
    unpacked: Event | None = None  # the unpack lane has read it

    def forget(self) -> None:
        """Everything has been waited for."""
        self.filled = self.computed = self.unpacked = None


def make_buffers(count: int, memories: Iterable[torch.Tensor], lanes: Streams) -> list[DeviceBuffer]:
    """Buffers of one size."""
    return [
        DeviceBuffer(memory, (lanes.mark(), lanes.mark(), lanes.mark()))
        for memory, _ in zip(memories, range(count), strict=True)
    ]


@dataclass(frozen=True)
class StoredUnit:
    """What is unpacked at once, or copied where it is raw: an item, or its weights `first` to `last`."""

    offset: int  # in the block's buffer
    n_bytes: int
    form: PackedForm | None
    first: int
    last: int

    def write(self, source: torch.Tensor, flat: torch.Tensor, unpack: Callable[..., Any]) -> None:
        """Bring its weights from its bytes to their place among all of the item's, flat and of any dtype."""
        target = flat[self.first : self.last]
        if self.form is None:
            target.copy_(source.view(flat.dtype), non_blocking=True)
        else:
            unpack(packed_in(self.form, source), target.view(self.form.shape))


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a block: the units that are copied together, and where they are in its buffer."""

    begin: int
    end: int
    units: tuple[tuple["StoredEntry", StoredUnit], ...]


@dataclass(frozen=True, eq=False)
class StoredEntry:
    """One entry of a block in the buffer, raw or packed."""

    entry: Entry
    offset: int
    n_bytes: int
    form: PackedForm | None  # of the whole; None: raw
    units: tuple[StoredUnit, ...]

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
        """The packed tensor, which is one unit, with its parts in that buffer."""
        assert self.form
        assert len(self.units) == 1
        return packed_in(self.form, self.bytes(buffer))

    def write(self, buffer: torch.Tensor, flat: torch.Tensor, unpack: Callable[..., Any]) -> None:
        """Bring all weights from the item's bytes to `flat`, of any dtype."""
        for unit in self.units:
            begin = unit.offset - self.offset
            unit.write(buffer[begin : begin + unit.n_bytes], flat, unpack)


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """A block laid out: its items, and the bytes of the buffer that holds them.

    A table stays packed: it has `room` behind its one item, for the piece that a product unpacks.
    """

    block: Block
    items: tuple[StoredEntry, ...]
    table: bool = False
    room: int = 0  # bytes
    most: int = 0  # bytes of a piece that is copied at once; 0: whole

    @property
    def n_bytes(self) -> int:
        """Bytes of a buffer for the block, each tensor aligned, and its room."""
        return sum(aligned(item.n_bytes) for item in self.items) + self.room

    @property
    def is_unpacked(self) -> bool:
        """Whether calls need it in a scratch buffer: unpacked, or put together from its pieces."""
        return not self.table and (self.most > 0 or any(item.form for item in self.items))

    @property
    def pieces(self) -> tuple[StoredPiece, ...]:
        """The block as it is copied: whole, or in pieces of at most `most` bytes where its units allow it."""
        units = [(item, unit) for item in self.items for unit in item.units]
        if not self.most or len(units) < 2:
            return (StoredPiece(0, self.n_bytes, tuple(units)),)
        ends = [unit.offset for _, unit in units[1:]] + [self.n_bytes]
        made: list[StoredPiece] = []
        for one, end in zip(units, ends, strict=True):
            if made and end - made[-1].begin <= self.most:
                made[-1] = StoredPiece(made[-1].begin, end, (*made[-1].units, one))
            else:
                made.append(StoredPiece(one[1].offset, end, (one,)))
        return tuple(made)


Cuts = Sequence[tuple[int, PackedForm | None]]  # the parts of a tensor: their first weights and their forms


def lay_out(
    block: Block, forms: Sequence[PackedForm | None] | None = None, cuts: Sequence[Cuts] | None = None
) -> StoredBlock:
    """Where each tensor of a block goes. `forms` are those of its entries, None for one that stays raw.

    `cuts`: the parts of each entry, none where it isn't cut.
    """
    items, count = [], len(block.entries)
    offset = 0
    for entry, form, parts in zip(block.entries, forms or [None] * count, cuts or [()] * count, strict=True):
        weights = prod(entry.shape)
        if len(parts) < 2:
            n_bytes = form.n_bytes if form else entry.n_bytes
            units = [StoredUnit(offset, n_bytes, form, 0, weights)]
        else:
            units, at = [], offset
            ends = [first for first, _ in parts[1:]] + [weights]
            for (first, part), last in zip(parts, ends, strict=True):
                n_bytes = part.n_bytes if part else (last - first) * entry.dtype.itemsize
                units.append(StoredUnit(at, n_bytes, part, first, last))
                at += aligned(n_bytes)
            n_bytes = units[-1].offset + units[-1].n_bytes - offset
        items.append(StoredEntry(entry, offset, n_bytes, form, tuple(units)))
        offset += aligned(n_bytes)
    return StoredBlock(block, tuple(items))


def unpacked_bytes(block: Block) -> int:
    """Bytes of the block unpacked, each tensor aligned: what a scratch buffer needs."""
    return sum(aligned(entry.n_bytes) for entry in block.entries)


def raw_view(entry: Entry, n_bytes: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The parameter's values as a view of its bytes, in the order that its dimensions have in memory.

    Dimensions of size 1 have the parameter's own strides: a library knows channels_last by them.
    `dtype`: that of the bytes, where it isn't the one that calls compute with.
    """
    order = memory_order(entry)
    stored = n_bytes.view(dtype or entry.dtype).view([entry.shape[d] for d in order])
    view = stored.permute([order.index(d) for d in range(len(order))])
    own = zip(entry.shape, entry.stride, view.stride(), strict=True)
    return view.as_strided(entry.shape, [given if size == 1 else made for size, given, made in own])


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


@dataclass(frozen=True)
class StorageOptions:
    """What a plan says of how blocks are stored, besides their tiers."""

    fast: bool  # few rows are multiplied with packed weights
    dense: Collection[str] = ()  # names of blocks that are packed with 3-bit codes
    kept: Collection[str] = ()  # and of those that are converted for each call
    tables: Collection[str] = ()  # and of those that stay packed

    @staticmethod
    def of(plan: Plan) -> "StorageOptions":
        """What this plan says."""
        return StorageOptions(
            plan.objective == "fast",
            {block.name for block in plan.blocks if block.dense},
            {block.name for block in plan.blocks if block.kept},
            {block.name for block in plan.blocks if block.table},
        )

    def is_compared(self, block: Block) -> bool:
        """Whether products with the whole table are needed, which are read in place, to compare with."""
        return block.name in self.tables and not self.fast and is_multiplied(block.entries[0])


def _stored_block(
    block: Block,
    forms: Sequence[PackedForm | None],
    cuts: Sequence[Cuts],
    storing: StorageOptions,
    *,
    most: int,
) -> StoredBlock:
    """Where each tensor is in the block's bytes: in pieces, if they take no more than the unpacked block."""
    stored = lay_out(block, forms)
    cut = replace(lay_out(block, forms, cuts), most=most)
    several = stored.is_unpacked or len(cut.pieces) > 1
    if most and several and cut.n_bytes <= unpacked_bytes(block):  # else calls read it from its slot
        stored = cut
    if block.name in storing.tables and forms[0] is not None:
        stored = replace(stored, table=True, room=table_room(block.entries[0]))
    return stored


def _given_form(block: Block, entry: Entry, storing: StorageOptions) -> PackedForm | None:
    """The form of a tensor that is kept with the bits that the model has."""
    if not entry.converts or block.name not in storing.kept:
        return None
    return as_it_is(tuple(entry.shape[d] for d in memory_order(entry)))


def _cuts(entry: Entry, packed: Packed | None, most: int) -> Cuts:
    """The parts of an entry that is larger than a slot."""
    if packed is not None:
        return [(first, form(part)) for first, part in packed.cut(most)]
    step = max(most // entry.dtype.itemsize // ALIGNMENT, 1) * ALIGNMENT
    return [(first, None) for first in range(0, prod(entry.shape), step)]
