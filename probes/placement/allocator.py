"""What torch's caching allocator on a GPU takes for a sequence of allocations: a simulation of it. Pure.

Sizes and rules are those of c10/cuda/CUDACachingAllocator (kSmallSize, kSmallBuffer, kMinLargeAlloc,
kLargeBuffer, kRoundLarge; torch 2.11): requests are rounded up to 512 bytes; those up to 1 MiB come from
segments of 2 MiB, those below 10 MiB from segments of 20 MiB, and larger ones have a segment of their own,
in multiples of 2 MiB. The smallest free block that is large enough is taken, and divided where much of it is
left. Segments stay: before the allocator gives up at its limit it returns those that are free as a whole, but
each return waits for the device and is taken anew in the next pass, so a pass that has to is a slow one.
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20
ROUND: Final = 512
SMALL: Final = MIB  # largest request from the pool of small blocks
SMALL_SEGMENT: Final = 2 * MIB
LARGE_FROM: Final = 10 * MIB  # requests from here on have a segment of their own
LARGE_SEGMENT: Final = 20 * MIB
LARGE_ROUND: Final = 2 * MIB


def rounded(n_bytes: int) -> int:
    """Bytes of a request as the allocator counts it."""
    return max(-(-n_bytes // ROUND) * ROUND, ROUND)


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment; `before` and `after` are its neighbours there."""

    size: int
    small: bool
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class _Pool:
    """Free blocks, the smallest first."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._blocks: list[_Block] = []

    def add(self, block: _Block) -> None:
        at = bisect.bisect_right(self._sizes, block.size)
        self._sizes.insert(at, block.size)
        self._blocks.insert(at, block)

    def drop(self, block: _Block) -> None:
        at = bisect.bisect_left(self._sizes, block.size)
        while self._blocks[at] is not block:
            at += 1
        del self._sizes[at], self._blocks[at]

    def best(self, size: int) -> _Block | None:
        at = bisect.bisect_left(self._sizes, size)
        return self._blocks[at] if at < len(self._blocks) else None


class Allocator:
    """The allocator's state: bytes asked for and bytes in segments, now and at their highest."""

    def __init__(self) -> None:
        self._pools = {True: _Pool(), False: _Pool()}
        self._used: dict[int, _Block] = {}
        self._asked: dict[int, int] = {}
        self.alive = self.reserved = self.most_alive = self.most_reserved = 0

    def take(self, name: int, n_bytes: int) -> None:
        """Allocate under a name that isn't in use."""
        size = rounded(n_bytes)
        small = size <= SMALL
        block = self._pools[small].best(size)
        if block is None:
            block = self._segment(size, small=small)
        else:
            self._pools[small].drop(block)
        left = block.size - size
        if left >= ROUND if small else left > SMALL:
            rest = _Block(left, small, before=block, after=block.after)
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            self._pools[small].add(rest)
        block.free = False
        self._used[name], self._asked[name] = block, size
        self.alive += size
        self.most_alive = max(self.most_alive, self.alive)

    def _segment(self, size: int, *, small: bool) -> _Block:
        if small:
            taken = SMALL_SEGMENT
        else:
            taken = LARGE_SEGMENT if size < LARGE_FROM else -(-size // LARGE_ROUND) * LARGE_ROUND
        self.reserved += taken
        self.most_reserved = max(self.most_reserved, self.reserved)
        return _Block(taken, small)

    def give(self, name: int) -> None:
        """Free what was allocated under a name."""
        block = self._used.pop(name)
        self.alive -= self._asked.pop(name)
        pool = self._pools[block.small]
        block.free = True
        for near in (block.before, block.after):
            if near is not None and near.free:
                pool.drop(near)
                block = _joined(near, block) if near is block.before else _joined(block, near)
        pool.add(block)


def _joined(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.after = second.after
    if second.after:
        second.after.before = first
    return first


# A name and its bytes: allocated; 0 bytes: freed
Event = tuple[int, int]
PASSES: Final = 3  # one after the other: later ones find the segments of the first divided otherwise


def peak_of(events: Iterable[Event]) -> tuple[int, int]:
    """The most bytes asked for at once, and the most in segments, over passes with these events.

    What a pass doesn't free, its outputs, is freed before the next.
    """
    allocator, passed = Allocator(), tuple(events)
    for _ in range(PASSES):
        kept: dict[int, None] = {}
        for name, n_bytes in passed:
            if n_bytes:
                allocator.take(name, n_bytes)
                kept[name] = None
            else:
                del kept[name]
                allocator.give(name)
        for name in kept:
            allocator.give(name)
    return allocator.most_alive, allocator.most_reserved
