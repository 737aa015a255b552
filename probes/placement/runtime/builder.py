"""Builds a placed model: brings each block's weights to its tier and hands those that move to the engine.

`place` and `load` share it. Everything on the host is in one arena, pinned as a whole, and everything
in VRAM in another. Where weights pack so badly that VRAM doesn't hold what the plan wants there, more blocks
stream than were planned; where that isn't enough, the model is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes, counted
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import Block, Entry, find_blocks, placed_already, require_module
from probes.placement.packing.format import ALIGNMENT, DENSE_FROM, aligned
from probes.placement.packing.packed import Packed
from probes.placement.packing.tensors import unpack
from probes.placement.plan_file import first_flaw
from probes.placement.planner.tiers import rounded
from probes.placement.runtime.block_placement import BlockPlacement, MemoryFiller, arrange
from probes.placement.runtime.buffers import (
    DeviceArena,
    DeviceBuffer,
    PlannedBlock,
    can_be_table,
    is_multiplied,
    lay_out,
    raw_view,
    unpacked_bytes,
)
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.experts import (
    ExpertGroup,
    PlacedExperts,
    is_packed_by_expert,
    make_group,
    table_bytes,
    why_not_experts,
)
from probes.placement.runtime.hooks import ForwardHook
from probes.placement.runtime.host_memory import HostArena, node_of_gpu, zero_copy
from probes.placement.runtime.origins import ParameterOrigins, bfloat16_target, joins_its_weights
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import (
    ModelWeights,
    PackedValues,
    WeightSource,
    given_values,
)
from probes.placement.types import (
    EXPERTS,
    IN_VRAM,
    MOVING,
    PACKED,
    PINNED,
    TIERS,
    BlockPlan,
    CardsPlan,
    Plan,
    PrefetchPool,
    Tier,
)

UNLIMITED: Final = 1 << 62  # bytes, for a plan without budgets

# What can be placed


def require_plan(plan: object) -> None:
    """Raise PlacementError for anything but a plan."""
    if not isinstance(plan, Plan | CardsPlan):
        raise PlacementError(
            f"a model is placed by a Plan, not by a {type(plan).__name__}",
            "make one with plan(), or read its file with read_plan()",
        )


def planned_blocks(
    model: nn.Module, plan: Plan, parts: Sequence[Plan] = (), *, gate: ForwardHook | None = None
) -> list[PlannedBlock]:
    """The model's blocks in the plan's order, with what it says of each. Raises PlacementError for another.

    `parts`: the plans of several cards, of which `plan` has all blocks. `gate`: a hook that may be there.
    """
    require_module(model)
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, ForwardHook) and forward is not gate:
            raise placed_already()
    for part in (plan, *parts):
        if why := first_flaw(part):
            raise PlacementError(f"the plan can't be followed: {why}", "make it again with plan()")
    tiers = {block.name: block for block in plan.blocks}
    blocks = {block.name: block for block in find_blocks(model, tiers, becomes=bfloat16_target(plan))}
    strange = sorted(tiers.keys() - blocks.keys()) or sorted(blocks.keys() - tiers.keys())
    if strange:
        whose = "plan" if strange[0] in tiers else "model"
        raise _other_model(f"only the {whose} has {', '.join(strange[:4])}")
    for name, block in blocks.items():
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
        if tiers[name].tier in EXPERTS:
            _require_experts(block, parts)
        if tiers[name].table and not can_be_table(block):
            raise _other_model(
                f"{name} isn't one bfloat16 matrix whose rows can be looked up while it is packed"
            )
    return [(blocks[name], block) for name, block in tiers.items()]


def _require_experts(block: Block, parts: Sequence[Plan]) -> None:
    """Raise PlacementError for a block that can't be placed expert by expert; `parts`: of several cards."""
    if parts:
        raise PlacementError(
            f"{block.name} is planned expert by expert, which is for one card", "plan again with plan_cards()"
        )
    if why := why_not_experts(block):
        raise _other_model(f"{block.name} can't be placed expert by expert: {why}")


