"""Which tier each block goes to: the sizes of the rings are tried, the counts are an integer program's. Pure.

Blocks that cost the same are one group, so a model of 80 layers is a program of a few groups. The tiers of a
group are then spread evenly over its blocks, so that copies can run while resident blocks compute.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from probes.placement.planner.blockkinds import Kind, exactly, options_by_block, undominated
from probes.placement.planner.costs.option import Option
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
from probes.placement.planner.solver.integers import Choice, Counts, Group, Program, Search, solve
from probes.placement.planner.timeline import ARRIVAL_S, RELEASE_S, Timeline, simulate
from probes.placement.split import spread
from probes.placement.values import Rings, Tier

MOST_SIZES: Final = 7  # of each ring that are tried
ALIKE: Final = 1.1  # times a size: of those that are as alike, the largest is tried
SLOTS: Final = (1, 2, 4)  # that there is room for while blocks are counted
MOST_WAYS: Final = 60  # in which the best counts are looked for, the most promising ones
ROOMY: Final = 0.5  # of the host memory: as long as more than that is free, the disk has no use
WORTH_A_DISK: Final = 0.01  # of the time, that the disk must save
LANES: Final = 5  # of an option
SMALL_RINGS: Final = 0.002  # of VRAM, that the largest rings take: none of other sizes is tried
SMALL: Final = 0.005  # of the largest block: no ring is made for smaller ones
WORTH_POLISHING: Final = 0.002  # of what the integer program promises, that a pass takes longer
MOST_POLISHED: Final = 6  # placements, the quickest ones
# Tiers without which counts are looked for too; the plan is the one that the simulation finds quickest.
LEFT_OUT: Final[tuple[tuple[Tier, ...], ...]] = (
    ("cpu",),
    ("packed", "streamed_packed"),
    ("in_place",),
    ("streamed", "streamed_packed"),
    ("cpu", "packed", "streamed_packed", "in_place"),
)
LEFT_OUT_OF_MANY: Final = (LEFT_OUT[2], LEFT_OUT[-1])  # of very many blocks, of which each search takes long
# A link that waits for slots isn't always busy: counts are also looked for as if it took so much longer.
LONGER: Final = (1.06, 1.15, 1.3)
VARIED: Final = 5  # rings, the two best and those of other sizes, for which that is done
NEARBY: Final = 1.3  # times a size: those within are tried where the size is one of the two best
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
    if len(best.chosen) > MANY_BLOCKS or launch <= HANDED_OVER * best.timeline.seconds:
        return best
    by_place = options_by_block(found)
    for share in QUICKER:
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
    """The best by simulation among the best counts for many rings, and without some tiers, each improved.

    The integer program takes lanes for independent. With a few slots they aren't: copies stand still while
    one block is computed or unpacked for long.
    """
    starts = _Starts(found, limits)
    starts.of_all_rings()
    if not starts.made:  # the budget is so tight that no split of the search came to whole counts
        tight = anything(found, limits)
        made = polished(tight, options_by_block(found), limits) if tight else None
        return _found(made, limits, gap=1.0) if made else None
    if starts.may_be_better():
        starts.of_the_best_rings()
    best, gap = starts.made[0].placed, starts.made[0].counts.gap
    if starts.may_be_better():
        different = [start.placed for start in starts.made[:MOST_POLISHED]]
        choices, steps = options_by_block(found), MOST_STEPS // len(different)
        best = min((polished(one, choices, limits, steps=steps) for one in different), key=_seconds)
    return _found(best, limits, gap=gap)


def _seconds(one: Placed) -> float:
    return one.seconds


@dataclass(frozen=True)
class _Way:
    """How counts are looked for."""

    rings: Rings
    least: int = 0  # bytes of the slot that a block which moves needs at least
    longer: float = 1.0  # times, that the link is taken to be busy with copies
    without: tuple[Tier, ...] = ()


@dataclass(frozen=True)
class _Start:
    """Counts, how they were found, and their blocks placed."""

    counts: Counts
    way: _Way
    placed: Placed


class _Starts:
    """Placements to begin with, of different counts, the quickest first."""

    def __init__(self, found: Sequence[Kind], limits: Limits) -> None:
        self._found, self._limits = found, limits
        self.made: list[_Start] = []
        self.promised = math.inf  # the least time that the program promises
        self._known: set[Used] = set()
        self._undominated: dict[tuple[int, ...], Kind] = {}

    @property
    def _least(self) -> float:
        return self.made[0].placed.seconds if self.made else math.inf

    def may_be_better(self) -> bool:
        """Whether a pass may take notably less time than the best so far."""
        return self._least > self.promised * (1 + WORTH_POLISHING)

    def of_all_rings(self) -> None:
        """The best counts for each of the rings that promise less than the best placement so far takes."""
        waiting: list[tuple[float, int, _Allowed]] = []
        ticket, seen = itertools.count(), set()

        def wait(way: _Way) -> None:
            one = self._allowed(way)
            if (way.rings, one.moving) not in seen:
                seen.add((way.rings, one.moving))
                heapq.heappush(waiting, (one.search.promise, next(ticket), one))

        for rings in _rings(self._found, self._limits):
            wait(_Way(rings))
        self.promised = waiting[0][0] if waiting else math.inf
        for _ in range(MOST_WAYS):
            if not waiting or waiting[0][0] >= self._least:
                break
            _, _, allowed = heapq.heappop(waiting)
            rings = allowed.way.rings
            smaller = self._try(allowed, better_than=self._least)
            if not _notable(rings.slot_bytes, rings.scratch_bytes, self._limits):
                continue
            if smaller:
                wait(replace(allowed.way, rings=smaller))
            if not allowed.way.least:  # promises no more than this, so it isn't looked at before
                wait(replace(allowed.way, least=rings.slot_bytes // 2))

    def of_the_best_rings(self) -> None:
        """Counts for those as if the link took longer, without tiers that the best uses, in sizes nearby."""
        first = self.made[0].placed.chosen
        used = {option.tier for option in first}
        each_size = {start.way.rings.slot_bytes: start.way for start in reversed(self.made)}
        ranked = list(dict.fromkeys(start.way for start in self.made))
        different = sorted(each_size.values(), key=ranked.index)
        best = list(dict.fromkeys((*ranked[:2], *different)))[:VARIED]
        promising = min(self.made, key=lambda start: start.counts.cost).way
        if len(first) > MANY_BLOCKS:
            for tiers in LEFT_OUT_OF_MANY:
                self._try(self._allowed(replace(promising, without=tiers)))
            return
        ways = [replace(way, longer=longer) for way in best for longer in LONGER]
        others = dict.fromkeys((promising, *best[:2]))
        ways += [replace(way, without=t) for t in LEFT_OUT if used & set(t) for way in others]
        slots = {option.slot_bytes for kind in self._found for option in kind.options}
        for way in best[:2]:
            slot, scratch = way.rings.slot_bytes, way.rings.scratch_bytes
            near = (size for size in slots if size != slot and slot < NEARBY * size < NEARBY**2 * slot)
            ways += [replace(way, rings=_with_sizes(way.rings, size, scratch)) for size in near]
        for way in ways:
            self._try(self._allowed(way))

    def _try(self, allowed: "_Allowed", better_than: float = math.inf) -> Rings | None:
        """Place the best counts. The rings that they need, if there are any counts."""
        counts = allowed.search.run(better_than)
        if counts is None:
            return None
        used = _used(allowed.kinds, counts)
        if used not in self._known:
            self._known.add(used)
            ways = (_spread(allowed.kinds, counts, early=e) for e in sorted({False, self._limits.replayed}))
            made = filter(None, (placed(chosen, self._limits) for chosen in ways))
            if best := min(made, key=_seconds, default=None):
                self.made.append(_Start(counts, allowed.way, best))
                self.made.sort(key=lambda start: start.placed.seconds)
        every = [option for one in used for option, _ in one]
        rings, slot = allowed.way.rings, max(o.slot_bytes for o in every)
        return _with_sizes(rings, slot, max(o.scratch_bytes for o in every))

    def _allowed(self, way: _Way) -> "_Allowed":
        made = []
        for nth, kind in enumerate(self._found):
            fitting = _fitting(kind.options, way.rings.slot_bytes, way.rings.scratch_bytes)
            fitting = [o for o in fitting if not 0 < o.slot_bytes < way.least and o.tier not in way.without]
            key = (nth, *map(id, fitting))
            if key not in self._undominated:
                self._undominated[key] = replace(kind, options=undominated(fitting))
            made.append(self._undominated[key])
        return _Allowed(way, made, Search(_program(made, way.rings, self._limits, way.longer)))


@dataclass(frozen=True)
class _Allowed:
    """The options of each kind that are of use on a way, and the search for counts of them."""

    way: _Way
    kinds: Sequence[Kind]
    search: Search

    @property
    def moving(self) -> frozenset[int]:
        """The sizes of slots that blocks need which may move."""
        return frozenset(option.slot_bytes for kind in self.kinds for option in kind.options)


def _found(best: Placed, limits: Limits, *, gap: float) -> Found:
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


def _used(found: Sequence[Kind], counts: Counts) -> Used:
    """The options that are used of each kind, and how often."""
    return tuple(
        tuple((option, n) for option, n in zip(kind.options, numbers, strict=True) if n)
        for kind, numbers in zip(found, counts.counts, strict=True)
    )


def _fitting(found: Sequence[Option], slot: int, scratch: int) -> list[Option]:
    return [option for option in found if option.slot_bytes <= slot and option.scratch_bytes <= scratch]


def _program(found: Sequence[Kind], rings: Rings, limits: Limits, longer: float = 1.0) -> Program:
    """The integer program; `longer`: how many times as long the link is taken to be busy with copies."""
    groups = tuple(
        Group(
            len(kind.places),
            tuple(Choice(_lanes(option, rings.slots, longer), option.memories) for option in kind.options),
        )
        for kind in found
    )
    staging = 2 * rings.slot_bytes if any(o.tier == "disk" for kind in found for o in kind.options) else 0
    room = (limits.vram - ring_bytes(rings), limits.host - staging, limits.pinned - staging)
    return Program(groups, (0.0,) * LANES, tuple(float(n) for n in room))


def _lanes(option: Option, slots: int, longer: float) -> tuple[float, ...]:
    """Seconds of the lanes, with what it takes to wait for copies and for slots.

    A slot holds a block from the begin of its copy until it has been unpacked or computed.
    """
    if not option.copy_s:
        return option.lanes
    device, link, *others = option.lanes
    waits = option.pieces * ARRIVAL_S
    held = option.copy_s + waits + option.pieces * RELEASE_S + (option.unpack_s or option.compute_s)
    return (device + waits, link + max(longer * option.copy_s, held / slots) - option.copy_s, *others)


def _rings(found: Sequence[Kind], limits: Limits) -> Iterator[Rings]:
    for slot, scratch in _sizes(found, limits):
        for slots in SLOTS if _notable(slot, scratch, limits) else SLOTS[-1:]:
            yield _with_sizes(Rings(slots), slot, scratch)


def _notable(slot: int, scratch: int, limits: Limits) -> bool:
    """Whether rings of these sizes take a notable share of VRAM."""
    return 2 * slot + scratch >= SMALL_RINGS * limits.vram


def _with_sizes(rings: Rings, slot: int, scratch: int) -> Rings:
    return Rings(rings.slots if slot else 0, slot, 1 if scratch else 0, scratch)


def _sizes(found: Sequence[Kind], limits: Limits) -> Iterator[tuple[int, int]]:
    """Sizes of slot and scratch that are tried: of no use are others than some block's own.

    Where the largest take next to nothing of VRAM, smaller ones would save nothing. Where some block has no
    option, no size is of use.
    """
    if not all(kind.options for kind in found):
        return
    options = [option for kind in found for option in kind.options]
    slot, scratch = max(o.slot_bytes for o in options), max(o.scratch_bytes for o in options)
    if not _notable(slot, scratch, limits):
        yield from dict.fromkeys(((0, 0), (slot, scratch)))
        return
    slots, scratches = _few({o.slot_bytes for o in options}), _few({o.scratch_bytes for o in options})
    sizes = {(o.slot_bytes, o.scratch_bytes) for o in options}
    yield from dict.fromkeys(_needed(sizes, slot, scratch) for slot in slots for scratch in scratches)


def _needed(sizes: Collection[tuple[int, int]], slot: int, scratch: int) -> tuple[int, int]:
    """The largest sizes that options have which fit these."""
    fitting = [size for size in sizes if size[0] <= slot and size[1] <= scratch]
    return max(slot for slot, _ in fitting), max(scratch for _, scratch in fitting)


def _few(sizes: set[int], most: int = MOST_SIZES) -> list[int]:
    """Nothing, the largest, and some in between."""
    ordered = sorted({0} | {size for size in sizes if size >= SMALL * max(sizes)})
    ordered = [
        size
        for size, next_one in zip(ordered, [*ordered[1:], math.inf], strict=True)
        if next_one > ALIKE * size
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
