"""A run of the probes as metrics. Unknown is left out. Pure."""

from collections.abc import Iterable, Iterator
from datetime import datetime

from probes.records.facts import TorchFacts
from probes.records.rounds import merged
from probes.records.rows import Block, Measurement, Pass, Reading, Reads, Record, Stop
from probes.records.schema import ProbeReport
from probes.records.stats import median, summarize
from probes.reports import crossover, run_findings
from probes.reports.figures import rate
from probes.reports.prometheus import Metric, if_known, render_metrics
from probes.reports.run_findings import all_records, device_time_s, pick

HELP = {
    "weir_report_info": "What was measured and with what; always 1.",
    "weir_report_started_timestamp_seconds": "When the run began, Unix time.",
    "weir_probe_outcome_info": "How each probe ended; always 1.",
    "weir_probe_duration_seconds": "How long each probe took.",
    "weir_host_memory_total_bytes": "System RAM.",
    "weir_host_memory_available_bytes": "System RAM available when the run began.",
    "weir_gpu_vram_total_bytes": "VRAM.",
    "weir_gpu_vram_free_bytes": "VRAM free when the run began.",
    "weir_transfer_time_seconds": "Time of one transfer: the median of the processes' medians.",
    "weir_transfer_time_error_seconds": "Standard error of that time, between processes and within them.",
    "weir_transfer_time_within_seconds": "Standard error of the median within one process.",
    "weir_transfer_time_between_seconds": "Standard deviation of the processes' medians.",
    "weir_transfer_samples": "Samples behind the figures of a transfer.",
    "weir_transfer_processes": "Processes that measured a transfer.",
    "weir_transfer_bandwidth_gigabytes_per_second": "Bandwidth from that time, 10^9 bytes per second.",
    "weir_transfer_bandwidth_error_gigabytes_per_second": "Standard error of that bandwidth.",
    "weir_break_even_reads": "Full reads from which copying to VRAM first is faster, measured.",
    "weir_break_even_error_reads": "Standard error of that count.",
    "weir_break_even_predicted_reads": "The same, predicted from single transfers.",
    "weir_break_even_predicted_error_reads": "Standard error of the prediction.",
    "weir_spill_granted_bytes": "Device memory granted when the spill probe stopped.",
    "weir_spill_label_bytes": "Device memory by where timing places it.",
    "weir_spill_first_read_seconds": "First read of a block after all were allocated: median and longest.",
    "weir_spill_disagreeing_blocks": "Blocks about which the two signals disagree.",
    "weir_memory_gauge_bytes": "A memory gauge of the driver or the kernel at a moment of the spill probe.",
    "weir_scenario_pass_seconds": "Wall-clock time of a forward pass: the median of the processes' medians.",
    "weir_scenario_pass_error_seconds": "Standard error of that time, between processes and within them.",
    "weir_scenario_pass_device_seconds": "The same pass by the device's clock alone, without launching.",
    "weir_scenario_pass_samples": "Samples behind the wall-clock time of a pass.",
    "weir_scenario_pass_processes": "Processes that measured a pass.",
    "weir_scenario_spilled_bytes": "Weights left in system RAM.",
}


def exposition(report: ProbeReport) -> str:
    """All metrics of a report."""
    return render_metrics(_metrics(report), HELP)


def _metrics(report: ProbeReport) -> Iterator[Metric]:
    records = all_records(report)
    yield from _about(report)
    for measurement in pick(records, Measurement):
        yield from _transfer(measurement)
    yield from _break_even(records)
    yield from _spill(records)
    for row in pick(records, Pass):
        yield from _pass(row)


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
    for run in merged(report).runs:
        outcome = (("probe", run.probe), ("outcome", type(run.outcome).__name__.lower()))
        yield Metric("weir_probe_outcome_info", outcome, 1)
        yield Metric("weir_probe_duration_seconds", (("probe", run.probe),), run.seconds)
    yield from if_known("weir_host_memory_total_bytes", (), machine.ram_total_bytes)
    yield from if_known("weir_host_memory_available_bytes", (), machine.ram_available_bytes)
    for index, gpu in enumerate(torch.gpus if isinstance(torch, TorchFacts) else ()):
        labels = (("index", str(index)), ("gpu", gpu.name))
        yield from if_known("weir_gpu_vram_total_bytes", labels, gpu.vram_total_bytes)
        yield from if_known("weir_gpu_vram_free_bytes", labels, gpu.vram_free_bytes)


