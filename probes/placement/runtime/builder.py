"""Brings every block to its tier: what `place` and `load` share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.format import ALIGNMENT, aligned
from probes.placement.packing.packed import packed_in
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.buffers import (
    DeviceArena,
    HostArena,
    Settled,
    Storing,
    arranged,
    laid,
    node_of_gpu,
)
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.hooks import Buffer, ring
from probes.placement.runtime.host_memory import Candidate, Counted, Slots, spilled, zero_copy
from probes.placement.runtime.measuring import TierUse, tier_use
from probes.placement.runtime.stored_blocks import Item, raw_bytes, raw_view
from probes.placement.runtime.streams import Lanes
from probes.placement.runtime.weight_sources import (
    Held,
    Homes,
    PackedValues,
    Source,
    joins_its_weights,
    own_values,
    require_entry,
    require_packed,
)
from probes.placement.types import IN_VRAM, TIERS, PrefetchPool, Tier


class Filler:
    """Brings values from their source to memory, and lets the parameters' homes know where."""

    def __init__(self, source: Source, homes: Homes) -> None:
        self.source, self.homes = source, homes
        self._ways_back: dict[int, Callable[[], torch.Tensor]] = {}

    def fill(self, one: Settled, memory: torch.Tensor) -> None:
        """Write the block's bytes, and let its parameters have theirs there.

        Raises PlacementError for values that changed meanwhile or that can't be converted.
        """
        for index, item in enumerate(one.stored.items):
            if item.form is None:
                self._fill_plain(item.entry, item.raw(memory))
                continue
            if packed := one.packed[index]:
                _fill_packed(item, packed, memory)
            else:
                self.source.fill(item.entry, item.given(memory))
                require_entry(item.entry, item.given(memory))
            self.homes.later(item.entry, partial(_unpacked_from, item, memory))
        one.packed = ()

    def keep_on_host(self, block: Block) -> None:
        """A model that is built has its values there already; one on meta gets memory for them."""
        for entry in block.entries:
            if entry.parameter.is_meta or entry.converts:
                self._fill_plain(
                    entry, raw_view(entry, torch.empty(entry.n_bytes, dtype=torch.uint8, device="cpu"))
                )
            else:
                self.homes.adopt(entry, entry.parameter.detach())

    def leave_on_disk(self, block: Block) -> None:
        """Each pass reads the block. Raises PlacementError for values that can't be converted."""
        for entry in block.entries:
            if entry.converts and entry.dtype is torch.float16:  # no pass looks for large numbers
                require_entry(entry, own_values(self.source, entry))
            self.homes.later(entry, partial(own_values, self.source, entry))

    def see(self, one: Settled, seen: torch.Tensor) -> None:
        """Let the parameters of a block that was filled have its memory as the GPU sees it."""
        assert one.memory is not None
        for item in one.stored.items:
            fetch = self._ways_back.get(id(item.entry)) or partial(item.raw, one.memory)
            self.homes.adopt(item.entry, item.raw(seen), fetch)

    def forget(self) -> None:
        """Release what the notes hold."""
        self._ways_back.clear()

    def _fill_plain(self, entry: Entry, view: torch.Tensor) -> None:
        self.source.fill(entry, view)
        self.homes.adopt(entry, view, self._way_back(entry, view))

    def _way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """How the values come to the host again; None where `view` has them there."""
        if entry.converts:
            self._ways_back[id(entry)] = self.source.way_back(entry, view)
            return self._ways_back[id(entry)]
        return None if view.device.type == "cpu" else partial(_itself, view)


def _fill_packed(item: Item, packed: PackedValues, memory: torch.Tensor) -> None:
    places = [memory[unit.offset :][: unit.n_bytes] for unit in item.units]
    parts = [packed.outline.part(unit.first, unit.last) for unit in item.units]
    if not packed.write(list(zip(parts, places, strict=True))):
        raise PlacementError(f"{item.entry.name} changed while it was loaded", "load it again")
    for unit, place in zip(item.units, places, strict=True):
        assert unit.form
        require_packed(item.entry, packed_in(unit.form, place))


def _itself(view: torch.Tensor) -> torch.Tensor:
    """The values where they are: a copy beside them may not fit."""
    return view