def _other_model(why: str) -> PlacementError:
    return PlacementError(f"this isn't the model that was planned: {why}", "plan again for this model")


def cpu_modules(blocks: Sequence[PlannedBlock]) -> list[nn.Module]:
    """The modules that compute on the host, with those below them."""
    tops = [module for block, plan in blocks if plan.tier == "cpu" for module in block.modules]
    return [module for top in tops for module in top.modules()]


def _unpacked_from_memory(entry: Entry, packed: Packed) -> torch.Tensor:
    flat = torch.empty(entry.given_bytes, dtype=torch.uint8, device=packed.device)
    unpack(packed, flat.view(entry.given).view(packed.shape))
    return raw_view(entry, flat, entry.given)


@dataclass(frozen=True)
class TierUse:
    """The blocks of one tier: their bytes unpacked, and as they are kept or sent."""

    tier: Tier
    blocks: int
    weight_bytes: int
    kept_bytes: int

    def __str__(self) -> str:
        sizes = f"{binary_bytes(self.weight_bytes)}, kept in {binary_bytes(self.kept_bytes)}"
        return f"{self.tier}: {counted(self.blocks, 'block')} of {sizes}"


# What streams where weights pack worse than planned


@dataclass(frozen=True)
class PlannedBytes:
    """What a plan with budgets counts, in bytes."""

    vram: int  # of weights, staging buffers and decode buffers, as torch's allocator rounds them up
    host: int  # that blocks may take in host memory, except those that the CPU computes
    blocks: Mapping[str, int]  # the plan's blocks, each with its weights' bytes where they stay in VRAM
    experts: int = 0  # of `vram`, for a cache of experts
    least: bool = False  # where `vram` isn't enough, as many blocks stream as can

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
            plan.experts.cache_bytes if plan.experts else 0,
        )


@dataclass(frozen=True)
class SpillCandidate:
    """A block that can stream instead. Bytes."""

    place: int  # among all blocks
    freed: int  # in VRAM
    needs: tuple[int, int]  # that each staging buffer and each decode buffer must have for it
    packed: bool = True  # it was planned to be packed in VRAM


def choose_spilled(
    candidates: Sequence[SpillCandidate], over: int, counts: tuple[int, int], sizes: tuple[int, int]
) -> list[SpillCandidate] | None:
    """The blocks to move so that VRAM needs `over` bytes less; None where all of them aren't enough.

    `counts` and `sizes` are those of staging and decode buffers. Blocks that need no larger ones go first;
    what larger ones take besides is counted. Of equal needs packed blocks go first, and the largest of these.
    """

    def grown(needs: tuple[int, int]) -> int:
        return sum(n * max(need - size, 0) for n, need, size in zip(counts, needs, sizes, strict=True))

    chosen: list[SpillCandidate] = []
    most, left = sizes, over
    for block in sorted(candidates, key=lambda block: (grown(block.needs), not block.packed, -block.freed)):
        most = max(most[0], block.needs[0]), max(most[1], block.needs[1])
        chosen.append(block)
        left -= block.freed
        if left + grown(most) <= 0:
            return chosen
    return None


# The builder


