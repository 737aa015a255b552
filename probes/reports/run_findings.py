"""What the figures of a report mean, in plain sentences with the figures they rest on. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from probes.core.units import binary_bytes, duration, gb_per_s
from probes.core.unknown import Unknown
from probes.measure.stacks import MODELS
from probes.records.rounds import merged
from probes.records.rows import (
    Block,
    Expectation,
    Label,
    Measurement,
    Noise,
    Pass,
    Reads,
    Record,
    Request,
    Scenario,
    Stop,
    Timed,
)
from probes.records.schema import ProbeReport
from probes.records.stats import median, summarize
from probes.reports import crossover

R = TypeVar("R", bound=Record)
OWN_LOAD = "throttled: power cap"
CLEAR = 3.0  # standard errors between two figures before one is called smaller
NOTABLE = 0.01  # of the smaller: below it a difference may be real, but is of no use
SLOW_FIRST = 3.0  # times as long as later reads: the block was fetched from elsewhere first
LEAST_CONTRAST = 3.0  # between the controls; below it (an APU) timing can't distinguish the two
FAR_BELOW = 3.0  # slower than the link by this factor: pages come and go


def pick(records: Sequence[Record], kind: type[R]) -> list[R]:
    """The records of one kind, in order."""
    return [record for record in records if isinstance(record, kind)]


def all_records(report: ProbeReport) -> list[Record]:
    """The records of every probe, each case once with what all of its processes measured."""
    return [record for run in merged(report).runs for record in run.records]


def findings(report: ProbeReport) -> tuple[str, ...]:
    """Everything that can be said from this report."""
    records = all_records(report)
    return (*_link(records), *_break_even(records), *_spill(records), *_scenarios(records))


def best_gb_per_s(records: Sequence[Record], name: str) -> float | None:
    """The bandwidth of a path at the largest size measured, GB/s. None where it wasn't."""
    largest = _largest(records, name)
    return gb_per_s(largest.moved_bytes, summarize(largest.times_s).median) if largest else None


def _largest(records: Sequence[Record], name: str) -> Measurement | None:
    rows = [m for m in pick(records, Measurement) if m.name == name]
    return max(rows, key=lambda m: m.payload_bytes, default=None)


def large_break_even(records: Sequence[Record]) -> crossover.BreakEven | None:
    """k* of a large buffer, from the bandwidths of a copy, of reads in place and of reads in VRAM.

    Latencies are left out, so for small buffers (about a megabyte) the true value is higher. None where one
    of the three wasn't measured.
    """
    rows = [_largest(records, name) for name in ("h2d_pinned", "zero_copy_read", "vram_read")]
    per_byte = []
    for row in rows:
        if row is None:
            return None
        text = crossover.timed(row)
        per_byte.append(crossover.Timed(text.seconds / row.moved_bytes, text.error_s / row.moved_bytes))
    copy, in_place, vram = per_byte
    return crossover.k_star(1, copy, in_place=in_place, vram=vram)


def _link(records: Sequence[Record]) -> list[str]:
    pinned, pageable, in_place, vram = (
        best_gb_per_s(records, name) for name in ("h2d_pinned", "h2d_pageable", "zero_copy_read", "vram_read")
    )
    sentences = []
    if pinned and pageable:
        sentences.append(
            f"Copying into VRAM runs at {pinned:.1f} GB/s from pinned memory and {pageable:.1f} GB/s from "
            f"ordinary (pageable) memory: pinning once gains a factor of {pinned / pageable:.1f}."
        )
    if pinned and in_place and vram:
        sentences.append(
            f"A kernel reads host memory in place at {in_place:.1f} GB/s, {in_place / pinned:.0%} of a "
            f"copy's speed, and VRAM at {vram:.0f} GB/s: {_reads(large_break_even(records))}"
        )
    return sentences


def _break_even(records: Sequence[Record]) -> list[str]:
    """The advice by size, and how well the prediction met the measurement."""
    advice = crossover.adviser(pick(records, Measurement))
    reads = pick(records, Reads)
    if isinstance(advice, Unknown):
        return [f"Break-even can't be predicted: {advice.reason}."] if reads else []
    sizes = [2**power for power in range(16, 29)]  # 64 KiB to 256 MiB
    sentences = [f"Host memory that the GPU reads in full: {_advice([advice.at(n) for n in sizes])}."]
    met = crossover.crossings(pick(records, Measurement), reads)
    if isinstance(met, tuple) and met:
        worst = max(met, key=lambda crossing: crossing.distance)
        sentences.append(
            f"Predicted and measured break-even differ by {worst.distance:.0%} at most over {len(met)} sizes "
            f"(at {binary_bytes(worst.n_bytes)}: predicted {worst.predicted.reads:.2f}, "
            f"measured {worst.measured.reads:.2f} reads)."
        )
    return sentences


