"""Improves a placement block by block, judged by the simulation. Pure.

The integer program counts blocks and takes lanes for independent. What it can't see is the order: which
blocks wait for a slot, and what a last copy leaves uncovered. One or two blocks are moved to another tier, or
two exchange theirs, as long as the simulated pass gets shorter.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from probes.placement.planner.costs.option import Option
from probes.placement.planner.searching.placed import (
    GAIN,
    SLOT_COUNTS,
    Chosen,
    Limits,
    Placed,
    placed,
    scratch_counts,
)
from probes.placement.planner.searching.simulation import Blocks

MOST_STEPS: Final = 16_000  # simulated blocks in all, about a tenth of a second
STAYING: Final = 8  # blocks that stay where they are take as long as one that moves
NEIGHBOURS: Final = 1  # blocks: exchanges of those come first
FEW_BLOCKS: Final = 8  # of which two are moved at once


def polished(
    start: Placed, choices: Sequence[Sequence[Option]], limits: Limits, *, steps: int = MOST_STEPS
) -> Placed:
    """The placement after every move that shortens the pass; `choices` are the options of each block."""
    best, left = start, steps
    moving = _work(Blocks(start.chosen), limits) <= steps
    while moving:
        moving, shorter = False, best.seconds * (1 - GAIN)
        for chosen in _near(best.chosen, choices):
            blocks = Blocks(chosen)
            left -= _work(blocks, limits)
            if left < 0:
                return best
            tried = placed(blocks, limits) if blocks.least_s < shorter else None
            if tried and tried.seconds < shorter:
                best, moving = tried, True
                break
    return best


def _work(blocks: Blocks, limits: Limits) -> int:
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
