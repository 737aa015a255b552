"""The report of a throughput scan: settings, machine, ceilings, and its two halves. Reads and writes it.

Derived figures are not stored. New keys with a default don't change the version.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from probes.errors import ReportError
from probes.records.json_schema import document
from probes.records.possible import require_moment
from probes.records.reportfiles import json_of, reading, word_under, writing
from probes.records.schema import WRITABLE, Machine
from probes.shared import files
from probes.shared.codec import Misfit, check_figures, decode, to_json
from probes.shared.invocation import probe_command, tool_version
from probes.shared.unknown import Unknown
from probes.throughput.ceilings.ceiling import Ceilings
from probes.throughput.checked import check_parts
from probes.throughput.direct.scanned import DirectScan
from probes.throughput.served.servedscan import ServedScan

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