def _advice(break_evens: Sequence[crossover.BreakEven]) -> str:
    """Groups neighbouring sizes with the same answer: from how many reads on copying to VRAM first pays."""
    parts = []
    for (least, sure), run in groupby(break_evens, key=lambda at: (least_reads(at), surely_reads(at))):
        sizes = [at.n_bytes for at in run]
        span = binary_bytes(sizes[0]) + (f" to {binary_bytes(sizes[-1])}" if len(sizes) > 1 else "")
        if least is None or sure is None:
            parts.append(f"{span}: leave it, VRAM is no faster")
        elif sure <= 1:
            parts.append(f"{span}: copy it to VRAM first, even for one read")
        elif least < sure:
            parts.append(f"{span}: copy it first from {sure} reads on ({_undecided(least, sure)})")
        else:
            parts.append(f"{span}: copy it first from {least} reads on")
    return "; ".join(parts)


def _undecided(least: int, sure: int) -> str:
    """The counts of reads for which the two ways are too close: from `least` to one below `sure`."""
    if sure - least > 1:
        return f"{least} to {sure - 1} are too close to tell"
    return f"{'one read is' if least == 1 else f'{least} are'} too close to tell"


def least_reads(at: crossover.BreakEven) -> int | None:
    """The smallest whole number of reads for which copying first may be faster; None when it never is.

    That is the first whole number above the point three standard errors below break-even.
    """
    return None if math.isinf(at.reads) else max(math.floor(at.reads - CLEAR * at.error) + 1, 1)


def surely_reads(at: crossover.BreakEven) -> int | None:
    """The smallest whole number of reads above break-even by three standard errors."""
    return None if math.isinf(at.reads) else math.floor(at.reads + CLEAR * at.error) + 1


def reads_advice(at: crossover.BreakEven, what: str) -> str:
    """From how many reads on copying pays, as a clause; `what` is what would be copied. Not for infinity."""
    least, sure = least_reads(at), surely_reads(at)
    assert least is not None
    assert sure is not None
    if least == sure:
        return f"{what} if they are read {sure} times or more, and else leave them"
    return f"{what} if they are read {sure} times or more ({_undecided(least, sure)})"


def _reads(k: crossover.BreakEven | None) -> str:
    if k is None or math.isinf(k.reads):
        return "VRAM is no faster, so copying never pays."
    text = f"break-even at {k.reads:.2f} +- {k.error:.2g} reads"
    if surely_reads(k) == 1:
        return f"data that is read even once is better copied to VRAM ({text})."
    return f"{reads_advice(k, 'copy data')}; {text}."


def _spill(records: Sequence[Record]) -> list[str]:
    stops = pick(records, Stop)
    if not stops:
        return []
    requests, expected = pick(records, Request), pick(records, Expectation)
    sentences = [f"Asking for more device memory: {verdict(requests, pick(records, Block), stops[-1])}."]
    first = first_read_verdict(pick(records, Block))
    if isinstance(first, str):
        sentences.append(f"When the blocks were read again, {first}.")
    forced = forced_verdict(requests)
    if isinstance(forced, str):
        sentences.append(f"Around the limit: {forced}.")
    driver = driver_verdict(requests)
    if isinstance(driver, str):
        sentences.append(f"The driver itself: {driver}.")
        oversize = next(request for request in requests if request.purpose == "oversize")
        agrees = expected[0].agrees(granted=oversize.granted) if expected else None
        if agrees is not None:
            sentences.append(f"That is {'as' if agrees else 'NOT as'} expected here. {expected[0].sentence}")
    return sentences


@dataclass(frozen=True)
class Controls:
    """Read bandwidth of blocks whose place is known, GB/s."""

    vram_gb_per_s: float
    host_gb_per_s: float


@dataclass(frozen=True)
class LabelledBlock:
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


def label_by_timing(read: float, known: Controls) -> Label:
    """The label nearest to the read bandwidth (GB/s) on a logarithmic scale."""
    if known.vram_gb_per_s < LEAST_CONTRAST * known.host_gb_per_s:
        return "unclear"
    if read < known.host_gb_per_s / FAR_BELOW:
        return "paged"
    return "vram" if read > math.sqrt(known.vram_gb_per_s * known.host_gb_per_s) else "host"


def label_by_counters(block: Block) -> Label:
    """The label by the driver's own accounts; unclear when they moved by less than half the block."""
    half = block.n_bytes // 2
    if isinstance(block.gtt_growth_bytes, int) and block.gtt_growth_bytes >= half:
        return "host"
    if isinstance(block.vram_drop_bytes, int) and block.vram_drop_bytes >= half:
        return "vram"
    return "unclear"


