"""Named machines from `profiles.toml`: makers' peaks and the share that programs reach, with sources."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.placement.planner.costs import PROFILE_SPREAD, REPORT_SPREAD, Constants
from probes.records.facts import Gpu, TorchFacts
from probes.records.rounds import merged
from probes.records.rows import SMALL_LAYERS, Measurement, Pass, Small, SmallWork
from probes.records.schema import ProbeReport
from probes.records.stats import summarize

FILE: Final = Path(__file__).with_name("profiles.toml")
GIB: Final = 2**30
MIB: Final = 2**20
# GB/s of a lane in one direction, 128b/130b coded: PCIe 3.0 to 5.0, by generation
LANE_GB_PER_S: Final[Mapping[int, float]] = {3: 0.985, 4: 1.969, 5: 3.938}
# AMD's targets that no profile's own begins like: the newer ones have bfloat16 units and Triton
LIKE: Final[Mapping[str, str]] = {"gfx95": "mi300x", "gfx115": "strix-halo", "gfx12": "rx7900xtx"}
NEAREST: Final = "rx6800"  # of AMD's others
GCN: Final = ("gfx8", "gfx900", "gfx906")


@cache
def table() -> Mapping[str, Any]:
    """The file as it is."""
    with FILE.open("rb") as file:
        return tomllib.load(file)


def names() -> tuple[str, ...]:
    """The machines that have a profile."""
    return tuple(table()["machines"])


def called(name: str) -> str:
    """The machine's name in the file: `RX 7900 XTX` and `AMD Radeon RX 7900 XTX` are `rx7900xtx`.

    What has no profile stays as it is.
    """
    words = _letters(name)
    for key in names():
        if _letters(key) in words and words in _letters(key) + _letters(
            str(table()["machines"][key]["title"])
        ):
            return key
    return name


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def profile(name: str) -> Constants:
    """A named machine's constants. Raises UsageError for a name that has no profile."""
    if name not in table()["machines"]:
        raise UsageError(
            f"there is no profile {name!r}",
            f"give one of {', '.join(names())}, or a probe report of your machine",
        )
    return _Profile(name).constants()


def sources(name: str) -> dict[str, str]:
    """For each number of a machine's profile, where it is from and when that was read."""
    known = table()["sources"]
    entry = {**table()["reached"], **table()["common"], **table()["machines"][name]}
    return {
        key: f"{known[value['source']]['what']} ({known[value['source']]['date']})"
        for key, value in entry.items()
        if isinstance(value, dict)
    }


class _Profile:
    """One machine of the file, over what is common to all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._machine = table()["machines"][name]
        self._entry = {**table()["common"], **self._machine}

    def _value(self, key: str) -> float:
        return float(self._entry[key]["value"])

    def _reached(self, key: str) -> float:
        return float(table()["reached"][key]["value"])

    def constants(self) -> Constants:
        """All of it, in bytes and seconds."""
        target = str(self._machine["target"])
        amd, triton = target.startswith("gfx"), bool(self._machine["triton"]["value"])
        unified = "unified" in self._machine
        peak = self._value("vram_gb_per_s") * 1e9
        link = peak * self._reached("vram_read") / 2 if unified else self._link() * self._reached("link")
        flops = {
            k: v * 1e12 * self._reached("flops") for k, v in self._machine["tflops"].items() if k != "source"
        }
        vram = peak * self._reached("gcn_vram_read" if target.startswith(GCN) else "vram_read")
        fused = peak * self._reached("fused") if triton else 0.0
        matrix_units = bool(self._machine["bfloat16"]["value"])
        return Constants(
            name=str(self._machine["title"]),
            origin=f"predicted: profile {self._name}",
            vram_bytes=int(self._value("vram_gib") * GIB),
            vram_rate=vram,
            unpack_rate=peak * self._reached("unpack" if triton else "torch_unpack"),
            ranked_rate=self._at_most(peak * self._reached("unpack"), "amd_ranked" if amd else "ranked")
            if triton
            else peak * self._reached("torch_unpack"),
            activation_rate=self._at_most(vram, "activations"),
            operations_rate=peak * self._reached("torch_unpack"),
            experts_rate=self._at_most(vram, "experts"),
            fused_rate=fused,
            fused_rows_rate=self._at_most(fused, "fused_rows"),
            link_rate=link,
            link_alpha_s=self._value("copy_alpha_us") * 1e-6,
            pageable_rate=link if unified else link * self._reached("pageable"),
            zero_copy_rate=peak * self._reached("vram_read")
            if unified
            else link * self._reached("zero_copy"),
            flops=flops,
            cpu_rate=self._value("cpu_gb_per_s") * 1e9,
            cpu_flops=self._value("cpu_tflops") * 1e12,
            disk_rate=self._value("disk_gb_per_s") * 1e9,
            operation_s=self._value("operation_us") * 1e-6,
            kernel_s=self._value("kernel_us") * 1e-6,
            product_s=self._value("product_us") * 1e-6,
            product_step_s=self._value("product_step_ns") * 1e-9,
            unpack_item_s=self._value("unpack_item_us") * 1e-6,
            context_bytes=int(self._value("amd_context_mib" if amd else "nvidia_context_mib") * MIB),
            workspace_bytes=int(
                self._value("workspace_mib" if matrix_units else "small_workspace_mib") * MIB
            ),
            bfloat16=matrix_units,
            triton=triton,
            unified=unified,
            pinned_share=self._value("pinned_share") if amd else 1.0,
            spread=PROFILE_SPREAD,
            notes=("nothing here was measured on an AMD card",) if amd else (),
        )

    def _at_most(self, rate: float, key: str) -> float:
        """A rate of VRAM, or what the GPU's units reach where that is less."""
        return min(rate, float(self._machine["tflops"]["float32"]) * 1e12 * self._reached(key))

    def _link(self) -> float:
        link = self._machine["link"]
        return LANE_GB_PER_S[int(link["generation"])] * 1e9 * int(link["lanes"])


def matching(name: str, target: str) -> str:
    """The profile of a GPU as torch names it; of one that has none, that of a card with like units."""
    words = "".join(name.lower().split()).replace("-", "")
    for key in sorted(names(), key=len, reverse=True):
        if key.replace("-", "") in words:
            return key
    machines = table()["machines"]
    same = [key for key in names() if machines[key]["target"] == target.split(":", maxsplit=1)[0]]
    if same:
        return same[0]
    if not target.startswith("gfx"):
        return "rtx4090"
    like = next((key for begin, key in LIKE.items() if target.startswith(begin)), "")
    return like or next((key for key in names() if machines[key]["target"][:5] == target[:5]), NEAREST)


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
