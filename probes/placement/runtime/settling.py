"""Brings every block to its tier: what `place` and `load` share."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import nn

from probes.errors import PlacementError
from probes.machine.torchfacts import first_line
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.estimate import DENSE_FROM
from probes.placement.packing.forms import ALIGNMENT, PackedForm, aligned
from probes.placement.packing.packed import Packed, as_it_is, form, packed_in, write_into
from probes.placement.packing.tensors import pack, unpack
from probes.placement.runtime.arena import DeviceArena, HostArena, node_of_gpu
from probes.placement.runtime.blocks.blockstore import (
    Cuts,
    Item,
    Stored,
    as_stored,
    lay_out,
    memory_order,
    raw_bytes,
    raw_view,
)
from probes.placement.runtime.blocks.homes import Homes
from probes.placement.runtime.blocks.lanes import Lanes
from probes.placement.runtime.blocks.moving import Buffer, ring
from probes.placement.runtime.blocks.packedtables import is_multiplied, room_of
from probes.placement.runtime.blocks.wires import Held, Wire
from probes.placement.runtime.converting import Correction, require_entry, require_packed
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.hostview import zero_copy
from probes.placement.runtime.measuring import TierUse, tier_use
from probes.placement.values import TIERS, Rings, Tier
from probes.shared.units import binary_bytes

IN_HOST = ("streamed", "streamed_packed", "in_place")
IN_VRAM = ("resident", "packed")
PACKED = ("packed", "streamed_packed")
MOVING = ("streamed", "streamed_packed", "disk")


class PackedValues(Protocol):
    """A packed tensor that may be elsewhere: its outline, and how its bytes come to their places."""

    @property
    def outline(self) -> Packed:
        """The tensor, its parts perhaps on meta, all but `starts`."""

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Write parts of the outline into buffers; False where the values aren't what they were."""


@dataclass(frozen=True)
class InMemory:
    """One that is in memory."""

    outline: Packed

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Copy."""
        for part, flat in parts:
            write_into(part, flat)
        return True


class Source(Protocol):
    """Where a model's values come from: the module itself, or a checkpoint.

    `again`: values may be asked for twice, so packed ones aren't kept in memory until they have their place.
    """

    again: bool

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """Write the values into `target`, of the entry's shape, on the host or in VRAM.

        They are converted where its dtype isn't the model's. Raises PlacementError for a number that it can't
        hold.
        """

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """The values packed, dimensions as in memory (`as_stored`); None where that saves nothing.

        `dense`: with 3-bit codes.
        """

    def way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """How the model's own values are found again once `view` has them converted."""

    def wire(self, stored: Stored, lanes: Lanes) -> Wire:
        """For the tier `disk`: what reads the block in each pass. Raises PlacementError if nothing can."""

    def close(self) -> None:
        """Nothing is asked for any more."""