def label_blocks(blocks: Sequence[Block]) -> tuple[LabelledBlock, ...]:
    """Every block with both labels."""
    known = controls(blocks)
    return tuple(
        LabelledBlock(
            block,
            read_gb_per_s(block),
            label_by_timing(read_gb_per_s(block), known) if isinstance(known, Controls) else "unclear",
            label_by_counters(block),
        )
        for block in blocks
    )


def bytes_outside_vram(blocks: Sequence[Block]) -> int:
    """Bytes that were granted as device memory and read as slowly as the link or below."""
    placed = (p for p in label_blocks(blocks) if not p.block.control and p.by_timing in ("host", "paged"))
    return sum(p.block.n_bytes for p in placed)


def first_read_verdict(blocks: Sequence[Block]) -> str | Unknown:
    """How long the first read after everything was allocated took, against later ones, in a sentence."""
    known = [(b.first_read_s, median(b.read_s), b) for b in blocks if isinstance(b.first_read_s, float)]
    granted = [entry for entry in known if entry[2].asked == "vram"]
    if not granted:
        return Unknown("the first read of the blocks was not timed")
    slow = [(first / later, block) for first, later, block in granted if first > SLOW_FIRST * later]
    if not slow:
        middle = median([first / later for first, later, _ in granted])
        return f"the first read of a block took {middle:.2f} x as long as later ones: nothing was paged in"
    worst = max(factor for factor, _ in slow)
    n_bytes = sum(block.n_bytes for _, block in slow)
    return (
        f"the first read of {len(slow)} of {len(granted)} blocks ({binary_bytes(n_bytes)}) took up to "
        f"{worst:.3g} x as long as later ones: they were paged in from elsewhere"
    )


def refused_by(request: Request) -> str:
    """Who refused: our cap, if there is one and the driver had room for the request, else the driver."""
    capped = request.cap_bytes is not None and request.vram_free_bytes >= request.asked_bytes
    return "torch's cap" if capped else "the driver"


def verdict(requests: Sequence[Request], blocks: Sequence[Block], stop: Stop) -> str:
    """What happened, in a sentence."""
    held = binary_bytes(stop.held_bytes)
    spilled = bytes_outside_vram(blocks)
    if spilled:
        return (
            f"spilled silently: of {held} granted as device memory, {binary_bytes(spilled)} "
            "reads at the link's speed or below"
        )
    unclear = any(p.by_timing == "unclear" for p in label_blocks(blocks))
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
    oversize = [request for request in requests if request.purpose == "oversize"]
    if not oversize:
        return Unknown("the driver was not asked for more than the free VRAM")
    size, free = binary_bytes(oversize[0].asked_bytes), binary_bytes(oversize[0].vram_free_bytes)
    refused = "refused with out of memory: it does not spill"
    answer = "granted: it would spill" if oversize[0].granted else refused
    return f"one request for {size} with {free} free was {answer}"


# older reports have no others
COMPARED = frozenset({"resident", "streamed", "zero_copy_weights", "zero_copy_all"})
Way = tuple[str, str, int]  # model, element type, batch size
NAMES: dict[Scenario, str] = {
    "resident": "all in VRAM",
    "streamed": "streamed",
    "packed": "packed",
    "placed": "placed by plan",
    "zero_copy_weights": "with weights read in place",
    "zero_copy_all": "with weights and inputs read in place",
}


def by_model(passes: Sequence[Pass]) -> dict[Way, dict[Scenario, Pass]]:
    """The passes by model, element type and batch size, each with its scenarios."""
    models: dict[Way, dict[Scenario, Pass]] = {}
    for row in sorted(passes, key=lambda p: (MODELS.index(p.model) if p.model in MODELS else 99, p.rows)):
        models.setdefault((row.model, row.dtype, row.rows), {})[row.scenario] = row
    return models


def _scenarios(records: Sequence[Record]) -> list[str]:
    """Each statement once, with the models for which it holds and those for which it doesn't."""
    link = best_gb_per_s(records, "h2d_pinned")
    complete = {
        key: times for key, times in by_model(pick(records, Pass)).items() if times.keys() >= COMPARED
    }
    if not complete:
        return []
    streamed = "; ".join(f"{_named(key)}: {_streaming(times, link)}" for key, times in complete.items())
    return [
        _claim("all in VRAM is fastest", {key: _first_claim(times) for key, times in complete.items()}),
        _claim(
            "leaving the inputs in system RAM beats copying them",
            {key: _third_claim(times) for key, times in complete.items()},
        ),
        f"Streaming the spilled weights through two VRAM buffers, compared with the better of the two "
        f"zero-copy ways: {streamed}.",
        *_by_the_device(complete),
    ]


