"""Which tier each block goes to: the sizes of the rings are tried, the counts are an integer program's. Pure.

Blocks that cost the same are one group, so a model of 80 layers is a program of a few groups. The tiers of a
group are then spread evenly over its blocks, so that copies can run while resident blocks compute.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from probes.placement.models.description import BlockDescription
from probes.placement.planner.constants import Constants
from probes.placement.planner.costs import Option, Pass, options
from probes.placement.planner.integers import Choice, Counts, Group, Program, solve
from probes.placement.planner.timeline import Timeline, simulate
from probes.placement.values import Rings, Tier

MOST_SIZES: Final = 7  # of each ring that are tried
LANES: Final = 5  # of an option
SMALL: Final = 0.02  # of the largest block: no ring is made for smaller ones
MOST_SLOTS: Final = 4
WORTH_A_SLOT: Final = 0.01  # of the time that one more slot must save


@dataclass(frozen=True)
class Limits:
    """Bytes that weights, rings, keys and values may take, and host memory, of it pinned."""

    vram: int
    host: int
    pinned: int


@dataclass(frozen=True)
class Found:
    """The option of each block, in call order, and the rings they need."""

    chosen: tuple[Option, ...]
    rings: Rings
    timeline: Timeline
    gap: float  # a better choice of counts can save this share of the busiest lane's time at most


@dataclass(frozen=True)
class Kind:
    """Blocks that cost the same, by their places in call order."""

    places: tuple[int, ...]
    options: tuple[Option, ...]


def kinds(blocks: Sequence[BlockDescription], machine: Constants, work: Pass) -> tuple[Kind, ...]:
    """The blocks by cost."""
    places: dict[object, list[int]] = {}
    for place, block in enumerate(blocks):
        places.setdefault(block.kind, []).append(place)
    return tuple(Kind(tuple(found), options(blocks[found[0]], machine, work)) for found in places.values())


def search(found: Sequence[Kind], limits: Limits) -> Found | None:
    """The best choice within the limits, using the disk only if the host is too small; None if none fits."""
    return _quickest(_without(found, "disk"), limits) or _quickest(found, limits)


def _quickest(found: Sequence[Kind], limits: Limits) -> Found | None:
    """The best by simulation: with a few slots, copies stand still while the CPU computes for long."""
    tried = [_best(found, limits), _best(_without(found, "cpu"), limits)]
    return min((one for one in tried if one), key=lambda one: one.timeline.seconds, default=None)


def _without(found: Sequence[Kind], tier: Tier) -> list[Kind]:
    return [replace(kind, options=tuple(o for o in kind.options if o.tier != tier)) for kind in found]


def _best(found: Sequence[Kind], limits: Limits) -> Found | None:
    best: tuple[Counts, Sequence[Kind], Rings] | None = None
    for slot, scratch in _sizes(found):
        tried = _with_rings(found, limits, slot, scratch, better_than=best[0].cost if best else math.inf)
        best = tried or best
    if best is None:
        return None
    counts, allowed, rings = best
    chosen = _spread(allowed, counts)
    left = limits.vram - ring_bytes(rings) - sum(option.vram_bytes for option in chosen)
    return _with_more_slots(Found(chosen, rings, simulate(chosen, rings), counts.gap), left)


def _with_rings(
    found: Sequence[Kind], limits: Limits, slot: int, scratch: int, *, better_than: float
) -> tuple[Counts, Sequence[Kind], Rings] | None:
    """The best counts with rings of these sizes, which shrink to what those counts use."""
    best = None
    while True:
        allowed = [
            replace(kind, options=_undominated(_fitting(kind.options, slot, scratch))) for kind in found
        ]
        rings = Rings(2 if slot else 0, slot, 1 if scratch else 0, scratch)
        counts = solve(_program(allowed, rings, limits), better_than=better_than)
        if counts is None:
            return best
        best, better_than = (counts, allowed, rings), counts.cost * (1 + 1e-9)
        used = [
            option
            for kind, numbers in zip(allowed, counts.counts, strict=True)
            for option, number in zip(kind.options, numbers, strict=True)
            if number
        ]
        smaller = max(o.slot_bytes for o in used), max(o.scratch_bytes for o in used)
        if smaller == (slot, scratch):
            return best
        slot, scratch = smaller


def _fitting(found: Sequence[Option], slot: int, scratch: int) -> list[Option]:
    return [option for option in found if option.slot_bytes <= slot and option.scratch_bytes <= scratch]


def ring_bytes(rings: Rings) -> int:
    """Bytes of VRAM that the rings take."""
    return rings.slots * rings.slot_bytes + rings.scratches * rings.scratch_bytes


def _program(found: Sequence[Kind], rings: Rings, limits: Limits) -> Program:
    groups = tuple(
        Group(len(kind.places), tuple(Choice(option.lanes, option.memories) for option in kind.options))
        for kind in found
    )
    staging = 2 * rings.slot_bytes if any(o.tier == "disk" for kind in found for o in kind.options) else 0
    room = (limits.vram - ring_bytes(rings), limits.host - staging, limits.pinned - staging)
    return Program(groups, (0.0,) * LANES, tuple(float(n) for n in room))


def _sizes(found: Sequence[Kind]) -> Iterator[tuple[int, int]]:
    """Sizes of slot and scratch that are tried: of no use are others than some block's own."""
    slots = _few({option.slot_bytes for kind in found for option in kind.options})
    scratches = _few({option.scratch_bytes for kind in found for option in kind.options})
    yield from ((slot, scratch) for slot in slots for scratch in scratches)


