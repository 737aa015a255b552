"""Placements to begin with: of the best counts for many rings, and of those without some tiers. Pure.

The integer program takes lanes for independent. With a few slots they aren't: copies stand still while one
block is computed or unpacked for long. So different counts are placed, and the simulation judges them.
"""

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Final, NamedTuple, TypeAlias

from probes.core.errors import UsageError
from probes.placement.models.description import BlockDescription, ModelDescription
from probes.placement.planner.costs import Option, Pass
from probes.placement.planner.ilp import LOOSE_GAP, Choice, Counts, Group, Program, Search
from probes.placement.planner.machine import Constants
from probes.placement.planner.simulation import (
    ARRIVAL_S,
    GAIN,
    MANY_BLOCKS,
    RELEASE_S,
    SLOT_COUNTS,
    Assignment,
    Chosen,
    Limits,
    Placement,
    pool_bytes,
    scratch_counts,
    with_best_pool,
)
from probes.placement.planner.tiers import options
from probes.placement.types import PrefetchPool, Tier, spread

MOST_KINDS: Final = 64  # that a search counts one by one: its integer programs take the cube of their number
NEARLY: Final = 1.01  # times the bytes of another, that a kind is counted with first; then this squared


@dataclass(frozen=True)
class Kind:
    """Blocks that cost the same, by their places in call order. `block` is one of them.

    `members`: the kinds that are counted together as this one, each with its own options.
    """

    places: tuple[int, ...]
    options: tuple[Option, ...]
    block: BlockDescription
    members: "tuple[Kind, ...]" = ()


def kinds(model: ModelDescription, machine: Constants, work: Pass) -> tuple[Kind, ...]:
    """The model's blocks by cost, each kind as the machine computes it.

    Raises UsageError for a product or lookup whose tensor has no rows.
    """
    places: dict[object, list[int]] = {}
    for place, block in enumerate(model.blocks):
        places.setdefault(block.kind, []).append(place)
    made = []
    for found in places.values():
        block = model.blocks[found[0]].computed(model.becomes)
        for tensor in block.tensors:
            if tensor.use != "elementwise" and len(tensor.shape) < 2:
                said = f"{tensor.name} is described as a {tensor.use}"
                raise UsageError(
                    f"{said}, and its shape {list(tensor.shape)} has no rows",
                    "describe it as elementwise",
                )
        made.append(Kind(tuple(found), options(block, machine, work), block))
    return tuple(made)


def merge_kinds(found: Sequence[Kind]) -> tuple[Kind, ...]:
    """At most MOST_KINDS: those of nearly the same bytes with the same tiers count as one.

    Such a one takes, in each tier, the most of all its members. So what fits the sums fits the blocks, and a
    budget for nearly nothing else may be refused although it would do.
    """
    if len(found) <= MOST_KINDS:
        return tuple(found)
    ordered = sorted(found, key=lambda kind: (_ways(kind), kind.block.weight_bytes))
    ratio = NEARLY
    while len(runs := list(_runs(ordered, ratio))) > MOST_KINDS and ratio < 2.0**64:
        ratio *= ratio
    return tuple(run[0] if len(run) == 1 else _as_one(run) for run in runs)


def _ways(kind: Kind) -> tuple[tuple[str, bool, bool, bool, int], ...]:
    return tuple(option.way for option in kind.options)


def _runs(ordered: Iterable[Kind], ratio: float) -> Iterator[list[Kind]]:
    for _, alike in groupby(ordered, key=_ways):
        run: list[Kind] = []
        for kind in alike:
            if run and kind.block.weight_bytes > ratio * run[0].block.weight_bytes:
                yield run
                run = []
            run.append(kind)
        yield run


def _as_one(run: Sequence[Kind]) -> Kind:
    options = (_most(same) for same in zip(*(kind.options for kind in run), strict=True))
    places = sorted(place for kind in run for place in kind.places)
    return Kind(tuple(places), tuple(options), run[-1].block, members=tuple(run))


def _most(same: Sequence[Option]) -> Option:
    """The option of this way that takes the most of everything."""
    names = [field.name for field in fields(Option)][1:]  # after the tier
    return Option(same[0].tier, **{name: max(getattr(one, name) for one in same) for name in names})


def options_by_block(found: Sequence[Kind]) -> list[tuple[Option, ...]]:
    """The options of each block, in call order."""
    each = [one for kind in found for one in kind.members or (kind,)]
    by_place = {place: kind.options for kind in each for place in kind.places}
    return [by_place[place] for place in sorted(by_place)]


def _with_own_options(found: Sequence[Kind], chosen: dict[int, Option]) -> None:
    """Exchange the options of blocks that were counted together, by place, for their own."""
    for kind in found:
        for member in kind.members:
            own = {option.way: option for option in member.options}
            chosen.update((place, own[chosen[place].way]) for place in member.places)


