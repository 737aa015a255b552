"""Prefetch pools: the sizes to try, the memory they take, and the best pool for an assignment. Pure."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from probes.placement.planner.costs import Option
from probes.placement.planner.kinds import Kind
from probes.placement.planner.simulation import Assignment, pass_seconds
from probes.placement.types import DISK_BUFFERS, PrefetchPool

GAIN: Final = 1e-4  # share of the time that a change must save to be taken
MANY_BLOCKS: Final = 4_096  # above which placements are compared by WINDOWS windows of WINDOW blocks
WINDOW: Final = 256
WINDOWS: Final = 8
SLOT_COUNTS: Final = (1, 2, 3, 4)  # numbers of slots to simulate an assignment with,
PIECE_SLOT_COUNTS: Final = (1, 2, 3, 4, 6)  # and where a slot holds a piece of a block
Chosen: TypeAlias = tuple[Option, ...]
MOST_SIZES: Final = 9  # of slots, and of scratch buffers, that are tried
ALIKE: Final = 1.1  # ratio up to which sizes count as alike: the largest of them is tried
COUNTED_SLOTS: Final = (1, 2, 4)  # numbers of slots to count blocks with
SMALL_POOL: Final = 0.002  # share of VRAM: where the largest pool takes less, no other sizes are tried
SMALL: Final = 0.005  # share of the largest size, below which sizes aren't tried


@dataclass(frozen=True)
class Limits:
    """The memory for a placement, in bytes, and how its passes run."""

    vram: int  # for weights, the prefetch pool and the KV cache
    host: int
    pinned: int  # part of `host`
    replayed: bool = False  # passes are replayed as graphs, which end with all copies that they begin


@dataclass(frozen=True)
class Placement:
    """The option of each block in call order, their prefetch pool, and the simulated time of a pass."""

    chosen: Chosen
    pool: PrefetchPool
    seconds: float


def pool_bytes(pool: PrefetchPool) -> int:
    """Bytes of VRAM that a prefetch pool takes."""
    return pool.slots * pool.slot_bytes + pool.scratches * pool.scratch_bytes


def disk_buffer_bytes(used: Iterable[Option], slot: int) -> int:
    """Bytes of the pinned buffers through which weights come from the disk."""
    return DISK_BUFFERS * slot if any(option.tier == "disk" for option in used) else 0


def pool_room(used: Mapping[Option, int], limits: Limits) -> tuple[int, int, int] | None:
    """Bytes of a slot, of a scratch buffer, and of the VRAM left for them, beside options and their numbers.

    None where host memory is too small for these.
    """
    slot = max(option.slot_bytes for option in used)
    scratch = max(option.scratch_bytes for option in used)
    pinned = sum(option.pinned_bytes * number for option, number in used.items())
    pinned += disk_buffer_bytes(used, slot)
    pageable = sum(option.pageable_bytes * number for option, number in used.items())
    if pinned > limits.pinned or pinned + pageable > limits.host:
        return None
    return slot, scratch, limits.vram - sum(option.vram_bytes * number for option, number in used.items())


def with_best_pool(assignment: Assignment, limits: Limits) -> Placement | None:
    """With the pool that makes the pass shortest, the smallest of equals; None where none fits."""
    room = pool_room(assignment.used, limits)
    if room is None:
        return None
    slot, scratch, left = room
    best, pieces = None, max(option.pieces for option in assignment.used)
    windows = _windows(assignment)
    repeats = len(assignment.chosen) / sum(len(window.chosen) for window in windows)
    counts = (0,) if not slot else PIECE_SLOT_COUNTS if pieces > 1 else SLOT_COUNTS
    for slots in counts:
        pool = PrefetchPool(slots, slot, int(scratch > 0), scratch, ahead=max(slots, 1), pieces=pieces)
        if pool_bytes(pool) > left:
            continue
        seconds = repeats * sum(pass_seconds(window, pool, replayed=limits.replayed) for window in windows)
        if best is None or seconds < best.seconds * (1 - GAIN):
            best = Placement(assignment.chosen, pool, seconds)
    return best


def _windows(assignment: Assignment) -> list[Assignment]:
    """What to simulate: the whole assignment, of very many blocks only some windows."""
    chosen = assignment.chosen
    if len(chosen) <= MANY_BLOCKS:
        return [assignment]
    last = len(chosen) - WINDOW
    starts = (round(i * last / (WINDOWS - 1)) for i in range(WINDOWS))
    return [Assignment(chosen[at : at + WINDOW]) for at in starts]


def pools_tried(kinds: Sequence[Kind], limits: Limits) -> Iterator[PrefetchPool]:
    """The pools that counts are looked for with: some numbers of slots in each size."""
    for slot, scratch in sizes_tried(kinds, limits):
        for slots in COUNTED_SLOTS if notable(slot, scratch, limits) else COUNTED_SLOTS[-1:]:
            yield with_sizes(PrefetchPool(slots), slot, scratch)


def sizes_tried(kinds: Sequence[Kind], limits: Limits) -> Iterator[tuple[int, int]]:
    """Sizes of slots and scratch buffers to try, at most MOST_SIZES of each: sizes that some option needs.

    Where the largest take next to nothing of VRAM, smaller ones would save nothing. Where some block has no
    option, no size is of use.
    """
    if not all(kind.options for kind in kinds):
        return
    options = [option for kind in kinds for option in kind.options]
    slot, scratch = max(o.slot_bytes for o in options), max(o.scratch_bytes for o in options)
    if not notable(slot, scratch, limits):
        yield from dict.fromkeys(((0, 0), (slot, scratch)))
        return
    slots, scratches = (
        _few({getattr(option, size) for option in options}) for size in ("slot_bytes", "scratch_bytes")
    )
    sizes = {(o.slot_bytes, o.scratch_bytes) for o in options}
    yield from dict.fromkeys(_needed(sizes, slot, scratch) for slot in slots for scratch in scratches)


def notable(slot: int, scratch: int, limits: Limits) -> bool:
    """Whether pools of these sizes take a notable share of VRAM."""
    return 2 * slot + scratch >= SMALL_POOL * limits.vram


def with_sizes(pool: PrefetchPool, slot: int, scratch: int) -> PrefetchPool:
    """A pool with as many slots of another size, and a scratch buffer where one is needed."""
    return PrefetchPool(pool.slots if slot else 0, slot, 1 if scratch else 0, scratch)


def _needed(sizes: Collection[tuple[int, int]], slot: int, scratch: int) -> tuple[int, int]:
    """The largest sizes needed by options that fit these."""
    fitting = [size for size in sizes if size[0] <= slot and size[1] <= scratch]
    return max(slot for slot, _ in fitting), max(scratch for _, scratch in fitting)


def _few(sizes: set[int]) -> list[int]:
    """0, the largest, and some in between: at most MOST_SIZES."""
    ordered = sorted({0} | {size for size in sizes if size >= SMALL * max(sizes)})
    ordered = [
        size
        for size, next_one in zip(ordered, [*ordered[1:], math.inf], strict=True)
        if next_one > ALIKE * size
    ]
    if len(ordered) <= MOST_SIZES:
        return ordered
    return sorted({ordered[round(i * (len(ordered) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)})


def spread(layers: int, spilled: int) -> tuple[int, ...]:
    """`spilled` indices out of `layers`, evenly apart, so that copies can run while resident layers do."""
    if spilled >= layers:
        return tuple(range(layers))
    return tuple(-(-nth * layers // spilled) - 1 for nth in range(1, spilled + 1))
