"""Requests around and beyond a limit, in VRAM and in host memory: each ends in a record, with any outcome."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from probes.errors import OutOfMemory
from probes.measure.pattern import Pattern
from probes.measure.workbench import Kind, Workbench
from probes.records.schema import Request

KINDS: tuple[Kind, ...] = ("vram", "pinned", "pageable")
FACTORS = (0.9, 1.5)  # of the limit
ALIGNMENT = 2 * 2**20
CONTENT = Pattern(start=0x0DDBA11)


@dataclass(frozen=True)
class Limits:
    """Around which sizes to ask. Bytes."""

    vram_bytes: int
    host_bytes: int
    cap_bytes: int | None  # of torch's allocator, where the probe has set one


def force(
    bench: Workbench, limits: Limits, *, count: int, seed: int, host_spendable_bytes: Callable[[], int]
) -> Iterator[Request]:
    """Ask `count` times for 0.9 to 1.5 of a limit, each kind of memory in turn; what is granted is touched.

    A request that could take the host below its floor isn't made, and is recorded as such.
    """
    draw = random.Random(seed)
    for turn in range(count):
        kind = KINDS[turn % len(KINDS)]
        limit = limits.vram_bytes if kind == "vram" else limits.host_bytes
        asked = int(limit * draw.uniform(*FACTORS)) // ALIGNMENT * ALIGNMENT
        yield _ask(bench, limits, kind=kind, asked=asked, spendable=host_spendable_bytes())


def _ask(bench: Workbench, limits: Limits, *, kind: Kind, asked: int, spendable: int) -> Request:
    free = bench.vram_free_bytes()

    def answer(message: str, *, granted: bool = False, declined: bool = False) -> Request:
        cap = limits.cap_bytes if kind == "vram" else None
        return Request("forced", asked, 0, free, cap, granted, message, kind, declined)

    if host_bytes(kind, asked, vram_free_bytes=free) > spendable:
        return answer("it could take the host below its memory floor", declined=True)
    try:
        with bench.memory(kind, asked) as memory:
            bench.fill(memory.span(0, asked), CONTENT)
    except OutOfMemory as refusal:
        return answer(refusal.message)
    return answer("", granted=True)


def host_bytes(kind: Kind, asked: int, *, vram_free_bytes: int) -> int:
    """The most host memory that a request can take: torch pins powers of two; a driver may spill VRAM."""
    if kind == "vram":
        return max(asked - vram_free_bytes, 0)
    return 1 << (asked - 1).bit_length() if kind == "pinned" else asked
