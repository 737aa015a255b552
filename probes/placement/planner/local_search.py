"""Improves a placement block by block, as long as the simulated pass gets shorter. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from probes.placement.planner.costs import Option
from probes.placement.planner.pools import (
    GAIN,
    SLOT_COUNTS,
    Chosen,
    Limits,
    Placement,
    with_best_pool,
)
from probes.placement.planner.simulation import Assignment

MOST_STEPS: Final = 16_000  # simulated blocks in all, about a tenth of a second
STAYING: Final = 8  # blocks that stay where they are take as long to simulate as one that moves
NEIGHBOURS: Final = 1  # distance in call order up to which exchanges are tried first


def improved(
    start: Placement, choices: Sequence[Sequence[Option]], limits: Limits, *, steps: int = MOST_STEPS
) -> Placement:
    """The placement after moves that each shorten the pass, at most `steps` simulated blocks later.

    `choices`: the options of each block, in call order.
    """
    best, left = start, steps
    searching = _work(Assignment(start.chosen)) <= steps
    while searching:
        searching, shorter = False, best.seconds * (1 - GAIN)
        for chosen in _neighbours(best.chosen, choices):
            assignment = Assignment(chosen)
            left -= _work(assignment)
            if left < 0:
                return best
            placement = with_best_pool(assignment, limits) if assignment.least_s < shorter else None
            if placement and placement.seconds < shorter:
                best, searching = placement, True
                break
    return best


def _work(assignment: Assignment) -> int:
    """Simulated blocks in finding an assignment's best pool."""
    moving = sum(number for option, number in assignment.used.items() if option.moves)
    return (moving + len(assignment.chosen) // STAYING) * len(SLOT_COUNTS)


def _neighbours(chosen: Chosen, choices: Sequence[Sequence[Option]]) -> Iterator[Chosen]:
    """Assignments that differ in an exchange of two blocks, or in one block.

    Exchanges of adjacent blocks come first: what waits is mostly one block too early or too late.
    """
    yield from _exchanged(chosen, choices, range(1, NEIGHBOURS + 1))
    for place, options in enumerate(choices):
        others = (option for option in options if option != chosen[place])
        yield from ((*chosen[:place], option, *chosen[place + 1 :]) for option in others)
    yield from _exchanged(chosen, choices, range(NEIGHBOURS + 1, len(chosen)))


def _exchanged(
    chosen: Chosen, choices: Sequence[Sequence[Option]], distances: Iterable[int]
) -> Iterator[Chosen]:
    """Assignments in which two blocks at one of these distances have each other's tiers."""
    for distance in distances:
        for first in range(len(chosen) - distance):
            second = first + distance
            if chosen[first].way == chosen[second].way:
                continue
            option, other = _like(choices[first], chosen[second]), _like(choices[second], chosen[first])
            if option and other:
                yield (*chosen[:first], option, *chosen[first + 1 : second], other, *chosen[second + 1 :])


def _like(options: Sequence[Option], other: Option) -> Option | None:
    """The option of the same tier and layout as another block's."""
    return next((option for option in options if option.way == other.way), None)
