"""Which blocks leave VRAM when weights take more bytes there than their plan counts. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from probes.placement.planner.footprint import rounded
from probes.placement.values import IN_VRAM, Plan


@dataclass(frozen=True)
class Counted:
    """What a plan with budgets counts, in bytes."""

    vram: int  # of weights, slots and scratch buffers, as torch's allocator rounds them up
    host: int  # that blocks may take in host memory, except those that the CPU computes
    blocks: Mapping[str, int]  # those that it counts, with the bytes of the model in VRAM

    @staticmethod
    def of(plan: Plan) -> "Counted | None":
        """What this plan counts; None for one without budgets, which was made by hand."""
        if not plan.vram_budget:
            return None
        arena = plan.vram.weights + plan.vram.slots + plan.vram.scratch
        moving = sum(block.host_bytes for block in plan.blocks if block.tier != "cpu")
        return Counted(
            min(rounded(arena), arena + plan.vram.rounding),
            plan.host_budget - plan.host.total + moving,
            {block.name: block.weight_bytes if block.tier in IN_VRAM else 0 for block in plan.blocks},
        )


@dataclass(frozen=True)
class Candidate:
    """A block that can stream instead. Bytes."""

    place: int  # among all blocks
    freed: int  # in VRAM
    slot: int  # that each slot must have for it
    packed: bool  # it was planned to be packed in VRAM


@dataclass(frozen=True)
class Slots:
    """How many slots there are, and the bytes of each."""

    count: int
    n_bytes: int


def spilled(candidates: Sequence[Candidate], over: int, slots: Slots) -> list[Candidate] | None:
    """The blocks to move so that VRAM needs `over` bytes less; None where all of them aren't enough.

    Others than packed ones are moved only with all of those that pass through the same slots.
    """
    packed = [one for one in candidates if one.packed]
    for usable in (packed, candidates):
        size = _slot_for(usable, over, slots)
        if size is None:
            continue
        wanted = over + slots.count * (size - slots.n_bytes)
        if usable is packed:
            return _few([one for one in packed if one.slot <= size], wanted)
        first = [one for one in packed if one.slot <= size]
        others = [one for one in candidates if not one.packed and one.slot <= size]
        return first + _few(others, wanted - sum(one.freed for one in first))
    return None


def _slot_for(candidates: Sequence[Candidate], over: int, slots: Slots) -> int | None:
    """Bytes of the smallest slot for which all that pass through it are enough, larger slots counted."""

    def needed(one: Candidate) -> int:
        return max(one.slot, slots.n_bytes)

    freed = 0
    for size, alike in groupby(sorted(candidates, key=needed), key=needed):
        freed += sum(one.freed for one in alike)
        if freed >= over + slots.count * (size - slots.n_bytes):
            return size
    return None


def _few(usable: Sequence[Candidate], wanted: int) -> list[Candidate]:
    """The smallest block that is enough, else the largest, and again for the rest."""
    left, found = sorted(usable, key=lambda one: one.freed), list[Candidate]()
    while wanted > 0:
        found.append(left.pop(min(bisect_left(left, wanted, key=lambda one: one.freed), len(left) - 1)))
        wanted -= found[-1].freed
    return found
