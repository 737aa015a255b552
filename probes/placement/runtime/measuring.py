"""What a placed model takes and how long its passes take, next to what was planned."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from probes.core.units import binary_bytes, counted, duration, gb_per_s
from probes.core.unknown import Unknown
from probes.placement.runtime.streams import Event, Stream, Streams
from probes.placement.runtime.weight_sources import WeightSource
from probes.placement.types import PassTime, Tier


@dataclass(frozen=True)
class TierUse:
    """The blocks of one tier: their bytes unpacked, and as they are kept or sent."""

    tier: Tier
    blocks: int
    weight_bytes: int
    kept_bytes: int

    def __str__(self) -> str:
        sizes = f"{binary_bytes(self.weight_bytes)}, kept in {binary_bytes(self.kept_bytes)}"
        return f"{self.tier}: {counted(self.blocks, 'block')} of {sizes}"


def tier_use(tier: Tier, sizes: Sequence[tuple[int, int]]) -> TierUse:
    """The sum of blocks of (unpacked, kept) bytes."""
    return TierUse(tier, len(sizes), sum(raw for raw, _ in sizes), sum(kept for _, kept in sizes))


@dataclass(frozen=True)
class Measured:
    """Passes by the host's clock, and the lanes of one more pass by the device's.

    `waited_s`: the compute lane stood still for weights. Lanes overlap: their times don't add up to the
    wall time.
    """

    wall_s: tuple[float, ...]
    copied_s: float
    unpacked_s: float
    waited_s: float
    copied_bytes: int

    @property
    def middle_s(self) -> float:
        """The median of the wall times."""
        return median(self.wall_s)


@dataclass(frozen=True)
class PlacementReport:
    """Planned against taken, planned against measured. Bytes and seconds."""

    tiers: tuple[TierUse, ...]
    vram_asked: int
    vram_taken: int  # weights, slots and scratch buffers: one allocation
    pinned_asked: int
    pinned_taken: int
    spilled: int  # blocks that stream, though they were to stay in VRAM
    why_pageable: str  # empty where host memory is pinned
    planned: PassTime
    measured: Measured | Unknown
    surprises: int  # blocks called in another order than in the pass before
    graphs: int
    not_captured: tuple[str, ...]

    def gap(self) -> tuple[str, ...]:
        """Where the difference between the planned and the measured wall time comes from, in sentences."""
        if isinstance(self.measured, Unknown):
            return (f"the time of a pass is unknown: {self.measured.reason}",)
        one, planned = self.measured, duration(self.planned.middle_s)
        rest = max(one.middle_s - one.waited_s, 0.0)
        lines = [
            f"a pass takes {duration(one.middle_s)} (wall), {planned} were predicted",
            f"computing waits for weights for {duration(one.waited_s)} of that, and not for {duration(rest)}",
        ]
        if one.copied_bytes and one.copied_s > 0:
            rate, carried = gb_per_s(one.copied_bytes, one.copied_s), binary_bytes(one.copied_bytes)
            lines.append(f"the link carries {carried} in {duration(one.copied_s)}: {rate:.1f} GB/s")
        if one.unpacked_s > 0:
            lines.append(f"unpacking takes {duration(one.unpacked_s)}")
        if self.why_pageable and one.copied_bytes:
            lines.append(f"host memory isn't pinned: {self.why_pageable}")
        if self.surprises:
            lines.append(
                f"{counted(self.surprises, 'call')} came in another order than before, and waited for weights"
            )
        lines += [f"not captured: {why}" for why in self.not_captured]
        return tuple(lines)

    def __str__(self) -> str:
        rows = [str(use) for use in self.tiers]
        rows.append(f"VRAM: {binary_bytes(self.vram_taken)} taken, {binary_bytes(self.vram_asked)} asked for")
        rows.append(
            f"pinned: {binary_bytes(self.pinned_taken)} taken, {binary_bytes(self.pinned_asked)} asked for"
        )
        if self.spilled:
            rows.append(
                f"{counted(self.spilled, 'block')} of these were to stay in VRAM and stream: "
                "the weights pack worse than planned"
            )
        return "\n".join((*rows, *self.gap()))


class Stopwatches:
    """Begin and end of every step of one pass, by lane."""

    def __init__(self, lanes: Streams) -> None:
        self._lanes = lanes
        self._taken: dict[str, list[tuple[Any, Any]]] = {"copy": [], "unpack": [], "wait": []}
        self.copied_bytes = 0

    def _around(self, what: str, lane: Stream, work: Callable[[], object]) -> None:
        begin, end = self._lanes.stopwatch(), self._lanes.stopwatch()
        lane.record(begin)
        work()
        lane.record(end)
        self._taken[what].append((begin, end))

    def send(self, wire: WeightSource, target: torch.Tensor, lane: Stream) -> None:
        """A copy."""
        self.copied_bytes += target.numel()
        self._around("copy", lane, lambda: wire.send(target, lane))

    def unpack(self, work: Callable[[], object], lane: Stream) -> None:
        """An unpacking."""
        self._around("unpack", lane, lambda: lane.run(work))

    def wait(self, lane: Stream, mark: Event) -> None:
        """A wait for weights."""
        self._around("wait", lane, lambda: lane.wait(mark))

    def seconds(self, what: str) -> float:
        """The sum of these steps, all of them done."""
        return sum(self._lanes.seconds(begin, end) for begin, end in self._taken[what])


class Watched(Protocol):
    """What runs the passes that are measured."""

    @property
    def lanes(self) -> Streams:
        """Its lanes."""

    watches: Stopwatches | None


def wall_times(finish: Callable[[], None], work: Callable[[], object], passes: int) -> tuple[float, ...]:
    """Seconds of each pass by the host's clock, after one to warm up. `finish` waits for the device."""
    work()
    walls = []
    for _ in range(passes):
        finish()
        began = time.perf_counter()
        work()
        finish()
        walls.append(time.perf_counter() - began)
    return tuple(walls)


def measure(engine: Watched, work: Callable[[], object], passes: int) -> Measured:
    """Time passes: `passes` by the host's clock after one to warm up, then one with stopwatches on lanes."""
    walls = wall_times(engine.lanes.finish, work, passes)
    watches = engine.watches = Stopwatches(engine.lanes)
    try:
        work()
        engine.lanes.finish()
    finally:
        engine.watches = None
    copied, unpacked, waited = (watches.seconds(what) for what in ("copy", "unpack", "wait"))
    return Measured(walls, copied, unpacked, waited, watches.copied_bytes)