@dataclass(eq=False)
class Builder:
    """The memory of one placed model, or of one card's part of it, and the steps that fill it."""

    model: nn.Module
    streams: Streams
    source: ModelWeights
    origins: ParameterOrigins
    pool: PrefetchPool
    pinned: bool
    fast: bool  # few rows are multiplied with packed weights
    planned: PlannedBytes | None  # None: the plan has no budgets
    experts_bytes: int = 0  # of VRAM, for a cache of experts
    experts: PlacedExperts | None = None
    placements: list[BlockPlacement] = field(default_factory=list)
    host: HostArena | None = None
    vram: DeviceArena | None = None
    spilled: int = 0  # blocks that stream, though they were to stay in VRAM

    def __post_init__(self) -> None:
        self._filler = MemoryFiller(self.source, self.origins)

    def take_over(self, blocks: Sequence[PlannedBlock], engine: Engine) -> None:
        """Bring all blocks to their tiers, and those that move to the engine. The caller undoes failures."""
        self._into_host(blocks)
        self._spill()
        self._pin()
        as_can_be = self.planned is not None and self.planned.least
        if self.spilled and self._beyond_plan > 0 and not as_can_be:  # blocks read in place stream, too
            assert self.host
            raise self._refusal(
                f"host memory can't be pinned with those that stream instead ({self.host.why_pageable})"
            )
        self._count_experts()
        with memory_refusals(self.streams.device):
            self._into_vram()
        self._move(engine)
        self._place_experts(engine)

    def _into_host(self, blocks: Sequence[PlannedBlock]) -> None:
        """Pack what is packed, and bring what streams into the host's arena."""
        held = (block for block, plan in blocks if plan.tier in PINNED or self._is_compared(block, plan))
        self.host = HostArena(sum(map(unpacked_bytes, held)), node_of_gpu(self.streams.device))
        for block, plan in blocks:
            original = self._original(block) if self._is_compared(block, plan) else None
            placement, tier = self._pack(block, plan), plan.tier
            placement.original = original
            self.placements.append(placement)
            if tier == "disk":
                placement.weight_source = self.source.weight_source(placement.stored, self.streams)
                self._filler.leave_on_disk(block)
            elif tier == "cpu":
                self._filler.keep_on_host(block)
            elif tier in PINNED:
                self._stream(placement)

    def _is_compared(self, block: Block, plan: BlockPlan) -> bool:
        """Whether a table's products in pieces are compared with those of the whole, read in place."""
        return plan.table and not self.fast and is_multiplied(block.entries[0])

    def _pack(self, block: Block, plan: BlockPlan) -> BlockPlacement:
        """The block as its tier stores it, packed already if it is to be."""
        tier = plan.tier
        if tier not in PACKED and not plan.kept:
            return BlockPlacement(block, plan, tier, lay_out(block))
        packed: list[PackedValues | None] = []
        for entry in block.entries:
            dense = plan.dense and prod(entry.shape) >= DENSE_FROM
            wanted = tier in PACKED and (tier not in EXPERTS or is_packed_by_expert(block, entry))
            values = self.source.packed(entry, dense=dense) if wanted else None
            packed.append(values)
            if self.source.rereadable:
                self.origins.fetch_with(entry, partial(given_values, self.source, entry))
            elif values is not None:  # the values are kept twice no longer than necessary
                self.origins.fetch_with(entry, partial(_unpacked_from_memory, entry, values.outline))
        return arrange(block, plan, tier, packed, most=self._piece_bytes)

    def _stream(self, placement: BlockPlacement) -> None:
        assert self.host
        placement.memory = (
            self.host.take(placement.stored.n_bytes) if placement.original is None else placement.original
        )
        self._filler.fill(placement, placement.memory)

    def _spill(self) -> None:
        """Let blocks stream that were to stay in VRAM, where weights pack so badly that it has no room."""
        if self.planned is None:
            return
        assert self.host
        alignment = ALIGNMENT * sum(len(placement.block.entries) for placement in self.placements)
        if self.host.used > self.planned.host + alignment:
            raise self._refusal_of_host()
        if self._beyond_plan <= 0:
            return
        moved = self._moved()
        room = sum(placement.stored.n_bytes for placement in moved.values() if placement.original is None)
        if self.host.used + room > self.planned.host:
            needed, planned = binary_bytes(self.host.used + room), binary_bytes(max(self.planned.host, 0))
            raise self._refusal(
                "with those that would have to stream instead, blocks take "
                f"{needed} of host memory, not the plan's {planned}"
            )
        self.host.widen(room)
        for place, placement in moved.items():
            self.placements[place] = placement
            self._stream(placement)
        self.spilled = len(moved)

    def _moved(self) -> dict[int, BlockPlacement]:
        """Blocks by their places, as they stream. Raises PlacementError where no choice is enough."""
        elsewhere = {
            place: self._elsewhere(placement)
            for place, placement in enumerate(self.placements)
            if placement.can_stream_instead
        }
        sizes = self.staging_bytes, self.decode_bytes
        candidates = [
            SpillCandidate(
                place,
                aligned(self.placements[place].stored.n_bytes),
                (there.staging_bytes, there.decode_bytes),
                packed=self.placements[place].tier == "packed",
            )
            for place, there in elsewhere.items()
        ]
        counts = self.staging_count, self.decode_count
        if (chosen := choose_spilled(candidates, self._beyond_plan, counts, sizes)) is not None:
            return {candidate.place: elsewhere[candidate.place] for candidate in chosen}
        if self.planned and self.planned.least:
            return {place: there for place, there in elsewhere.items() if there.decode_bytes <= sizes[1]}
        raise self._refusal("too few blocks can stream instead")

    def _elsewhere(self, placement: BlockPlacement) -> BlockPlacement:
        """The block as it streams; whole if the plan has no decode buffer to put its pieces together."""
        tier: Tier = "streamed_packed" if placement.tier == "packed" else "streamed"
        most = self._piece_bytes if unpacked_bytes(placement.block) <= self.pool.scratch_bytes else 0
        streamed = arrange(placement.block, placement.plan, tier, placement.packed, most=most)
        streamed.original = placement.original  # of a table that doesn't pack: the host has its bytes already
        return streamed

    def _refusal(self, why: str) -> PlacementError:
        needed, planned = self.vram_bytes, self.vram_bytes - self._beyond_plan
        return PlacementError(
            f"weights, slots and scratch buffers take {binary_bytes(needed)} of VRAM instead of the plan's "
            f"{binary_bytes(planned)}: these weights pack worse than the Gaussian ones that plans assume, "
            f"and {why}",
            "plan again with a larger vram or host, so that fewer blocks are packed",
        )

    def _refusal_of_host(self) -> PlacementError:
        assert self.host
        assert self.planned
        return PlacementError(
            f"blocks take {binary_bytes(self.host.used)} of host memory, not the plan's "
            f"{binary_bytes(max(self.planned.host, 0))}: these weights pack worse than the Gaussian ones "
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
        for placement in self.placements:
            if placement.tier != "in_place" or not gpu:
                continue
            assert self.host
            if self.host.why_pageable:
                placement.tier = "streamed"
                continue
            assert placement.memory is not None
            self._filler.alias(placement, zero_copy(placement.memory))

    def _original(self, block: Block) -> torch.Tensor:
        """The table's weights in the host's arena."""
        assert self.host
        (entry,) = block.entries
        memory = self.host.take(unpacked_bytes(block))
        self.source.fill(entry, raw_view(entry, memory[: entry.n_bytes]))
        return memory

    def _whole(self, placement: BlockPlacement) -> torch.Tensor | None:
        """A table's weights as the device reads them; None where it can't, or where nothing is compared."""
        if placement.original is None or not placement.stored.table:
            return None
        gpu = self.streams.device.type == "cuda"
        if gpu and (self.host is None or self.host.why_pageable):
            return None
        (entry,) = placement.block.entries
        return raw_view(
            entry, (zero_copy(placement.original) if gpu else placement.original)[: entry.n_bytes]
        )

    def _into_vram(self) -> None:
        """One allocation for everything that stays in VRAM, filled."""
        self.vram = DeviceArena(self.vram_bytes, self.streams.device)
        self.streams.use(self.vram.whole)
        for placement in self.placements:
            if placement.tier in IN_VRAM:
                placement.memory = self.vram.take(placement.stored.n_bytes)
                self._filler.fill(placement, placement.memory)

    def _count_experts(self) -> None:
        """Have room for the table of addresses, even where a plan made by hand has none."""
        stored = [placement.stored for placement in self.placements if placement.tier in EXPERTS]
        self.experts_bytes = max(self.experts_bytes, table_bytes(stored)) if stored else 0

    def _place_experts(self, engine: Engine) -> None:
        """Let modules of experts find theirs by the table of a cache in VRAM."""
        placements = [placement for placement in self.placements if placement.tier in EXPERTS]
        if not placements:
            return
        assert self.vram
        assert self.host
        in_place = self.streams.device.type == "cuda" and not self.host.why_pageable
        groups: list[ExpertGroup] = []
        for placement in placements:
            assert placement.memory is not None
            seen = zero_copy(placement.memory) if in_place else placement.memory
            first = sum(len(group.experts) for group in groups)
            groups.append(make_group(placement.stored, placement.memory, seen, first))
        room = self.vram.take(self.experts_bytes)
        self.experts = PlacedExperts(groups, room, self.streams, engine.work)
        self.experts.install(self.origins)

    @property
    def vram_bytes(self) -> int:
        """Bytes of what stays in VRAM and of all staging and decode buffers, as the arena aligns them."""
        stays = sum(
            aligned(placement.stored.n_bytes) for placement in self.placements if placement.tier in IN_VRAM
        )
        buffers = self.staging_count * self.staging_bytes + self.decode_count * self.decode_bytes
        return stays + buffers + aligned(self.experts_bytes)

    @property
    def _beyond_plan(self) -> int:
        """Bytes of VRAM that are needed beyond what the plan counts; 0 without budgets.

        What is used between blocks of other cards was counted there. Buffers that a checkpoint has are
        counted with their blocks, and are beside the arena.
        """
        if self.planned is None:
            return 0
        planned = self.planned.blocks
        others = sum(
            aligned(placement.stored.n_bytes)
            for placement in self.placements
            if placement.block.name not in planned
        )
        beside = sum(
            max(planned.get(placement.block.name, 0) - placement.block.given_bytes, 0)
            for placement in self.placements
        )
        return self.vram_bytes + beside - self.planned.vram - others

    @property
    def movable_bytes(self) -> int:
        """Bytes of VRAM of blocks that stay there and could stream instead, and of cached experts."""
        blocks = sum(aligned(p.stored.n_bytes) for p in self.placements if p.can_stream_instead)
        return blocks + self.cached_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of VRAM of the cache of experts, without the table of addresses."""
        stored = [placement.stored for placement in self.placements if placement.tier in EXPERTS]
        return max(self.experts_bytes - table_bytes(stored), 0) if stored else 0

    def with_room(self, n_bytes: int) -> PlannedBytes:
        """What to take so that so many bytes of VRAM become free, or as many as can be.

        The cache of experts gives up first: a pass reads a missing expert only where it is chosen.
        """
        planned = self.planned or PlannedBytes(
            self.vram_bytes, UNLIMITED, {placement.block.name: 0 for placement in self.placements}
        )
        beyond = self._beyond_plan if self.planned else 0
        experts = self.experts_bytes - min(self.cached_bytes, n_bytes)
        experts -= experts % ALIGNMENT
        return replace(planned, vram=planned.vram + beyond - n_bytes, experts=experts, least=True)

    @property
    def staging_count(self) -> int:
        """How many staging buffers there are."""
        return max(self.pool.slots, 1)

    @property
    def decode_count(self) -> int:
        """How many decode buffers there are: none where the plan says that all products are fused."""
        return self.pool.scratches if self.fast else max(self.pool.scratches, 1)

    @property
    def _piece_bytes(self) -> int:
        """The most that is copied at once of a packed block; 0 where staging buffers hold whole ones."""
        return self.pool.slot_bytes if self.pool.pieces > 1 and self.decode_count else 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of each staging buffer: the largest block, or piece of one, that passes through it."""
        return max(
            (placement.staging_bytes for placement in self.placements if placement.tier in MOVING), default=0
        )

    @property
    def decode_bytes(self) -> int:
        """Bytes of each decode buffer: the largest block that is unpacked into one."""
        unpacked = (placement.decode_bytes for placement in self.placements if placement.tier not in EXPERTS)
        return max(unpacked, default=0)

    def _buffers(self, count: int, n_bytes: int) -> list[DeviceBuffer]:
        assert self.vram
        event = self.streams.event
        return [DeviceBuffer(self.vram.take(n_bytes), (event(), event(), event())) for _ in range(count)]

    def _move(self, engine: Engine) -> None:
        staging = self._buffers(self.staging_count, self.staging_bytes)
        decode_buffers = self._buffers(self.decode_count, self.decode_bytes)
        staged = unpacked = 0
        for placement in self.placements:
            if placement.tier in ("cpu", "in_place", *EXPERTS) or (
                placement.tier == "resident" and not placement.stored.is_unpacked
            ):
                continue
            decode_buffer, through = None, []
            if placement.tier not in IN_VRAM:
                pieces = len(placement.stored.pieces)
                through = [staging[(staged + nth) % len(staging)] for nth in range(pieces)]
                staged += pieces
            if placement.stored.is_unpacked and decode_buffers:
                decode_buffer, unpacked = decode_buffers[unpacked % len(decode_buffers)], unpacked + 1
            weight_source = placement.weight_source
            if weight_source is None:
                assert placement.memory is not None
                weight_source = WeightSource(placement.memory)
            engine.add(placement.stored, weight_source, through, decode_buffer, whole=self._whole(placement))

    @property
    def vram_asked(self) -> int:
        """Bytes of what stays in VRAM and of all staging and decode buffers, without alignment."""
        there = [placement.stored for placement in self.placements if placement.tier in IN_VRAM]
        stays = sum(item.n_bytes for stored in there for item in stored.items)
        stays += sum(stored.room for stored in there)
        staging, decode = self.staging_count, self.decode_count
        return stays + staging * self.staging_bytes + decode * self.decode_bytes + self.experts_bytes

    def require_capturable(self, hint: str) -> None:
        """Raise PlacementError, with this hint, where a pass can't be recorded as a graph."""
        why = self._uncapturable()
        if why:
            raise PlacementError(f"the model can't be captured: {why}", hint)

    def _uncapturable(self) -> str:
        """Why a pass can't be recorded as a graph; empty where it can."""
        tiers = {placement.tier for placement in self.placements}
        if self.streams.device.type != "cuda":
            return ""
        if tiers & {"cpu", "disk"}:
            return "some of its blocks compute on the host or are read from disk in each pass"
        if any(
            joins_its_weights(module) for placement in self.placements for module in placement.block.modules
        ):
            return "cuDNN joins weights of a recurrent module without biases where a graph would lose them"
        if self.experts is not None and not all(group.fused for group in self.experts.groups):
            return "its experts are modules of their own, which a graph would read where they no longer are"
        if self.host and self.host.used and self.host.why_pageable:
            return f"its host memory isn't pinned ({self.host.why_pageable})"
        return ""

    def taken(self) -> tuple[TierUse, ...]:
        """What each tier takes, in the order of `TIERS`."""
        return tuple(
            TierUse(
                tier,
                len(placements),
                sum(placement.block.given_bytes for placement in placements),
                sum(placement.stored.n_bytes for placement in placements),
            )
            for tier in TIERS
            if (placements := [placement for placement in self.placements if placement.tier == tier])
        )

    def clear(self) -> None:
        """Release the memory, as far as no tensor uses it."""
        if self.host is not None:
            self.host.release()
        self.placements.clear()
        self._filler.forget()
        self.host = self.vram = self.experts = None


@contextmanager
def memory_refusals(device: torch.device) -> Iterator[None]:
    """Let an allocation that torch refuses say what is free, and what to do."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
        raise PlacementError(
            f"the plan's VRAM was refused: {first_line(error)} "
            f"({binary_bytes(free)} of {binary_bytes(total)} are free)",
            "plan again with a smaller vram, or end other programs that use the GPU",
        ) from None
