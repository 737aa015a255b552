"""The report of a run: its settings, the machine, and every raw sample. Derived figures are not stored.

Schema 1: every case was measured by one process. Schema 2: `runs` holds a run for each process, so a case
occurs once per round, and new kinds of records exist (`numa`). This program reads both and refuses others.
New keys with a default alone don't change the version.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from probes.core import files
from probes.core.codec import DERIVED, Json, Misfit, decode, to_json
from probes.core.errors import ReportError
from probes.core.invocation import probe_command
from probes.core.quoting import command
from probes.records.facts import Machine
from probes.records.files import json_of, reading, writing
from probes.records.rows import Record, Small, require_possible

SCHEMA_VERSION = 2
READABLE = (1, 2)
MOST_BYTES = 128 << 20  # of a file; that of a full run has a few MB
WRITABLE = "choose a writable directory: --out DIR"

# keys of other files of ours, which are given by mistake
_AUDITS, _PLANS = {"image", "findings", "budget"}, {"blocks", "rings", "vram_budget"}

NumaMode = Literal["as_found", "gpu"]


@dataclass(frozen=True)
class Settings:
    """What a run was asked for. `seed` orders the sizes and draws the models' weights."""

    quick: bool
    seed: int
    vram_cap_bytes: int | None  # pretend that the card has no more than this
    models: tuple[str, ...] = ()  # of the scenarios; none: those that the mode chooses
    dtypes: tuple[str, ...] = ()  # likewise
    numa: NumaMode = "as_found"  # "gpu": only processors and host memory of the GPU's NUMA node


@dataclass(frozen=True)
class Done:
    """The probe ran to its end."""

    tag: ClassVar[str] = "done"


@dataclass(frozen=True)
class Waived:
    """The probe can't apply here."""

    tag: ClassVar[str] = "waived"
    reason: str


@dataclass(frozen=True)
class Failed:
    """The probe broke. `wedged`: not even SIGKILL ended it, so nothing more was started."""

    tag: ClassVar[str] = "failed"
    reason: str
    hint: str
    exit_code: int
    wedged: bool


Outcome = Done | Waived | Failed


@dataclass(frozen=True)
class ProbeRun:
    """The outcome of one process of a probe, and everything that it had measured by then."""

    probe: str
    outcome: Outcome
    seconds: float
    records: tuple[Record, ...]
    round: int = 0  # every round measures the cases again in a fresh process
    small: tuple[Small, ...] = ()  # what plans know of launches
    processes: int = field(default=1, metadata=DERIVED)  # that were put together


@dataclass(frozen=True)
class ProbeReport:
    """One run of `python3 -m probes run`."""

    schema_version: int
    tool_version: str
    started: str  # UTC, 2026-02-08T12:00:00Z
    settings: Settings
    machine: Machine
    runs: tuple[ProbeRun, ...]
    resumed: int = 0  # how often it was cut short and taken up again
    asked: tuple[str, ...] = ()  # the probes of this run, in order; fewer `runs` while it is unfinished
    pair: str = ""  # two reports that were measured in turns have the same word here


def from_json(text: str, *, name: Path = Path("FILE")) -> ProbeReport:
    """The report that `to_json` wrote. Raises ReportError, naming the place that doesn't fit."""
    value = json_of(text)
    if isinstance(value, dict) and "runs" not in value:
        _refuse_other_kinds(value, name)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise ReportError(
            f"schema_version is {repr(version)[:60]}, this program reads {known}",
            "read it with the Weir that wrote it",
        )
    try:
        return decode(ProbeReport, value)
    except Misfit as error:
        raise ReportError(str(error)) from error


def _refuse_other_kinds(value: Mapping[str, Json], name: Path) -> None:
    """Raises ReportError with what shows a file of ours that isn't a report of the probes."""
    if value.keys() >= _AUDITS:
        raise ReportError(
            "it is the report of an audit", command("weir", "audit", str(name), "--html", "PAGE.html")
        )
    if value.keys() >= _PLANS:
        raise ReportError("it is a plan of where a model's weights go")


def read_report(path: Path) -> ProbeReport:
    """The report in a file. Raises ReportError, naming the file."""
    return named_report(path)[0]


def named_report(path: Path, *, name: Path | None = None, make_one: str = "") -> tuple[ProbeReport, str]:
    """The report in a file, and the text that it was read from. Raises ReportError, which calls it `name`.

    `make_one`: what to do for one that can be read.
    """
    with reading(name or path, make_one or f"make one: {probe_command()} run", "is not a probe report"):
        text = files.read_text(path, most_bytes=MOST_BYTES)
        report = from_json(text, name=name or path)
        require_possible(report.started, ((*run.records, *run.small) for run in report.runs))
    return report, text


def write_report(report: ProbeReport, path: Path) -> None:
    """Write the whole report or nothing, over an older one of the same name. Raises ReportError."""
    with writing(path, WRITABLE):
        files.write_text(path, to_json(report))
