"""Improves a placement block by block, judged by the simulation. Pure.

The integer program counts blocks and takes lanes for independent. What it can't see is the order: which
blocks wait for a slot, and what a last copy leaves uncovered. One or two blocks are moved to another tier, or
two exchange theirs, as long as the simulated pass gets shorter.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from probes.placement.planner.costs.option import Option
from probes.placement.planner.timeline import seconds
from probes.placement.values import Rings

MOST_STEPS: Final = 16_000  # simulated blocks in all, about a tenth of a second
STAYING: Final = 8  # blocks that stay where they are take as long as one that moves
NEIGHBOURS: Final = 1  # blocks: exchanges of those come first
FEW_BLOCKS: Final = 8  # of which two are moved at once
GAIN: Final = 1e-4  # of the time that a move must save
MANY_BLOCKS: Final = 4_096  # above which candidates are compared by windows of so many blocks:
WINDOW: Final = 256
WINDOWS: Final = 8
SLOT_COUNTS: Final = (1, 2, 3, 4)
PIECE_SLOT_COUNTS: Final = (1, 2, 3, 4, 6)  # where a slot holds a piece of a block
SCRATCH_COUNTS: Final = (1, 2)

Chosen = tuple[Option, ...]


@dataclass(frozen=True)
class Limits:
    """Bytes that weights, rings, keys and values may take; of host memory; of it pinned. How passes run."""

    vram: int
    host: int
    pinned: int
    replayed: bool = False  # passes are replayed as graphs, which end with all copies that they begin


@dataclass(frozen=True)
class Placed:
    """Options in call order, with the rings they need, and the simulated time of the pass that follows."""

    chosen: Chosen
    rings: Rings
    seconds: float


def ring_bytes(rings: Rings) -> int:
    """Bytes of VRAM that the rings take."""
    return rings.slots * rings.slot_bytes + rings.scratches * rings.scratch_bytes


def staging_bytes(chosen: Sequence[Option], slot: int) -> int:
    """Bytes of pinned memory through which weights come from the disk."""
    return 2 * slot if any(option.tier == "disk" for option in chosen) else 0


def rings_room(used: Sequence[tuple[Option, int]], limits: Limits) -> tuple[int, int, int] | None:
    """Bytes of a slot and of a scratch buffer that options, so many of each, need, and what is left for them.

    None where host memory is too small.
    """
    slot = max(option.slot_bytes for option, _ in used)
    scratch = max(option.scratch_bytes for option, _ in used)
    pinned = sum(option.pinned_bytes * number for option, number in used)
    pinned += staging_bytes([option for option, _ in used], slot)
    pageable = sum(option.pageable_bytes * number for option, number in used)
    if pinned > limits.pinned or pinned + pageable > limits.host:
        return None
    return slot, scratch, limits.vram - sum(option.vram_bytes * number for option, number in used)


def simulated(chosen: Chosen, rings: Rings, limits: Limits) -> float:
    """Seconds of the pass through the blocks. Of very many blocks only some windows are simulated."""
    if len(chosen) <= MANY_BLOCKS:
        return seconds(chosen, rings, replayed=limits.replayed)
    last = len(chosen) - WINDOW
    starts = [round(i * last / (WINDOWS - 1)) for i in range(WINDOWS)]
    parts = [seconds(chosen[at : at + WINDOW], rings, replayed=limits.replayed) for at in starts]
    return sum(parts) * len(chosen) / (WINDOWS * WINDOW)


def placed(chosen: Chosen, limits: Limits) -> Placed | None:
    """With the rings that make the pass shortest, the fewest of equal ones; None where it doesn't fit."""
    numbers, by_id = Counter(map(id, chosen)), {id(option): option for option in chosen}
    room = rings_room([(by_id[key], number) for key, number in numbers.items()], limits)
    if room is None:
        return None
    slot, scratch, left = room
    best, pieces = None, max(option.pieces for option in chosen)
    counts = (0,) if not slot else PIECE_SLOT_COUNTS if pieces > 1 else SLOT_COUNTS
    for slots, scratches in itertools.product(counts, _scratch_counts(scratch, limits)):
        rings = Rings(slots, slot, scratches, scratch, ahead=max(slots, 1), pieces=pieces)
        if ring_bytes(rings) > left:
            continue
        found = simulated(chosen, rings, limits)
        if best is None or found < best.seconds * (1 - GAIN):
            best = Placed(chosen, rings, found)
    return best


def _scratch_counts(scratch: int, limits: Limits) -> tuple[int, ...]:
    """A second one is of use to a graph alone, which unpacks a block ahead for the next pass."""
    return (0,) if not scratch else SCRATCH_COUNTS if limits.replayed else SCRATCH_COUNTS[:1]


def polished(
    start: Placed, choices: Sequence[Sequence[Option]], limits: Limits, *, steps: int = MOST_STEPS
) -> Placed:
    """The placement after every move that shortens the pass; `choices` are the options of each block."""
    best, left = start, steps
    moving = _work(start.chosen, limits) <= steps
    while moving:
        moving = False
        for chosen in _near(best.chosen, choices):
            left -= _work(chosen, limits)
            if left < 0:
                return best
            tried = placed(chosen, limits)
            if tried and tried.seconds < best.seconds * (1 - GAIN):
                best, moving = tried, True
                break
    return best


def _work(chosen: Chosen, limits: Limits) -> int:
    """Steps of the simulations that find a placement's rings: of blocks that move, the others are runs."""
    moving = sum(1 for option in chosen if option.copy_s or option.shared_s or option.cpu_s)
    scratches = len(_scratch_counts(max(option.scratch_bytes for option in chosen), limits))
    return (moving + len(chosen) // STAYING) * len(SLOT_COUNTS) * scratches


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
            one, other = _like(choices[first], chosen[second]), _like(choices[second], chosen[first])
            if one and other and one.way != other.way:
                yield (*chosen[:first], one, *chosen[first + 1 : second], other, *chosen[second + 1 :])


def _like(found: Sequence[Option], other: Option) -> Option | None:
    """The option of the same tier and layout."""
    return next((one for one in found if one.way == other.way), None)
