"""The probe `breakeven`: read a buffer of host memory k times, copied to VRAM first or in place.

What it measures is held against the prediction from `transfer`'s figures (`probes.breakeven`).
"""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from probes import sampling
from probes.errors import Unsupported
from probes.report import Gap, Reads, Record, Settings, Way, case_name
from probes.transfer import KIB, MIB, ROW_S, SOURCE, arena_bytes, places, verify_sum
from probes.workbench import Memory, Operation, Workbench

FULL_SIZES = tuple(64 * KIB * 4**i for i in range(7))  # 64 KiB, 256 KiB, ... 256 MiB
QUICK_SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
FULL_READS = tuple(range(1, 9))
QUICK_READS = (1, 2, 8)
QUICK_EFFORT = sampling.Effort(samples=50, at_least=5, budget_s=0.1, spread_s=sampling.QUICK_SPREAD_S)
FULL_EFFORT = replace(sampling.FULL, spread_s=sampling.FULL_SPREAD_S)
WAYS: tuple[Way, ...] = ("copy_first", "in_place")


def run(
    bench: Workbench, settings: Settings, host_available_bytes: int, *, done: Collection[str] = ()
) -> Iterator[Record]:
    """Time both ways for every size and count of reads that isn't `done`, in an order drawn from the seed.

    Raises ContentMismatch when a sum is wrong, OutOfMemory when a buffer is refused.
    """
    sizes = QUICK_SIZES if settings.quick else FULL_SIZES
    arena = arena_bytes(
        max(sizes) * 2, host_available_bytes=host_available_bytes, vram_free_bytes=bench.vram_free_bytes()
    )
    draw = random.Random(settings.seed)
    try:
        with bench.memory("zero_copy", arena) as host, bench.memory("vram", arena) as vram:
            bench.fill(host.span(0, arena), SOURCE)
            for n_bytes in draw.sample(sizes, len(sizes)):
                cases = [(way, k) for way in WAYS for k in (QUICK_READS if settings.quick else FULL_READS)]
                for way, reads in draw.sample(cases, len(cases)):
                    if case_name(way, reads, n_bytes) in done:
                        continue
                    if n_bytes > arena:
                        yield Gap("breakeven", n_bytes, "buffers are held smaller: memory is short")
                        break
                    case = _Case(host, vram, way, reads, n_bytes)
                    yield _measure(bench, case, QUICK_EFFORT if settings.quick else FULL_EFFORT)
    except Unsupported as lacking:
        yield from (Gap("breakeven", n_bytes, lacking.message) for n_bytes in sizes)


def planned(settings: Settings) -> tuple[tuple[str, float], ...]:
    """Every case with about how many seconds it takes on an ordinary machine. Pure."""
    sizes, counts = (QUICK_SIZES, QUICK_READS) if settings.quick else (FULL_SIZES, FULL_READS)
    effort = QUICK_EFFORT if settings.quick else FULL_EFFORT
    return tuple(
        (
            case_name(way, reads, n_bytes),
            ROW_S + sampling.cost_s(effort, _ordinary_s(way, reads, n_bytes), device=True),
        )
        for n_bytes in sizes
        for way in WAYS
        for reads in counts
    )


def _ordinary_s(way: Way, reads: int, n_bytes: int) -> float:
    if way == "in_place":
        return reads * n_bytes / sampling.LINK_BYTES_PER_S
    return n_bytes / sampling.LINK_BYTES_PER_S + reads * n_bytes / sampling.VRAM_BYTES_PER_S


@dataclass(frozen=True)
class _Case:
    host: Memory
    vram: Memory
    way: Way
    reads: int
    n_bytes: int


def _measure(bench: Workbench, case: _Case, effort: sampling.Effort) -> Reads:
    offsets = places(min(case.host.n_bytes, case.vram.n_bytes), case.n_bytes)
    operations = [_operation(bench, case, offset) for offset in offsets]
    checked = case.vram if case.way == "copy_first" else case.host
    for slot in {0, len(offsets) - 1}:
        operations[slot]()
        verify_sum(bench, checked.span(offsets[slot], case.n_bytes), offsets[slot], f"breakeven, {case.way}")
    samples = sampling.sample(bench, operations, effort=effort, queued=True)
    return Reads(case.way, case.reads, case.n_bytes, samples.batch, samples.device_s, samples.wall_s)


def _operation(bench: Workbench, case: _Case, offset: int) -> Operation:
    source, target = case.host.span(offset, case.n_bytes), case.vram.span(offset, case.n_bytes)
    if case.way == "in_place":
        read = bench.operation("read", None, source)
        return lambda: [read() for _ in range(case.reads)]
    copy = bench.operation("copy", target, source)
    reread = bench.operation("read", None, target)
    return lambda: (copy(), [reread() for _ in range(case.reads)])
