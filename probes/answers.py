"""What the figures of a report mean, in plain sentences with the figures they rest on. Pure."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from probes import breakeven, residency
from probes.model import MODELS
from probes.report import (
    Block,
    Expectation,
    Measurement,
    Pass,
    ProbeReport,
    Reads,
    Record,
    Request,
    Scenario,
    Stop,
    Unknown,
)
from probes.stats import median, summarize
from probes.units import binary_bytes, duration, gb_per_s

R = TypeVar("R", bound=Record)
CLEAR = 3.0  # standard errors between two means before one is called smaller
WORTH_TELLING = 0.01  # of the smaller: below it a difference is real perhaps, and of no use


def pick(records: Sequence[Record], kind: type[R]) -> list[R]:
    """The records of one kind, in order."""
    return [record for record in records if isinstance(record, kind)]


def all_records(report: ProbeReport) -> list[Record]:
    """The records of every probe."""
    return [record for run in report.runs for record in run.records]


def answers(report: ProbeReport) -> tuple[str, ...]:
    """Everything that can be said from this report."""
    records = all_records(report)
    return (*_link(records), *_break_even(records), *_spill(records), *_scenarios(records))


def best_gb_per_s(records: Sequence[Record], name: str) -> float | None:
    """The bandwidth of a path at the largest size measured, from the median. None where it wasn't."""
    rows = [m for m in pick(records, Measurement) if m.name == name]
    if not rows:
        return None
    largest = max(rows, key=lambda m: m.payload_bytes)
    return gb_per_s(largest.moved_bytes, median(largest.samples_s))


def _link(records: Sequence[Record]) -> list[str]:
    pinned, pageable, in_place, vram = (
        best_gb_per_s(records, name) for name in ("h2d_pinned", "h2d_pageable", "zero_copy_read", "vram_read")
    )
    said = []
    if pinned and pageable:
        said.append(
            f"Copying into VRAM runs at {pinned:.1f} GB/s from pinned memory and {pageable:.1f} GB/s from "
            f"ordinary (pageable) memory: pinning once gains a factor of {pinned / pageable:.1f}."
        )
    if pinned and in_place and vram:
        said.append(
            f"A kernel reads host memory in place at {in_place:.1f} GB/s, {in_place / pinned:.0%} of a "
            f"copy's speed, and VRAM at {vram:.0f} GB/s: {_reads(pinned, in_place, vram)}"
        )
    return said


def _break_even(records: Sequence[Record]) -> list[str]:
    """The advice by size, and how well the prediction met the measurement."""
    advice = breakeven.adviser(pick(records, Measurement))
    reads = pick(records, Reads)
    if isinstance(advice, Unknown):
        return [f"Break-even can't be predicted: {advice.reason}."] if reads else []
    sizes = [2**power for power in range(16, 29)]  # 64 KiB to 256 MiB
    said = [f"Host memory that the GPU reads in full: {_advice([advice.at(n) for n in sizes])}."]
    met = breakeven.crossings(pick(records, Measurement), reads)
    if isinstance(met, tuple) and met:
        worst = max(met, key=lambda crossing: crossing.distance)
        said.append(
            f"Predicted and measured break-even differ by {worst.distance:.0%} at most over {len(met)} sizes "
            f"(at {binary_bytes(worst.n_bytes)}: predicted {worst.predicted.reads:.2f}, "
            f"measured {worst.measured.reads:.2f} reads)."
        )
    return said


def _advice(found: Sequence[breakeven.BreakEven]) -> str:
    """For runs of neighbouring sizes with one answer: from how many reads on copying to VRAM first pays."""
    parts = []
    for least, run in groupby(found, key=least_reads):
        sizes = [at.n_bytes for at in run]
        span = binary_bytes(sizes[0]) + (f" to {binary_bytes(sizes[-1])}" if len(sizes) > 1 else "")
        if least is None:
            parts.append(f"{span}: leave it, VRAM is no faster")
        elif least <= 1:
            parts.append(f"{span}: copy it to VRAM first, even for one read")
        else:
            parts.append(f"{span}: copy it first from {least} reads on")
    return "; ".join(parts)


def least_reads(at: breakeven.BreakEven) -> int | None:
    """The smallest whole number of reads for which copying first is faster; None when it never is."""
    return None if math.isinf(at.reads) else math.floor(at.reads) + 1


def _reads(copy: float, in_place: float, vram: float) -> str:
    k = breakeven.k_star_of_bandwidths(copy, in_place, vram)
    if math.isinf(k):
        return "VRAM is no faster, so copying never pays."
    if k <= 1:
        return f"data that is read even once is better copied to VRAM (break-even at {k:.2f} reads)."
    return (
        f"data that is read {math.floor(k) + 1} times or more is better copied (break-even at {k:.2f} reads)."
    )


