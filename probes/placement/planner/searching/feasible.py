"""Whether blocks fit the limits at all, however slow the pass gets. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from probes.placement.planner.searching.blockkinds import Kind
from probes.placement.planner.searching.countprogram import (
    count_program,
    options_fitting,
    spread_out,
    used_options,
)
from probes.placement.planner.searching.placed import Limits, Placed, placed, rings_room
from probes.placement.planner.searching.ringsizes import sizes_tried
from probes.placement.planner.searching.simulation import Blocks
from probes.placement.planner.solver.integers import solve
from probes.placement.planner.solver.program import Choice, Counts, Program
from probes.placement.values import Rings


def anything(found: Sequence[Kind], limits: Limits) -> Placed | None:
    """Some placement within the limits, however slow; None where nothing fits."""
    for allowed, counts in _timeless(found, limits):
        if made := placed(Blocks(spread_out(allowed, counts)), limits):
            return made
    return None


def fits(found: Sequence[Kind], limits: Limits) -> bool:
    """Whether there is some placement within the limits."""
    for allowed, counts in _timeless(found, limits):
        room = rings_room(dict(itertools.chain(*used_options(allowed, counts))), limits)
        if room and room[0] + room[1] <= room[2]:
            return True
    return False


def _timeless(found: Sequence[Kind], limits: Limits) -> Iterator[tuple[list[Kind], Counts]]:
    """For each size of the rings, counts that fit it, however slow."""
    for slot, scratch in sizes_tried(found, limits):
        allowed = [
            replace(kind, options=tuple(options_fitting(kind.options, slot, scratch))) for kind in found
        ]
        program = count_program(allowed, Rings(2 if slot else 0, slot, 1 if scratch else 0, scratch), limits)
        timeless = tuple(
            replace(group, choices=tuple(Choice((0.0,), choice.memories) for choice in group.choices))
            for group in program.groups
        )
        counts = solve(Program(timeless, (1.0,), program.limits))
        if counts:
            yield allowed, counts
