"""The answer in three plain sentences: copy or leave, what a full card does, what runs fastest. Pure."""

import math
from collections.abc import Sequence

from probes.core.units import duration
from probes.hardware.expectation import expect, maker_of
from probes.records.facts import Machine, TorchFacts
from probes.records.rounds import merged
from probes.records.rows import Block, Expectation, Pass, Record, Request, Scenario, Stop
from probes.records.schema import Failed, ProbeReport, Waived
from probes.reports import run_findings
from probes.reports.crossover import BreakEven
from probes.reports.figures import size
from probes.reports.run_findings import (
    COMPARED,
    all_records,
    best_gb_per_s,
    by_model,
    device_time_s,
    is_faster,
    large_break_even,
    pick,
    reads_advice,
    surely_reads,
    took_s,
)

SPILLED: dict[Scenario, str] = {
    "streamed": "streaming those through two VRAM buffers",
    "packed": "packing weights without loss, in VRAM as far as they fit",
    "placed": "placing each layer by plan",
    "zero_copy_weights": "reading those in place with the inputs copied to VRAM",
    "zero_copy_all": "reading those and the inputs in place",
}


def headline(report: ProbeReport) -> tuple[str, str, str]:
    """Three sentences; an unknown answer is given as unknown, with the reason. Passes: wall clock."""
    records = all_records(report)
    return _inputs(report, records), _full_card(report, records), _fastest(report, records)


def why_missing(report: ProbeReport, probe: str) -> str:
    """Why a probe's figures aren't in the report."""
    runs = [run for run in merged(report).runs if run.probe == probe]
    if not runs:
        return f"the probe `{probe}` was not run"
    match runs[-1].outcome:
        case Waived(reason):
            return f"`{probe}` was waived: {reason}"
        case Failed(reason=reason):
            return f"`{probe}` failed: {reason}"
        case _:
            return f"`{probe}` holds no such rows"


def _inputs(report: ProbeReport, records: Sequence[Record]) -> str:
    copy, in_place, vram = (
        best_gb_per_s(records, name) for name in ("h2d_pinned", "zero_copy_read", "vram_read")
    )
    reads = large_break_even(records)
    if copy and in_place and vram and reads:
        met = f" (break-even at {reads.reads:.2f} +- {reads.error:.1g} full reads of a large buffer)"
        return (
            f"{_advice(reads)}: copying from pinned memory runs at {copy:.3g} GB/s, a kernel reads system "
            f"RAM in place at {in_place:.3g} GB/s, and VRAM itself at {vram:.4g} GB/s"
            f"{met if math.isfinite(reads.reads) else ''}."
        )
    host = best_gb_per_s(records, "h2h_copy")
    facts = report.machine.torch
    if host and isinstance(facts, TorchFacts) and facts.obstacle:
        return (
            f"There is no GPU to copy to ({facts.obstacle}), so inputs stay in system RAM, which this "
            f"machine copies at {host:.3g} GB/s (reads plus writes)."
        )
    return f"Whether to copy inputs into VRAM is unknown ({why_missing(report, 'transfer')})."


def _advice(reads: BreakEven) -> str:
    if math.isinf(reads.reads):
        return "Leave large inputs in system RAM, because VRAM is no faster here"
    if surely_reads(reads) == 1:
        return "Copy large inputs into VRAM before use, even those that are read only once"
    return reads_advice(reads, "Copy large inputs into VRAM")