class ModuleSource:
    """A model that is already built. Its tensors are packed on `device` where they fit there.

    Its own values are released when they have been packed.
    """

    again = False

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """The parameter's own."""
        values = self._values(entry)
        if target.dtype is not entry.given:
            require_entry(entry, values)
        target.copy_(values)

    def _values(self, entry: Entry) -> torch.Tensor:
        if entry.parameter.is_meta:
            raise PlacementError(
                f"{entry.name} has no values yet (it is on meta)", "load a checkpoint: load()"
            )
        return entry.parameter.detach()

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """Packed now."""
        packed = packed_on(self._device, as_stored(entry, self._values(entry)), dense=dense)
        return InMemory(packed) if packed else None

    def way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Converted back; what the conversion changed is noted now."""
        return partial(Correction.of(self._values(entry), entry.dtype).undo, entry, view)

    def wire(self, stored: Stored, _lanes: Lanes) -> Wire:
        """A module that is built has no file."""
        raise PlacementError(
            f"{stored.block.name} can't be read from disk: a model that is already built has no file",
            "load the model from its checkpoint with load(), or plan with more host memory",
        )

    def close(self) -> None:
        """Nothing to close."""


def packed_on(device: torch.device, stored: torch.Tensor, *, dense: bool = False) -> Packed | None:
    """The tensor packed on a GPU, which is quicker, or on the host where that has too little memory."""
    if device.type == "cuda":
        with suppress(torch.cuda.OutOfMemoryError):
            packed = pack(stored.to(device), dense=dense)
            return packed.to("cpu") if packed else None
    return pack(stored.cpu(), dense=dense)


@dataclass(eq=False)
class _Settled:
    """One block on its way."""

    block: Block
    tier: Tier
    stored: Stored
    packed: tuple[PackedValues | None, ...] = ()  # of each entry
    wire: Wire | None = None
    memory: torch.Tensor | None = None  # its bytes, wherever the tier keeps them
    original: torch.Tensor | None = None  # of a table, its bytes unpacked, in host memory


@dataclass(eq=False)
class Settling:
    """The memory of one placed model, and the steps that fill it."""

    model: nn.Module
    lanes: Lanes
    source: Source
    homes: Homes
    rings: Rings
    pinned: bool
    fast: bool  # few rows are multiplied with packed weights
    dense: Collection[str] = ()  # names of blocks that are packed with 3-bit codes
    kept: Collection[str] = ()  # and of those that are converted for each call
    tables: Collection[str] = ()  # and of those that stay packed
    settled: list[_Settled] = field(default_factory=list)
    _ways_back: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)
    host: HostArena | None = None
    vram: DeviceArena | None = None

    def take_over(self, blocks: Sequence[tuple[Block, Tier]], engine: Engine) -> None:
        """Bring all blocks to their tiers, and those that move to the engine. The caller undoes failures."""
        self._into_host(blocks)
        with _refusals(self.lanes.device):
            self._into_vram()
        self._move(engine)

    def _into_host(self, blocks: Sequence[tuple[Block, Tier]]) -> None:
        """Pack what is packed, and bring what streams into the arena, which is pinned once it is complete."""
        room = sum(raw_bytes(block) for block, tier in blocks if tier in IN_HOST or self._is_compared(block))
        self.host = HostArena(room, node_of_gpu(self.lanes.device))
        for block, tier in blocks:
            as_given = block.name in self.kept
            one = self._packed(block, tier) if tier in PACKED or as_given else _plain(block, tier)
            self.settled.append(one)
            if tier == "disk":
                one.wire = self.source.wire(one.stored, self.lanes)
                for entry in block.entries:
                    if entry.converts and entry.dtype is torch.float16:  # no pass looks for large numbers
                        require_entry(entry, own_values(self.source, entry))
                    self.homes.later(entry, partial(own_values, self.source, entry))
            elif tier == "cpu":
                self._keep_on_host(block)
            elif tier in IN_HOST:
                one.memory = self.host.take(one.stored.n_bytes)
                self._fill(one, one.memory)
        if not self.pinned:
            self.host.why_pageable = "pinning was switched off"
        elif self.lanes.device.type == "cuda":
            self.host.pin()
        self._in_place()

    def _in_place(self) -> None:
        """Let the GPU see what it reads in place. Where it can't, those blocks stream instead."""
        gpu = self.lanes.device.type == "cuda"
        for one in self.settled:
            if one.tier != "in_place" or not gpu:
                continue
            assert self.host
            if self.host.why_pageable:
                one.tier = "streamed"
                continue
            assert one.memory is not None
            seen = zero_copy(one.memory)
            for item in one.stored.items:
                fetch = self._ways_back.get(id(item.entry)) or partial(item.raw, one.memory)
                self.homes.adopt(item.entry, item.raw(seen), fetch)

    def _keep_on_host(self, block: Block) -> None:
        """A model that is built has its values there already; one on meta gets memory for them."""
        for entry in block.entries:
            if entry.parameter.is_meta or entry.converts:
                made = raw_view(entry, torch.empty(entry.n_bytes, dtype=torch.uint8))
                self.source.fill(entry, made)
                self.homes.adopt(entry, made, self._way_back(entry, made))

    def _packed(self, block: Block, tier: Tier) -> _Settled:
        """A block's packed tensors.

        Tensors that are converted for each call have a form as well, where they aren't packed.
        """
        original = self._original(block) if self._is_compared(block) else None
        most = self._piece_bytes if tier == "streamed_packed" else 0
        forms: list[PackedForm | None] = []
        cuts: list[Cuts] = []
        found: list[PackedValues | None] = []
        for entry in block.entries:
            dense = block.name in self.dense and prod(entry.shape) >= DENSE_FROM
            values = self.source.packed(entry, dense=dense) if tier in PACKED else None
            packed = values.outline if values else None
            forms.append(form(packed) if packed else _as_given(block, entry, self.kept))
            cuts.append(_cuts(entry, packed, most) if most and (packed or forms[-1] is None) else ())
            found.append(values)
            if self.source.again:
                self.homes.later(entry, partial(own_values, self.source, entry))
            elif packed is not None:  # the values are kept twice no longer than necessary
                self.homes.later(entry, partial(_unpacked, entry, packed))
        stored = lay_out(block, forms)
        cut = lay_out(block, forms, cuts)
        if stored.is_unpacked and cut.n_bytes <= raw_bytes(block):  # else calls read it from its slot
            stored = replace(cut, most=most)
        if block.name in self.tables and forms[0] is not None:
            stored = replace(stored, table=True, room=room_of(block.entries[0]))
        return _Settled(block, tier, stored, tuple(found), original=original)

    def _is_compared(self, block: Block) -> bool:
        """Whether products with the whole table are needed, which are read in place, to compare with."""
        return block.name in self.tables and not self.fast and is_multiplied(block.entries[0])

    def _original(self, block: Block) -> torch.Tensor:
        """The table's weights in the host's arena."""
        assert self.host
        (entry,) = block.entries
        memory = self.host.take(raw_bytes(block))
        self.source.fill(entry, raw_view(entry, memory[: entry.n_bytes]))
        return memory

    def _whole(self, one: _Settled) -> torch.Tensor | None:
        """A table's weights as the device reads them; None where it can't, or where nothing is compared."""
        if one.original is None or not one.stored.table:
            return None
        gpu = self.lanes.device.type == "cuda"
        if gpu and (self.host is None or self.host.why_pageable):
            return None
        (entry,) = one.block.entries
        return raw_view(entry, (zero_copy(one.original) if gpu else one.original)[: entry.n_bytes])

    def _way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """How the values come to the host again; None where `view` has them there."""
        if entry.converts:
            self._ways_back[id(entry)] = self.source.way_back(entry, view)
            return self._ways_back[id(entry)]
        return None if view.device.type == "cpu" else partial(_itself, view)

    def _fill(self, one: _Settled, memory: torch.Tensor) -> None:
        """Write the block's bytes, and let its parameters have theirs there."""
        for index, item in enumerate(one.stored.items):
            if item.form is None:
                view = item.raw(memory)
                self.source.fill(item.entry, view)
                self.homes.adopt(item.entry, view, self._way_back(item.entry, view))
                continue
            packed = one.packed[index]
            if packed is None:
                self.source.fill(item.entry, item.given(memory))
                require_entry(item.entry, item.given(memory))
            else:
                places = [memory[unit.offset :][: unit.n_bytes] for unit in item.units]
                parts = [packed.outline.part(unit.first, unit.last) for unit in item.units]
                if not packed.write(list(zip(parts, places, strict=True))):
                    raise PlacementError(f"{item.entry.name} changed while it was loaded", "load it again")
                for unit, place in zip(item.units, places, strict=True):
                    assert unit.form
                    require_packed(item.entry, packed_in(unit.form, place))
            self.homes.later(item.entry, partial(_unpacked_from, item, memory))
        one.packed = ()

    def _into_vram(self) -> None:
        """One allocation for everything that stays in VRAM, filled."""
        needed = sum(aligned(one.stored.n_bytes) for one in self.settled if one.tier in IN_VRAM)
        slot, scratch = self.slot_bytes, self.scratch_bytes
        needed += self.slots * slot + self.scratches * scratch
        self.vram = DeviceArena(needed, self.lanes.device)
        for one in self.settled:
            if one.tier in IN_VRAM:
                one.memory = self.vram.take(one.stored.n_bytes)
                self._fill(one, one.memory)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return max(self.rings.slots, 1)

    @property
    def scratches(self) -> int:
        """How many scratch buffers there are: none where the plan says that all products are fused."""
        return self.rings.scratches if self.fast else max(self.rings.scratches, 1)

    @property
    def _piece_bytes(self) -> int:
        """The most that is copied at once of a packed block; 0 where slots hold whole ones."""
        return self.rings.slot_bytes if self.rings.pieces > 1 and self.scratches else 0

    @property
    def slot_bytes(self) -> int:
        """Of each slot: the largest block that passes through one, or piece of one."""
        moving = [one.stored for one in self.settled if one.tier in MOVING]
        return max((aligned(p.end - p.begin) for stored in moving for p in stored.pieces), default=0)

    @property
    def scratch_bytes(self) -> int:
        """Of each scratch buffer: the largest block that is unpacked into one."""
        return max((raw_bytes(one.block) for one in self.settled if one.stored.is_unpacked), default=0)

    def _ring(self, count: int, n_bytes: int) -> list[Buffer]:
        assert self.vram
        memories = [self.vram.take(n_bytes) for _ in range(count)]
        return ring(count, memories, self.lanes)

    def _move(self, engine: Engine) -> None:
        slots = self._ring(self.slots, self.slot_bytes)
        scratches = self._ring(self.scratches, self.scratch_bytes)
        in_slots = unpacked = 0
        for one in self.settled:
            if one.tier in ("cpu", "in_place") or (one.tier == "resident" and not one.stored.is_unpacked):
                continue
            scratch, through = None, []
            if one.tier not in IN_VRAM:
                pieces = len(one.stored.pieces)
                through = [slots[(in_slots + nth) % len(slots)] for nth in range(pieces)]
                in_slots += pieces
            if one.stored.is_unpacked and scratches:
                scratch, unpacked = scratches[unpacked % len(scratches)], unpacked + 1
            wire = one.wire
            if wire is None:
                assert one.memory is not None
                wire = Held(one.memory)
            engine.add(one.stored, wire, through, scratch, whole=self._whole(one))

    @property
    def vram_asked(self) -> int:
        """Bytes of what stays in VRAM, of the slots and of the scratch buffers, without alignment."""
        there = [one.stored for one in self.settled if one.tier in IN_VRAM]
        stays = sum(item.n_bytes for stored in there for item in stored.items)
        stays += sum(stored.room for stored in there)
        slots, scratches = self.slots, self.scratches
        return stays + slots * self.slot_bytes + scratches * self.scratch_bytes

    def require_capturable(self, hint: str) -> None:
        """Raise PlacementError, with this hint, where a pass can't be recorded as a graph."""
        why = self._uncapturable()
        if why:
            raise PlacementError(f"the model can't be captured: {why}", hint)

    def _uncapturable(self) -> str:
        """Why a pass can't be recorded as a graph; empty where it can."""
        tiers = {one.tier for one in self.settled}
        if self.lanes.device.type != "cuda":
            return ""
        if tiers & {"cpu", "disk"}:
            return "some of its blocks compute on the host or are read from disk in each pass"
        if self.host and self.host.used and self.host.why_pageable:
            return f"its host memory isn't pinned ({self.host.why_pageable})"
        return ""

    def taken(self) -> tuple[TierUse, ...]:
        """What each tier takes, in the order of `TIERS`."""
        return tuple(
            tier_use(
                tier,
                [(one.block.given_bytes, one.stored.n_bytes) for one in self.settled if one.tier == tier],
            )
            for tier in TIERS
            if any(one.tier == tier for one in self.settled)
        )

    def clear(self) -> None:
        """Release the memory, as far as no tensor uses it, and the source."""
        self.source.close()
        if self.host is not None:
            self.host.release()
        self.settled.clear()
        self._ways_back.clear()
        self.host = self.vram = None