def _spill(records: Sequence[Record]) -> list[str]:
    stops = pick(records, Stop)
    if not stops:
        return []
    requests, expected = pick(records, Request), pick(records, Expectation)
    said = [f"Asking for more device memory: {residency.verdict(requests, pick(records, Block), stops[-1])}."]
    forced = residency.forced_verdict(requests)
    if isinstance(forced, str):
        said.append(f"Around the limit: {forced}.")
    driver = residency.driver_verdict(requests)
    if isinstance(driver, str):
        said.append(f"The driver itself: {driver}.")
        oversize = next(request for request in requests if request.purpose == "oversize")
        agrees = expected[0].agrees(granted=oversize.granted) if expected else None
        if agrees is not None:
            said.append(f"That is {'as' if agrees else 'NOT as'} expected here. {expected[0].sentence}")
    return said


Way = tuple[str, str, int]  # model, element type, batch size


def groups(passes: Sequence[Pass]) -> dict[Way, dict[Scenario, Pass]]:
    """The passes by model, element type and batch size, each with its scenarios."""
    found: dict[Way, dict[Scenario, Pass]] = {}
    for one in sorted(passes, key=lambda p: (MODELS.index(p.model) if p.model in MODELS else 99, p.rows)):
        found.setdefault((one.model, one.dtype, one.rows), {})[one.scenario] = one
    return found


def _scenarios(records: Sequence[Record]) -> list[str]:
    """Each statement once, with the models for which it holds and those for which it doesn't."""
    link = best_gb_per_s(records, "h2d_pinned")
    complete = {key: times for key, times in groups(pick(records, Pass)).items() if len(times) == 4}
    if not complete:
        return []
    streamed = "; ".join(f"{_named(key)}: {_streaming(times, link)}" for key, times in complete.items())
    return [
        _claim("all in VRAM is fastest", {key: _first_claim(times) for key, times in complete.items()}),
        _claim(
            "leaving the inputs in system RAM beats copying them",
            {key: _third_claim(times) for key, times in complete.items()},
        ),
        f"Streaming the spilled weights through two VRAM buffers, held against the better of the two "
        f"zero-copy ways: {streamed}.",
    ]


def _named(key: Way) -> str:
    model, dtype, rows = key
    return f"{model} {dtype} batch {rows}"


def _claim(statement: str, found: Mapping[Way, tuple[str, str]]) -> str:
    """The statement with its verdicts, each followed by the cases it is passed on and their figures."""
    verdicts = dict.fromkeys(verdict for verdict, _ in found.values())
    parts = (
        f"{verdict} for "
        + ", ".join(f"{_named(key)} ({figures})" for key, (mine, figures) in found.items() if mine == verdict)
        for verdict in verdicts
    )
    return f'"{statement}" {"; it ".join(parts)}.'


def _first_claim(times: Mapping[Scenario, Pass]) -> tuple[str, str]:
    """The verdict and its figures."""
    resident, spilled = times["resident"], times["zero_copy_weights"]
    factor = median(spilled.samples_s) / median(resident.samples_s)
    share = spilled.spilled_bytes / spilled.weight_bytes
    figures = (
        f"{_ms(resident)} against {_ms(spilled)} with {share:.0%} of the weights left in system RAM, "
        f"{factor:.1f} x"
    )
    return _holds(resident, spilled), figures


def _third_claim(times: Mapping[Scenario, Pass]) -> tuple[str, str]:
    """The verdict and its figures."""
    copied, left = times["zero_copy_weights"], times["zero_copy_all"]
    return _holds(left, copied), f"{_ms(left)} left there, {_ms(copied)} copied"


def _streaming(times: Mapping[Scenario, Pass], link: float | None) -> str:
    streamed = times["streamed"]
    rival = min(median(times["zero_copy_weights"].samples_s), median(times["zero_copy_all"].samples_s))
    took = median(streamed.samples_s)
    text = f"{_ms(streamed)}, {rival / took:.2f} x " + ("faster" if rival >= took else "their speed")
    if link:
        limit = streamed.spilled_bytes / link / 1e9
        text += f" (the link alone needs {duration(limit)}, {limit / took:.0%} of that)"
    return text


def _ms(passes: Pass) -> str:
    told = summarize(passes.samples_s)
    error = f" +- {duration(told.sem)}" if told.sem is not None else ""
    return f"{duration(told.median)}{error}"


def is_faster(one: Pass, other: Pass) -> bool | None:
    """Whether the first is the faster one, by means and standard errors; None where it can't be told."""
    a, b = summarize(one.samples_s), summarize(other.samples_s)
    gap, error = b.mean - a.mean, math.hypot(a.sem or 0.0, b.sem or 0.0)
    if abs(gap) <= CLEAR * error or abs(gap) < WORTH_TELLING * min(a.mean, b.mean):
        return None
    return gap > 0


def _holds(faster: Pass, slower: Pass) -> str:
    verdicts = {True: "holds here", False: "does NOT hold here", None: "can't be told from its opposite here"}
    return verdicts[is_faster(faster, slower)]
