"""The probe `transfer`: what it costs to move bytes, by path and size.

Each path gets its two buffers, in which every size rotates; what the timed operations left is compared.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import get_args

from probes.core.errors import DeviceUnusable, Unsupported
from probes.core.units import binary_bytes
from probes.measure import sampling
from probes.measure.workbench import (
    WORD_BYTES,
    WRITTEN,
    Action,
    Kind,
    Memory,
    Operation,
    Pattern,
    Span,
    Workbench,
    mismatch,
)
from probes.records.rows import ClassWork, Clock, Gap, Measurement, Record, Small, SmallWork, case_name
from probes.records.schema import Settings

KIB, MIB = 2**10, 2**20
FULL_SIZES = tuple(4 * KIB * 4**i for i in range(10))  # 4 KiB, 16 KiB, ... 1 GiB
QUICK_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
SMALLEST_ARENA = 16 * MIB
# Rotation past caches needs many places for small sizes; beyond this, preparation costs more than it gains.
MOST_SLOTS = 2048
ROW_S = 0.05  # to prepare and to check a row
SMALL_EFFORT = sampling.Effort(samples=50, at_least=5, budget_s=0.08)
CLASS_EFFORT = sampling.Effort(samples=50, at_least=5, budget_s=0.06)
SOURCE = Pattern(start=0x1234567)
SCRUB = Pattern(start=0x0BADF00D, step=0)  # neither of the contents that an operation leaves


@dataclass(frozen=True)
class Path:
    """One way to move bytes. `weight`: how often each byte counts in the bandwidth, as in BabelStream."""

    name: str
    action: Action
    target: Kind | None
    source: Kind | None
    weight: int = 1
    rotates: bool = True  # past the caches; else the same place again and again, which a cache may serve

    @property
    def queued(self) -> bool:
        """Whether the host can hand it over and go on. Copies of pageable memory block the host."""
        return "pageable" not in (self.target, self.source)

    @property
    def inside(self) -> bool:
        """Whether it stays within VRAM."""
        return {self.target, self.source} <= {"vram", None}

    @property
    def clock(self) -> Clock:
        """The leading clock: the device's, except where the host does part of the work."""
        return "device" if self.queued else "wall"


GPU_PATHS = (
    Path("h2d_pageable", "copy", "vram", "pageable"),
    Path("h2d_pinned", "copy", "vram", "pinned"),
    Path("h2d_then_read", "copy_then_read", "vram", "pinned"),
    Path("d2h_pageable", "copy", "pageable", "vram"),
    Path("d2h_pinned", "copy", "pinned", "vram"),
    Path("zero_copy_read", "read", None, "zero_copy"),
    Path("zero_copy_write", "kernel_copy", "zero_copy", "vram"),
    Path("vram_read", "read", None, "vram"),
    Path("vram_reread", "read", None, "vram", rotates=False),
    Path("vram_write", "write", "vram", None),
    Path("vram_copy", "copy", "vram", "vram", weight=2),
)
HOST_PATHS = (
    Path("h2h_copy", "copy", "pageable", "pageable", weight=2),
    Path("h2h_read", "read", None, "pageable"),
    Path("h2h_write", "write", "pageable", None),
)


def planned(settings: Settings, *, has_gpu: bool) -> tuple[tuple[str, float], ...]:
    """Every case with its approximate seconds on an ordinary machine. Pure."""
    return tuple(
        (case_name(path.name, n_bytes), ROW_S + _cost_s(settings, path, n_bytes, has_gpu=has_gpu))
        for path in (GPU_PATHS if has_gpu else HOST_PATHS)
        for n_bytes in (QUICK_SIZES if settings.quick else FULL_SIZES)
    )


def _cost_s(settings: Settings, path: Path, n_bytes: int, *, has_gpu: bool) -> float:
    ordinary = sampling.VRAM_BYTES_PER_S if path.inside else sampling.LINK_BYTES_PER_S
    effort = _effort(settings, path, has_gpu=has_gpu)
    return sampling.cost_s(effort, n_bytes / ordinary, device=has_gpu and path.queued)


