"""A placement within limits: options in call order, with the rings that make its pass shortest. Pure."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from probes.placement.planner.costs.option import Option
from probes.placement.planner.searching.simulation import Blocks, seconds
from probes.placement.values import Rings

GAIN: Final = 1e-4  # of the time that a move must save
MANY_BLOCKS: Final = 4_096  # above which candidates are compared by windows of so many blocks:
WINDOW: Final = 256
WINDOWS: Final = 8
SLOT_COUNTS: Final = (1, 2, 3, 4)
PIECE_SLOT_COUNTS: Final = (1, 2, 3, 4, 6)  # where a slot holds a piece of a block
SCRATCH_COUNTS: Final = (1, 2)
Chosen: TypeAlias = tuple[Option, ...]


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


def staging_bytes(used: Iterable[Option], slot: int) -> int:
    """Bytes of pinned memory through which weights come from the disk."""
    return 2 * slot if any(option.tier == "disk" for option in used) else 0


def rings_room(used: Mapping[Option, int], limits: Limits) -> tuple[int, int, int] | None:
    """Bytes of a slot and of a scratch buffer that options, so many of each, need, and what is left for them.

    None where host memory is too small.
    """
    slot = max(option.slot_bytes for option in used)
    scratch = max(option.scratch_bytes for option in used)
    pinned = sum(option.pinned_bytes * number for option, number in used.items())
    pinned += staging_bytes(used, slot)
    pageable = sum(option.pageable_bytes * number for option, number in used.items())
    if pinned > limits.pinned or pinned + pageable > limits.host:
        return None
    return slot, scratch, limits.vram - sum(option.vram_bytes * number for option, number in used.items())


def placed(blocks: Blocks, limits: Limits) -> Placed | None:
    """With the rings that make the pass shortest, the fewest of equal ones; None where it doesn't fit."""
    room = rings_room(blocks.used, limits)
    if room is None:
        return None
    slot, scratch, left = room
    best, pieces = None, max(option.pieces for option in blocks.used)
    windows = _windows(blocks)
    as_often = len(blocks.chosen) / sum(len(window.chosen) for window in windows)
    counts = (0,) if not slot else PIECE_SLOT_COUNTS if pieces > 1 else SLOT_COUNTS
    for slots, scratches in itertools.product(counts, scratch_counts(scratch, limits)):
        rings = Rings(slots, slot, scratches, scratch, ahead=max(slots, 1), pieces=pieces)
        if ring_bytes(rings) > left:
            continue
        found = as_often * sum(seconds(one, rings, replayed=limits.replayed) for one in windows)
        if best is None or found < best.seconds * (1 - GAIN):
            best = Placed(blocks.chosen, rings, found)
    return best


def scratch_counts(scratch: int, limits: Limits) -> tuple[int, ...]:
    """A second one is of use to a graph alone, which unpacks a block ahead for the next pass."""
    return (0,) if not scratch else SCRATCH_COUNTS if limits.replayed else SCRATCH_COUNTS[:1]


def _windows(blocks: Blocks) -> list[Blocks]:
    """What is simulated: the blocks, of very many only some windows."""
    chosen = blocks.chosen
    if len(chosen) <= MANY_BLOCKS:
        return [blocks]
    last = len(chosen) - WINDOW
    starts = (round(i * last / (WINDOWS - 1)) for i in range(WINDOWS))
    return [Blocks(chosen[at : at + WINDOW]) for at in starts]
