"""The integer program of how many blocks get which option, and the placement that counts mean. Pure.

The tiers of a kind are spread evenly over its blocks, so that copies can run while resident blocks compute.
"""

import itertools
from collections.abc import Sequence
from typing import Final, TypeAlias

from probes.placement.planner.costs.option import Option
from probes.placement.planner.searching.blockkinds import Kind, exactly
from probes.placement.planner.searching.placed import Limits, ring_bytes
from probes.placement.planner.searching.simulation import ARRIVAL_S, RELEASE_S
from probes.placement.planner.solver.program import Choice, Counts, Group, Program
from probes.placement.split import spread
from probes.placement.values import Rings

LANES: Final = 5  # of an option
Used: TypeAlias = tuple[tuple[tuple[Option, int], ...], ...]


def count_program(found: Sequence[Kind], rings: Rings, limits: Limits, longer: float = 1.0) -> Program:
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
    exactly(found, chosen)
    return tuple(chosen[place] for place in range(len(chosen)))
