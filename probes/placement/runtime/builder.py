"""Brings every block to its tier: what `place` and `load` share."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from math import prod
from typing import Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, Entry, find_blocks, placed_already
from probes.placement.packing.format import ALIGNMENT, DENSE_FROM, PackedForm, aligned
from probes.placement.packing.packed import Packed, form, packed_in
from probes.placement.packing.tensors import unpack
from probes.placement.plan_file import first_flaw
from probes.placement.planner.tiers import rounded
from probes.placement.runtime.buffers import (
    Cuts,
    DeviceArena,
    DeviceBuffer,
    StorageOptions,
    StoredBlock,
    StoredEntry,
    _cuts,
    _given_form,
    _stored_block,
    lay_out,
    make_buffers,
    raw_view,
    unpacked_bytes,
)
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.handle import TierUse, tier_use
from probes.placement.runtime.hooks import ForwardHook
from probes.placement.runtime.host_memory import HostArena, node_of_gpu, zero_copy
from probes.placement.runtime.origins import ParameterOrigins, bfloat16_target, joins_its_weights
from probes.placement.runtime.packed_tables import can_be_table
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import (
    MemorySource,
    ModelWeights,
    PackedValues,
    WeightSource,
    given_values,
    require_entry_range,
    require_packed_range,
)
from probes.placement.types import IN_VRAM, TIERS, CardsPlan, Plan, PrefetchPool, Tier


def require_plan(plan: object) -> None:
    """Raise PlacementError for anything else."""
    if not isinstance(plan, Plan | CardsPlan):
        raise PlacementError(
            f"a model is placed by a Plan, not by a {type(plan).__name__}",
            "make one with plan(), or read its file with read_plan()",
        )


def planned_blocks(model: nn.Module, plan: Plan, parts: Sequence[Plan] = ()) -> list[tuple[Block, Tier]]:
    """The model's blocks in the plan's order, each with its tier. Raises PlacementError for another model.

    `parts`: the plans of several cards, of which `plan` has all blocks.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise PlacementError(
                "a scripted or compiled model can't be placed", "place the model it was made of"
            )
        if isinstance(module.__dict__.get("forward"), ForwardHook):
            raise placed_already()
    for one in (plan, *parts):
        _require_sound(one)
    tiers = {block.name: block for block in plan.blocks}
    found = {block.name: block for block in find_blocks(model, tiers, becomes=bfloat16_target(plan))}
    strange = sorted(tiers.keys() - found.keys()) or sorted(found.keys() - tiers.keys())
    if strange:
        whose = "plan" if strange[0] in tiers else "model"
        raise _other_model(f"only the {whose} has {', '.join(strange[:4])}")
    for name, block in found.items():
        kept = sum(b.numel() * b.element_size() for module in block.modules for b in module.buffers())
        own = block.given_bytes
        if not own <= tiers[name].weight_bytes <= own + kept:
            raise _other_model(f"{name} has {own:,} bytes, {tiers[name].weight_bytes:,} were planned")
        if not block.called and tiers[name].tier != "resident":
            raise PlacementError(
                f"{name} is used while other blocks are called: it can only be resident",
                "plan again",
            )
        if block.written and tiers[name].tier != "resident":
            raise PlacementError(
                f"calls of {name} write to {block.written}, which is lost elsewhere: it can only be resident",
                "plan again; or let the module have no max_norm, if it is an embedding",
            )
        if tiers[name].table and not can_be_table(block):
            raise _other_model(
                f"{name} isn't one bfloat16 matrix whose rows can be looked up while it is packed"
            )
    return [(found[name], block.tier) for name, block in tiers.items()]


def _require_sound(plan: Plan) -> None:
    if why := first_flaw(plan):
        raise PlacementError(f"the plan can't be followed: {why}", "make it again with plan()")


def _other_model(why: str) -> PlacementError:
    return PlacementError(f"this isn't the model that was planned: {why}", "plan again for this model")


def cpu_modules(blocks: Sequence[tuple[Block, Tier]]) -> list[nn.Module]:
    """The modules that compute on the host, with those below them."""
    tops = [module for block, tier in blocks if tier == "cpu" for module in block.modules]
    return [module for top in tops for module in top.modules()]


PACKED: Final = ("packed", "streamed_packed")


@dataclass(eq=False)
class BlockPlacement:
    """One block on its way."""

    block: Block
    tier: Tier
    stored: StoredBlock
    packed: tuple[PackedValues | None, ...] = ()  # of each entry
    weight_source: WeightSource | None = None
    memory: torch.Tensor | None = None  # its bytes, wherever the tier keeps them
    original: torch.Tensor | None = None  # of a table, its bytes unpacked, in host memory


