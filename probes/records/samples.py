"""What watching a machine finds: the gauges, and one sample of them. Pure.

A gauge has a figure or a reason why there is none; a figure that isn't known is never 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from probes.core.codec import Misfit, decode
from probes.core.unknown import Unknown

SHORTEST_S = 1e-9  # between two samples in a file


@dataclass(frozen=True)
class Gauge:
    """Something that is read again and again. `name` ends with its unit."""

    name: str
    words: str  # for people, without the unit
    unit: str
    meaning: str


MACHINE_GAUGES = (
    Gauge("cpu_percent", "CPU", "%", "processors' time spent on programs and the kernel, of all processors"),
    Gauge("ram_bytes", "RAM", "bytes", "MemTotal - MemAvailable"),
    Gauge("cgroup_bytes", "container's RAM", "bytes", "memory charged to this process's control group"),
    Gauge("swap_bytes", "swap", "bytes", "SwapTotal - SwapFree"),
    Gauge(
        "disk_read_bytes_per_s", "disk read", "bytes/s", "read from whole block devices since the last sample"
    ),
    Gauge("disk_write_bytes_per_s", "disk written", "bytes/s", "the same, written"),
    Gauge(
        "command_bytes",
        "command's RAM",
        "bytes",
        "resident sets of the command and its descendants; pages that several share count once for each",
    ),
)
CARD_GAUGES = (
    Gauge(
        "busy_percent",
        "GPU busy",
        "%",
        "share of time in which at least one kernel ran, on however few units",
    ),
    Gauge(
        "memory_busy_percent",
        "memory controller busy",
        "%",
        "share of time in which memory was read or written, at whatever rate",
    ),
    Gauge("vram_bytes", "VRAM", "bytes", "in use on the card by all processes"),
    Gauge("gtt_bytes", "GTT", "bytes", "system memory mapped for the card, all processes"),
    Gauge("power_w", "power", "W", "of the whole board or package, as its sensor averages it"),
    Gauge("energy_j", "energy", "J", "the card's own counter"),
    Gauge("edge_celsius", "temperature", "C", "edge of the die; on NVIDIA cards the one GPU sensor"),
    Gauge("hotspot_celsius", "hotspot", "C", "hottest place of the die (junction)"),
    Gauge("memory_celsius", "memory temperature", "C", "hottest memory chip or stack"),
    Gauge("core_mhz", "core clock", "MHz", "of the shader cores"),
    Gauge("memory_mhz", "memory clock", "MHz", "of the memory"),
    Gauge("to_card_bytes_per_s", "link to card", "bytes/s", "PCI Express traffic received by the card"),
    Gauge("from_card_bytes_per_s", "link from card", "bytes/s", "PCI Express traffic sent by the card"),
    Gauge("fan_percent", "fan", "%", "of full drive"),
    Gauge("sm_active_percent", "SM active", "%", "share of time x multiprocessors with at least one warp"),
    Gauge("sm_occupancy_percent", "SM occupancy", "%", "warps resident, of the most that fit"),
    Gauge(
        "tensor_percent", "tensor pipes active", "%", "share of cycles in which the tensor pipes were busy"
    ),
    Gauge(
        "dram_percent", "memory bandwidth", "%", "bytes moved by the memory, of its bandwidth by the clock"
    ),
    Gauge(
        "evicted_bytes", "evicted from VRAM", "bytes", "buffers of visible processes that wait outside VRAM"
    ),
)
GAUGES: Mapping[str, Gauge] = {gauge.name: gauge for gauge in (*MACHINE_GAUGES, *CARD_GAUGES)}


@dataclass(frozen=True)
class Look:
    """Every gauge of one place at one moment: a value, or why there is none."""

    values: Mapping[str, float]
    missing: Mapping[str, str]

    def get(self, gauge: str) -> float | Unknown:
        """One gauge."""
        found = self.values.get(gauge)
        return Unknown(self.missing.get(gauge, "not read")) if found is None else found


@dataclass(frozen=True)
class ProcessUse:
    """What one process holds on one card, in bytes."""

    pid: int
    name: str
    vram_bytes: int | Unknown
    gtt_bytes: int | Unknown
    evicted_bytes: int | Unknown


@dataclass(frozen=True)
class CardSample:
    """One card at one moment."""

    look: Look
    slowdowns: tuple[str, ...] | Unknown  # reasons why it runs slower than it could
    processes: tuple[ProcessUse, ...] | Unknown


@dataclass(frozen=True)
class Sample:
    """Everything at one moment. The cards are in the order of the watch's subjects."""

    at_s: float  # since the watch began
    late_s: float | None  # after its deadline; null for the last one, which has none
    machine: Look
    cards: tuple[CardSample, ...]


@dataclass(frozen=True)
class WatchedCard:
    """A card that is watched."""

    name: str
    driver: str  # amdgpu, nvidia
    pci_id: str
    vram_total_bytes: int | Unknown
    memory_bytes_per_s: float | Unknown  # by the highest memory clock and the width of its bus


@dataclass(frozen=True)
class Subject:
    """What is watched, and how often."""

    started: str  # UTC, 2026-02-08T12:00:00Z
    host: str
    interval_s: float
    cards: tuple[WatchedCard, ...]
    command: tuple[str, ...]


def gathered(found: Mapping[str, float | Unknown]) -> Look:
    """A look from figures and reasons in one mapping."""
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, figure in found.items():
        if isinstance(figure, Unknown):
            missing[name] = figure.reason
        elif not math.isfinite(figure):  # NVML's metrics of an idle card
            missing[name] = "the driver's figure is not a number"
        else:
            values[name] = figure
    return Look(values, missing)


def subject_from(value: object, where: str) -> Subject:
    """The subject in a file. Raises Misfit."""
    subject = decode(Subject, value, where)
    if subject.interval_s < SHORTEST_S:
        raise Misfit(f"{where}.interval_s: expected a time above 0, found {subject.interval_s!r}")
    return subject
