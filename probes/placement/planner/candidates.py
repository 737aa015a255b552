"""Candidate placements: of the best counts for many prefetch pools, and of those without some tiers. Pure.

The integer program takes lanes for independent. With a few slots they aren't: copies wait while a block is
computed or unpacked for long. So different counts are placed, and the simulation judges them.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Final, TypeAlias

from probes.placement.planner.costs import Option
from probes.placement.planner.ilp import Choice, Counts, Group, Program, Search
from probes.placement.planner.kinds import Kind, unmerge_options
from probes.placement.planner.pools import (
    MANY_BLOCKS,
    Limits,
    Placement,
    notable,
    pool_bytes,
    pools_tried,
    spread,
    with_best_pool,
    with_sizes,
)
from probes.placement.planner.simulation import ARRIVAL_S, RELEASE_S, Assignment
from probes.placement.types import DISK_BUFFERS, PrefetchPool, Tier

MOST_PROGRAMS: Final = 60  # that are solved at first, the most promising ones
WORTH_IMPROVING: Final = (
    0.002  # share by which a pass exceeds the program's bound, above which search goes on
)
# Tiers that are left out in turn; the simulation decides which counts are quickest.
LEFT_OUT: Final[tuple[tuple[Tier, ...], ...]] = (
    ("cpu",),
    ("packed", "streamed_packed"),
    ("in_place",),
    ("streamed", "streamed_packed"),
    ("cpu", "packed", "streamed_packed", "in_place"),
)
LEFT_OUT_OF_MANY: Final = (LEFT_OUT[2], LEFT_OUT[-1])  # for very many blocks, where each search takes long
VARIED: Final = 5  # pools for which that is done: the two best and the best of other sizes
NEARBY: Final = 1.3  # ratio up to which other sizes are tried for the two best
LANES: Final = 5  # entries of `Option.lanes`
# The options used of each kind, and how often
Used: TypeAlias = tuple[tuple[tuple[Option, int], ...], ...]


@dataclass(frozen=True)
class Restriction:
    """What counts are restricted to: a pool, and some of the options that fit it."""

    pool: PrefetchPool
    least_slot: int = 0  # bytes: options that need smaller slots are left out
    without: tuple[Tier, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """Counts, what they were restricted to, and the best placement of them."""

    counts: Counts
    restriction: Restriction
    placement: Placement

    @property
    def tiers(self) -> set[Tier]:
        """The tiers that any block goes to."""
        return {option.tier for option in self.placement.chosen}


class CandidateSearch:
    """Candidates of different counts. `ranked` has them, the quickest first."""

    def __init__(self, kinds: Sequence[Kind], limits: Limits) -> None:
        self._kinds, self._limits = kinds, limits
        self.ranked: list[Candidate] = []
        self.bound = math.inf  # no counts take less than this, by the programs
        self._placed: set[Used] = set()
        self._undominated: dict[tuple[int, tuple[Option, ...]], Kind] = {}

    @property
    def _least(self) -> float:
        return self.ranked[0].placement.seconds if self.ranked else math.inf

    def may_be_better(self) -> bool:
        """Whether a pass may take notably less time than the best so far."""
        return self._least > self.bound * (1 + WORTH_IMPROVING)

    def try_all_pools(self) -> None:
        """Add the best counts for the pools whose bound is below the best placement, lowest bound first."""
        waiting: list[tuple[float, int, _Subproblem]] = []
        ticket, seen = itertools.count(), set()

        def enqueue(restriction: Restriction) -> None:
            problem = self._subproblem(restriction)
            slot_sizes = frozenset(option.slot_bytes for kind in problem.kinds for option in kind.options)
            if (restriction.pool, slot_sizes) not in seen:
                seen.add((restriction.pool, slot_sizes))
                heapq.heappush(waiting, (problem.search.promise, next(ticket), problem))

        for pool in pools_tried(self._kinds, self._limits):
            enqueue(Restriction(pool))
        self.bound = waiting[0][0] if waiting else math.inf
        for _ in range(MOST_PROGRAMS):
            if not waiting or waiting[0][0] >= self._least:
                break
            _, _, problem = heapq.heappop(waiting)
            pool = problem.restriction.pool
            needed = self._try(problem, better_than=self._least)
            if not notable(pool.slot_bytes, pool.scratch_bytes, self._limits):
                continue
            if needed:
                enqueue(replace(problem.restriction, pool=needed))
            if not problem.restriction.least_slot:  # its bound is no lower, so it can wait until now
                enqueue(replace(problem.restriction, least_slot=pool.slot_bytes // 2))

    def vary_the_best(self) -> None:
        """Add counts for the best pools without tiers in use, and for nearby sizes."""
        used = {candidate.restriction: candidate.tiers for candidate in reversed(self.ranked)}
        by_size = {c.restriction.pool.slot_bytes: c.restriction for c in reversed(self.ranked)}
        ranked = list(dict.fromkeys(candidate.restriction for candidate in self.ranked))
        different = sorted(by_size.values(), key=ranked.index)
        best = list(dict.fromkeys((*ranked[:2], *different)))[:VARIED]
        cheapest = min(self.ranked, key=lambda candidate: candidate.counts.cost).restriction
        if len(self.ranked[0].placement.chosen) > MANY_BLOCKS:
            for tiers in LEFT_OUT_OF_MANY:
                self._try(self._subproblem(replace(cheapest, without=tiers)))
            return
        bases = dict.fromkeys((cheapest, *best))
        varied = [replace(base, without=t) for t in LEFT_OUT for base in bases if used[base] & set(t)]
        slots = {option.slot_bytes for kind in self._kinds for option in kind.options}
        for base in best[:2]:
            slot, scratch = base.pool.slot_bytes, base.pool.scratch_bytes
            near = (size for size in slots if size != slot and slot < NEARBY * size < NEARBY**2 * slot)
            varied += [replace(base, pool=with_sizes(base.pool, size, scratch)) for size in near]
        for restriction in varied:
            self._try(self._subproblem(restriction))

    def _try(self, problem: "_Subproblem", better_than: float = math.inf) -> PrefetchPool | None:
        """Place the best counts. Returns the pool that they need; None where there are no such counts."""
        counts = problem.search.run(better_than)
        if counts is None:
            return None
        used = used_options(problem.kinds, counts)
        needed = [option for uses in used for option, _ in uses]
        if used not in self._placed:
            self._placed.add(used)
            spreads = (
                spread_out(problem.kinds, counts, early=e) for e in sorted({False, self._limits.replayed})
            )
            placements = filter(
                None, (with_best_pool(Assignment(chosen), self._limits) for chosen in spreads)
            )
            if best := min(placements, key=attrgetter("seconds"), default=None):
                self.ranked.append(Candidate(counts, problem.restriction, best))
                self.ranked.sort(key=lambda candidate: candidate.placement.seconds)
        slot, scratch = max(o.slot_bytes for o in needed), max(o.scratch_bytes for o in needed)
        return with_sizes(problem.restriction.pool, slot, scratch)

    def _subproblem(self, restriction: Restriction) -> "_Subproblem":
        kinds: list[Kind] = []
        for nth, kind in enumerate(self._kinds):
            fitting = options_fitting(
                kind.options, restriction.pool.slot_bytes, restriction.pool.scratch_bytes
            )
            few = tuple(
                option
                for option in fitting
                if not 0 < option.slot_bytes < restriction.least_slot
                and option.tier not in restriction.without
            )
            if (nth, few) not in self._undominated:
                self._undominated[nth, few] = replace(kind, options=undominated(few))
            kinds.append(self._undominated[nth, few])
        return _Subproblem(restriction, kinds, self._limits)


@dataclass(frozen=True)
class _Subproblem:
    """The options of each kind that a restriction leaves, and the search for counts of them."""

    restriction: Restriction
    kinds: Sequence[Kind]
    limits: Limits

    @cached_property
    def search(self) -> Search:
        """Return the integer program of this restriction."""
        return Search(count_program(self.kinds, self.restriction.pool, self.limits))


def count_program(kinds: Sequence[Kind], pool: PrefetchPool, limits: Limits) -> Program:
    """The program of how many blocks of each kind take each option."""
    groups = tuple(
        Group(
            len(kind.places),
            tuple(Choice(_lanes(option, pool.slots), option.memories) for option in kind.options),
        )
        for kind in kinds
    )
    staging = (
        DISK_BUFFERS * pool.slot_bytes if any(o.tier == "disk" for kind in kinds for o in kind.options) else 0
    )
    room = (limits.vram - pool_bytes(pool), limits.host - staging, limits.pinned - staging)
    return Program(groups, (0.0,) * LANES, tuple(float(n) for n in room))


def _lanes(option: Option, slots: int) -> tuple[float, ...]:
    """Seconds of the lanes, including waits for copies and for slots.

    A slot holds a block from the beginning of its copy until it has been unpacked or computed.
    """
    if not option.copy_s:
        return option.lanes
    device, link, *others = option.lanes
    waits = option.pieces * ARRIVAL_S
    held = option.copy_s + waits + option.pieces * RELEASE_S + (option.unpack_s or option.compute_s)
    return (device + waits, link + max(option.copy_s, held / slots) - option.copy_s, *others)


def options_fitting(options: Sequence[Option], slot: int, scratch: int) -> list[Option]:
    """The options that need no larger slots or scratch buffers."""
    return [option for option in options if option.slot_bytes <= slot and option.scratch_bytes <= scratch]


def used_options(kinds: Sequence[Kind], counts: Counts) -> Used:
    """The options that counts use of each kind, and how often."""
    return tuple(
        tuple((option, n) for option, n in zip(kind.options, numbers, strict=True) if n)
        for kind, numbers in zip(kinds, counts.counts, strict=True)
    )


def spread_out(kinds: Sequence[Kind], counts: Counts, *, early: bool = False) -> tuple[Option, ...]:
    """The option of each block in call order: within a kind, the blocks of each option are evenly apart.

    Options are assigned in the order of their time on the link, then of unpacking. Of a kind's blocks the
    last is the first to be assigned, or with `early` the first block is.
    """
    chosen: dict[int, Option] = {}
    for kind, used in zip(kinds, used_options(kinds, counts), strict=True):
        left = kind.places[:: -1 if early else 1]
        for option, number in sorted(used, key=lambda use: (-use[0].copy_s, -use[0].unpack_s)):
            picked = spread(len(left), number)
            chosen.update((left[nth], option) for nth in picked)
            ends = zip((0, *(nth + 1 for nth in picked)), (*picked, len(left)), strict=True)
            left = tuple(itertools.chain.from_iterable(left[begin:end] for begin, end in ends))
    unmerge_options(kinds, chosen)
    return tuple(chosen[place] for place in range(len(chosen)))


def undominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """The options for which no other takes less or the same of everything."""
    kept: list[Option] = []
    for option in options:
        costs = (*option.lanes, *option.memories)
        others = ((*other.lanes, *other.memories) for other in options if other is not option)
        worse = any(
            all(a <= b for a, b in zip(other, costs, strict=True)) and other != costs for other in others
        )
        if not worse and not any((*k.lanes, *k.memories) == costs for k in kept):
            kept.append(option)
    return tuple(kept)
