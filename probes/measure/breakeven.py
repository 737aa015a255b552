"""The probe `breakeven`: read a buffer of host memory k times, copied to VRAM first or in place.

Its results are compared with the prediction from `transfer`'s figures (`probes.reports.crossover`).
"""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from probes.core.errors import Unsupported
from probes.measure import sampling
from probes.measure.transfer import KIB, MIB, MOST_SLOTS, ROW_S, SCRUB, SOURCE, Grid, arena_bytes
from probes.measure.workbench import WORD_BYTES, Memory, Operation, Workbench, mismatch
from probes.records.rows import Gap, Reads, Record, Way, case_name
from probes.records.schema import Settings

FULL_SIZES = tuple(64 * KIB * 4**i for i in range(7))  # 64 KiB, 256 KiB, ... 256 MiB
QUICK_SIZES = (64 * KIB, MIB, 16 * MIB, 64 * MIB)
FULL_READS = (1, 2, 4, 8)
QUICK_READS = (1, 2, 8)
QUICK_EFFORT = sampling.Effort(samples=30, at_least=4, budget_s=0.05, spread_s=sampling.QUICK_SPREAD_S)
FULL_EFFORT = replace(sampling.FULL, spread_s=sampling.FULL_SPREAD_S)
WAYS: tuple[Way, ...] = ("copy_first", "in_place")


def run(
    bench: Workbench, settings: Settings, host_available_bytes: int, *, done: Collection[str] = ()
) -> Iterator[Record]:
    """Time both ways for every size and count of reads that isn't `done`, in an order drawn from the seed.

    Raises ContentMismatch when a sum is wrong, OutOfMemory when a buffer is refused.
    """
    sizes, counts, effort = _sizes_reads_effort(settings)
    arena = arena_bytes(
        max(sizes) * 2, host_available_bytes=host_available_bytes, vram_free_bytes=bench.vram_free_bytes()
    )
    draw = random.Random(settings.seed)
    try:
        with (
            bench.memory("zero_copy", arena) as host,
            bench.memory("vram", arena) as vram,
            bench.memory("vram", MOST_SLOTS * WORD_BYTES) as sums,
        ):
            bench.fill(host.span(0, arena), SOURCE)
            for n_bytes in draw.sample(sizes, len(sizes)):
                cases = [(way, k) for way in WAYS for k in counts]
                for way, reads in draw.sample(cases, len(cases)):
                    if case_name(way, reads, n_bytes) in done:
                        continue
                    if n_bytes > arena:
                        yield Gap("breakeven", n_bytes, "buffers are held smaller: memory is short")
                        break
                    case = _Case(host, vram, sums, way, reads, Grid(arena, n_bytes))
                    yield _measure(bench, case, effort)
    except Unsupported as lacking:
        yield from (Gap("breakeven", n_bytes, lacking.message) for n_bytes in sizes)


def planned(settings: Settings) -> tuple[tuple[str, float], ...]:
    """Every case with its approximate seconds on an ordinary machine. Pure."""
    sizes, counts, effort = _sizes_reads_effort(settings)
    return tuple(
        (
            case_name(way, reads, n_bytes),
            ROW_S + sampling.cost_s(effort, _ordinary_s(way, reads, n_bytes), device=True),
        )
        for n_bytes in sizes
        for way in WAYS
        for reads in counts
    )


def _sizes_reads_effort(settings: Settings) -> tuple[tuple[int, ...], tuple[int, ...], sampling.Effort]:
    """Sizes, counts of reads, and the effort for each case."""
    if settings.quick:
        return QUICK_SIZES, QUICK_READS, QUICK_EFFORT
    return FULL_SIZES, FULL_READS, FULL_EFFORT


def _ordinary_s(way: Way, reads: int, n_bytes: int) -> float:
    if way == "in_place":
        return reads * n_bytes / sampling.LINK_BYTES_PER_S
    return n_bytes / sampling.LINK_BYTES_PER_S + reads * n_bytes / sampling.VRAM_BYTES_PER_S


@dataclass(frozen=True)
class _Case:
    """Buffers, the sums that reads leave in them (one for each place), and what to do."""

    host: Memory
    vram: Memory
    sums: Memory
    way: Way
    reads: int
    grid: Grid


def _measure(bench: Workbench, case: _Case, effort: sampling.Effort) -> Reads:
    """Time a case, then compare the sum of the last read of each used place with its closed form."""
    grid = case.grid
    bench.fill(case.sums.span(0, case.sums.n_bytes), SCRUB)
    if case.way == "copy_first":
        bench.fill(grid.all_of(case.vram, grid.count), SCRUB)
    operations = [_operation(bench, case, place, offset) for place, offset in enumerate(grid.offsets)]
    samples = sampling.sample(bench, operations, effort=effort, queued=True)
    used = min(samples.taken, grid.count)
    if bench.words(case.sums.span(0, used * WORD_BYTES)) != grid.sums(SOURCE, used):
        raise mismatch(f"breakeven, {case.way}", grid.n_bytes)
    return Reads(
        way=case.way,
        reads=case.reads,
        payload_bytes=grid.n_bytes,
        batch=samples.batch,
        device_s=samples.device_s,
        wall_s=samples.wall_s,
        host_bound=samples.host_bound,
    )


def _operation(bench: Workbench, case: _Case, place: int, offset: int) -> Operation:
    n_bytes = case.grid.n_bytes
    result = case.sums.span(place * WORD_BYTES, WORD_BYTES)
    source, target = case.host.span(offset, n_bytes), case.vram.span(offset, n_bytes)
    if case.way == "in_place":
        read = bench.operation("read", result, source)
        return lambda: [read() for _ in range(case.reads)]
    copy = bench.operation("copy", target, source)
    reread = bench.operation("read", result, target)
    return lambda: (copy(), [reread() for _ in range(case.reads)])