def _unpacked_from(item: Item, memory: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(item.entry.given_bytes, dtype=torch.uint8, device="cpu")
    item.write(item.bytes(memory).cpu(), flat.view(item.entry.given), unpack)
    return raw_view(item.entry, flat, item.entry.given)


IN_HOST = ("streamed", "streamed_packed", "in_place")
MOVING = ("streamed", "streamed_packed", "disk")


@dataclass(eq=False)
class Settling:
    """The memory of one placed model, and the steps that fill it."""

    model: nn.Module
    lanes: Lanes
    source: Source
    homes: Homes
    rings: PrefetchPool
    pinned: bool
    storing: Storing
    counted: Counted | None  # None: the plan has no budgets
    settled: list[Settled] = field(default_factory=list)
    host: HostArena | None = None
    vram: DeviceArena | None = None
    spilled: int = 0  # blocks that stream, though they were to stay in VRAM

    def __post_init__(self) -> None:
        self._filler = Filler(self.source, self.homes)

    def take_over(self, blocks: Sequence[tuple[Block, Tier]], engine: Engine) -> None:
        """Bring all blocks to their tiers, and those that move to the engine. The caller undoes failures."""
        self._into_host(blocks)
        self._spill()
        self._pin()
        if self.spilled and self._beyond_plan > 0:  # blocks that were read in place stream, too
            assert self.host
            raise self._refusal(
                f"host memory can't be pinned with those that stream instead ({self.host.why_pageable})"
            )
        with _refusals(self.lanes.device):
            self._into_vram()
        self._move(engine)

    def _into_host(self, blocks: Sequence[tuple[Block, Tier]]) -> None:
        """Pack what is packed, and bring what streams into the arena."""
        compared = self.storing.is_compared
        room = sum(raw_bytes(block) for block, tier in blocks if tier in IN_HOST or compared(block))
        self.host = HostArena(room, node_of_gpu(self.lanes.device))
        for block, tier in blocks:
            original = self._original(block) if compared(block) else None
            one = laid(block, tier, self.storing, self.source, self.homes, most=self._piece_bytes)
            one.original = original
            self.settled.append(one)
            if tier == "disk":
                one.wire = self.source.wire(one.stored, self.lanes)
                self._filler.leave_on_disk(block)
            elif tier == "cpu":
                self._filler.keep_on_host(block)
            elif tier in IN_HOST:
                self._stream(one)

    def _stream(self, one: Settled) -> None:
        assert self.host
        one.memory = self.host.take(one.stored.n_bytes) if one.original is None else one.original
        self._filler.fill(one, one.memory)

    def _spill(self) -> None:
        """Let blocks stream that were to stay in VRAM, where weights pack so badly that it has no room."""
        if self.counted is None:
            return
        assert self.host
        alignment = ALIGNMENT * sum(len(one.block.entries) for one in self.settled)
        if self.host.used > self.counted.host + alignment:
            raise self._refusal_of_host()
        if self._beyond_plan <= 0:
            return
        moved = self._moved()
        room = sum(one.stored.n_bytes for one in moved.values() if one.original is None)
        if self.host.used + room > self.counted.host:
            said = f"{binary_bytes(self.host.used + room)} of host memory, not the plan's "
            said += binary_bytes(max(self.counted.host, 0))
            raise self._refusal(f"with those that would have to stream instead, blocks take {said}")
        self.host.widen(room)
        for place, one in moved.items():
            self.settled[place] = one
            self._stream(one)
        self.spilled = len(moved)

    def _moved(self) -> dict[int, Settled]:
        """Blocks by their places, as they stream. Raises PlacementError where no choice is enough."""
        elsewhere = {place: self._elsewhere(one) for place, one in enumerate(self.settled) if _can_move(one)}
        # blocks that don't pack take a scratch buffer where they go through slots in pieces: the smallest
        now = self.scratch_bytes
        for scratch in sorted({now, *(n for n in map(_scratch_of, elsewhere.values()) if n > now)}):
            able = [
                self._candidate(place, one) for place, one in elsewhere.items() if _scratch_of(one) <= scratch
            ]
            over = self._beyond_plan + self.scratches * (scratch - now)
            chosen = spilled(able, over, Slots(self.slots, self.slot_bytes))
            if chosen is not None:
                return {one.place: elsewhere[one.place] for one in chosen}
        raise self._refusal("too few blocks can stream instead")

    def _elsewhere(self, one: Settled) -> Settled:
        """The same block, streamed; whole if the plan has no scratch buffer to put its pieces together."""
        tier: Tier = "streamed_packed" if one.tier == "packed" else "streamed"
        most = self._piece_bytes if raw_bytes(one.block) <= self.rings.scratch_bytes else 0
        made = arranged(one.block, tier, one.packed, self.storing, most=most)
        made.original = one.original  # of a table that doesn't pack: the host has its bytes already
        return made

    def _candidate(self, place: int, elsewhere: Settled) -> Candidate:
        now = self.settled[place]
        return Candidate(place, aligned(now.stored.n_bytes), _slot_of(elsewhere), packed=now.tier == "packed")

    def _refusal(self, why: str) -> PlacementError:
        needed, counted = self._vram_bytes, self._vram_bytes - self._beyond_plan
        return PlacementError(
            f"weights, slots and scratch buffers take {binary_bytes(needed)} of VRAM instead of the plan's "
            f"{binary_bytes(counted)}: these weights pack worse than the Gaussian ones that plans assume, "
            f"and {why}",
            "plan again with a larger vram or host, so that fewer blocks are packed",
        )

    def _refusal_of_host(self) -> PlacementError:
        assert self.host
        assert self.counted
        return PlacementError(
            f"blocks take {binary_bytes(self.host.used)} of host memory, not the plan's "
            f"{binary_bytes(max(self.counted.host, 0))}: these weights pack worse than the Gaussian ones "
            "that plans assume",
            "plan again with a larger host, or with a larger vram so that fewer blocks stream",
        )

    def _pin(self) -> None:
        """Pin the arena, which is complete."""
        assert self.host
        if not self.pinned:
            self.host.why_pageable = "pinning was switched off"
        elif self.lanes.device.type == "cuda":
            self.host.pin(self.lanes.finish)
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
            self._filler.see(one, zero_copy(one.memory))

    def _original(self, block: Block) -> torch.Tensor:
        """The table's weights in the host's arena."""
        assert self.host
        (entry,) = block.entries
        memory = self.host.take(raw_bytes(block))
        self.source.fill(entry, raw_view(entry, memory[: entry.n_bytes]))
        return memory

    def _whole(self, one: Settled) -> torch.Tensor | None:
        """A table's weights as the device reads them; None where it can't, or where nothing is compared."""
        if one.original is None or not one.stored.table:
            return None
        gpu = self.lanes.device.type == "cuda"
        if gpu and (self.host is None or self.host.why_pageable):
            return None
        (entry,) = one.block.entries
        return raw_view(entry, (zero_copy(one.original) if gpu else one.original)[: entry.n_bytes])

    def _into_vram(self) -> None:
        """One allocation for everything that stays in VRAM, filled."""
        self.vram = DeviceArena(self._vram_bytes, self.lanes.device)
        self.lanes.use(self.vram.whole)
        for one in self.settled:
            if one.tier in IN_VRAM:
                one.memory = self.vram.take(one.stored.n_bytes)
                self._filler.fill(one, one.memory)

    @property
    def _vram_bytes(self) -> int:
        """Bytes of what stays in VRAM, of the slots and of the scratch buffers."""
        stays = sum(aligned(one.stored.n_bytes) for one in self.settled if one.tier in IN_VRAM)
        return stays + self.slots * self.slot_bytes + self.scratches * self.scratch_bytes

    @property
    def _beyond_plan(self) -> int:
        """Bytes of VRAM that are needed beyond what the plan counts; 0 without budgets.

        What is used between blocks of other cards was counted there. Buffers that a checkpoint has are
        counted with their blocks, and are beside the arena.
        """
        if self.counted is None:
            return 0
        counted = self.counted.blocks
        others = sum(aligned(one.stored.n_bytes) for one in self.settled if one.block.name not in counted)
        beside = sum(max(counted.get(one.block.name, 0) - one.block.given_bytes, 0) for one in self.settled)
        return self._vram_bytes + beside - self.counted.vram - others

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return max(self.rings.slots, 1)

    @property
    def scratches(self) -> int:
        """How many scratch buffers there are: none where the plan says that all products are fused."""
        return self.rings.scratches if self.storing.fast else max(self.rings.scratches, 1)

    @property
    def _piece_bytes(self) -> int:
        """The most that is copied at once of a packed block; 0 where slots hold whole ones."""
        return self.rings.slot_bytes if self.rings.pieces > 1 and self.scratches else 0

    @property
    def slot_bytes(self) -> int:
        """Of each slot: the largest block that passes through one, or piece of one."""
        return max((_slot_of(one) for one in self.settled if one.tier in MOVING), default=0)

    @property
    def scratch_bytes(self) -> int:
        """Of each scratch buffer: the largest block that is unpacked into one."""
        return max(map(_scratch_of, self.settled), default=0)

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
        if any(joins_its_weights(module) for one in self.settled for module in one.block.modules):
            return "cuDNN joins weights of a recurrent module without biases where a graph would lose them"
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
        self._filler.forget()
        self.host = self.vram = None


def _can_move(one: Settled) -> bool:
    """Whether a block that is to stay in VRAM can stream instead."""
    block = one.block
    moves = block.called and not block.written and bool(block.entries)
    return one.tier in IN_VRAM and not one.stored.table and moves


def _slot_of(one: Settled) -> int:
    """Bytes of a slot that its pieces pass through."""
    return max((aligned(piece.end - piece.begin) for piece in one.stored.pieces), default=0)


def _scratch_of(one: Settled) -> int:
    """Bytes of a scratch buffer for it; 0 where calls read it where it is."""
    return raw_bytes(one.block) if one.stored.is_unpacked else 0


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
