"""The report of a watch: what its samples amount to. Reads and writes it.

Raw samples are not in it: `--jsonl` keeps them, and such a file can be read as a report, too. New keys with a
default don't change the version.
"""

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
from probes.records.samples import GAUGES, ProcessUse, Subject

Kind = Literal["watch"]
KIND: Kind = "watch"
VERSION = 1
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
    return isinstance(value, dict) and value.get("kind") == KIND


def from_json(text: str) -> WatchReport:
    """The report that `to_json` wrote. Raises ReportError, naming the place that doesn't fit."""
    value = json_of(text)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if not is_watch(value) or version not in READABLE:
        raise ReportError(f"not a watch's report of version {VERSION}", "read it with the Weir that wrote it")
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