@dataclass(frozen=True)
class PlannedBytes:
    """What a plan with budgets counts, in bytes."""

    vram: int  # of weights, staging buffers and decode buffers, as torch's allocator rounds them up
    host: int  # that blocks may take in host memory, except those that the CPU computes
    blocks: Mapping[str, int]  # those that it counts, with the bytes of the model in VRAM

    @staticmethod
    def of(plan: Plan) -> "PlannedBytes | None":
        """What this plan counts; None for one without budgets, which was made by hand."""
        if not plan.vram_budget:
            return None
        arena = plan.vram.weights + plan.vram.slots + plan.vram.scratch
        moving = sum(block.host_bytes for block in plan.blocks if block.tier != "cpu")
        return PlannedBytes(
            min(rounded(arena), arena + plan.vram.rounding),
            plan.host_budget - plan.host.total + moving,
            {block.name: block.weight_bytes if block.tier in IN_VRAM else 0 for block in plan.blocks},
        )


@dataclass(frozen=True)
class SpillCandidate:
    """A block that can stream instead. Bytes."""

    place: int  # among all blocks
    freed: int  # in VRAM
    staging_buffer: int  # that each staging buffer must have for it
    packed: bool  # it was planned to be packed in VRAM


@dataclass(frozen=True)
class StagingSize:
    """How many staging buffers there are, and the bytes of each."""

    count: int
    n_bytes: int


def choose_spilled(
    candidates: Sequence[SpillCandidate], over: int, staging: StagingSize
) -> list[SpillCandidate] | None:
    """The blocks to move so that VRAM needs `over` bytes less; None where all of them aren't enough.

    Others than packed ones are moved only with all of those that pass through the same staging buffers.
    """
    packed = [one for one in candidates if one.packed]
    for usable in (packed, candidates):
        size = _staging_size_for(usable, over, staging)
        if size is None:
            continue
        wanted = over + staging.count * (size - staging.n_bytes)
        if usable is packed:
            return _fewest([one for one in packed if one.staging_buffer <= size], wanted)
        first = [one for one in packed if one.staging_buffer <= size]
        others = [one for one in candidates if not one.packed and one.staging_buffer <= size]
        return first + _fewest(others, wanted - sum(one.freed for one in first))
    return None


def _staging_size_for(candidates: Sequence[SpillCandidate], over: int, staging: StagingSize) -> int | None:
    """Bytes of the smallest staging buffer for which all that pass through it are enough, larger staging buffers counted."""

    def needed(one: SpillCandidate) -> int:
        return max(one.staging_buffer, staging.n_bytes)

    freed = 0
    for size, alike in groupby(sorted(candidates, key=needed), key=needed):
        freed += sum(one.freed for one in alike)
        if freed >= over + staging.count * (size - staging.n_bytes):
            return size
    return None


def _fewest(usable: Sequence[SpillCandidate], wanted: int) -> list[SpillCandidate]:
    """The smallest block that is enough, else the largest, and again for the rest."""
    left, found = sorted(usable, key=lambda one: one.freed), list[SpillCandidate]()
    while wanted > 0:
        found.append(left.pop(min(bisect_left(left, wanted, key=lambda one: one.freed), len(left) - 1)))
        wanted -= found[-1].freed
    return found


IN_HOST_ARENA = ("streamed", "streamed_packed", "in_place")


MOVING = ("streamed", "streamed_packed", "disk")


