"""Reports made by hand, with figures that follow from a few constants: what a page must show is known."""

import random
from dataclasses import replace
from functools import cache

from probes.core.unknown import Unknown
from probes.records.facts import Gpu, Machine, TorchFacts
from probes.records.rows import (
    Block,
    Expectation,
    Gap,
    Measurement,
    Noise,
    Pass,
    Reading,
    Reads,
    Request,
    Split,
    Stop,
)
from probes.records.schema import Done, Failed, ProbeReport, ProbeRun, Settings, Waived

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB)
# path -> latency in seconds, bytes per second
PATHS = {
    "h2d_pinned": (5e-6, 50e9),
    "h2d_then_read": (12e-6 + 4 * 6e-6, 1 / (1 / 50e9 + 4 / 3200e9)),  # a copy and four reads of it
    "h2d_pageable": (20e-6, 8e9),
    "d2h_pinned": (5e-6, 48e9),
    "d2h_pageable": (22e-6, 7e9),
    "zero_copy_read": (8e-6, 45e9),
    "zero_copy_write": (7e-6, 46e9),
    "vram_read": (6e-6, 3000e9),
    "vram_reread": (6e-6, 3200e9),
    "vram_write": (6e-6, 3100e9),
    "vram_copy": (6e-6, 2900e9),
}
HOST_PATHS = {"h2h_copy": (1e-6, 12e9), "h2h_read": (1e-6, 11e9), "h2h_write": (1e-6, 9e9)}
SPEED = {"vram": 3000e9, "host": 45e9}


def samples(seconds: float, *, n: int = 20, seed: int = 1, spread: float = 0.004) -> tuple[float, ...]:
    """Independent samples about a time."""
    draw = random.Random(f"{seconds} {seed}")
    return tuple(seconds * (1 + draw.gauss(0, spread)) for _ in range(n))


def transfers(
    paths: dict[str, tuple[float, float]], *, clock: str = "device", seed: int = 1
) -> tuple[Measurement, ...]:
    found = []
    for name, (latency, speed) in paths.items():
        for n_bytes in SIZES:
            times = samples(latency + n_bytes / speed, seed=seed)
            weight = 2 if name.endswith("_copy") else 1
            device = times if clock == "device" else Unknown("this device has no clock of its own")
            wall = tuple(t + 1e-5 for t in times) if clock == "device" else times
            found.append(Measurement(name, n_bytes, n_bytes * weight, 1, clock, device, wall))  # type: ignore[arg-type]
    return tuple(found)


def again(run: ProbeRun, turn: int, *, between: float = 0.004) -> ProbeRun:
    """The run's timed rows by another process, in which each is a little faster or slower."""
    draw = random.Random(f"{run.probe} {turn}")
    records = []
    for record in run.records:
        if isinstance(record, Measurement | Reads | Pass):
            factor = 1 + draw.gauss(0, between)
            wall = tuple(t * factor for t in record.wall_s)
            device = record.device_s
            if not isinstance(device, Unknown):
                device = tuple(t * factor for t in device)
            records.append(replace(record, wall_s=wall, device_s=device))
    return replace(run, records=tuple(records), round=turn)


def reads() -> tuple[Reads, ...]:
    """Times that hold to the model."""
    (in_place_s, in_place), (vram_s, vram) = (PATHS[n] for n in ("zero_copy_read", "vram_reread"))
    found = []
    for n_bytes in SIZES[1:]:
        for k in (1, 2, 4):
            first = 12e-6 + n_bytes / 50e9 + k * (vram_s + n_bytes / vram)
            inside = k * (in_place_s + n_bytes / in_place)
            found.append(Reads("copy_first", k, n_bytes, 1, samples(first), samples(first + 1e-5)))
            found.append(Reads("in_place", k, n_bytes, 1, samples(inside), samples(inside + 1e-5)))
    return tuple(found)


def block(index: int, place: str, *, asked: str = "vram", control: bool = False, accounts: str = "") -> Block:
    accounts = accounts or place
    return Block(
        index=index,
        asked=asked,  # type: ignore[arg-type]
        control=control,
        n_bytes=256 * MIB,
        read_s=samples(256 * MIB / SPEED[place], n=5, seed=index),
        vram_drop_bytes=256 * MIB if accounts == "vram" else 0,
        gtt_growth_bytes=256 * MIB if accounts == "host" else Unknown("no GTT here"),
    )


