"""A machine's constants from its own probe report. What that lacks comes from a profile, and is named."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from probes.placement.planner.costs.constants import REPORT_SPREAD, Constants
from probes.placement.planner.profiles import matching, profile
from probes.records.rounds import merged
from probes.records.rows import SMALL_LAYERS
from probes.records.schema import (
    Gpu,
    Measurement,
    Pass,
    ProbeReport,
    Small,
    SmallWork,
    TorchFacts,
    Unknown,
)
from probes.records.stats import summarize

# What small work took by an H100's clock, which the profiles' constants of small kernels are of.
THERE: Final[Mapping[SmallWork, float]] = {"layers": 286e-6, "product": 4.05e-6, "unpack": 2.83e-6}
PLAIN_OPERATIONS: Final = 11  # of a plain layer, in which models/families.py counts all others
SHORT_COPY: Final = 64 << 10  # bytes, of which a copy's own time is known best
LARGE: Final = 64 << 20  # bytes; of smaller copies the latency is a part of the time
CPU_SHARE: Final = 0.5  # of the rate at which memory is read, that products on the CPU reach
CORES: Final = 16  # of the machine whose CPU is measured in the profiles


def constants(report: ProbeReport, *, name: str) -> Constants:
    """The machine that a report is of. `name` is the report's own, for people."""
    report = merged(report)
    records = [record for run in report.runs for record in run.records]
    rows = [record for record in records if isinstance(record, Measurement)]
    passes = [record for record in records if isinstance(record, Pass)]
    small = [one for run in report.runs for one in run.small]
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
    machine = _launched(machine, rows, small)
    missing = [] if small else ["Python's time for an operation", "small kernels"]
    return _measured(machine, gpu, rows, passes, profile=nearest, missing=missing)


def without_gpu(cpus: int) -> Constants:
    """A machine with so many processors and no GPU: the profiles' CPU, by its share of their cores."""
    base, share = profile("h200"), cpus / CORES
    rate = base.cpu_rate * min(share, 1.0)
    return replace(base, name="CPU", vram_bytes=0, cpu_rate=rate, cpu_flops=base.cpu_flops * share)


def _gpu(report: ProbeReport) -> Gpu | None:
    torch = report.machine.torch
    return torch.gpus[0] if isinstance(torch, TorchFacts) and torch.gpus else None


def _measured(
    machine: Constants,
    gpu: Gpu,
    rows: Sequence[Measurement],
    passes: Sequence[Pass],
    *,
    profile: str,
    missing: list[str],
) -> Constants:
    def rate(name: str, fallback: float) -> float:
        found = _rate(rows, name)
        if found is None:
            missing.append(name)
        return found or fallback

    vram = rate("vram_read", machine.vram_rate)
    scale = vram / machine.vram_rate
    flops = _flops(passes)
    made = replace(
        machine,
        vram_bytes=gpu.vram_total_bytes,
        vram_rate=vram,
        unpack_rate=machine.unpack_rate * scale,
        ranked_rate=min(machine.ranked_rate, machine.unpack_rate * scale),
        operations_rate=machine.operations_rate * scale,
        activation_rate=min(machine.activation_rate, vram),
        experts_rate=min(machine.experts_rate, vram),
        fused_rate=machine.fused_rate * scale,
        fused_rows_rate=min(machine.fused_rows_rate, machine.fused_rate * scale),
        link_rate=rate("h2d_pinned", machine.link_rate),
        pageable_rate=rate("h2d_pageable", machine.pageable_rate),
        zero_copy_rate=rate("zero_copy_read", machine.zero_copy_rate),
        flops={key: flops.get(key, value) for key, value in machine.flops.items()},
        unified=gpu.integrated is True,
    )
    missing += [] if flops else ["products at batch 256"]
    always = ["context", "workspace", "unpacking", *missing]
    left = f"from the profile {profile}: {', '.join(always)}"
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


def _launched(machine: Constants, rows: Sequence[Measurement], small: Sequence[Small]) -> Constants:
    """With what the report knows of launches. The device's constants grow as small work does."""
    walls = _middles(small, lambda one: one.wall_s)
    devices = _middles(small, lambda one: one.device_s)
    times = {name: devices.get(name, there) / there for name, there in THERE.items()}
    layers = SMALL_LAYERS * PLAIN_OPERATIONS
    return replace(
        machine,
        operation_s=walls["layers"] / layers if "layers" in walls else machine.operation_s,
        kernel_s=machine.kernel_s * times["layers"],
        product_s=machine.product_s * times["product"],
        unpack_item_s=machine.unpack_item_s * times["unpack"],
        link_alpha_s=_alpha(rows) or machine.link_alpha_s,
    )


def _middles(
    small: Sequence[Small], samples: Callable[[Small], Sequence[float] | Unknown]
) -> Mapping[SmallWork, float]:
    """The middle of the processes' middle samples, by the kind of work."""
    found: dict[SmallWork, list[float]] = {}
    for one in small:
        times = samples(one)
        if not isinstance(times, Unknown):
            found.setdefault(one.name, []).append(median(times))
    return {name: median(middles) for name, middles in found.items()}


def _alpha(rows: Sequence[Measurement]) -> float | None:
    """What a short copy takes beyond its bytes."""
    rate = _rate(rows, "h2d_pinned")
    short = [row for row in rows if row.name == "h2d_pinned" and row.payload_bytes == SHORT_COPY]
    took = [summarize(row.times_s).median - row.moved_bytes / rate for row in short if rate]
    return took[0] if took and took[0] > 0 else None
