"""A report as metrics in Prometheus' text exposition format, version 0.0.4. Unknown is left out. Pure.

Base units, named in the metric (https://prometheus.io/docs/practices/naming): _seconds, _bytes.
The one exception says so in its name: bandwidth in gigabytes (10^9 bytes) per second.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from buildtool.probereport.quantities import rate
from buildtool.quoting import prometheus
from probes import breakeven, residency
from probes.answers import all_records, pick
from probes.report import (
    Block,
    Measurement,
    Pass,
    ProbeReport,
    Reading,
    Reads,
    Record,
    Stop,
    TorchFacts,
)
from probes.stats import summarize

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One sample of a gauge."""

    name: str
    labels: Labels
    value: float


HELP = {
    "weir_report_info": "What was measured and with what; always 1.",
    "weir_report_started_timestamp_seconds": "When the run began, Unix time.",
    "weir_probe_outcome_info": "How each probe ended; always 1.",
    "weir_probe_duration_seconds": "How long each probe took.",
    "weir_host_memory_total_bytes": "System RAM.",
    "weir_host_memory_available_bytes": "System RAM available when the run began.",
    "weir_gpu_vram_total_bytes": "VRAM.",
    "weir_gpu_vram_free_bytes": "VRAM free when the run began.",
    "weir_transfer_time_mean_seconds": "Mean time of one transfer.",
    "weir_transfer_time_sem_seconds": "Standard error of that mean.",
    "weir_transfer_time_median_seconds": "Median time of one transfer.",
    "weir_transfer_samples": "Samples behind the figures of a transfer.",
    "weir_transfer_bandwidth_gigabytes_per_second": "Bandwidth from the mean time, 10^9 bytes per second.",
    "weir_transfer_bandwidth_sem_gigabytes_per_second": "Standard error of that bandwidth.",
    "weir_break_even_reads": "Full reads from which copying to VRAM first is faster, measured.",
    "weir_break_even_predicted_reads": "The same, predicted from single transfers.",
    "weir_spill_granted_bytes": "Device memory granted when the spill probe stopped.",
    "weir_spill_label_bytes": "Device memory by where timing says that it lies.",
    "weir_spill_disagreeing_blocks": "Blocks about which the two signals disagree.",
    "weir_memory_gauge_bytes": "A memory gauge of the driver or the kernel at a moment of the spill probe.",
    "weir_scenario_pass_mean_seconds": "Mean time of a forward pass.",
    "weir_scenario_pass_sem_seconds": "Standard error of that mean.",
    "weir_scenario_pass_samples": "Samples behind the figures of a pass.",
    "weir_scenario_spilled_bytes": "Weights left in system RAM.",
}


def exposition(report: ProbeReport) -> str:
    """All metrics of a report; of two samples with the same labels the later one stands."""
    found: dict[tuple[str, Labels], float] = {}
    for metric in _metrics(report):
        if math.isfinite(metric.value):
            found[metric.name, metric.labels] = metric.value
    lines = []
    for name, told in HELP.items():
        samples = [(labels, value) for (of, labels), value in found.items() if of == name]
        if samples:
            lines += [f"# HELP {name} {told}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_braces(labels)} {value!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{key}="{prometheus(value)}"' for key, value in labels) + "}" if labels else ""


def _metrics(report: ProbeReport) -> Iterator[Metric]:
    records = all_records(report)
    yield from _about(report)
    for measurement in pick(records, Measurement):
        yield from _transfer(measurement)
    yield from _break_even(records)
    yield from _spill(records)
    for one in pick(records, Pass):
        yield from _pass(one)


