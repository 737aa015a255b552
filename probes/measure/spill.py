"""The probe `spill`: asks for device memory up to and past the limit, and finds where the bytes went.

Never uses managed memory: oversubscribing it can hang a GPU that others share.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from probes.core.errors import ContentMismatch, OutOfMemory, Unsupported
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.measure.workbench import WORD_BYTES, Kind, Memory, Pattern, Span, Workbench
from probes.records.rows import Block, BlockKind, Expectation, Gap, Reading, Record, Request, Stop
from probes.records.schema import Settings

MIB, GIB = 2**20, 2**30
BLOCK_RANGE = (64 * MIB, GIB)
BLOCKS_PER_CAP = 16
PAST = 1.25  # of the limit: how far to ask
BIG_CARD = 8 * GIB  # above it, quick mode pretends that the card has QUICK_CAP
QUICK_CAP = 4 * GIB
OVERSIZE_MARGIN = 256 * MIB
CONTROLS = 2  # of each kind
QUICK_FORCED, FULL_FORCED = 6, 30  # requests around the limit, once the blocks are freed
HOST_LIMIT = 64 * MIB  # around which host memory is asked for
READS = 5
LEAD_S = 200e-6  # before each read: ten times what handing over one kernel takes
QUICK_S, FULL_S = 3.0, 20.0  # about how long the probe takes on an ordinary machine
ALIGNMENT = 2 * MIB  # the allocator's and the driver's page; larger requests are not rounded further


@dataclass(frozen=True)
class Plan:
    """How far to go and in what steps. Bytes."""

    cap_bytes: int | None  # None: the card's own limit
    limit_bytes: int
    target_bytes: int
    block_bytes: int


@dataclass(frozen=True)
class Gauges:
    """The outside figures that the probe watches; each is read again at every call."""

    host_spendable_bytes: Callable[[], int]  # above the host-memory floor
    gtt_used_bytes: Callable[[], int | Unknown]
    readings: Callable[[str], tuple[Reading, ...]]


def plan(settings: Settings, *, vram_total_bytes: int, vram_free_bytes: int) -> Plan:
    """The cap, the limit that is expected to hold, and blocks that make about sixteen of it. Pure."""
    cap = settings.vram_cap_bytes
    if cap is None and settings.quick and vram_total_bytes > BIG_CARD:
        cap = QUICK_CAP
    limit = min(vram_free_bytes, cap) if cap is not None else vram_free_bytes
    block = min(max(limit // BLOCKS_PER_CAP, BLOCK_RANGE[0]), BLOCK_RANGE[1]) // ALIGNMENT * ALIGNMENT
    return Plan(cap, limit, int(limit * PAST), block)


def pattern_of(index: int) -> Pattern:
    """Each block has its own content, so that one block can't pass for another."""
    return Pattern(start=0x600DB10C + (index << 32))


@dataclass
class _Held:
    """A block in hand; it has no reads yet."""

    memory: Memory
    block: Block


@dataclass
class _Run:
    """The probe under way: what it holds, and who frees it."""

    bench: Workbench
    gauges: Gauges
    plan: Plan
    stack: ExitStack
    held: list[_Held] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        return sum(held.block.n_bytes for held in self.held if held.block.asked == "vram")


def run(
    bench: Workbench,
    settings: Settings,
    *,
    vram_total_bytes: int,
    expectation: Expectation,
    gauges: Gauges,
) -> Iterator[Record]:
    """Allocate, touch, read again, record. Raises ContentMismatch when a block's content changed."""
    chosen = plan(settings, vram_total_bytes=vram_total_bytes, vram_free_bytes=bench.vram_free_bytes())
    yield expectation
    yield from gauges.readings("before")
    oversize = _ask_oversize(bench, gauges)
    if oversize:
        yield oversize
    if chosen.cap_bytes is not None:
        bench.cap_vram(chosen.cap_bytes)
    with ExitStack() as stack:
        state = _Run(bench, gauges, chosen, stack)
        # A sum needs a little VRAM for its result, the driver some for the kernel: allocate both early.
        result = stack.enter_context(bench.memory("vram", WORD_BYTES))
        word = result.span(0, WORD_BYTES)
        warm = bench.operation("read", word, word)  # the kernel and the clock's events are there before
        bench.device_s([warm], lead_s=LEAD_S)
        bench.total(word)
        yield from _host_controls(state)
        yield from _fill_up(state)
        yield from gauges.readings("full")
        for held in state.held:
            yield _reread(bench, held, word)
    limits = Limits(chosen.limit_bytes, HOST_LIMIT, chosen.cap_bytes)
    yield from ask_around_limits(
        bench,
        limits,
        count=QUICK_FORCED if settings.quick else FULL_FORCED,
        seed=settings.seed,
        host_spendable_bytes=gauges.host_spendable_bytes,
    )
    yield from gauges.readings("after")


def _ask_oversize(bench: Workbench, gauges: Gauges) -> Request | None:
    """One request that no free VRAM can satisfy, never touched: the driver's own answer, despite our cap.

    None when a driver that spills could break the host-memory floor by granting it.
    """
    free = bench.vram_free_bytes()
    if gauges.host_spendable_bytes() < OVERSIZE_MARGIN * 2:
        return None
    n_bytes = (free + OVERSIZE_MARGIN) // ALIGNMENT * ALIGNMENT
    request = Request("oversize", n_bytes, 0, free, None, granted=True, message="")
    try:
        with bench.memory("vram", n_bytes):
            return request
    except OutOfMemory as refusal:
        return replace(request, granted=False, message=refusal.message)


