"""What a watch records: the gauges, one sample of them, and the report that sums the samples up.

A gauge has a figure or a reason why there is none; a figure that isn't known is never 0. The report holds no
raw samples: `--jsonl` keeps them, and such a file can be read as a report, too. New keys with a default don't
change the report's version.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from probes.core import files
from probes.core.codec import Misfit, check_figures, decode, shown, to_json
from probes.core.errors import ReportError
from probes.core.invocation import probe_command
from probes.core.unknown import Unknown
from probes.records.files import json_of, writing
from probes.records.json_schema import document

SHORTEST_S = 1e-9  # between two samples in a file

# ---- gauges and samples --------------------------------------------------------------------------------


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
        value = self.values.get(gauge)
        return Unknown(self.missing.get(gauge, "not read")) if value is None else value


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
    begun_s: float = 0.0  # Unix time of the first sample, which other programs' times are compared with


def gathered(figures: Mapping[str, float | Unknown]) -> Look:
    """A look from figures and reasons in one mapping."""
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, figure in figures.items():
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


# ---- the report ----------------------------------------------------------------------------------------

Kind = Literal["watch"]
WATCH_KIND: Kind = "watch"
WATCH_VERSION = 1
READABLE = (1,)
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Track:
    """One gauge over the watch: its extremes, its mean over time, and a curve of equal steps."""

    gauge: str
    known_s: float  # for how long it was known
    least: float | Unknown
    mean: float | Unknown
    most: float | Unknown
    curve: tuple[float | None, ...]  # the mean of each step of `step_s`; null where it wasn't known


@dataclass(frozen=True)
class Energy:
    """Energy of a card over the watch."""

    joules: float
    error_j: float  # one standard deviation, by how it was found
    covers_s: float  # of the watch; where power wasn't known there is no energy
    source: str


@dataclass(frozen=True)
class Slowdown:
    """A reason why a card ran slower than it could, and for how much of the time that this was known."""

    reason: str
    share: float


@dataclass(frozen=True)
class Slowdowns:
    """All reasons, and the share of time with any of them."""

    any_share: float
    known_s: float
    reasons: tuple[Slowdown, ...]


@dataclass(frozen=True)
class Saturation:
    """What was achieved of what this machine can do. Utilisation is something else: time, not work."""

    of: str
    achieved: float | Unknown  # a mean over the watch, in `unit`
    ceiling: float | Unknown  # measured on this machine, in `unit`
    unit: str
    meaning: str


@dataclass(frozen=True)
class CardWatch:
    """One card over the watch. The subject has its name, in the same order."""

    tracks: tuple[Track, ...]
    energy: Energy | Unknown
    slowdowns: Slowdowns | Unknown
    saturation: tuple[Saturation, ...]
    processes: tuple[ProcessUse, ...] | Unknown  # the most that each held at any sample


@dataclass(frozen=True)
class Pace:
    """How well the samples kept their times, and what sampling cost."""

    samples: int
    skipped: int  # deadlines that passed while the program couldn't run
    error_p50_s: float | Unknown  # of the intervals between samples, against what was asked for
    error_p99_s: float | Unknown
    error_most_s: float | Unknown
    own_cpu_share: float | Unknown  # processor time of the watch, in shares of one core


@dataclass(frozen=True)
class Allocator:
    """torch's allocator on one device, as the hook in the command's process saw it (`--torch-allocator`)."""

    device: int
    most_allocated_bytes: int
    most_reserved_bytes: int
    unused_share: float  # reserved and not allocated, of the most that was reserved, when most was allocated
    split_share: float  # in pieces of partly used segments, which can't be given back, at that moment
    largest_free_bytes: int | Unknown  # in one piece, at that moment
    retries: int  # allocations that needed the cache emptied first
    out_of_memory: int


@dataclass(frozen=True)
class Ended:
    """How the command ended."""

    exit_code: int  # 128 + the signal's number where a signal ended it
    largest_process_bytes: int | Unknown  # the largest resident set of any one of its processes (rusage)
    cpu_s: float | Unknown  # processor time of all its processes


@dataclass(frozen=True)
class WatchReport:
    """One run of `weir probe watch`."""

    kind: Kind
    schema_version: int
    tool_version: str
    subject: Subject
    duration_s: float
    step_s: float  # of every curve
    pace: Pace
    machine: tuple[Track, ...]
    cards: tuple[CardWatch, ...]
    allocator: tuple[Allocator, ...] | Unknown
    ended: Ended | Unknown


def watch_schema() -> str:
    """The JSON Schema of a watch's report, as its file holds it."""
    return document(
        WatchReport,
        title="Weir watch report",
        description="What a machine and its cards did over some time, beside a command or alone. A figure "
        'that may be {"is": "unknown", "reason": ...} is never 0.',
        versions={"schema_version": READABLE},
    )


def is_watch(value: object) -> bool:
    """Whether a JSON value is a watch's report, to distinguish it from others."""
    return isinstance(value, dict) and value.get("kind") == WATCH_KIND


def watch_from_json(text: str) -> WatchReport:
    """The report that `to_json` wrote. Raises ReportError, naming the place that doesn't fit."""
    value = json_of(text)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if not is_watch(value) or version not in READABLE:
        raise ReportError(
            f"not a watch's report of version {WATCH_VERSION}", "read it with the Weir that wrote it"
        )
    try:
        check_figures(value)
        report = decode(WatchReport, value)
        _check(report)
    except Misfit as error:
        raise ReportError(str(error)) from error
    return report


def _check(report: WatchReport) -> None:
    """What types don't say. Raises Misfit."""
    named, watched = len(report.subject.cards), len(report.cards)
    if named != watched:
        raise Misfit(f"report.cards: expected {named}, as many as the subject names, found {watched}")
    for track in (*report.machine, *(track for card in report.cards for track in card.tracks)):
        if track.gauge not in GAUGES:
            raise Misfit(f"report: this version knows no gauge {shown(track.gauge)}")


def write_watch(report: WatchReport, path: Path, *, name: Path | None = None) -> None:
    """Write the whole report or nothing, over an older one. Raises ReportError, which calls it `name`."""
    with writing(name or path, f"choose another: {probe_command()} watch --report FILE"):
        files.write_text(path, to_json(report))