@dataclass(eq=False)
class Builder:
    """The memory of one placed model, and the steps that fill it."""

    model: nn.Module
    streams: Streams
    source: ModelWeights
    origins: ParameterOrigins
    rings: PrefetchPool
    pinned: bool
    storing: StorageOptions
    counted: PlannedBytes | None  # None: the plan has no budgets
    placements: list[BlockPlacement] = field(default_factory=list)
    host: HostArena | None = None
    vram: DeviceArena | None = None
    spilled: int = 0  # blocks that stream, though they were to stay in VRAM

    def __post_init__(self) -> None:
        self._filler = MemoryFiller(self.source, self.origins)

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
        with _refusals(self.streams.device):
            self._into_vram()
        self._move(engine)

    def _into_host(self, blocks: Sequence[tuple[Block, Tier]]) -> None:
        """Pack what is packed, and bring what streams into the arena."""
        compared = self.storing.is_compared
        room = sum(
            unpacked_bytes(block) for block, tier in blocks if tier in IN_HOST_ARENA or compared(block)
        )
        self.host = HostArena(room, node_of_gpu(self.streams.device))
        for block, tier in blocks:
            original = self._original(block) if compared(block) else None
            one = lay_out_placement(
                block, tier, self.storing, self.source, self.origins, most=self._piece_bytes
            )
            one.original = original
            self.placements.append(one)
            if tier == "disk":
                one.weight_source = self.source.weight_source(one.stored, self.streams)
                self._filler.leave_on_disk(block)
            elif tier == "cpu":
                self._filler.keep_on_host(block)
            elif tier in IN_HOST_ARENA:
                self._stream(one)

    def _stream(self, one: BlockPlacement) -> None:
        assert self.host
        one.memory = self.host.take(one.stored.n_bytes) if one.original is None else one.original
        self._filler.fill(one, one.memory)

    def _spill(self) -> None:
        """Let blocks stream that were to stay in VRAM, where weights pack so badly that it has no room."""
        if self.counted is None:
            return
        assert self.host
        alignment = ALIGNMENT * sum(len(one.block.entries) for one in self.placements)
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
            self.placements[place] = one
            self._stream(one)
        self.spilled = len(moved)

    def _moved(self) -> dict[int, BlockPlacement]:
        """Blocks by their places, as they stream. Raises PlacementError where no choice is enough."""
        elsewhere = {
            place: self._elsewhere(one) for place, one in enumerate(self.placements) if _can_move(one)
        }
        # blocks that don't pack take a decode buffer where they go through staging buffers in pieces: the smallest
        now = self.decode_bytes
        for decode_buffer in sorted(
            {now, *(n for n in map(_decode_bytes_of, elsewhere.values()) if n > now)}
        ):
            able = [
                self._candidate(place, one)
                for place, one in elsewhere.items()
                if _decode_bytes_of(one) <= decode_buffer
            ]
            over = self._beyond_plan + self.decode_buffers * (decode_buffer - now)
            chosen = choose_spilled(able, over, StagingSize(self.staging, self.staging_bytes))
            if chosen is not None:
                return {one.place: elsewhere[one.place] for one in chosen}
        raise self._refusal("too few blocks can stream instead")

    def _elsewhere(self, one: BlockPlacement) -> BlockPlacement:
        """The same block, streamed; whole if the plan has no decode buffer to put its pieces together."""
        tier: Tier = "streamed_packed" if one.tier == "packed" else "streamed"
        most = self._piece_bytes if unpacked_bytes(one.block) <= self.rings.scratch_bytes else 0
        made = arrange(one.block, tier, one.packed, self.storing, most=most)
        made.original = one.original  # of a table that doesn't pack: the host has its bytes already
        return made

    def _candidate(self, place: int, elsewhere: BlockPlacement) -> SpillCandidate:
        now = self.placements[place]
        return SpillCandidate(
            place, aligned(now.stored.n_bytes), _staging_bytes_of(elsewhere), packed=now.tier == "packed"
        )

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
        elif self.streams.device.type == "cuda":
            self.host.pin(self.streams.finish)
        self._in_place()

    def _in_place(self) -> None:
        """Let the GPU see what it reads in place. Where it can't, those blocks stream instead."""
        gpu = self.streams.device.type == "cuda"
        for one in self.placements:
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
        memory = self.host.take(unpacked_bytes(block))
        self.source.fill(entry, raw_view(entry, memory[: entry.n_bytes]))
        return memory

    def _whole(self, one: BlockPlacement) -> torch.Tensor | None:
        """A table's weights as the device reads them; None where it can't, or where nothing is compared."""
        if one.original is None or not one.stored.table:
            return None
        gpu = self.streams.device.type == "cuda"
        if gpu and (self.host is None or self.host.why_pageable):
            return None
        (entry,) = one.block.entries
        return raw_view(entry, (zero_copy(one.original) if gpu else one.original)[: entry.n_bytes])

    def _into_vram(self) -> None:
        """One allocation for everything that stays in VRAM, filled."""
        self.vram = DeviceArena(self._vram_bytes, self.streams.device)
        self.streams.use(self.vram.whole)
        for one in self.placements:
            if one.tier in IN_VRAM:
                one.memory = self.vram.take(one.stored.n_bytes)
                self._filler.fill(one, one.memory)

    @property
    def _vram_bytes(self) -> int:
        """Bytes of what stays in VRAM, of the staging buffers and of the decode buffers."""
        stays = sum(aligned(one.stored.n_bytes) for one in self.placements if one.tier in IN_VRAM)
        return stays + self.staging * self.staging_bytes + self.decode_buffers * self.decode_bytes

    @property
    def _beyond_plan(self) -> int:
        """Bytes of VRAM that are needed beyond what the plan counts; 0 without budgets.

        What is used between blocks of other cards was counted there. Buffers that a checkpoint has are
        counted with their blocks, and are beside the arena.
        """
        if self.counted is None:
            return 0
        counted = self.counted.blocks
        others = sum(aligned(one.stored.n_bytes) for one in self.placements if one.block.name not in counted)
        beside = sum(
            max(counted.get(one.block.name, 0) - one.block.given_bytes, 0) for one in self.placements
        )
        return self._vram_bytes + beside - self.counted.vram - others

    @property
    def staging(self) -> int:
        """How many staging buffers there are."""
        return max(self.rings.slots, 1)

    @property
    def decode_buffers(self) -> int:
        """How many decode buffers there are: none where the plan says that all products are fused."""
        return self.rings.scratches if self.storing.fast else max(self.rings.scratches, 1)

    @property
    def _piece_bytes(self) -> int:
        """The most that is copied at once of a packed block; 0 where staging buffers hold whole ones."""
        return self.rings.slot_bytes if self.rings.pieces > 1 and self.decode_buffers else 0

    @property
    def staging_bytes(self) -> int:
        """Of each staging buffer: the largest block that passes through one, or piece of one."""
        return max((_staging_bytes_of(one) for one in self.placements if one.tier in MOVING), default=0)

    @property
    def decode_bytes(self) -> int:
        """Of each decode buffer: the largest block that is unpacked into one."""
        return max(map(_decode_bytes_of, self.placements), default=0)

    def _ring(self, count: int, n_bytes: int) -> list[DeviceBuffer]:
        assert self.vram
        memories = [self.vram.take(n_bytes) for _ in range(count)]
        return make_buffers(count, memories, self.streams)

    def _move(self, engine: Engine) -> None:
        staging = self._ring(self.staging, self.staging_bytes)
        decode_buffers = self._ring(self.decode_buffers, self.decode_bytes)
        staged = unpacked = 0
        for one in self.placements:
            if one.tier in ("cpu", "in_place") or (one.tier == "resident" and not one.stored.is_unpacked):
                continue
            decode_buffer, through = None, []
            if one.tier not in IN_VRAM:
                pieces = len(one.stored.pieces)
                through = [staging[(staged + nth) % len(staging)] for nth in range(pieces)]
                staged += pieces
            if one.stored.is_unpacked and decode_buffers:
                decode_buffer, unpacked = decode_buffers[unpacked % len(decode_buffers)], unpacked + 1
            weight_source = one.weight_source
            if weight_source is None:
                assert one.memory is not None
                weight_source = MemorySource(one.memory)
            engine.add(one.stored, weight_source, through, decode_buffer, whole=self._whole(one))

    @property
    def vram_asked(self) -> int:
        """Bytes of what stays in VRAM, of the staging buffers and of the decode buffers, without alignment."""
        there = [one.stored for one in self.placements if one.tier in IN_VRAM]
        stays = sum(item.n_bytes for stored in there for item in stored.items)
        stays += sum(stored.room for stored in there)
        staging, decode_buffers = self.staging, self.decode_buffers
        return stays + staging * self.staging_bytes + decode_buffers * self.decode_bytes

    def require_capturable(self, hint: str) -> None:
        """Raise PlacementError, with this hint, where a pass can't be recorded as a graph."""
        why = self._uncapturable()
        if why:
            raise PlacementError(f"the model can't be captured: {why}", hint)

    def _uncapturable(self) -> str:
        """Why a pass can't be recorded as a graph; empty where it can."""
        tiers = {one.tier for one in self.placements}
        if self.streams.device.type != "cuda":
            return ""
        if tiers & {"cpu", "disk"}:
            return "some of its blocks compute on the host or are read from disk in each pass"
        if any(joins_its_weights(module) for one in self.placements for module in one.block.modules):
            return "cuDNN joins weights of a recurrent module without biases where a graph would lose them"
        if self.host and self.host.used and self.host.why_pageable:
            return f"its host memory isn't pinned ({self.host.why_pageable})"
        return ""

    def taken(self) -> tuple[TierUse, ...]:
        """What each tier takes, in the order of `TIERS`."""
        return tuple(
            tier_use(
                tier,
                [(one.block.given_bytes, one.stored.n_bytes) for one in self.placements if one.tier == tier],
            )
            for tier in TIERS
            if any(one.tier == tier for one in self.placements)
        )

    def clear(self) -> None:
        """Release the memory, as far as no tensor uses it, and the source."""
        self.source.close()
        if self.host is not None:
            self.host.release()
        self.placements.clear()
        self._filler.forget()
        self.host = self.vram = None