def _about(report: ProbeReport) -> Iterator[Metric]:
    machine, torch = report.machine, report.machine.torch
    facts = {
        "host": machine.host,
        "tool_version": report.tool_version,
        "quick": str(report.settings.quick).lower(),
    }
    if isinstance(machine.gpu_driver, str):
        facts["gpu_driver"] = machine.gpu_driver
    if isinstance(torch, TorchFacts):
        facts |= {"torch": torch.version, "api": torch.api}
        if torch.gpus:
            facts |= {"gpu": torch.gpus[0].name, "target": torch.gpus[0].target}
    yield Metric("weir_report_info", tuple(facts.items()), 1)
    yield Metric(
        "weir_report_started_timestamp_seconds", (), datetime.fromisoformat(report.started).timestamp()
    )
    for run in report.runs:
        outcome = (("probe", run.probe), ("outcome", type(run.outcome).__name__.lower()))
        yield Metric("weir_probe_outcome_info", outcome, 1)
        yield Metric("weir_probe_duration_seconds", (("probe", run.probe),), run.seconds)
    yield from _known("weir_host_memory_total_bytes", (), machine.ram_total_bytes)
    yield from _known("weir_host_memory_available_bytes", (), machine.ram_available_bytes)
    for index, gpu in enumerate(torch.gpus if isinstance(torch, TorchFacts) else ()):
        labels = (("index", str(index)), ("gpu", gpu.name))
        yield from _known("weir_gpu_vram_total_bytes", labels, gpu.vram_total_bytes)
        yield from _known("weir_gpu_vram_free_bytes", labels, gpu.vram_free_bytes)


def _known(name: str, labels: Labels, value: object) -> Iterator[Metric]:
    """The metric, if its value is known."""
    if isinstance(value, int | float):
        yield Metric(name, labels, value)


def _transfer(row: Measurement) -> Iterator[Metric]:
    labels = (("path", row.name), ("payload_bytes", str(row.payload_bytes)), ("clock", row.clock))
    told, speed = summarize(row.samples_s), rate(row.moved_bytes, row.samples_s)
    yield Metric("weir_transfer_time_mean_seconds", labels, told.mean)
    yield from _known("weir_transfer_time_sem_seconds", labels, told.sem)
    yield Metric("weir_transfer_time_median_seconds", labels, told.median)
    yield Metric("weir_transfer_samples", labels, told.n)
    yield Metric("weir_transfer_bandwidth_gigabytes_per_second", labels, speed.mean)
    yield from _known("weir_transfer_bandwidth_sem_gigabytes_per_second", labels, speed.sem)


def _break_even(records: Iterable[Record]) -> Iterator[Metric]:
    rows = list(records)
    reads = pick(rows, Reads)
    advice = breakeven.adviser(pick(rows, Measurement))
    for n_bytes in sorted({row.payload_bytes for row in reads}):
        labels = (("payload_bytes", str(n_bytes)),)
        seen = breakeven.measured(reads, n_bytes)
        if isinstance(seen, breakeven.BreakEven):
            yield Metric("weir_break_even_reads", labels, seen.reads)
        if isinstance(advice, breakeven.Adviser):
            yield Metric("weir_break_even_predicted_reads", labels, advice.at(n_bytes).reads)


def _spill(records: Iterable[Record]) -> Iterator[Metric]:
    rows = list(records)
    for stop in pick(rows, Stop):
        yield Metric("weir_spill_granted_bytes", (), stop.held_bytes)
    placed = [p for p in residency.place(pick(rows, Block)) if not p.block.control]
    for label in sorted({p.by_timing for p in placed}):
        n_bytes = sum(p.block.n_bytes for p in placed if p.by_timing == label)
        yield Metric("weir_spill_label_bytes", (("label", label),), n_bytes)
    if placed:
        yield Metric("weir_spill_disagreeing_blocks", (), sum(p.disagree for p in placed))
    for reading in pick(rows, Reading):
        labels = (("gauge", reading.gauge), ("moment", reading.moment))
        yield from _known("weir_memory_gauge_bytes", labels, reading.value_bytes)


def _pass(one: Pass) -> Iterator[Metric]:
    labels = (
        ("model", one.model),
        ("dtype", one.dtype),
        ("batch", str(one.rows)),
        ("scenario", one.scenario),
    )
    told = summarize(one.samples_s)
    yield Metric("weir_scenario_pass_mean_seconds", labels, told.mean)
    yield from _known("weir_scenario_pass_sem_seconds", labels, told.sem)
    yield Metric("weir_scenario_pass_samples", labels, told.n)
    yield Metric("weir_scenario_spilled_bytes", labels, one.spilled_bytes)