def _by_the_device(complete: Mapping[Way, Mapping[Scenario, Pass]]) -> list[str]:
    """The device's own time, which leaves out what the host needs to hand a pass over."""
    parts = []
    for key, times in complete.items():
        times_s = [device_time_s(times[name]) for name in ("resident", "streamed")]
        known = [seconds for seconds in times_s if seconds is not None]
        if len(known) == 2:
            parts.append(f"{_named(key)} {duration(known[0])} all in VRAM, {duration(known[1])} streamed")
    if not parts:
        return []
    return [
        f"The times of passes above are by the wall clock. Device time alone, without launching: "
        f"{'; '.join(parts)}."
    ]


def device_time_s(row: Pass) -> float | None:
    """Seconds of a pass by the device's clock. None where it has none, or the host held it up."""
    devices_s = row.devices_s
    return None if isinstance(devices_s, Unknown) or row.host_bound else summarize(devices_s).median


def _named(key: Way) -> str:
    model, dtype, rows = key
    return f"{model} {dtype} batch {rows}"


def _claim(statement: str, verdicts_by_model: Mapping[Way, tuple[str, str]]) -> str:
    """The statement with its verdicts, each followed by the cases it is passed on and their figures."""
    verdicts = dict.fromkeys(verdict for verdict, _ in verdicts_by_model.values())
    parts = (
        f"{verdict} for "
        + ", ".join(
            f"{_named(key)} ({figures})"
            for key, (own, figures) in verdicts_by_model.items()
            if own == verdict
        )
        for verdict in verdicts
    )
    return f'"{statement}" {"; it ".join(parts)}.'


def took_s(row: Pass) -> float:
    """Seconds that a pass takes by the wall clock."""
    return summarize(row.times_s).median


def _first_claim(times: Mapping[Scenario, Pass]) -> tuple[str, str]:
    """The verdict against every other way, and the figures of the fastest of them."""
    resident = times["resident"]
    others = sorted((row for name, row in times.items() if name != "resident"), key=took_s)
    best = others[0]
    share = best.spilled_bytes / best.weight_bytes
    figures = (
        f"{figure_text(resident)} against {figure_text(best)} {NAMES[best.scenario]} "
        f"with {share:.0%} of the weights left in system RAM, {took_s(best) / took_s(resident):.2f} x"
    )
    return _verdict([is_faster(resident, other) for other in others]), figures


def _third_claim(times: Mapping[Scenario, Pass]) -> tuple[str, str]:
    """The verdict and its figures."""
    copied, left = times["zero_copy_weights"], times["zero_copy_all"]
    return _verdict(
        [is_faster(left, copied)]
    ), f"{figure_text(left)} left there, {figure_text(copied)} copied"


def _streaming(times: Mapping[Scenario, Pass], link: float | None) -> str:
    streamed = times["streamed"]
    rival = min(took_s(times["zero_copy_weights"]), took_s(times["zero_copy_all"]))
    took = took_s(streamed)
    text = f"{figure_text(streamed)}, {rival / took:.2f} x " + ("faster" if rival >= took else "their speed")
    if link:
        limit = streamed.spilled_bytes / link / 1e9
        text += f" (the link alone needs {duration(limit)}, {limit / took:.0%} of that)"
    return text


def figure_text(row: Timed) -> str:
    """The figure of a row and its standard error, in ASCII."""
    summary = summarize(row.times_s)
    error = f" +- {duration(summary.error)}" if summary.error is not None else ""
    return f"{duration(summary.median)}{error}"


def is_faster(one: Timed, other: Timed) -> bool | None:
    """Whether the first is the faster one; None where that isn't clear.

    By more than three standard errors, which include how processes differ and how successive samples
    correlate, and by more than a percent. Other activity only ever slows a row down: where the slower one
    was disturbed, its fastest samples (p5) represent it.
    """
    a, b = summarize(one.times_s), summarize(other.times_s)
    gap, error = b.median - a.median, math.hypot(a.error or 0.0, b.error or 0.0)
    slower, summary = (other, b) if gap > 0 else (one, a)
    if disturbed(slower):
        gap = math.copysign(max(abs(gap) - (summary.median - summary.p5), 0.0), gap)
    if abs(gap) <= CLEAR * error or abs(gap) < NOTABLE * min(a.median, b.median):
        return None
    return gap > 0


def disturbed(row: Timed) -> bool:
    """Whether other activity was seen while the row was measured.

    A card that reaches its power cap under the row's own load isn't a disturbance: it does so in every run.
    """
    return isinstance(row.noise, Noise) and any(flag != OWN_LOAD for flag in row.noise.flags)


def _verdict(faster: Sequence[bool | None]) -> str:
    """Of a statement that something is faster than each of others."""
    if all(faster):
        return "holds here"
    return "does NOT hold here" if False in faster else "can't be distinguished from its opposite here"