def spill_records() -> tuple[object, ...]:
    """Of 16 blocks the last 6 are in host memory; about one of these the driver's accounts say otherwise."""
    blocks = [block(i, "vram" if i < 10 else "host", accounts="vram" if i == 10 else "") for i in range(16)]
    return (
        Expectation("spills", "WDDM grants more than VRAM.", "the driver's notes"),
        Reading("before", "driver free VRAM", 4 * GIB),
        Reading("before", "fdinfo resident gtt", Unknown("no fdinfo of this process has gtt")),
        Request("oversize", 5 * GIB, 0, 4 * GIB, None, granted=True, message=""),
        block(100, "vram", control=True),
        block(101, "host", asked="zero_copy", control=True),
        *blocks,
        Stop("target", 4 * GIB, "the target was reached"),
    )


def passes(model: str = "mlp", *, rows: int = 1) -> tuple[Pass, ...]:
    times = {"resident": 0.5e-3, "streamed": 6.6e-3, "zero_copy_weights": 8.5e-3, "zero_copy_all": 10.2e-3}
    return tuple(
        Pass(
            scenario=name,  # type: ignore[arg-type]
            rows=rows,
            layers=32,
            weight_bytes=GIB,
            spilled_bytes=0 if name == "resident" else 320 * MIB,
            input_bytes=8192,
            dtype="float16",
            device_s=samples(seconds / 2),
            wall_s=samples(seconds),
            difference=0.0,
            model=model,
            split=Split(6.5e-3, 1e-4, 4e-4) if name == "streamed" else Unknown("not measured"),
            noise=Noise(("foreign: another process used the GPU",), ("clocks: no such file",)),
        )
        for name, seconds in times.items()
    )


GPU = Gpu("Some GPU", "gfx1100", "0000:03:00.0", 4 * GIB, 3 * GIB, Unknown("not told"), integrated=False)
CUDA = TorchFacts("2.11.0", "cuda", "13.0", 16, (GPU,), "")
MACHINE = Machine(
    host="box",
    kernel="6.12.1",
    wsl=False,
    container=True,
    cpus=16,
    ram_total_bytes=64 * GIB,
    ram_available_bytes=60 * GIB,
    cgroup_limit_bytes=Unknown("no limit is set"),
    gpu_driver=Unknown("the driver doesn't say"),
    device_files=("/dev/kfd",),
    cards=(),
    kfd_nodes=(),
    torch=CUDA,
)
NO_GPU = TorchFacts("2.6.0", "none", "", 2, (), "this torch is a CPU build")


def made(
    *runs: ProbeRun, machine: Machine = MACHINE, quick: bool = True, cap: int | None = None
) -> ProbeReport:
    return ProbeReport(2, "0.1.0", "2026-02-08T12:00:00Z", Settings(quick, 7, cap), machine, runs)


def ran(probe: str, *records: object) -> ProbeRun:
    return ProbeRun(probe, Done(), 1.5, records)  # type: ignore[arg-type]


@cache
def full_report(*, seed: int = 1) -> ProbeReport:
    """Everything that a page can show."""
    return made(
        ran("transfer", *transfers(PATHS, seed=seed), Gap("h2d_pinned", GIB, "memory is short")),
        ran("breakeven", *reads()),
        ran("spill", *spill_records()),
        ran("scenarios", *passes(), *passes(rows=256)),
    )


@cache
def three_rounds(*, seed: int = 1) -> ProbeReport:
    """The full report, measured by three processes."""
    once = full_report(seed=seed)
    more = [again(run, turn + 10 * seed) for turn in (1, 2) for run in once.runs if run.probe != "spill"]
    runs = [*once.runs, *(replace(run, round=run.round - 10 * seed) for run in more)]
    return replace(once, runs=tuple(runs))


@cache
def cpu_report() -> ProbeReport:
    """A machine without a GPU: host transfers, the rest waived."""
    return made(
        ran("transfer", *transfers(HOST_PATHS, clock="wall")),
        ProbeRun("spill", Waived("no GPU to measure"), 0.0, ()),
        ProbeRun("scenarios", Waived("no GPU to measure"), 0.0, ()),
        machine=machine(cpus=2, torch=NO_GPU, device_files=()),
    )


@cache
def broken_report() -> ProbeReport:
    """A run in which nothing was measured; its texts would be markup if a page let them."""
    hostile = "<script>alert('x')</script> & \"quoted\""
    return made(
        ProbeRun("transfer", Failed(hostile, "mend it", 4, wedged=True), 3.0, ()),
        machine=machine(host=hostile, torch=Unknown("torch is not installed")),
    )


def machine(**changes: object) -> Machine:
    """The usual machine with something else."""
    fields = {name: getattr(MACHINE, name) for name in MACHINE.__dataclass_fields__}
    return Machine(**{**fields, **changes})  # type: ignore[arg-type]