def _can_move(one: BlockPlacement) -> bool:
    """Whether a block that is to stay in VRAM can stream instead."""
    block = one.block
    moves = block.called and not block.written and bool(block.entries)
    return one.tier in IN_VRAM and not one.stored.table and moves


def _staging_bytes_of(one: BlockPlacement) -> int:
    """Bytes of a staging buffer that its pieces pass through."""
    return max((aligned(piece.end - piece.begin) for piece in one.stored.pieces), default=0)


def _decode_bytes_of(one: BlockPlacement) -> int:
    """Bytes of a decode buffer for it; 0 where calls read it where it is."""
    return unpacked_bytes(one.block) if one.stored.is_unpacked else 0


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


def lay_out_placement(
    block: Block,
    tier: Tier,
    storing: StorageOptions,
    source: ModelWeights,
    origins: ParameterOrigins,
    *,
    most: int,
) -> BlockPlacement:
    """The block as its tier has it, packed already if it is to be. `most` is as for `arranged`."""
    if tier not in PACKED and block.name not in storing.kept:
        return BlockPlacement(block, tier, lay_out(block))
    found: list[PackedValues | None] = []
    for entry in block.entries:
        dense = block.name in storing.dense and prod(entry.shape) >= DENSE_FROM
        values = source.packed(entry, dense=dense) if tier in PACKED else None
        found.append(values)
        if source.rereadable:
            origins.fetch_with(entry, partial(given_values, source, entry))
        elif values is not None:  # the values are kept twice no longer than necessary
            origins.fetch_with(entry, partial(_unpacked_from_memory, entry, values.outline))
    return arrange(block, tier, found, storing, most=most)