def _full_card(report: ProbeReport, records: Sequence[Record]) -> str:
    stops, requests = pick(records, Stop), pick(records, Request)
    if not stops:
        return _untried(report)
    blocks = pick(records, Block)
    oversize = [request for request in requests if request.purpose == "oversize"]
    spilled = run_findings.bytes_outside_vram(blocks)
    if spilled:
        return (
            f"When VRAM is full it spills silently: of {size(stops[-1].held_bytes)} granted as device "
            f"memory, {size(spilled)} reads at the link's speed or below"
            f"{_as_expected(records, granted=True)}."
        )
    if not oversize:
        return f"Asked for more device memory: {run_findings.verdict(requests, blocks, stops[-1])}."
    request_was = (
        f"a request for {size(oversize[0].asked_bytes)} with {size(oversize[0].vram_free_bytes)} free was "
    )
    as_expected = _as_expected(records, granted=oversize[0].granted)
    if oversize[0].granted:
        return f"When VRAM is full the driver spills silently: {request_was}granted{as_expected}."
    return (
        f"When VRAM is full the driver refuses: {request_was}answered with out of memory{as_expected}, "
        "so nothing moves to system RAM unless the program puts it there."
    )


def _untried(report: ProbeReport) -> str:
    expected = expect(report.machine)
    known = "" if expected.behaviour == "unknown" else f"; expected here: {expected.sentence}"
    return (
        f"What happens when VRAM is full is unknown ({why_missing(report, 'spill')}){known}".rstrip(".") + "."
    )


def next_step(machine: Machine) -> str:
    """How a GPU that this torch can't use could be measured; empty where torch has one."""
    if isinstance(machine.torch, TorchFacts) and not machine.torch.obstacle:
        return ""
    services = {"amd": "probe-wsl" if machine.wsl else "probe-rocm", "nvidia": "probe-cuda"}
    service = services.get(maker_of(machine))
    if service:
        return f"to measure the card that is here, run `docker compose run --rm {service}`"
    has_torch = isinstance(machine.torch, TorchFacts)
    here = "" if has_torch else "`docker compose run --rm probe` runs in an image that has torch; "
    return (
        f"{here}no card is visible from here; if the machine has one, `docker compose run --rm probe-rocm` "
        "(AMD), `probe-cuda` (NVIDIA) or `probe-wsl` (Windows) gives a container access to it"
    )


def _as_expected(records: Sequence[Record], *, granted: bool) -> str:
    expected = pick(records, Expectation)
    agrees = expected[0].agrees(granted=granted) if expected else None
    if agrees is None:
        return ""
    return ", as expected on this system" if agrees else ", which is NOT what is expected on this system"


def _fastest(report: ProbeReport, records: Sequence[Record]) -> str:
    complete = [(key, ways) for key, ways in by_model(pick(records, Pass)).items() if ways.keys() >= COMPARED]
    if not complete:
        why, step = why_missing(report, "scenarios"), next_step(report.machine)
        return f"What runs a model larger than VRAM fastest is unknown ({why}){step and f': {step}'}."
    (model, dtype, rows), ways = complete[0]
    ranked = sorted(SPILLED.keys() & ways.keys(), key=lambda name: took_s(ways[name]))
    best, second = ways[ranked[0]], ways[ranked[1]]
    share = best.spilled_bytes / best.weight_bytes
    slower = took_s(best) / took_s(ways["resident"])
    clear = is_faster(best, second) is True
    return (
        f"With {share:.0%} of the weights in system RAM, {SPILLED[best.scenario]} "
        f"{'is fastest' if clear else 'is no slower than any other way'}: "
        f"{_took(best)} a pass by the wall clock, against {_took(second)} for {SPILLED[second.scenario]}, "
        f"and {_took(ways['resident'])} with everything in VRAM, {slower:.2g} times less "
        f"({model}, {dtype}, batch {rows}{_device_time(best, ways['resident'])})."
    )


def _device_time(best: Pass, resident: Pass) -> str:
    """The device's own time next to the wall clock's, labelled as such."""
    times_s = [seconds for seconds in map(device_time_s, (best, resident)) if seconds is not None]
    if len(times_s) < 2:
        return ""
    return f"; device time alone, without launching: {duration(times_s[0])} against {duration(times_s[1])}"


def _took(passes: Pass) -> str:
    return duration(took_s(passes))
