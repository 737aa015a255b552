"""The report of a throughput scan: settings, machine, ceilings, both halves. Reads and writes its file.

Derived figures are not stored. New keys with a default don't change the version.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from probes.core import files
from probes.core.codec import Misfit, check_figures, decode, to_json
from probes.core.errors import ReportError
from probes.core.invocation import probe_command, tool_version
from probes.core.unknown import Unknown
from probes.records.facts import Machine
from probes.records.files import json_of, reading, word_under, writing
from probes.records.json_schema import document
from probes.records.rows import require_moment
from probes.records.schema import WRITABLE
from probes.throughput.ceilings import Ceiling, Ceilings
from probes.throughput.direct.results import DirectScan
from probes.throughput.served.results import ServedScan

LEAST = 1e-12  # of a time in seconds, or of work: far below any that was measured, and its inverse is finite

Place = tuple[str, float]


def check_parts(ceilings: Ceilings | Unknown, direct: DirectScan | None, served: ServedScan | None) -> None:
    """Raises Misfit for a part that no scan writes."""
    places = [*_of_ceilings(ceilings), *_of_direct(direct), *_of_served(served)]
    for where, value in places:
        if value < LEAST:
            raise Misfit(f"report.{where}: expected a figure above 0, found {value!r}")


def _of_ceilings(ceilings: Ceilings | Unknown) -> Iterator[Place]:
    for device in () if isinstance(ceilings, Unknown) else ceilings.devices:
        rates = [device.memory, device.to_device, device.from_device, device.launches]
        for rate in (*rates, *(one.rate for one in device.flop)):
            if isinstance(rate, Ceiling):
                yield "ceilings: the work of a ceiling", rate.work
                yield from _samples("ceilings: the seconds of a ceiling", rate.seconds)


def _of_direct(direct: DirectScan | None) -> Iterator[Place]:
    for row in (row for series in (direct.series if direct else ()) for row in series.rows):
        yield "direct: a batch size", row.batch
        yield from _samples("direct: the trials of a batch size", row.wall_s)


def _of_served(served: ServedScan | None) -> Iterator[Place]:
    for level in served.levels if served else ():
        yield "served: the seconds of a level", level.seconds
        yield "served: the callers of a level", level.callers
        if level.loop == "open":
            yield "served: the rate of an open loop", level.rate_per_s or 0.0
        yield from (("served: the seconds of a window", window.seconds) for window in level.windows)
        answers = len(level.latency_s)
        waits = answers if level.loop == "open" else 0
        if (len(level.due_s), len(level.waited_s)) != (answers, waits):
            raise Misfit("report.served: the lists of a level don't belong together")


def _samples(where: str, seconds: tuple[float, ...]) -> Iterator[Place]:
    yield f"{where} (how many)", len(seconds)
    yield where, min(seconds, default=LEAST)


Kind = Literal["throughput"]
KIND: Kind = "throughput"
READABLE = (1,)
VERSION = 1
MOST_BYTES = 128 << 20
MOST_ALIKE = 1000  # reports of one second in one folder


@dataclass(frozen=True)
class ScanSettings:
    """What a scan was asked for. Empty tuples: what this machine has."""

    model: str
    batches: tuple[int, ...]
    trials: int
    inputs: tuple[str, ...]  # copied, pinned, in-place, resident
    backends: tuple[str, ...]
    precisions: tuple[str, ...]
    devices: tuple[str, ...]  # cpu, gpu
    seed: int  # of weights and inputs
    threads: int  # of torch and ONNX Runtime on the CPU; 0: as they choose
    aim: float = 0.0  # beyond `trials`, until the throughput's error is this share of it; 0: never


@dataclass(frozen=True)
class ThroughputReport:
    """One run of `weir probe throughput`; a half that wasn't asked for is null."""

    kind: Kind
    schema_version: int
    tool_version: str
    started: str  # UTC, 2026-02-08T12:00:00Z
    settings: ScanSettings
    machine: Machine
    ceilings: Ceilings | Unknown
    direct: DirectScan | None = None
    served: ServedScan | None = None


def begun(settings: ScanSettings, machine: Machine, ceilings: Unknown) -> ThroughputReport:
    """A report that begins now, without figures yet."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return ThroughputReport(KIND, VERSION, tool_version(), started, settings, machine, ceilings)


def throughput_schema() -> str:
    """The JSON Schema of a throughput report, as its file holds it."""
    return document(
        ThroughputReport,
        title="Weir throughput report",
        description="How much a device does over batch size or under load, and this machine's ceilings, by "
        "every raw trial. Derived figures are not stored. "
        'A figure that may be {"is": "unknown", "reason": ...} is never 0.',
        versions={"schema_version": READABLE},
    )


def from_json(text: str) -> ThroughputReport:
    """The report that `to_json` wrote. Raises ReportError, naming the place that doesn't fit."""
    value = json_of(text)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if not is_throughput(value) or version not in READABLE:
        raise ReportError(
            f"not a throughput report of version {READABLE[-1]}", "read it with the Weir that wrote it"
        )
    try:
        check_figures(value)
        report = decode(ThroughputReport, value)
        require_moment(report.started)
        check_parts(report.ceilings, report.direct, report.served)
    except Misfit as error:
        raise ReportError(str(error)) from error
    return report


def is_throughput(value: object) -> bool:
    """Whether a JSON value is a throughput report, to tell it from a probe report."""
    return isinstance(value, dict) and value.get("kind") == KIND


def is_scan(path: Path) -> bool:
    """Whether a file holds a throughput report; a file that can't be read doesn't."""
    return word_under(path, "kind", KIND, most_bytes=MOST_BYTES) == KIND


def named_scan(path: Path, *, name: Path | None = None) -> tuple[ThroughputReport, str]:
    """The report in a file, and the text that it was read from. Raises ReportError, which calls it `name`."""
    with reading(name or path, f"make one: {probe_command()} throughput"):
        text = files.read_text(path, most_bytes=MOST_BYTES)
        return from_json(text), text


def write_scan(report: ThroughputReport, path: Path) -> None:
    """Write the whole report or nothing, over an older one of the same name. Raises ReportError."""
    with writing(path, WRITABLE):
        files.write_text(path, to_json(report))


def write_new_scan(report: ThroughputReport, folder: Path, name: str) -> Path:
    """Write it into `folder` as `TIME-NAME.json`, with a number where that is taken. Raises ReportError."""
    stem = f"{re.sub(r'[-:]', '', report.started)}-{name}"
    numbers = ("", *(f"-{number}" for number in range(2, MOST_ALIKE)))
    with writing(folder / f"{stem}.json", WRITABLE):
        return files.write_new((folder / f"{stem}{number}.json" for number in numbers), to_json(report))
