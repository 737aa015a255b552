"""Which tier each block goes to, and which rings that takes, so that a pass is short. Pure.

An integer program counts options, a simulation judges the placements that the counts mean, and the best
ones are improved block by block. Blocks that cost the same are one kind, so a model of 80 layers is a program
of a few kinds.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from probes.placement.planner.candidates import (
    MOST_STEPS,
    CandidateSearch,
    Kind,
    count_program,
    improved,
    options_by_block,
    options_fitting,
    sizes_tried,
    spread_out,
    used_options,
)
from probes.placement.planner.costs import Option
from probes.placement.planner.ilp import Choice, Counts, Program, solve
from probes.placement.planner.simulation import (
    MANY_BLOCKS,
    Assignment,
    Limits,
    Placement,
    Timeline,
    pool_room,
    simulate,
    with_best_pool,
)
from probes.placement.types import PrefetchPool, Tier


def any_placement(found: Sequence[Kind], limits: Limits) -> Placement | None:
    """Some placement within the limits, however slow; None where nothing fits."""
    for allowed, counts in _timeless(found, limits):
        if made := with_best_pool(Assignment(spread_out(allowed, counts)), limits):
            return made
    return None


def fits(found: Sequence[Kind], limits: Limits) -> bool:
    """Whether there is some placement within the limits."""
    for allowed, counts in _timeless(found, limits):
        room = pool_room(dict(itertools.chain(*used_options(allowed, counts))), limits)
        if room and room[0] + room[1] <= room[2]:
            return True
    return False


def _timeless(found: Sequence[Kind], limits: Limits) -> Iterator[tuple[list[Kind], Counts]]:
    """For each size of the rings, counts that fit it, however slow."""
    for slot, scratch in sizes_tried(found, limits):
        allowed = [
            replace(kind, options=tuple(options_fitting(kind.options, slot, scratch))) for kind in found
        ]
        program = count_program(
            allowed, PrefetchPool(2 if slot else 0, slot, 1 if scratch else 0, scratch), limits
        )
        timeless = tuple(
            replace(group, choices=tuple(Choice((0.0,), choice.memories) for choice in group.choices))
            for group in program.groups
        )
        counts = solve(Program(timeless, (1.0,), program.limits))
        if counts:
            yield allowed, counts


ROOMY: Final = 0.5  # of the host memory: as long as more than that is free, the disk has no use
WORTH_A_DISK: Final = 0.01  # of the time, that the disk must save
MOST_POLISHED: Final = 6  # placements, the quickest ones
# Python's time differs from host to host beside the same GPU, and from minute to minute: by up to 2.5.
QUICKER: Final = (0.6, 0.8)  # of it, on hosts for which a plan shall do as well, the first that is possible
STEADIER: Final = 1.02  # of the shortest time, that a plan may take which does better there
HANDED_OVER: Final = 0.7  # share of a pass that is Python's, from which on that is looked at


@dataclass(frozen=True)
class SearchResult:
    """The option of each block, in call order, with the rings they need and the pass that follows."""

    chosen: tuple[Option, ...]
    rings: PrefetchPool
    timeline: Timeline
    gap: float  # a better choice of counts can save this share of the busiest lane's time at most


def search(found: Sequence[Kind], limits: Limits) -> SearchResult | None:
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


def _quickest(found: Sequence[Kind], limits: Limits) -> SearchResult | None:
    """The best by simulation among the best counts for many rings, and without some tiers, each improved."""
    starts = CandidateSearch(found, limits)
    starts.of_all_rings()
    if not starts.made:  # the budget is so tight that no split of the search came to whole counts
        tight = any_placement(found, limits)
        made = improved(tight, options_by_block(found), limits) if tight else None
        return _found(made, limits, gap=1.0) if made else None
    if starts.may_be_better():
        starts.of_the_best_rings()
    best, gap = starts.made[0].placed, starts.made[0].counts.gap
    if starts.may_be_better():
        different = [start.placed for start in starts.made[:MOST_POLISHED]]
        choices, steps = options_by_block(found), MOST_STEPS // len(different)
        results = (improved(one, choices, limits, steps=steps) for one in different)
        best = min(results, key=attrgetter("seconds"))
    return _found(best, limits, gap=gap)


def hedged(best: SearchResult, found: Sequence[Kind], limits: Limits) -> SearchResult:
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
        other = SearchResult(
            chosen, quick.rings, simulate(chosen, quick.rings, replayed=limits.replayed), quick.gap
        )
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


def _found(best: Placement, limits: Limits, *, gap: float) -> SearchResult:
    timeline = simulate(best.chosen, best.rings, replayed=limits.replayed)
    return SearchResult(best.chosen, best.rings, timeline, gap)


def _without(found: Sequence[Kind], tiers: Sequence[Tier]) -> list[Kind]:
    return [replace(kind, options=tuple(o for o in kind.options if o.tier not in tiers)) for kind in found]
