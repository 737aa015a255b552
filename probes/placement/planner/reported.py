"""A machine's constants from its own probe report. What that lacks comes from a profile, and is named."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from probes.placement.planner.constants import REPORT_SPREAD, Constants
from probes.placement.planner.profiles import matching, profile
from probes.records.rounds import merged
from probes.records.schema import Gpu, Measurement, Pass, ProbeReport, TorchFacts
from probes.records.stats import summarize

# Operations in a layer of the scenarios' models, as models/families.py counts them.
OPERATIONS: Final = {"transformer": 11, "bert-base": 21, "gpt2-xl": 22, "qwen2.5-1.5b": 40, "qwen2.5-3b": 40}
BOUND_BY_PYTHON: Final = 1.5  # times the device's time: a pass with such a wall time waits for Python
LARGE: Final = 64 << 20  # bytes; of smaller copies the latency is a part of the time
CPU_SHARE: Final = 0.5  # of the rate at which memory is read, that products on the CPU reach
CORES: Final = 16  # of the machine whose CPU is measured in the profiles


def constants(report: ProbeReport, *, name: str) -> Constants:
    """The machine that a report is of. `name` is the report's own, for people."""
    report = merged(report)
    records = [record for run in report.runs for record in run.records]
    rows = [record for record in records if isinstance(record, Measurement)]
    passes = [record for record in records if isinstance(record, Pass)]
    gpu = _gpu(report)
    nearest = matching(gpu.name, gpu.target) if gpu else "h200"
    base = profile(nearest)
    ram = report.machine.ram_total_bytes
    read = _rate(rows, "h2h_read")
    machine = replace(
        base,
        name=gpu.name if gpu else "CPU",
        origin=f"measured: {name}",
        host_bytes=ram if isinstance(ram, int) else None,
        cpu_rate=read * CPU_SHARE if read else base.cpu_rate * min(report.machine.cpus / CORES, 1.0),
        cpu_flops=base.cpu_flops * report.machine.cpus / CORES,
        spread=REPORT_SPREAD,
    )
    if gpu is None:
        return replace(machine, vram_bytes=0, notes=("the report has no GPU: all blocks go to the CPU",))
    return _measured(machine, gpu, nearest, rows, passes)


def _gpu(report: ProbeReport) -> Gpu | None:
    torch = report.machine.torch
    return torch.gpus[0] if isinstance(torch, TorchFacts) and torch.gpus else None


def _measured(
    machine: Constants, gpu: Gpu, nearest: str, rows: Sequence[Measurement], passes: Sequence[Pass]
) -> Constants:
    def rate(name: str, fallback: float) -> float:
        found = _rate(rows, name)
        if found is None:
            missing.append(name)
        return found or fallback

    missing: list[str] = []
    vram = rate("vram_read", machine.vram_rate)
    scale = vram / machine.vram_rate
    flops, operation = _flops(passes), _operation(passes)
    made = replace(
        machine,
        vram_bytes=gpu.vram_total_bytes,
        vram_rate=vram,
        unpack_rate=machine.unpack_rate * scale,
        operations_rate=machine.operations_rate * scale,
        fused_rate=machine.fused_rate * scale,
        link_rate=rate("h2d_pinned", machine.link_rate),
        pageable_rate=rate("h2d_pageable", machine.pageable_rate),
        zero_copy_rate=rate("zero_copy_read", machine.zero_copy_rate),
        flops={key: flops.get(key, value) for key, value in machine.flops.items()},
        operation_s=operation or machine.operation_s,
        unified=gpu.integrated is True,
    )
    missing += [] if flops else ["products at batch 256"]
    missing += [] if operation else ["Python's time for an operation"]
    always = ["context", "workspace", "unpacking", "small kernels", *missing]
    left = f"from the profile {nearest}: {', '.join(always)}"
    return replace(made, notes=(*machine.notes, left))


def _rate(rows: Sequence[Measurement], name: str) -> float | None:
    """Bytes a second of the largest buffers on a path."""
    found = [row for row in rows if row.name == name and row.payload_bytes >= LARGE]
    if not found:
        return None
    row = max(found, key=lambda row: row.payload_bytes)
    return row.moved_bytes / summarize(row.times_s).median


def _flops(passes: Sequence[Pass]) -> Mapping[str, float]:
    """Operations a second in a dtype, by the largest batch through the resident linear layers."""
    found: dict[str, float] = {}
    for one in passes:
        if one.model == "mlp" and one.scenario == "resident" and one.rows >= 64:
            numbers = one.weight_bytes / (4 if one.dtype == "float32" else 2)
            rate = 2 * numbers * one.rows / summarize(one.times_s).median
            found[one.dtype] = max(found.get(one.dtype, 0.0), rate)
    if "float16" in found:  # units for both work at one rate; those that have none don't read this key
        found.setdefault("bfloat16", found["float16"])
    return found


def _operation(passes: Sequence[Pass]) -> float | None:
    """Python's time for one operation, by the passes that wait for it."""
    found = []
    for one in passes:
        device = one.devices_s
        waits = one.host_bound or (
            isinstance(device, tuple)
            and summarize(one.times_s).median > BOUND_BY_PYTHON * summarize(device).median
        )
        if one.scenario == "resident" and one.model in OPERATIONS and waits:
            found.append(summarize(one.times_s).median / (one.layers * OPERATIONS[one.model]))
    return median(found) if found else None