def _few(sizes: set[int]) -> list[int]:
    """Nothing, the largest, and some in between."""
    ordered = sorted({0} | {size for size in sizes if size >= SMALL * max(sizes)})
    if len(ordered) <= MOST_SIZES:
        return ordered
    return sorted({ordered[round(i * (len(ordered) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)})


def _undominated(found: Sequence[Option]) -> tuple[Option, ...]:
    """The options for which no other takes less or the same of everything."""
    kept: list[Option] = []
    for option in found:
        mine = (*option.lanes, *option.memories)
        others = ((*other.lanes, *other.memories) for other in found if other is not option)
        worse = any(
            all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in others
        )
        if not worse and not any((*k.lanes, *k.memories) == mine for k in kept):
            kept.append(option)
    return tuple(kept)


def _spread(found: Sequence[Kind], counts: Counts) -> tuple[Option, ...]:
    """The option of each block: within a kind, each option's blocks are evenly apart."""
    chosen: dict[int, Option] = {}
    for kind, numbers in zip(found, counts.counts, strict=True):
        given = [0] * len(numbers)
        for nth, place in enumerate(kind.places, start=1):
            behind = [n * nth / len(kind.places) - g for n, g in zip(numbers, given, strict=True)]
            pick = max((i for i, n in enumerate(numbers) if given[i] < n), key=behind.__getitem__)
            given[pick] += 1
            chosen[place] = kind.options[pick]
    return tuple(chosen[place] for place in sorted(chosen))


def _with_more_slots(found: Found, left: int) -> Found:
    """More slots and a second scratch, where there is room and the pass gets shorter by it."""
    for _ in range(MOST_SLOTS):
        rings = found.rings
        grown = [
            replace(rings, slots=rings.slots + 1) if rings.slots and rings.slots < MOST_SLOTS else None,
            replace(rings, scratches=2) if rings.scratches == 1 else None,
        ]
        tried = [
            replace(found, rings=one, timeline=simulate(found.chosen, one))
            for one in grown
            if one and ring_bytes(one) - ring_bytes(rings) <= left
        ]
        best = min(tried, key=lambda one: one.timeline.seconds, default=found)
        if best.timeline.seconds > found.timeline.seconds * (1 - WORTH_A_SLOT):
            return found
        left -= ring_bytes(best.rings) - ring_bytes(rings)
        found = best
    return found
