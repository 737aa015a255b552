"""The probe `transfer`: what it costs to move bytes, by path and size.

Each path gets its two buffers, in which every size rotates; content is compared before it counts.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from probes import sampling
from probes.errors import ContentMismatch, DeviceUnusable, Unsupported
from probes.pattern import WORD_BYTES, Pattern
from probes.report import Clock, Gap, Measurement, Record, Settings, case_name
from probes.units import binary_bytes
from probes.workbench import WRITTEN, Action, Kind, Memory, Span, Workbench

KIB, MIB = 2**10, 2**20
FULL_SIZES = tuple(4 * KIB * 4**i for i in range(10))  # 4 KiB, 16 KiB, ... 1 GiB
QUICK_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
SMALLEST_ARENA = 16 * MIB
# Rotation past caches needs many slots for small sizes; beyond this, preparing them costs more than it tells.
MOST_SLOTS = 2048
ROW_S = 0.15  # to prepare and to check a row
SOURCE = Pattern(start=0x1234567)
SCRUB = Pattern(start=0x0BADF00D, step=3)


@dataclass(frozen=True)
class Path:
    """One way to move bytes. `weight`: how often each byte counts in the bandwidth, as in BabelStream."""

    name: str
    action: Action
    target: Kind | None
    source: Kind | None
    weight: int = 1
    rotates: bool = True  # past the caches; else one place again and again, which they may answer for

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
        """Whose figure leads: the device's, except where the host does part of the work."""
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
    """Every case with about how many seconds it takes on an ordinary machine. Pure."""
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
        target = stack.enter_context(bench.memory(path.target, arena)) if path.target else None
        source = stack.enter_context(bench.memory(path.source, arena)) if path.source else None
        if target:
            bench.fill(target.span(0, arena), SCRUB)  # touched: no first page faults in the timings
        if source:
            bench.fill(source.span(0, arena), SOURCE)
        for n_bytes in order:
            if n_bytes > arena:
                yield Gap(path.name, n_bytes, f"buffers are held to {binary_bytes(arena)}: memory is short")
            else:
                yield _measure(
                    bench, path, _Rotation(path, target, source, n_bytes=n_bytes), settings=settings
                )


def _effort(settings: Settings, path: Path, *, has_gpu: bool) -> sampling.Effort:
    """What crosses the link is spread over more time than a slow spell of it lasts."""
    effort = sampling.FULL
    if settings.quick:
        effort = sampling.QUICK if has_gpu else sampling.QUICK_HOST
    spread_s = sampling.QUICK_SPREAD_S if settings.quick else sampling.FULL_SPREAD_S
    return replace(effort, spread_s=spread_s) if has_gpu and path.queued and not path.inside else effort


def places(arena: int, n_bytes: int) -> list[int]:
    """Offsets of a size's places in a buffer of `arena` bytes, spread over all of it, aligned to words."""
    slots = min(MOST_SLOTS, arena // n_bytes)
    stride = arena // slots // WORD_BYTES * WORD_BYTES
    return [slot * stride for slot in range(slots)]


class _Rotation:
    """The places of one size in a path's buffers."""

    def __init__(self, path: Path, target: Memory | None, source: Memory | None, *, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        offsets = places(min(memory.n_bytes for memory in (target, source) if memory), n_bytes)
        self.offsets = offsets if path.rotates else offsets[:1]
        self.targets = [target.span(offset, n_bytes) if target else None for offset in self.offsets]
        self.sources = [source.span(offset, n_bytes) if source else None for offset in self.offsets]


def _measure(bench: Workbench, path: Path, rotation: _Rotation, *, settings: Settings) -> Measurement:
    pairs = list(zip(rotation.targets, rotation.sources, strict=True))
    operations = [bench.operation(path.action, target, source) for target, source in pairs]
    checked = {0, len(pairs) - 1}
    for slot in checked:
        target = rotation.targets[slot]
        if target:
            bench.fill(target, SCRUB)  # so that what an earlier row left there can't pass for this one's
        operations[slot]()
        _verify(bench, path, target=target, source=rotation.sources[slot], offset=rotation.offsets[slot])
    samples = sampling.sample(
        bench, operations, effort=_effort(settings, path, has_gpu=bench.has_gpu), queued=path.queued
    )
    for slot in checked:
        _verify(
            bench,
            path,
            target=rotation.targets[slot],
            source=rotation.sources[slot],
            offset=rotation.offsets[slot],
        )
    return Measurement(
        name=path.name,
        payload_bytes=rotation.n_bytes,
        moved_bytes=rotation.n_bytes * path.weight,
        batch=samples.batch,
        clock=path.clock if bench.has_gpu else "wall",
        device_s=samples.device_s,
        wall_s=samples.wall_s,
    )


def _verify(bench: Workbench, path: Path, *, target: Span | None, source: Span | None, offset: int) -> None:
    if target:
        expected = {"kernel_copy": SOURCE.plus(1), "write": WRITTEN}.get(path.action, SOURCE)
        if not bench.matches(target, expected):
            raise _mismatch(path.name, target.n_bytes)
        return
    assert source is not None  # a path has at least one side
    verify_sum(bench, source, offset, path.name)


def verify_sum(bench: Workbench, span: Span, offset: int, what: str) -> None:
    """Hold the sum of a span of the content SOURCE against its closed form. Raises ContentMismatch."""
    if bench.total(span) != SOURCE.total(offset // WORD_BYTES, span.n_bytes // WORD_BYTES):
        raise _mismatch(what, span.n_bytes)


def _mismatch(what: str, n_bytes: int) -> ContentMismatch:
    return ContentMismatch(
        f"{what} of {binary_bytes(n_bytes)}: the content that arrived is not what was sent",
        "the memory, the link or the driver is faulty; see the kernel's log (dmesg)",
    )
