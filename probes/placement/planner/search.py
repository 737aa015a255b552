"""Chooses the tier of each block and the prefetch pool, so that a pass is short. Pure.

`search` is the entry. An integer program (`ilp.py`) counts how many blocks of each kind go to each tier;
`candidates.py` makes placements of such counts for many pools; the simulation judges them; and the best ones
are improved block by block (`local_search.py`).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from probes.placement.planner.candidates import (
    CandidateSearch,
    count_program,
    options_fitting,
    spread_out,
    used_options,
)
from probes.placement.planner.costs import Option
from probes.placement.planner.ilp import Choice, Counts, Program, Search
from probes.placement.planner.kinds import Kind, options_by_block
from probes.placement.planner.local_search import MOST_STEPS, improved
from probes.placement.planner.pools import (
    MANY_BLOCKS,
    Limits,
    Placement,
    pool_room,
    sizes_tried,
    with_best_pool,
    with_sizes,
)
from probes.placement.planner.simulation import Assignment, Timeline, simulate
from probes.placement.types import PrefetchPool, Tier

ROOMY: Final = 0.5  # share of host memory: while less of it is taken, reading from disk is of no use
WORTH_A_DISK: Final = 0.01  # share of the time that reading from disk must save
MOST_IMPROVED: Final = 6  # candidates, the quickest ones
# Python's time differs by up to 2.5 between hosts with the same GPU, and from minute to minute.
FASTER_PYTHON: Final = (0.6, 0.8)  # of its time: hosts for which a plan is hedged, the first that is possible
HEDGE: Final = 1.02  # of the shortest time: what a plan may take that is quicker on such a host
PYTHON_BOUND: Final = 0.7  # share of a pass that is Python's, from which on plans are hedged


@dataclass(frozen=True)
class SearchResult:
    """The option of each block in call order, their prefetch pool, and the simulated pass."""

    chosen: tuple[Option, ...]
    pool: PrefetchPool
    timeline: Timeline
    gap: float  # share of the busiest lane's time that other counts may save at most


def search(kinds: Sequence[Kind], limits: Limits) -> SearchResult | None:
    """The quickest placement found within the limits; None where nothing fits.

    Blocks are read from disk in each pass only where that saves a notable share of the time.
    """
    memory_only = _quickest(_without(kinds, ("disk",)), limits)
    if (
        memory_only
        and sum(o.pinned_bytes + o.pageable_bytes for o in memory_only.chosen) < ROOMY * limits.host
    ):
        return memory_only
    with_disk = _quickest(kinds, limits)
    if memory_only is None or with_disk is None:
        return memory_only or with_disk
    worth = with_disk.timeline.seconds < memory_only.timeline.seconds * (1 - WORTH_A_DISK)
    return with_disk if worth else memory_only


def _quickest(kinds: Sequence[Kind], limits: Limits) -> SearchResult | None:
    """The quickest of the candidates, of which the best are improved first if that may help."""
    candidates = CandidateSearch(kinds, limits)
    candidates.try_all_pools()
    if not candidates.ranked:  # the budget is so tight that the program found no whole counts
        tight = any_placement(kinds, limits)
        return _result(improved(tight, options_by_block(kinds), limits), limits, gap=1.0) if tight else None
    if candidates.may_be_better():
        candidates.vary_the_best()
    best, gap = candidates.ranked[0].placement, candidates.ranked[0].counts.gap
    if candidates.may_be_better():
        different = [candidate.placement for candidate in candidates.ranked[:MOST_IMPROVED]]
        choices, steps = options_by_block(kinds), MOST_STEPS // len(different)
        results = (improved(placement, choices, limits, steps=steps) for placement in different)
        best = min(results, key=attrgetter("seconds"))
    return _result(best, limits, gap=gap)


def hedged(best: SearchResult, kinds: Sequence[Kind], limits: Limits) -> SearchResult:
    """`best`, or a placement that takes hardly longer and gains more on a host with faster Python.

    While a pass waits for Python, a link that is nearly as busy costs nothing; on a faster host the pass
    would wait for that.
    """
    launch = sum(option.launch_s for option in best.chosen)
    if len(best.chosen) > MANY_BLOCKS or launch <= PYTHON_BOUND * best.timeline.seconds:
        return best
    by_place = options_by_block(kinds)
    for share in FASTER_PYTHON:
        quick = search([_with_faster_python(kind, share) for kind in kinds], limits)
        if quick is None:
            continue
        chosen = tuple(next(o for o in by_place[at] if o.way == q.way) for at, q in enumerate(quick.chosen))
        timeline = simulate(chosen, quick.pool, replayed=limits.replayed)
        other = SearchResult(chosen, quick.pool, timeline, quick.gap)
        there = simulate(_faster(best.chosen, share), best.pool, replayed=limits.replayed)
        loses, gains = other.timeline.seconds / best.timeline.seconds, there.seconds / quick.timeline.seconds
        if loses <= HEDGE and loses < gains:
            return other
    return best


def _faster(options: Sequence[Option], share: float) -> tuple[Option, ...]:
    return tuple(replace(option, launch_s=share * option.launch_s) for option in options)


def _with_faster_python(kind: Kind, share: float) -> Kind:
    members = tuple(_with_faster_python(member, share) for member in kind.members)
    return replace(kind, options=_faster(kind.options, share), members=members)


def _result(best: Placement, limits: Limits, *, gap: float) -> SearchResult:
    timeline = simulate(best.chosen, best.pool, replayed=limits.replayed)
    return SearchResult(best.chosen, best.pool, timeline, gap)


def _without(kinds: Sequence[Kind], tiers: Sequence[Tier]) -> list[Kind]:
    return [replace(kind, options=tuple(o for o in kind.options if o.tier not in tiers)) for kind in kinds]


def any_placement(kinds: Sequence[Kind], limits: Limits) -> Placement | None:
    """Any placement within the limits, however slow; None where nothing fits."""
    for allowed, counts in _fitting_counts(kinds, limits):
        if placement := with_best_pool(Assignment(spread_out(allowed, counts)), limits):
            return placement
    return None


def fits(kinds: Sequence[Kind], limits: Limits) -> bool:
    """Whether any placement is within the limits."""
    for allowed, counts in _fitting_counts(kinds, limits):
        room = pool_room(dict(itertools.chain(*used_options(allowed, counts))), limits)
        if room and room[0] + room[1] <= room[2]:
            return True
    return False


def _fitting_counts(kinds: Sequence[Kind], limits: Limits) -> Iterator[tuple[list[Kind], Counts]]:
    """For each size of the pool, counts that fit it, however slow, with the kinds they are of."""
    for slot, scratch in sizes_tried(kinds, limits):
        allowed = [
            replace(kind, options=tuple(options_fitting(kind.options, slot, scratch))) for kind in kinds
        ]
        program = count_program(allowed, with_sizes(PrefetchPool(2), slot, scratch), limits)
        without_times = tuple(
            replace(group, choices=tuple(Choice((0.0,), choice.memories) for choice in group.choices))
            for group in program.groups
        )
        counts = Search(Program(without_times, (1.0,), program.limits)).run()
        if counts:
            yield allowed, counts
