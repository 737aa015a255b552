"""One block on its way to its tier: how it is stored, and what writes its bytes there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from probes.core.errors import PlacementError
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import aligned
from probes.placement.packing.packed import packed_in
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.buffers import (
    StoredBlock,
    StoredEntry,
    room_for,
    store_block,
    unpacked_bytes,
)
from probes.placement.runtime.origins import ParameterOrigins
from probes.placement.runtime.weight_sources import (
    ModelWeights,
    PackedValues,
    WeightSource,
    given_values,
    require_entry_range,
    require_packed_range,
)
from probes.placement.types import (
    IN_VRAM,
    BlockPlan,
    Tier,
)


@dataclass(eq=False)
class BlockPlacement:
    """One block, how it is stored, and where its bytes are so far. `tier`: the plan's, or one instead."""

    block: Block
    plan: BlockPlan
    tier: Tier
    stored: StoredBlock
    packed: tuple[PackedValues | None, ...] = ()  # of each entry
    weight_source: WeightSource | None = None  # of a block that is read from disk
    memory: torch.Tensor | None = None  # its bytes, wherever the tier keeps them
    original: torch.Tensor | None = None  # of a table, its bytes unpacked, in host memory

    @property
    def staging_bytes(self) -> int:
        """Bytes of a staging buffer that its pieces pass through."""
        return max((aligned(piece.end - piece.begin) for piece in self.stored.pieces), default=0)

    @property
    def decode_bytes(self) -> int:
        """Bytes of a decode buffer for it; 0 where calls read it where it is."""
        return unpacked_bytes(self.block) if self.stored.is_unpacked else 0

    @property
    def can_stream_instead(self) -> bool:
        """Whether a block that is to stay in VRAM can stream instead."""
        block = self.block
        moves = block.called and not block.written and bool(block.entries)
        return self.tier in IN_VRAM and not self.stored.table and moves


def arrange(
    block: Block, plan: BlockPlan, tier: Tier, packed: Sequence[PackedValues | None], *, most: int
) -> BlockPlacement:
    """A block as its tier stores it, from what was packed of its entries; empty where nothing was.

    At most `most` bytes of a packed block that streams are copied at once; 0: it is copied as a whole.
    """
    packed = tuple(packed or [None] * len(block.entries))
    outlines = [values.outline if values else None for values in packed]
    most = most if tier == "streamed_packed" else 0
    return BlockPlacement(block, plan, tier, store_block(block, plan, outlines, most=most), packed)


class MemoryFiller:
    """Writes weights into their memory, and notes for each parameter how its values get back to the host."""

    def __init__(self, source: ModelWeights, origins: ParameterOrigins) -> None:
        self.source, self.origins = source, origins
        self._restorers: dict[int, Callable[[], torch.Tensor]] = {}

    def fill(self, placement: BlockPlacement, memory: torch.Tensor) -> None:
        """Write the block's bytes, and let its parameters have theirs there.

        Raises PlacementError for values that changed meanwhile or that can't be converted.
        """
        for index, item in enumerate(placement.stored.items):
            if item.form is None:
                self._fill_plain(item.entry, item.raw(memory))
                continue
            if packed := placement.packed[index]:
                _fill_packed(item, packed, memory)
            else:
                self.source.fill(item.entry, item.given(memory))
                require_entry_range(item.entry, item.given(memory))
            self.origins.fetch_with(item.entry, partial(_unpacked_from, item, memory))
        placement.packed = ()

    def keep_on_host(self, block: Block) -> None:
        """A model that is built has its values there already; one on meta gets memory for them."""
        for entry in block.entries:
            if entry.parameter.is_meta or entry.converts:
                self._fill_plain(entry, room_for(entry, "cpu"))
            else:
                self.origins.adopt(entry, entry.parameter.detach())

    def leave_on_disk(self, block: Block) -> None:
        """Each pass reads the block. Raises PlacementError for values that can't be converted."""
        for entry in block.entries:
            if entry.converts and entry.dtype is torch.float16:  # no pass looks for large numbers
                require_entry_range(entry, given_values(self.source, entry))
            self.origins.fetch_with(entry, partial(given_values, self.source, entry))

    def alias(self, placement: BlockPlacement, seen: torch.Tensor) -> None:
        """Let the parameters of a block that was filled have its memory as the GPU sees it."""
        assert placement.memory is not None
        for item in placement.stored.items:
            fetch = self._restorers.get(id(item.entry)) or partial(item.raw, placement.memory)
            self.origins.adopt(item.entry, item.raw(seen), fetch)

    def forget(self) -> None:
        """Drop the notes on parameters, and what they keep alive."""
        self._restorers.clear()

    def _fill_plain(self, entry: Entry, view: torch.Tensor) -> None:
        self.source.fill(entry, view)
        self.origins.adopt(entry, view, self._restorer(entry, view))

    def _restorer(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """How the values come to the host again; None where `view` has them there."""
        if entry.converts:
            self._restorers[id(entry)] = self.source.restorer(entry, view)
            return self._restorers[id(entry)]
        return None if view.device.type == "cpu" else partial(_identity, view)


def _fill_packed(item: StoredEntry, packed: PackedValues, memory: torch.Tensor) -> None:
    places = [memory[unit.offset :][: unit.n_bytes] for unit in item.units]
    parts = [packed.outline.part(unit.first, unit.last) for unit in item.units]
    if not packed.write(list(zip(parts, places, strict=True))):
        raise PlacementError(f"{item.entry.name} changed while it was loaded", "load it again")
    for unit, place in zip(item.units, places, strict=True):
        assert unit.form
        require_packed_range(item.entry, packed_in(unit.form, place))


def _identity(view: torch.Tensor) -> torch.Tensor:
    """The values where they are: a copy beside them may not fit."""
    return view


def _unpacked_from(item: StoredEntry, memory: torch.Tensor) -> torch.Tensor:
    return item.unpacked(item.bytes(memory).cpu(), unpack, item.entry.given)
