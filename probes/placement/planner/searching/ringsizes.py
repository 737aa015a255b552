"""The sizes of rings that are tried: of slots for blocks that move, of buffers for unpacked ones. Pure."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from probes.placement.planner.searching.blockkinds import Kind
from probes.placement.planner.searching.placed import Limits
from probes.placement.values import Rings

MOST_SIZES: Final = 7  # of each ring that are tried
ALIKE: Final = 1.1  # times a size: of those that are as alike, the largest is tried
SLOTS: Final = (1, 2, 4)  # that there is room for while blocks are counted
SMALL_RINGS: Final = 0.002  # of VRAM, that the largest rings take: none of other sizes is tried
SMALL: Final = 0.005  # of the largest block: no ring is made for smaller ones


def rings_tried(found: Sequence[Kind], limits: Limits) -> Iterator[Rings]:
    """Rings that counts are looked for with: so many slots as there is room for, in each size."""
    for slot, scratch in sizes_tried(found, limits):
        for slots in SLOTS if notable(slot, scratch, limits) else SLOTS[-1:]:
            yield with_sizes(Rings(slots), slot, scratch)


def sizes_tried(found: Sequence[Kind], limits: Limits) -> Iterator[tuple[int, int]]:
    """Sizes of slot and scratch that are tried: of no use are others than some block's own.

    Where the largest take next to nothing of VRAM, smaller ones would save nothing. Where some block has no
    option, no size is of use.
    """
    if not all(kind.options for kind in found):
        return
    options = [option for kind in found for option in kind.options]
    slot, scratch = max(o.slot_bytes for o in options), max(o.scratch_bytes for o in options)
    if not notable(slot, scratch, limits):
        yield from dict.fromkeys(((0, 0), (slot, scratch)))
        return
    slots, scratches = _few({o.slot_bytes for o in options}), _few({o.scratch_bytes for o in options})
    sizes = {(o.slot_bytes, o.scratch_bytes) for o in options}
    yield from dict.fromkeys(_needed(sizes, slot, scratch) for slot in slots for scratch in scratches)


def notable(slot: int, scratch: int, limits: Limits) -> bool:
    """Whether rings of these sizes take a notable share of VRAM."""
    return 2 * slot + scratch >= SMALL_RINGS * limits.vram


def with_sizes(rings: Rings, slot: int, scratch: int) -> Rings:
    """As many slots of another size, and a scratch buffer where one is needed."""
    return Rings(rings.slots if slot else 0, slot, 1 if scratch else 0, scratch)


def _needed(sizes: Collection[tuple[int, int]], slot: int, scratch: int) -> tuple[int, int]:
    """The largest sizes that options have which fit these."""
    fitting = [size for size in sizes if size[0] <= slot and size[1] <= scratch]
    return max(slot for slot, _ in fitting), max(scratch for _, scratch in fitting)


def _few(sizes: set[int], most: int = MOST_SIZES) -> list[int]:
    """Nothing, the largest, and some in between."""
    ordered = sorted({0} | {size for size in sizes if size >= SMALL * max(sizes)})
    ordered = [
        size
        for size, next_one in zip(ordered, [*ordered[1:], math.inf], strict=True)
        if next_one > ALIKE * size
    ]
    if len(ordered) <= most:
        return ordered
    return sorted({ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)})