def _transfer(row: Measurement) -> Iterator[Metric]:
    labels = (("path", row.name), ("payload_bytes", str(row.payload_bytes)), ("clock", row.clock))
    summary, speed = summarize(row.times_s), rate(row.moved_bytes, row.times_s)
    yield Metric("weir_transfer_time_seconds", labels, summary.median)
    yield from if_known("weir_transfer_time_error_seconds", labels, summary.error)
    yield from if_known("weir_transfer_time_within_seconds", labels, summary.within)
    yield from if_known("weir_transfer_time_between_seconds", labels, summary.between)
    yield Metric("weir_transfer_samples", labels, summary.n)
    yield Metric("weir_transfer_processes", labels, summary.processes)
    yield Metric("weir_transfer_bandwidth_gigabytes_per_second", labels, speed.value)
    yield from if_known("weir_transfer_bandwidth_error_gigabytes_per_second", labels, speed.error)


def _break_even(records: Iterable[Record]) -> Iterator[Metric]:
    rows = list(records)
    reads = pick(rows, Reads)
    advice = crossover.adviser(pick(rows, Measurement))
    for n_bytes in sorted({row.payload_bytes for row in reads}):
        labels = (("payload_bytes", str(n_bytes)),)
        seen = crossover.measured(reads, n_bytes)
        if isinstance(seen, crossover.BreakEven):
            yield Metric("weir_break_even_reads", labels, seen.reads)
            yield Metric("weir_break_even_error_reads", labels, seen.error)
        if isinstance(advice, crossover.Adviser):
            expected = advice.at(n_bytes)
            yield Metric("weir_break_even_predicted_reads", labels, expected.reads)
            yield Metric("weir_break_even_predicted_error_reads", labels, expected.error)


def _spill(records: Iterable[Record]) -> Iterator[Metric]:
    rows = list(records)
    for stop in pick(rows, Stop):
        yield Metric("weir_spill_granted_bytes", (), stop.held_bytes)
    placed = [p for p in run_findings.label_blocks(pick(rows, Block)) if not p.block.control]
    for label in sorted({p.by_timing for p in placed}):
        n_bytes = sum(p.block.n_bytes for p in placed if p.by_timing == label)
        yield Metric("weir_spill_label_bytes", (("label", label),), n_bytes)
    if placed:
        yield Metric("weir_spill_disagreeing_blocks", (), sum(p.disagree for p in placed))
    first = [p.block.first_read_s for p in placed if isinstance(p.block.first_read_s, float)]
    if first:
        yield Metric("weir_spill_first_read_seconds", (("of", "median"),), median(first))
        yield Metric("weir_spill_first_read_seconds", (("of", "longest"),), max(first))
    for reading in pick(rows, Reading):
        labels = (("gauge", reading.gauge), ("moment", reading.moment))
        yield from if_known("weir_memory_gauge_bytes", labels, reading.value_bytes)


def _pass(row: Pass) -> Iterator[Metric]:
    labels = (
        ("model", row.model),
        ("dtype", row.dtype),
        ("batch", str(row.rows)),
        ("scenario", row.scenario),
    )
    summary = summarize(row.times_s)
    yield Metric("weir_scenario_pass_seconds", labels, summary.median)
    yield from if_known("weir_scenario_pass_error_seconds", labels, summary.error)
    yield from if_known("weir_scenario_pass_device_seconds", labels, device_time_s(row))
    yield Metric("weir_scenario_pass_samples", labels, summary.n)
    yield Metric("weir_scenario_pass_processes", labels, summary.processes)
    yield Metric("weir_scenario_spilled_bytes", labels, row.spilled_bytes)