def undominated(found: Sequence[Option]) -> tuple[Option, ...]:
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


LANES: Final = 5  # of an option
Used: TypeAlias = tuple[tuple[tuple[Option, int], ...], ...]


def count_program(found: Sequence[Kind], rings: PrefetchPool, limits: Limits, longer: float = 1.0) -> Program:
    """The integer program; `longer`: how many times as long the link is taken to be busy with copies."""
    groups = tuple(
        Group(
            len(kind.places),
            tuple(Choice(_lanes(option, rings.slots, longer), option.memories) for option in kind.options),
        )
        for kind in found
    )
    staging = 2 * rings.slot_bytes if any(o.tier == "disk" for kind in found for o in kind.options) else 0
    room = (limits.vram - pool_bytes(rings), limits.host - staging, limits.pinned - staging)
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


def options_fitting(found: Sequence[Option], slot: int, scratch: int) -> list[Option]:
    """The options that need no larger rings."""
    return [option for option in found if option.slot_bytes <= slot and option.scratch_bytes <= scratch]


def used_options(found: Sequence[Kind], counts: Counts) -> Used:
    """The options that are used of each kind, and how often."""
    return tuple(
        tuple((option, n) for option, n in zip(kind.options, numbers, strict=True) if n)
        for kind, numbers in zip(found, counts.counts, strict=True)
    )


def spread_out(found: Sequence[Kind], counts: Counts, *, early: bool = False) -> tuple[Option, ...]:
    """The option of each block: within a kind, each option's blocks are evenly apart.

    First those that are longest on the link, then those that are unpacked. The last block of a kind is
    the first to be one of them, or the first block is (`early`).
    """
    chosen: dict[int, Option] = {}
    for kind, used in zip(found, used_options(found, counts), strict=True):
        left = kind.places[:: -1 if early else 1]
        for option, number in sorted(used, key=lambda one: (-one[0].copy_s, -one[0].unpack_s)):
            picked = spread(len(left), number)
            chosen.update((left[nth], option) for nth in picked)
            ends = zip((0, *(nth + 1 for nth in picked)), (*picked, len(left)), strict=True)
            left = tuple(itertools.chain.from_iterable(left[begin:end] for begin, end in ends))
    _with_own_options(found, chosen)
    return tuple(chosen[place] for place in range(len(chosen)))


MOST_SIZES: Final = 7  # of each ring that are tried
ALIKE: Final = 1.1  # times a size: of those that are as alike, the largest is tried
SLOTS: Final = (1, 2, 4)  # that there is room for while blocks are counted
SMALL_RINGS: Final = 0.002  # of VRAM, that the largest rings take: none of other sizes is tried
SMALL: Final = 0.005  # of the largest block: no ring is made for smaller ones


def pools_tried(found: Sequence[Kind], limits: Limits) -> Iterator[PrefetchPool]:
    """Rings that counts are looked for with: so many slots as there is room for, in each size."""
    for slot, scratch in sizes_tried(found, limits):
        for slots in SLOTS if notable(slot, scratch, limits) else SLOTS[-1:]:
            yield with_sizes(PrefetchPool(slots), slot, scratch)


def sizes_tried(found: Sequence[Kind], limits: Limits) -> Iterator[tuple[int, int]]:
    """Sizes of slot and scratch that are tried: of no use are others than some block's own.

    Where the largest take next to nothing of VRAM, smaller ones would save nothing. Where some block has no
    option, no size is of use.
    """
    if not all(kind.options for kind in found):
        return
    options = [option for kind in found for option in kind.options]
    slot, scratch = max(o.slot_bytes for o in options), max(o.scratch_bytes for o in options)
    if not notable(slot, scratch, limits):
        yield from dict.fromkeys(((0, 0), (slot, scratch)))
        return
    slots, scratches = _few({o.slot_bytes for o in options}), _few({o.scratch_bytes for o in options})
    sizes = {(o.slot_bytes, o.scratch_bytes) for o in options}
    yield from dict.fromkeys(_needed(sizes, slot, scratch) for slot in slots for scratch in scratches)


def notable(slot: int, scratch: int, limits: Limits) -> bool:
    """Whether rings of these sizes take a notable share of VRAM."""
    return 2 * slot + scratch >= SMALL_RINGS * limits.vram


def with_sizes(rings: PrefetchPool, slot: int, scratch: int) -> PrefetchPool:
    """As many slots of another size, and a scratch buffer where one is needed."""
    return PrefetchPool(rings.slots if slot else 0, slot, 1 if scratch else 0, scratch)


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


MOST_WAYS: Final = 60  # in which the best counts are looked for, the most promising ones
WORTH_POLISHING: Final = 0.002  # of what the integer program promises, that a pass takes longer
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