def _host_controls(state: _Run) -> Iterator[Record]:
    """Blocks known to be in host memory; without them a gap records that timing labels no block."""
    block = state.plan.block_bytes
    if state.gauges.host_spendable_bytes() < (CONTROLS + 1) * block:
        yield Gap("zero_copy control", block, "it could take the host below its memory floor")
        return
    try:
        for _ in range(CONTROLS):
            _add(state, "zero_copy", control=True)
    except Unsupported as lacking:
        yield Gap("zero_copy control", block, lacking.message)


def _fill_up(state: _Run) -> Iterator[Record]:
    """Blocks until refused, the target is reached, or the host's memory nears its floor."""
    block = state.plan.block_bytes
    while state.held_bytes < state.plan.target_bytes:
        if state.gauges.host_spendable_bytes() < 2 * block:
            yield Stop("floor", state.held_bytes, "one more block could take the host below its memory floor")
            return
        request = _request(state)
        yield request
        if not request.granted:
            yield Stop("refused", state.held_bytes, request.message)
            return
    note = f"the probe asks for no more than {binary_bytes(state.plan.target_bytes)}"
    yield Stop("target", state.held_bytes, note)


def _request(state: _Run) -> Request:
    free, held = state.bench.vram_free_bytes(), state.held_bytes
    control = (
        sum(held.block.asked == "vram" for held in state.held) < CONTROLS
    )  # the first are in an empty card
    message, granted = "", True
    try:
        _add(state, "vram", control=control)
    except OutOfMemory as refusal:
        message, granted = refusal.message, False
    return Request("block", state.plan.block_bytes, held, free, state.plan.cap_bytes, granted, message)


def _add(state: _Run, kind: BlockKind, *, control: bool) -> None:
    """Allocate and touch one block, noting what the driver's accounts did meanwhile."""
    bench, n_bytes = state.bench, state.plan.block_bytes
    free, gtt = bench.vram_free_bytes(), state.gauges.gtt_used_bytes()
    memory = state.stack.enter_context(bench.memory(kind, n_bytes))
    index = len(state.held)
    bench.fill(memory.span(0, n_bytes), pattern_of(index))
    drop = free - bench.vram_free_bytes()
    gtt_now = state.gauges.gtt_used_bytes()
    growth = gtt if isinstance(gtt, Unknown) else gtt_now if isinstance(gtt_now, Unknown) else gtt_now - gtt
    block = Block(index, kind, control, n_bytes, read_s=(), vram_drop_bytes=drop, gtt_growth_bytes=growth)
    state.held.append(_Held(memory, block))


def _reread(bench: Workbench, held: _Held, result: Span) -> Block:
    """Time reads of the block, the first one apart, and compare its content with what was written."""
    index, n_bytes = held.block.index, held.block.n_bytes
    span = held.memory.span(0, n_bytes)
    read = bench.operation("read", result, span)

    def timed() -> float:
        clocked = bench.device_s([read], lead_s=LEAD_S)
        return bench.wall_s([read]) if clocked is None else clocked.seconds

    first = timed()
    times = tuple(timed() for _ in range(READS))
    written = pattern_of(index).total(0, n_bytes // WORD_BYTES)
    if bench.words(result) != (written,) or bench.total(span) != written:
        raise ContentMismatch(
            f"block {index} of {binary_bytes(n_bytes)} does not hold what was written into it",
            "the memory or the driver is faulty; see the kernel's log (dmesg)",
        )
    return replace(held.block, read_s=times, first_read_s=first)


# ---- requests around a limit -------------------------------------------------------------------------

KINDS: tuple[Kind, ...] = ("vram", "pinned", "pageable")
FACTORS = (0.9, 1.5)  # of the limit
CONTENT = Pattern(start=0x0DDBA11)


@dataclass(frozen=True)
class Limits:
    """Around which sizes to ask. Bytes."""

    vram_bytes: int
    host_bytes: int
    cap_bytes: int | None  # of torch's allocator, where the probe has set one


def ask_around_limits(
    bench: Workbench, limits: Limits, *, count: int, seed: int, host_spendable_bytes: Callable[[], int]
) -> Iterator[Request]:
    """Ask `count` times for 0.9 to 1.5 of a limit, each kind of memory in turn; what is granted is touched.

    A request that could take the host below its floor isn't made, and is recorded as such.
    """
    draw = random.Random(seed)
    for turn in range(count):
        kind = KINDS[turn % len(KINDS)]
        limit = limits.vram_bytes if kind == "vram" else limits.host_bytes
        n_bytes = int(limit * draw.uniform(*FACTORS)) // ALIGNMENT * ALIGNMENT
        yield _request_around_limit(
            bench, limits, kind=kind, n_bytes=n_bytes, spendable=host_spendable_bytes()
        )


def _request_around_limit(
    bench: Workbench, limits: Limits, *, kind: Kind, n_bytes: int, spendable: int
) -> Request:
    free = bench.vram_free_bytes()

    def answer(message: str, *, granted: bool = False, declined: bool = False) -> Request:
        cap = limits.cap_bytes if kind == "vram" else None
        return Request("forced", n_bytes, 0, free, cap, granted, message, kind, declined)

    if host_bytes(kind, n_bytes, vram_free_bytes=free) > spendable:
        return answer("it could take the host below its memory floor", declined=True)
    try:
        with bench.memory(kind, n_bytes) as memory:
            bench.fill(memory.span(0, n_bytes), CONTENT)
    except OutOfMemory as refusal:
        return answer(refusal.message)
    return answer("", granted=True)


def host_bytes(kind: Kind, n_bytes: int, *, vram_free_bytes: int) -> int:
    """The most host memory that a request can take: torch pins powers of two; a driver may spill VRAM."""
    if kind == "vram":
        return max(n_bytes - vram_free_bytes, 0)
    return 1 << (n_bytes - 1).bit_length() if kind == "pinned" else n_bytes