def arrange(
    block: Block, tier: Tier, found: Sequence[PackedValues | None], storing: StorageOptions, *, most: int
) -> BlockPlacement:
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
        forms.append(form(packed) if packed else _given_form(block, entry, storing))
        cuts.append(_cuts(entry, packed, most) if most and (packed or forms[-1] is None) else ())
    return BlockPlacement(block, tier, _stored_block(block, forms, cuts, storing, most=most), found)


def _unpacked_from_memory(entry: Entry, packed: Packed) -> torch.Tensor:
    flat = torch.empty(entry.given_bytes, dtype=torch.uint8, device=packed.device)
    unpack(packed, flat.view(entry.given).view(packed.shape))
    return raw_view(entry, flat, entry.given)


class MemoryFiller:
    """Brings values from their source to memory, and lets the parameters' homes know where."""

    def __init__(self, source: ModelWeights, origins: ParameterOrigins) -> None:
        self.source, self.origins = source, origins
        self._restorers: dict[int, Callable[[], torch.Tensor]] = {}

    def fill(self, one: BlockPlacement, memory: torch.Tensor) -> None:
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
                require_entry_range(item.entry, item.given(memory))
            self.origins.fetch_with(item.entry, partial(_unpacked_from, item, memory))
        one.packed = ()

    def keep_on_host(self, block: Block) -> None:
        """A model that is built has its values there already; one on meta gets memory for them."""
        for entry in block.entries:
            if entry.parameter.is_meta or entry.converts:
                self._fill_plain(
                    entry, raw_view(entry, torch.empty(entry.n_bytes, dtype=torch.uint8, device="cpu"))
                )
            else:
                self.origins.adopt(entry, entry.parameter.detach())

    def leave_on_disk(self, block: Block) -> None:
        """Each pass reads the block. Raises PlacementError for values that can't be converted."""
        for entry in block.entries:
            if entry.converts and entry.dtype is torch.float16:  # no pass looks for large numbers
                require_entry_range(entry, given_values(self.source, entry))
            self.origins.fetch_with(entry, partial(given_values, self.source, entry))

    def see(self, one: BlockPlacement, seen: torch.Tensor) -> None:
        """Let the parameters of a block that was filled have its memory as the GPU sees it."""
        assert one.memory is not None
        for item in one.stored.items:
            fetch = self._restorers.get(id(item.entry)) or partial(item.raw, one.memory)
            self.origins.adopt(item.entry, item.raw(seen), fetch)

    def forget(self) -> None:
        """Release what the notes hold."""
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
    flat = torch.empty(item.entry.given_bytes, dtype=torch.uint8, device="cpu")
    item.write(item.bytes(memory).cpu(), flat.view(item.entry.given), unpack)
    return raw_view(item.entry, flat, item.entry.given)
