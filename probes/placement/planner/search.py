"""Which tier each block goes to: the sizes of the rings are tried, the counts are an integer program's. Pure.

Blocks that cost the same are one group, so a model of 80 layers is a program of a few groups. The tiers of a
group are then spread evenly over its blocks, so that copies can run while resident blocks compute.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from probes.placement.planner.blockkinds import Kind, exactly, options_by_block, undominated
from probes.placement.planner.costs import Option
from probes.placement.planner.polish import (
    MANY_BLOCKS,
    MOST_STEPS,
    Limits,
    Placed,
    placed,
    polished,
    ring_bytes,
    rings_room,
)
from probes.placement.planner.solver.integers import Choice, Counts, Group, Program, solve
from probes.placement.planner.timeline import Timeline, simulate
from probes.placement.split import spread
from probes.placement.values import Rings, Tier

MOST_SIZES: Final = 7  # of each ring that are tried
FEWER_SIZES: Final = 4  # where there are many kinds
MANY_KINDS: Final = 6
ROOMY: Final = 0.5  # of the host memory: as long as more than that is free, the disk has no use
WORTH_A_DISK: Final = 0.01  # of the time, that the disk must save
LANES: Final = 5  # of an option
NEARLY: Final = 1.05  # times the least that lanes take: counts that are about as good
SIMULATED: Final = 6  # such counts that are simulated
FEW_ENOUGH: Final = 1_000  # blocks, of which that takes less than a tenth of a second
SMALL_RINGS: Final = 0.002  # of VRAM, that the largest rings take: none of other sizes is tried
SMALL: Final = 0.005  # of the largest block: no ring is made for smaller ones
WORTH_POLISHING: Final = 0.002  # of what the integer program promises, that a pass takes longer
MOST_POLISHED: Final = 6  # placements, the quickest ones
# Tiers without which a search is made too; the plan is the one that the simulation finds quickest.
LEFT_OUT: Final[tuple[tuple[Tier, ...], ...]] = (
    (),
    ("cpu",),
    ("packed", "streamed_packed"),
    ("in_place",),
    ("streamed", "streamed_packed"),
    ("cpu", "packed", "streamed_packed", "in_place"),
)
# A link that waits for slots isn't always busy: counts are also looked for as if it took so much longer.
LONGER: Final = (1.06, 1.15, 1.3)
SLOTS_OF_PIECES: Final = (2, 3)
# Where there are many kinds each search takes long, so fewer are made.
LONGER_OF_MANY: Final = LONGER[1:2]
SLOTS_OF_MANY: Final = SLOTS_OF_PIECES[1:]
ROOM_OF_A_SLOT: Final = 0.02  # of the memory that a slot takes, from which one fewer is worth a search
LEFT_OUT_OF_MANY: Final = (LEFT_OUT[0], LEFT_OUT[3], LEFT_OUT[-1])
# Python's time differs from host to host beside the same GPU, and from minute to minute: by up to 2.5.
QUICKER: Final = (0.6, 0.8)  # of it, on hosts for which a plan shall do as well, the first that is possible
STEADIER: Final = 1.02  # of the shortest time, that a plan may take which does better there
HANDED_OVER: Final = 0.7  # share of a pass that is Python's, from which on that is looked at


Used: TypeAlias = tuple[tuple[tuple[Option, int], ...], ...]


@dataclass(frozen=True)
class Found:
    """The option of each block, in call order, with the rings they need and the pass that follows."""

    chosen: tuple[Option, ...]
    rings: Rings
    timeline: Timeline
    gap: float  # a better choice of counts can save this share of the busiest lane's time at most


def search(found: Sequence[Kind], limits: Limits) -> Found | None:
    """The quickest placement within the limits that is found; None where nothing fits.

    Reading from the disk in each pass has to be worth it: something else is the plan unless it takes longer.
    """
    memory_only = _quickest(_without(found, ("disk",)), limits)
    if (
        memory_only
        and sum(o.pinned_bytes + o.pageable_bytes for o in memory_only.chosen) < ROOMY * limits.host
    ):
        return memory_only
    with_disk = _quickest(found, limits)
    if memory_only is None or with_disk is None:
        return memory_only or with_disk
    worth = with_disk.timeline.seconds < memory_only.timeline.seconds * (1 - WORTH_A_DISK)
    return with_disk if worth else memory_only


def steadier(best: Found, found: Sequence[Kind], limits: Limits) -> Found:
    """The best placement, or one that takes hardly longer and gains more where Python is quicker.

    While a pass waits for Python, a link that is nearly as busy costs nothing. On a quicker host the pass
    waits for that.
    """
    launch = sum(option.launch_s for option in best.chosen)
    if len(best.chosen) > MANY_BLOCKS or launch < HANDED_OVER * best.timeline.seconds:
        return best
    by_place = options_by_block(found)
    for share in QUICKER if len(found) <= MANY_KINDS else QUICKER[:1]:
        quick = search([_with_quicker_python(kind, share) for kind in found], limits)
        if quick is None:
            continue
        same = (next(o for o in by_place[at] if o.way == one.way) for at, one in enumerate(quick.chosen))
        chosen = tuple(same)
        other = Found(chosen, quick.rings, simulate(chosen, quick.rings, replayed=limits.replayed), quick.gap)
        there = simulate(_quicker(best.chosen, share), best.rings, replayed=limits.replayed)
        loses, gains = other.timeline.seconds / best.timeline.seconds, there.seconds / quick.timeline.seconds
        if loses <= STEADIER and loses < gains:
            return other
    return best


def _quicker(options: Sequence[Option], share: float) -> tuple[Option, ...]:
    return tuple(replace(option, launch_s=share * option.launch_s) for option in options)


def _with_quicker_python(kind: Kind, share: float) -> Kind:
    members = tuple(_with_quicker_python(member, share) for member in kind.members)
    return replace(kind, options=_quicker(kind.options, share), members=members)


def _quickest(found: Sequence[Kind], limits: Limits) -> Found | None:
    """The best by simulation among the best counts with all tiers, and without some, each improved.

    The integer program takes lanes for independent. With a few slots they aren't: copies stand still while
    one block is computed or unpacked for long.
    """
    starts, promised = _starts(found, limits)
    if not starts:  # the budget is so tight that no split of the search came to whole counts
        tight = anything(found, limits)
        made = polished(tight, options_by_block(found), limits) if tight else None
        return _found(made, limits, gap=1.0) if made else None
    best, gap = min(((one, counts.gap) for one, counts in starts), key=lambda one: one[0].timeline.seconds)
    if best.timeline.seconds > promised * (1 + WORTH_POLISHING):
        each = {id(one): one for one, _ in starts}.values()
        different = sorted(each, key=lambda one: one.timeline.seconds)[:MOST_POLISHED]
        choices, steps = options_by_block(found), MOST_STEPS // len(different)
        best = min(
            (polished(one, choices, limits, steps=steps) for one in different),
            key=lambda one: one.timeline.seconds,
        )
    return _found(best, limits, gap=gap)


def _starts(found: Sequence[Kind], limits: Limits) -> tuple[list[tuple[Placed, Counts]], float]:
    """Placements to begin with, and the least time that the program promises."""
    few = len(found) <= MANY_KINDS
    left_out, longer_by = (LEFT_OUT, LONGER) if few else (LEFT_OUT_OF_MANY, LONGER_OF_MANY)
    known: dict[Used, Placed | None] = {}
    whole = [replace(kind, options=tuple(o for o in kind.options if o.pieces < 2)) for kind in found]
    starts = [_best(_without(whole, tiers), limits, known) for tiers in left_out]
    if any(one[0].rings.slot_bytes > ROOM_OF_A_SLOT * limits.vram for one in starts if one):
        starts.append(_best(whole, limits, known, slots=1))
        used = {(one[0].rings.slot_bytes, one[0].rings.scratch_bytes) for one in starts if one}
        starts += [
            _best(whole, limits, known, slots=slots, longer=longer, sizes=used)
            for longer, slots in itertools.product(longer_by, (1, 2))
        ]
    pieces = {option.slot_bytes for kind in found for option in kind.options if option.pieces > 1}
    if of_pieces := [size for size in _sizes(found, limits) if size[0] in pieces]:
        starts += [
            _best(found, limits, known, slots=slots, longer=longer, sizes=of_pieces)
            for longer, slots in itertools.product(
                (1.0, *longer_by), SLOTS_OF_PIECES if few else SLOTS_OF_MANY
            )
        ]
        starts += [_best(_without(found, tiers), limits, known, sizes=of_pieces) for tiers in left_out[1:]]
    found_any = [one for one in starts if one]
    return found_any, min((counts.cost for _, counts in found_any), default=0.0)


def _found(best: Placed, limits: Limits, *, gap: float) -> Found:
    timeline = best.timeline
    if not timeline.raw:  # only windows of it were simulated
        timeline = simulate(best.chosen, best.rings, replayed=limits.replayed)
    return Found(best.chosen, best.rings, timeline, gap)


def anything(found: Sequence[Kind], limits: Limits) -> Placed | None:
    """Some placement within the limits, however slow; None where nothing fits."""
    for allowed, counts in _timeless(found, limits):
        if made := placed(_spread(allowed, counts), limits):
            return made
    return None


def fits(found: Sequence[Kind], limits: Limits) -> bool:
    """Whether there is some placement within the limits."""
    for allowed, counts in _timeless(found, limits):
        room = rings_room([(option, n) for used in _used(allowed, counts) for option, n in used], limits)
        if room and room[0] + room[1] <= room[2]:
            return True
    return False


def _timeless(found: Sequence[Kind], limits: Limits) -> Iterator[tuple[list[Kind], Counts]]:
    """For each size of the rings, counts that fit it, however slow."""
    for slot, scratch in _sizes(found, limits):
        allowed = [replace(kind, options=tuple(_fitting(kind.options, slot, scratch))) for kind in found]
        program = _program(allowed, Rings(2 if slot else 0, slot, 1 if scratch else 0, scratch), limits)
        timeless = tuple(
            replace(group, choices=tuple(Choice((0.0,), choice.memories) for choice in group.choices))
            for group in program.groups
        )
        counts = solve(Program(timeless, (1.0,), program.limits))
        if counts:
            yield allowed, counts


def _without(found: Sequence[Kind], tiers: Sequence[Tier]) -> list[Kind]:
    return [replace(kind, options=tuple(o for o in kind.options if o.tier not in tiers)) for kind in found]


def _best(
    found: Sequence[Kind],
    limits: Limits,
    known: dict[Used, Placed | None],
    *,
    slots: int = 2,
    longer: float = 1.0,
    sizes: Collection[tuple[int, int]] = (),
) -> tuple[Placed, Counts] | None:
    """The best counts, placed. `known` has what was placed before, by what is used of each kind.

    `longer`: how much longer the link is taken to be busy. `sizes`: of rings, all by default.

    Lanes don't show that small blocks wait more often and that large ones need large buffers. So of a few
    counts with which lanes take about the same time, the simulation decides, unless there are many blocks.
    """
    least, tried = math.inf, []
    for slot, scratch in sorted(sizes or _sizes(found, limits), reverse=True):
        if one := _with_rings(found, limits, Rings(slots, slot, 1, scratch), longer, better_than=least):
            tried.append(one)
            least = one[0].cost
    simulated = SIMULATED if sum(len(kind.places) for kind in found) <= FEW_ENOUGH else 1
    made = []
    for counts, allowed in tried[: -simulated - 1 : -1]:  # each is better than the one before
        if counts.cost > least * NEARLY:
            break
        used = _used(allowed, counts)
        if used not in known:
            ways = [_spread(allowed, counts, early=early) for early in sorted({False, limits.replayed})]
            made_of_it = filter(None, (placed(chosen, limits) for chosen in ways))
            known[used] = min(made_of_it, key=lambda one: one.timeline.seconds, default=None)
        if (fitting := known[used]) is not None:
            made.append((fitting, counts))
    return min(made, key=lambda one: one[0].timeline.seconds, default=None)


def _used(found: Sequence[Kind], counts: Counts) -> Used:
    """The options that are used of each kind, and how often."""
    return tuple(
        tuple((option, n) for option, n in zip(kind.options, numbers, strict=True) if n)
        for kind, numbers in zip(found, counts.counts, strict=True)
    )


def _with_rings(
    found: Sequence[Kind], limits: Limits, rings: Rings, longer: float, *, better_than: float
) -> tuple[Counts, Sequence[Kind]] | None:
    """The best counts with rings of these sizes, which shrink to what those counts use."""
    best, slot, scratch = None, rings.slot_bytes, rings.scratch_bytes
    while True:
        allowed = [
            replace(kind, options=undominated(_fitting(kind.options, slot, scratch))) for kind in found
        ]
        rings = Rings(rings.slots if slot else 0, slot, 1 if scratch else 0, scratch)
        counts = solve(_program(allowed, rings, limits, longer), better_than=better_than)
        if counts is None:
            return best
        best, better_than = (counts, allowed), counts.cost * (1 + 1e-9)
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


def _program(found: Sequence[Kind], rings: Rings, limits: Limits, longer: float = 1.0) -> Program:
    groups = tuple(
        Group(
            len(kind.places),
            tuple(Choice(option.lanes_if(longer), option.memories) for option in kind.options),
        )
        for kind in found
    )
    staging = 2 * rings.slot_bytes if any(o.tier == "disk" for kind in found for o in kind.options) else 0
    room = (limits.vram - ring_bytes(rings), limits.host - staging, limits.pinned - staging)
    return Program(groups, (0.0,) * LANES, tuple(float(n) for n in room))


def _sizes(found: Sequence[Kind], limits: Limits) -> Iterator[tuple[int, int]]:
    """Sizes of slot and scratch that are tried: of no use are others than some block's own.

    Where the largest take next to nothing of VRAM, smaller ones would save nothing. Where some block has no
    option, no size is of use.
    """
    if not all(kind.options for kind in found):
        return
    slot = max(option.slot_bytes for kind in found for option in kind.options)
    scratch = max(option.scratch_bytes for kind in found for option in kind.options)
    if 2 * slot + scratch < SMALL_RINGS * limits.vram:
        yield from dict.fromkeys(((0, 0), (slot, scratch)))
        return
    most = MOST_SIZES if len(found) <= MANY_KINDS else FEWER_SIZES
    slots = _few({option.slot_bytes for kind in found for option in kind.options}, most)
    scratches = _few({option.scratch_bytes for kind in found for option in kind.options}, most)
    yield from ((slot, scratch) for slot in slots for scratch in scratches)


def _few(sizes: set[int], most: int) -> list[int]:
    """Nothing, the largest, and some in between."""
    ordered = sorted({0} | {size for size in sizes if size >= SMALL * max(sizes)})
    ordered = [
        size
        for size, next_one in zip(ordered, [*ordered[1:], math.inf], strict=True)
        if next_one > 1.01 * size
    ]
    if len(ordered) <= most:
        return ordered
    return sorted({ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)})


def _spread(found: Sequence[Kind], counts: Counts, *, early: bool = False) -> tuple[Option, ...]:
    """The option of each block: within a kind, each option's blocks are evenly apart.

    First those that are longest on the link, then those that are unpacked. The last block of a kind is
    the first to be one of them, or the first block is (`early`).
    """
    chosen: dict[int, Option] = {}
    for kind, used in zip(found, _used(found, counts), strict=True):
        left = kind.places[:: -1 if early else 1]
        for option, number in sorted(used, key=lambda one: (-one[0].copy_s, -one[0].unpack_s)):
            picked = set(spread(len(left), number))
            chosen.update((place, option) for nth, place in enumerate(left) if nth in picked)
            left = tuple(place for nth, place in enumerate(left) if nth not in picked)
    exactly(found, chosen)
    return tuple(chosen[place] for place in range(len(chosen)))