def _plain(block: Block, tier: Tier) -> _Settled:
    return _Settled(block, tier, lay_out(block))


def _as_given(block: Block, entry: Entry, kept: Collection[str]) -> PackedForm | None:
    return (
        as_it_is(tuple(entry.shape[d] for d in memory_order(entry)))
        if (entry.converts and block.name in kept)
        else None
    )


def own_values(source: Source, entry: Entry) -> torch.Tensor:
    """The model's own values in host memory of their own."""
    view = raw_view(entry, torch.empty(entry.given_bytes, dtype=torch.uint8), entry.given)
    source.fill(entry, view)
    return view


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


def _itself(view: torch.Tensor) -> torch.Tensor:
    """The values where they are: a copy beside them may not fit."""
    return view


def _unpacked_from(item: Item, memory: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(item.entry.given_bytes, dtype=torch.uint8)
    item.write(item.bytes(memory).cpu(), flat.view(item.entry.given), unpack)
    return raw_view(item.entry, flat, item.entry.given)


@contextmanager
def _refusals(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        raise PlacementError(
            f"the plan's VRAM was refused: {first_line(error)} "
            f"({binary_bytes(free)} of {binary_bytes(total)} are free)",
            "plan again with a smaller vram, or end other programs that use the GPU",
        ) from None
