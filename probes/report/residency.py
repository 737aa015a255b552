"""Finds where a block is, by two independent signals, and what an over-allocation did. Pure.

The first signal is the bandwidth of reading the block, compared with two controls of known place:
VRAM and the link differ by more than tenfold on every discrete card (96 against 6.5 GB/s on a WX 4100,
3459 against 51 on an H200). The second is what the driver's counters did when it was allocated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes.records.schema import Block, Label, Request, Stop, Unknown
from probes.records.stats import median
from probes.shared.units import binary_bytes, gb_per_s

SLOW_FIRST = 3.0  # times as long as later reads: the block was fetched from elsewhere first
LEAST_CONTRAST = 3.0  # between the controls; below it (an APU) timing can't distinguish the two
FAR_BELOW = 3.0  # slower than the link by this factor: pages come and go


@dataclass(frozen=True)
class Controls:
    """Read bandwidth of blocks whose place is known, GB/s."""

    vram_gb_per_s: float
    host_gb_per_s: float


@dataclass(frozen=True)
class Placed:
    """A block with its label by each signal."""

    block: Block
    gb_per_s: float
    by_timing: Label
    by_counters: Label

    @property
    def disagree(self) -> bool:
        """Whether both signals are known and disagree."""
        return "unclear" not in (self.by_timing, self.by_counters) and self.by_timing != self.by_counters


def read_gb_per_s(block: Block) -> float:
    """The block's median read bandwidth, GB/s."""
    return gb_per_s(block.n_bytes, median(block.read_s))


def controls(blocks: Sequence[Block]) -> Controls | Unknown:
    """The controls among the blocks, or why there are none."""
    vram = [read_gb_per_s(b) for b in blocks if b.control and b.asked == "vram"]
    host = [read_gb_per_s(b) for b in blocks if b.control and b.asked == "zero_copy"]
    if not vram or not host:
        return Unknown("the control blocks were not measured")
    return Controls(median(vram), median(host))


def by_timing(read: float, known: Controls) -> Label:
    """The label nearest to the read bandwidth (GB/s) on a logarithmic scale."""
    if known.vram_gb_per_s < LEAST_CONTRAST * known.host_gb_per_s:
        return "unclear"
    if read < known.host_gb_per_s / FAR_BELOW:
        return "paged"
    return "vram" if read > math.sqrt(known.vram_gb_per_s * known.host_gb_per_s) else "host"


def by_counters(block: Block) -> Label:
    """The label by the driver's own accounts; unclear when they moved by less than half the block."""
    half = block.n_bytes // 2
    if isinstance(block.gtt_growth_bytes, int) and block.gtt_growth_bytes >= half:
        return "host"
    if isinstance(block.vram_drop_bytes, int) and block.vram_drop_bytes >= half:
        return "vram"
    return "unclear"


def place(blocks: Sequence[Block]) -> tuple[Placed, ...]:
    """Every block with both labels."""
    known = controls(blocks)
    return tuple(
        Placed(
            block,
            read_gb_per_s(block),
            by_timing(read_gb_per_s(block), known) if isinstance(known, Controls) else "unclear",
            by_counters(block),
        )
        for block in blocks
    )


def outside_vram(blocks: Sequence[Block]) -> int:
    """Bytes that were granted as device memory and read as slowly as the link or below."""
    placed = (p for p in place(blocks) if not p.block.control and p.by_timing in ("host", "paged"))
    return sum(p.block.n_bytes for p in placed)


def first_read_verdict(blocks: Sequence[Block]) -> str | Unknown:
    """How long the first read after everything was allocated took, against later ones, in a sentence."""
    known = [(b.first_read_s, median(b.read_s), b) for b in blocks if isinstance(b.first_read_s, float)]
    mine = [one for one in known if one[2].asked == "vram"]
    if not mine:
        return Unknown("the first read of the blocks was not timed")
    slow = [(first / later, block) for first, later, block in mine if first > SLOW_FIRST * later]
    if not slow:
        middle = median([first / later for first, later, _ in mine])
        return f"the first read of a block took {middle:.2f} x as long as later ones: nothing was paged in"
    worst = max(factor for factor, _ in slow)
    n_bytes = sum(block.n_bytes for _, block in slow)
    return (
        f"the first read of {len(slow)} of {len(mine)} blocks ({binary_bytes(n_bytes)}) took up to "
        f"{worst:.3g} x as long as later ones: they were paged in from elsewhere"
    )


def refused_by(request: Request) -> str:
    """Who refused: our cap, if there is one and the driver had room for the request, else the driver."""
    capped = request.cap_bytes is not None and request.vram_free_bytes >= request.asked_bytes
    return "torch's cap" if capped else "the driver"


def verdict(requests: Sequence[Request], blocks: Sequence[Block], stop: Stop) -> str:
    """What happened, in a sentence."""
    held = binary_bytes(stop.held_bytes)
    spilled = outside_vram(blocks)
    if spilled:
        return (
            f"spilled silently: of {held} granted as device memory, {binary_bytes(spilled)} "
            "reads at the link's speed or below"
        )
    unclear = any(p.by_timing == "unclear" for p in place(blocks))
    where = "timing can't show where the blocks are" if unclear else "every block is in VRAM"
    if stop.cause == "refused":
        refusals = [refused_by(r) for r in requests if r.purpose == "block" and not r.granted]
        by = f" by {refusals[-1]}" if refusals else ""
        return f"refused with out of memory{by} at {held}; {where}"
    return f"{held} were granted; {where} ({stop.note})"


def forced_verdict(requests: Sequence[Request]) -> str | Unknown:
    """What became of the requests around the limit, in a sentence."""
    forced = [request for request in requests if request.purpose == "forced"]
    if not forced:
        return Unknown("nothing was asked for around the limit")
    granted, declined = sum(r.granted for r in forced), sum(r.declined for r in forced)
    return (
        f"of {len(forced)} requests for 0.9 to 1.5 of the limit {granted} were granted, "
        f"{len(forced) - granted - declined} refused with out of memory, "
        f"{declined} not made to keep the host-memory floor"
    )


def driver_verdict(requests: Sequence[Request]) -> str | Unknown:
    """The driver's answer to one request larger than all free VRAM."""
    asked = [request for request in requests if request.purpose == "oversize"]
    if not asked:
        return Unknown("the driver was not asked for more than the free VRAM")
    size, free = binary_bytes(asked[0].asked_bytes), binary_bytes(asked[0].vram_free_bytes)
    refused = "refused with out of memory: it does not spill"
    answer = "granted: it would spill" if asked[0].granted else refused
    return f"one request for {size} with {free} free was {answer}"