@dataclass(frozen=True)
class Restriction:
    """How counts are looked for."""

    rings: PrefetchPool
    least: int = 0  # bytes of the slot that a block which moves needs at least
    longer: float = 1.0  # times, that the link is taken to be busy with copies
    without: tuple[Tier, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """Counts, how they were found, and their blocks placed."""

    counts: Counts
    way: Restriction
    placed: Placement

    @property
    def tiers(self) -> set[Tier]:
        """Those that any block has."""
        return {option.tier for option in self.placed.chosen}


class CandidateSearch:
    """Placements to begin with, of different counts, the quickest first."""

    def __init__(self, found: Sequence[Kind], limits: Limits) -> None:
        self._found, self._limits = found, limits
        self.made: list[Candidate] = []
        self.promised = math.inf  # the least time that the program promises
        self._answers: dict[tuple[PrefetchPool, float], list[_Answer]] = {}
        self._known: set[Used] = set()
        self._undominated: dict[tuple[int, tuple[Option, ...]], Kind] = {}

    @property
    def _least(self) -> float:
        return self.made[0].placed.seconds if self.made else math.inf

    def may_be_better(self) -> bool:
        """Whether a pass may take notably less time than the best so far."""
        return self._least > self.promised * (1 + WORTH_POLISHING)

    def of_all_rings(self) -> None:
        """The best counts for each of the rings that promise less than the best placement so far takes."""
        waiting: list[tuple[float, int, _Subproblem]] = []
        ticket, seen = itertools.count(), set()

        def wait(way: Restriction) -> None:
            one = self._allowed(way)
            if (way.rings, one.moving) not in seen and not self._answered(one):
                seen.add((way.rings, one.moving))
                heapq.heappush(waiting, (one.search.promise, next(ticket), one))

        for rings in pools_tried(self._found, self._limits):
            wait(Restriction(rings))
        self.promised = waiting[0][0] if waiting else math.inf
        for _ in range(MOST_WAYS):
            if not waiting or waiting[0][0] >= self._least:
                break
            _, _, allowed = heapq.heappop(waiting)
            rings = allowed.way.rings
            smaller = self._try(allowed, better_than=self._least)
            if not notable(rings.slot_bytes, rings.scratch_bytes, self._limits):
                continue
            if smaller:
                wait(replace(allowed.way, rings=smaller))
            if not allowed.way.least:  # promises no more than this, so it isn't looked at before
                wait(replace(allowed.way, least=rings.slot_bytes // 2))

    def of_the_best_rings(self) -> None:
        """Counts for those as if the link took longer, without tiers that they use, in sizes nearby."""
        first = self.made[0].placed.chosen
        used = {start.way: start.tiers for start in reversed(self.made)}
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
        others = dict.fromkeys((promising, *best))
        ways += [replace(way, without=t) for t in LEFT_OUT for way in others if used[way] & set(t)]
        slots = {option.slot_bytes for kind in self._found for option in kind.options}
        for way in best[:2]:
            slot, scratch = way.rings.slot_bytes, way.rings.scratch_bytes
            near = (size for size in slots if size != slot and slot < NEARBY * size < NEARBY**2 * slot)
            ways += [replace(way, rings=with_sizes(way.rings, size, scratch)) for size in near]
        for way in ways:
            self._try(self._allowed(way))

    def _try(self, allowed: "_Subproblem", better_than: float = math.inf) -> PrefetchPool | None:
        """Place the best counts. The rings that they need, if there are any counts."""
        if self._answered(allowed):
            return None
        counts = allowed.search.run(better_than)
        if counts is None:
            return None
        used = used_options(allowed.kinds, counts)
        of_these = frozenset(option for one in used for option, _ in one)
        self._answers.setdefault(allowed.program, []).append(_Answer(allowed.options, of_these, counts.gap))
        if used not in self._known:
            self._known.add(used)
            ways = (
                spread_out(allowed.kinds, counts, early=e) for e in sorted({False, self._limits.replayed})
            )
            made = filter(None, (with_best_pool(Assignment(chosen), self._limits) for chosen in ways))
            if best := min(made, key=attrgetter("seconds"), default=None):
                self.made.append(Candidate(counts, allowed.way, best))
                self.made.sort(key=lambda start: start.placed.seconds)
        slot, scratch = max(o.slot_bytes for o in of_these), max(o.scratch_bytes for o in of_these)
        return with_sizes(allowed.way.rings, slot, scratch)

    def _answered(self, allowed: "_Subproblem") -> bool:
        """Whether the best counts of these options are known, or those of more use no others."""
        answers = self._answers.get(allowed.program, ())
        return any(
            one.used <= allowed.options <= one.options
            and (one.gap <= LOOSE_GAP or allowed.options == one.options)
            for one in answers
        )

    def _allowed(self, way: Restriction) -> "_Subproblem":
        made: list[Kind] = []
        options: list[Option] = []
        for nth, kind in enumerate(self._found):
            fitting = options_fitting(kind.options, way.rings.slot_bytes, way.rings.scratch_bytes)
            few = tuple(o for o in fitting if not 0 < o.slot_bytes < way.least and o.tier not in way.without)
            options += few
            if (nth, few) not in self._undominated:
                self._undominated[nth, few] = replace(kind, options=undominated(few))
            made.append(self._undominated[nth, few])
        return _Subproblem(way, made, frozenset(options), self._limits)


class _Answer(NamedTuple):
    """The options that counts were looked for with, and those of the best ones."""

    options: frozenset[Option]
    used: frozenset[Option]
    gap: float


@dataclass(frozen=True)
class _Subproblem:
    """The options of each kind that are of use on a way, and the search for counts of them."""

    way: Restriction
    kinds: Sequence[Kind]
    options: frozenset[Option]  # all that are allowed
    limits: Limits

    @cached_property
    def search(self) -> Search:
        """The search for counts."""
        return Search(count_program(self.kinds, self.way.rings, self.limits, self.way.longer))

    @property
    def program(self) -> tuple[PrefetchPool, float]:
        """What the program is made of, besides the options."""
        return self.way.rings, self.way.longer

    @property
    def moving(self) -> frozenset[int]:
        """The sizes of slots that blocks need which may move."""
        return frozenset(option.slot_bytes for kind in self.kinds for option in kind.options)


MOST_STEPS: Final = 16_000  # simulated blocks in all, about a tenth of a second
STAYING: Final = 8  # blocks that stay where they are take as long as one that moves
NEIGHBOURS: Final = 1  # blocks: exchanges of those come first
FEW_BLOCKS: Final = 8  # of which two are moved at once


def improved(
    start: Placement, choices: Sequence[Sequence[Option]], limits: Limits, *, steps: int = MOST_STEPS
) -> Placement:
    """The placement after every move that shortens the pass; `choices` are the options of each block."""
    best, left = start, steps
    moving = _work(Assignment(start.chosen), limits) <= steps
    while moving:
        moving, shorter = False, best.seconds * (1 - GAIN)
        for chosen in _near(best.chosen, choices):
            blocks = Assignment(chosen)
            left -= _work(blocks, limits)
            if left < 0:
                return best
            tried = with_best_pool(blocks, limits) if blocks.least_s < shorter else None
            if tried and tried.seconds < shorter:
                best, moving = tried, True
                break
    return best


def _work(blocks: Assignment, limits: Limits) -> int:
    """Steps of the simulations that find a placement's rings: of blocks that move, the others are runs."""
    moving = sum(number for option, number in blocks.used.items() if option.moves)
    scratches = len(scratch_counts(max(option.scratch_bytes for option in blocks.used), limits))
    return (moving + len(blocks.chosen) // STAYING) * len(SLOT_COUNTS) * scratches


def _near(chosen: Chosen, choices: Sequence[Sequence[Option]]) -> Iterator[Chosen]:
    """Placements that differ in an exchange of two blocks, in one block, and in two blocks of a few.

    Exchanges of neighbours come first: what waits is mostly one block too early or too late.
    """
    yield from _exchanged(chosen, choices, range(1, NEIGHBOURS + 1))
    single = [
        (place, option) for place, found in enumerate(choices) for option in found if option != chosen[place]
    ]
    for place, option in single:
        yield (*chosen[:place], option, *chosen[place + 1 :])
    yield from _exchanged(chosen, choices, range(NEIGHBOURS + 1, len(chosen)))
    if len(chosen) <= FEW_BLOCKS:
        for (first, one), (second, other) in itertools.combinations(single, 2):
            if first != second:
                changed = list(chosen)
                changed[first], changed[second] = one, other
                yield tuple(changed)


def _exchanged(
    chosen: Chosen, choices: Sequence[Sequence[Option]], distances: Iterable[int]
) -> Iterator[Chosen]:
    """Placements in which two blocks so far from each other have each other's tiers."""
    for distance in distances:
        for first in range(len(chosen) - distance):
            second = first + distance
            if chosen[first].way == chosen[second].way:
                continue
            one, other = _like(choices[first], chosen[second]), _like(choices[second], chosen[first])
            if one and other:
                yield (*chosen[:first], one, *chosen[first + 1 : second], other, *chosen[second + 1 :])


def _like(found: Sequence[Option], other: Option) -> Option | None:
    """The option of the same tier and layout."""
    return next((one for one in found if one.way == other.way), None)