def arena_bytes(largest: int, *, host_available_bytes: int, vram_free_bytes: int | None) -> int:
    """The size of each of a path's two buffers: a power of two, both in a quarter of a memory.

    Raises DeviceUnusable when even the smallest do not fit.
    """
    room = host_available_bytes if vram_free_bytes is None else min(host_available_bytes, vram_free_bytes)
    least = 8 * SMALLEST_ARENA
    if room < least:
        raise DeviceUnusable(
            f"transfer needs {binary_bytes(least)} of free memory, there is {binary_bytes(room)}",
            "end other programs or raise the container's memory limit",
        )
    return min(largest, 1 << ((room // 8).bit_length() - 1))


def run(
    bench: Workbench, settings: Settings, host_available_bytes: int, *, done: Collection[str] = ()
) -> Iterator[Record]:
    """Measure every path and size that isn't `done` yet, in an order drawn from the seed.

    Raises ContentMismatch when a copy's content is wrong, OutOfMemory when a buffer is refused.
    """
    sizes = QUICK_SIZES if settings.quick else FULL_SIZES
    free = bench.vram_free_bytes() if bench.has_gpu else None
    if free is not None and settings.vram_cap_bytes is not None:
        free = min(free, settings.vram_cap_bytes)
    arena = arena_bytes(max(sizes), host_available_bytes=host_available_bytes, vram_free_bytes=free)
    draw = random.Random(settings.seed)
    paths = list(GPU_PATHS if bench.has_gpu else HOST_PATHS)
    for path in draw.sample(paths, len(paths)):
        order = [n for n in draw.sample(sizes, len(sizes)) if case_name(path.name, n) not in done]
        if not order:
            continue
        try:
            yield from _measure_path(bench, path, order, arena=arena, settings=settings)
        except Unsupported as lacking:
            yield from (Gap(path.name, n_bytes, lacking.message) for n_bytes in order)


def _measure_path(
    bench: Workbench, path: Path, order: Sequence[int], *, arena: int, settings: Settings
) -> Iterator[Record]:
    with ExitStack() as stack:
        # a read leaves its sums, one for each place, where the device computes
        target_bytes = arena if path.target else MOST_SLOTS * WORD_BYTES
        target = stack.enter_context(bench.memory(path.target or "vram", target_bytes))
        source = stack.enter_context(bench.memory(path.source, arena)) if path.source else None
        if source:
            bench.fill(source.span(0, arena), SOURCE)
        for n_bytes in order:
            if n_bytes > arena:
                yield Gap(path.name, n_bytes, f"buffers are held to {binary_bytes(arena)}: memory is short")
            else:
                grid = Grid(arena, n_bytes, rotates=path.rotates)
                yield _measure(bench, path, _Buffers(target, source, grid), settings=settings)


def small(bench: Workbench, settings: Settings) -> Iterator[Small]:
    """Each kind of small work that a GPU does: what launches cost, for plans. Half a second.

    In quick mode nothing is unpacked: the kernel for it has to be compiled, which takes seconds.
    """
    for name in get_args(SmallWork):
        if not bench.has_gpu or (name == "unpack" and settings.quick):
            continue
        try:
            operation = bench.small(name)
        except Unsupported:
            continue
        leads: Clock = "wall" if name == "layers" else "device"
        samples = sampling.sample(bench, [operation], effort=SMALL_EFFORT, queued=True, leads=leads)
        yield Small(name, samples.device_s, samples.wall_s)


def classes(bench: Workbench, settings: Settings) -> Iterator[Small]:
    """Each class of operation, small and large: what plans count a traced pass by. Two seconds.

    Not in quick mode, whose plans take the profile's.
    """
    for name in () if settings.quick else get_args(ClassWork):
        try:
            work = bench.class_work(name)
        except Unsupported:
            continue
        samples = sampling.sample(bench, [work.operation], effort=CLASS_EFFORT, queued=bench.has_gpu)
        yield Small(
            name, samples.device_s, samples.wall_s, work.count, work.launches, work.flops, work.moved_bytes
        )


def _effort(settings: Settings, path: Path, *, has_gpu: bool) -> sampling.Effort:
    """Rows that cross the link are spread over more time than a slow spell of it lasts.

    So are copies of pageable memory, in which a processor does part of the work: it has slow spells as well.
    """
    effort = sampling.FULL
    if settings.quick:
        effort = sampling.QUICK if has_gpu else sampling.QUICK_HOST
    spread_s = sampling.QUICK_SPREAD_S if settings.quick else sampling.FULL_SPREAD_S
    if not path.queued and not settings.quick:
        spread_s = sampling.HOST_SPREAD_S
    return replace(effort, spread_s=spread_s) if has_gpu and not path.inside else effort


@dataclass(frozen=True)
class Grid:
    """The places of one size in a buffer of `arena` bytes: spread over all of it, aligned to words."""

    arena: int
    n_bytes: int
    rotates: bool = True

    @property
    def count(self) -> int:
        """How many places there are."""
        return min(MOST_SLOTS, self.arena // self.n_bytes) if self.rotates else 1

    @property
    def stride_bytes(self) -> int:
        """From one place to the next."""
        return self.arena // self.count // WORD_BYTES * WORD_BYTES if self.rotates else self.n_bytes

    @property
    def offsets(self) -> list[int]:
        """Return the offsets at which the buffers begin."""
        return [place * self.stride_bytes for place in range(self.count)]

    def spans(self, memory: Memory) -> list[Span]:
        """The places in a buffer, one by one."""
        return [memory.span(offset, self.n_bytes) for offset in self.offsets]

    def all_of(self, memory: Memory, count: int) -> Span:
        """The first `count` places in a buffer, as one."""
        return memory.spans(self.n_bytes, stride_bytes=self.stride_bytes, count=min(count, self.count))

    def sums(self, content: Pattern, count: int) -> tuple[int, ...]:
        """The sum of the words of each of the first `count` places of a buffer with this content."""
        words = self.n_bytes // WORD_BYTES
        return tuple(content.total(at // WORD_BYTES, words) for at in self.offsets[:count])


@dataclass(frozen=True)
class _Buffers:
    """A path's two buffers and the places of one size in them. The target of a read takes sums."""

    target: Memory
    source: Memory | None
    grid: Grid


def _measure(bench: Workbench, path: Path, buffers: _Buffers, *, settings: Settings) -> Measurement:
    """Time a row, then compare the content of every place that was used. All are scrubbed before."""
    grid = buffers.grid
    _scrub(bench, path, buffers)
    operations = _operations(bench, path, buffers)
    samples = sampling.sample(
        bench, operations, effort=_effort(settings, path, has_gpu=bench.has_gpu), queued=path.queued
    )
    _verify(bench, path, buffers, used=min(samples.taken, grid.count))
    return Measurement(
        name=path.name,
        payload_bytes=grid.n_bytes,
        moved_bytes=grid.n_bytes * path.weight,
        batch=samples.batch,
        clock=path.clock if bench.has_gpu else "wall",
        device_s=samples.device_s,
        wall_s=samples.wall_s,
        host_bound=samples.host_bound,
    )


def _operations(bench: Workbench, path: Path, buffers: _Buffers) -> list[Operation]:
    grid = buffers.grid
    sources: list[Span | None] = [*grid.spans(buffers.source)] if buffers.source else [None] * grid.count
    if path.target:
        targets = grid.spans(buffers.target)
    else:
        targets = [buffers.target.span(i * WORD_BYTES, WORD_BYTES) for i in range(grid.count)]
    return [bench.operation(path.action, *pair) for pair in zip(targets, sources, strict=True)]


def _scrub(bench: Workbench, path: Path, buffers: _Buffers) -> None:
    """Scrub all places, so that neither an earlier row nor an operation that does nothing can pass.

    Touches pages, too.
    """
    target, grid = buffers.target, buffers.grid
    bench.fill(grid.all_of(target, grid.count) if path.target else target.span(0, target.n_bytes), SCRUB)


def _verify(bench: Workbench, path: Path, buffers: _Buffers, *, used: int) -> None:
    """Raises ContentMismatch where one of the first `used` places doesn't hold what the operation leaves."""
    if path.target:
        expected = {"kernel_copy": SOURCE.plus(1), "write": WRITTEN}.get(path.action, SOURCE)
        right = bench.matches(buffers.grid.all_of(buffers.target, used), expected)
    else:
        sums = bench.words(buffers.target.span(0, used * WORD_BYTES))
        right = sums == buffers.grid.sums(SOURCE, used)
    if not right:
        raise mismatch(path.name, buffers.grid.n_bytes)
