"""The report of a run: its settings, the machine, and every raw sample. Derived figures are not stored.

Schema 1: every case was measured by one process. Schema 2: `runs` holds a run for each process, so a case
occurs once per round, and new kinds of records exist (`numa`). This program reads both and refuses others.
New keys with a default alone don't change the version.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from probes.errors import ReportError
from probes.records.facts import (
    Api,
    Card,
    DeviceFile,
    DeviceMemoryLimit,
    Gpu,
    KfdNode,
    Link,
    Machine,
    NumaNode,
    NvidiaCard,
    Surroundings,
    TorchFacts,
)
from probes.shared import files
from probes.shared.codec import DERIVED, Json, Misfit, decode, encode
from probes.shared.invocation import probe_command
from probes.shared.unknown import Unknown

# fmt: off
__all__ = [
    "READABLE", "SCHEMA_VERSION", "UNSPLIT", "UNWATCHED", "Api", "Asked", "Behaviour", "Block", "Card",
    "Case", "Clock", "DeviceFile", "DeviceMemoryLimit", "Done", "Expectation", "Failed", "Gap", "Gpu",
    "KfdNode", "Label", "Link", "Machine", "Measurement", "Noise", "NumaMode", "NumaNode", "NumaPlaces",
    "NvidiaCard", "Outcome",
    "Pass", "ProbeReport", "ProbeRun", "Purpose", "Reading", "Reads", "Record", "Request", "Scenario",
    "Settings", "Split", "Stop", "Surroundings", "Timed", "TorchFacts", "Unknown", "Waived", "Way",
    "case_name", "from_json", "named_report", "read_report", "to_json", "write_report",
]
# fmt: on

SCHEMA_VERSION = 2
READABLE = (1, 2)
MOST_BYTES = 128 << 20  # of a file; that of a full run has a few MB

Clock = Literal["device", "wall"]
Label = Literal["vram", "host", "paged", "unclear"]
Asked = Literal["vram", "zero_copy"]
Behaviour = Literal["refuses", "spills", "uses_gtt", "unknown"]
Scenario = Literal["resident", "zero_copy_weights", "zero_copy_all", "streamed"]
Way = Literal["copy_first", "in_place"]
Purpose = Literal["block", "oversize", "forced"]
NumaMode = Literal["as_found", "gpu"]
Samples = tuple[float, ...]


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
class Noise:
    """Other activity while a row was measured. Empty `flags` mean that none was seen."""

    tag: ClassVar[str] = "noise"
    flags: tuple[str, ...]
    unwatched: tuple[str, ...]  # what couldn't be watched, and why


UNWATCHED = Unknown("nothing was watched")


def case_name(*parts: object) -> str:
    """The name of one case of a probe, by which a resumed run knows what is done."""
    return " ".join(map(str, parts))


class _Repeated:
    """A case that several processes measured: `repeats` are what the later ones did."""

    wall_s: Samples
    repeats: tuple[Any, ...]

    @property
    def samples_s(self) -> Samples:
        """This process's samples by the leading clock."""
        raise NotImplementedError

    @property
    def times_s(self) -> tuple[Samples, ...]:
        """The samples by the leading clock, of each process."""
        return tuple(one.samples_s for one in (self, *self.repeats))

    @property
    def walls_s(self) -> tuple[Samples, ...]:
        """The samples by the wall clock, of each process."""
        return tuple(one.wall_s for one in (self, *self.repeats))


@dataclass(frozen=True)
class Measurement(_Repeated):
    """Repeated timings of one operation on buffers of one size, by one process. Content was verified.

    `host_bound`: the device ran out of work while operations were handed over, so that the device's clock
    includes the time that the host takes. `repeats` are the same case measured by later processes; they are
    put together when a report is read, and a file holds them in runs of their own.
    """

    tag: ClassVar[str] = "measurement"
    name: str  # h2d_pinned
    payload_bytes: int  # of one buffer
    moved_bytes: int  # that bandwidth counts: reads plus writes in the same memory
    batch: int  # operations per device sample; each sample is divided by it
    clock: Clock  # the headline's
    device_s: tuple[float, ...] | Unknown  # seconds per operation, by device events
    wall_s: tuple[float, ...]  # seconds of one operation, synchronised on both sides
    noise: Noise | Unknown = UNWATCHED
    host_bound: bool = False
    repeats: tuple["Measurement", ...] = field(default=(), metadata=DERIVED)

    @property
    def case(self) -> str:
        """Its name in the journal."""
        return case_name(self.name, self.payload_bytes)

    @property
    def leading(self) -> Clock:
        """The clock behind the figure that is shown."""
        return "device" if self.clock == "device" and isinstance(self.device_s, tuple) else "wall"

    @property
    def samples_s(self) -> Samples:
        """This process's samples by the leading clock, seconds per operation."""
        return self.device_s if isinstance(self.device_s, tuple) and self.leading == "device" else self.wall_s


@dataclass(frozen=True)
class Gap:
    """A row that was not measured, and why."""

    tag: ClassVar[str] = "gap"
    name: str
    payload_bytes: int
    reason: str

    @property
    def case(self) -> str:
        """Its name in the journal."""
        return case_name(self.name, self.payload_bytes)


@dataclass(frozen=True)
class Reads(_Repeated):
    """Repeated timings of reading a buffer of host memory a number of times, in one of two ways."""

    tag: ClassVar[str] = "reads"
    way: Way
    reads: int  # full reads by a sum kernel
    payload_bytes: int
    batch: int
    device_s: tuple[float, ...] | Unknown  # seconds for all the reads, the copy included
    wall_s: tuple[float, ...]
    noise: Noise | Unknown = UNWATCHED
    host_bound: bool = False  # as in Measurement
    repeats: tuple["Reads", ...] = field(default=(), metadata=DERIVED)

    @property
    def case(self) -> str:
        """Its name in the journal."""
        return case_name(self.way, self.reads, self.payload_bytes)

    @property
    def leading(self) -> Clock:
        """The device's clock, the wall's where there is no other."""
        return "device" if isinstance(self.device_s, tuple) else "wall"

    @property
    def samples_s(self) -> Samples:
        """This process's samples by the leading clock, seconds."""
        return self.device_s if isinstance(self.device_s, tuple) else self.wall_s


@dataclass(frozen=True)
class Reading:
    """One memory gauge at one moment, with its source."""

    tag: ClassVar[str] = "reading"
    moment: str
    gauge: str
    value_bytes: int | Unknown


@dataclass(frozen=True)
class Expectation:
    """What an over-allocation should do here, predicted before trying, with the source."""

    tag: ClassVar[str] = "expectation"
    behaviour: Behaviour
    sentence: str
    source: str
    note: str = ""  # what else can happen

    def agrees(self, *, granted: bool) -> bool | None:
        """Did a request beyond free VRAM end as expected? None where nothing is expected."""
        return None if self.behaviour == "unknown" else (self.behaviour == "refuses") != granted


@dataclass(frozen=True)
class Request:
    """One request for device memory and the answer."""

    tag: ClassVar[str] = "request"
    purpose: Purpose
    asked_bytes: int
    held_bytes: int  # by this probe already
    vram_free_bytes: int  # by the driver's account, just before
    cap_bytes: int | None  # set by the probe itself, in torch's allocator
    granted: bool
    message: str  # the refusal's words
    kind: str = "vram"  # or pinned, pageable
    declined: bool = False  # by the probe itself, to keep the host-memory floor: no request was made


UNTIMED = Unknown("not measured")


@dataclass(frozen=True)
class Block:
    """One block of the spill probe, re-read after everything was allocated. Content was verified."""

    tag: ClassVar[str] = "block"
    index: int
    asked: Asked  # zero_copy blocks are controls: known to be in host memory
    control: bool
    n_bytes: int
    read_s: tuple[float, ...]
    vram_drop_bytes: int | Unknown  # by how much the driver's free VRAM fell when it was allocated
    gtt_growth_bytes: int | Unknown
    # the first read after everything was allocated: what a driver had paged out comes back in it
    first_read_s: float | Unknown = UNTIMED


@dataclass(frozen=True)
class Stop:
    """Why the spill probe asked for no more."""

    tag: ClassVar[str] = "stop"
    cause: Literal["refused", "target", "floor"]
    held_bytes: int
    note: str


@dataclass(frozen=True)
class Split:
    """How one pass spends its time, seconds by the device's clock, in a pass measured for this alone."""

    tag: ClassVar[str] = "split"
    copy_s: float  # the copy engine's, which may run alongside compute
    wait_s: float  # kernels waiting for a copy
    compute_s: float  # the rest of the pass; reading host memory in place counts here


UNSPLIT = Unknown("not measured")


@dataclass(frozen=True)
class Pass(_Repeated):
    """Forward passes through the stack in one scenario, compared with the all-resident output.

    The wall clock leads: it is what the caller of a model waits for. The device's clock, behind a queued
    wait, leaves out what handing the pass over costs.
    """

    tag: ClassVar[str] = "pass"
    scenario: Scenario
    rows: int  # batch size
    layers: int
    weight_bytes: int
    spilled_bytes: int  # of the weights, left in host memory
    input_bytes: int
    dtype: str
    device_s: tuple[float, ...] | Unknown
    wall_s: tuple[float, ...]
    difference: float  # largest absolute difference of outputs, over the largest output
    model: str = "mlp"
    split: Split | Unknown = UNSPLIT
    noise: Noise | Unknown = UNWATCHED
    host_bound: bool = False  # as in Measurement
    repeats: tuple["Pass", ...] = field(default=(), metadata=DERIVED)

    @property
    def case(self) -> str:
        """Its name in the journal."""
        return case_name(self.model, self.dtype, self.scenario, self.rows)

    @property
    def leading(self) -> Clock:
        """The wall clock."""
        return "wall"

    @property
    def samples_s(self) -> Samples:
        """This process's seconds per pass by the wall clock, everything finished before and after."""
        return self.wall_s

    @property
    def devices_s(self) -> tuple[Samples, ...] | Unknown:
        """The samples by the device's clock, of each process that has one."""
        known = tuple(one.device_s for one in (self, *self.repeats) if isinstance(one.device_s, tuple))
        return known or Unknown("no device clock")


@dataclass(frozen=True)
class NumaPlaces:
    """On which NUMA nodes one process measured. A node is the number that the kernel gives it."""

    tag: ClassVar[str] = "numa"
    gpu: int | Unknown
    processors: tuple[int, ...]  # nodes on whose processors it may run
    pinned_buffer: int | Unknown  # where a page of pinned memory is
    pageable_buffer: int | Unknown
    held: bool  # to the GPU's node, by --numa gpu


Timed = Measurement | Reads | Pass  # rows with samples, which every round measures again
Case = Measurement | Gap | Reads | Pass  # records of their own; a resumed run keeps them
Record = Measurement | Gap | Reads | Reading | Expectation | Request | Block | Stop | Pass | NumaPlaces


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
    processes: int = field(default=1, metadata=DERIVED)  # that were put together


@dataclass(frozen=True)
class ProbeReport:
    """One run of `python -m probes run`."""

    schema_version: int
    tool_version: str
    started: str  # UTC, 2026-02-08T12:00:00Z
    settings: Settings
    machine: Machine
    runs: tuple[ProbeRun, ...]
    resumed: int = 0  # how often it was cut short and taken up again
    asked: tuple[str, ...] = ()  # the probes of this run, in order; fewer `runs` while it is unfinished


def to_json(report: ProbeReport) -> str:
    """The report as a file holds it."""
    return json.dumps(encode(report), indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> ProbeReport:
    """The report that `to_json` wrote. Raises ReportError, naming the place that doesn't fit."""
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"not JSON: {error}") from error
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise ReportError(
            f"schema_version is {version!r}, this program reads {known}",
            "read it with the Weir that wrote it",
        )
    try:
        return decode(ProbeReport, value)
    except Misfit as error:
        raise ReportError(str(error)) from error


def read_report(path: Path) -> ProbeReport:
    """The report in a file. Raises ReportError, naming the file."""
    return named_report(path)[0]


def named_report(path: Path) -> tuple[ProbeReport, str]:
    """The report in a file, and the text that it was read from. Raises ReportError, naming the file."""
    try:
        text = files.read_text(path, most_bytes=MOST_BYTES)
        return from_json(text), text
    except OSError as error:
        raise ReportError(
            f"can't read {path}: {error.strerror or error}", f"make one: {probe_command()} run"
        ) from error
    except UnicodeDecodeError as error:
        raise ReportError(f"can't read {path}: not UTF-8 text", f"make one: {probe_command()} run") from error
    except ReportError as error:
        raise ReportError(f"{path} is not a probe report: {error.message}", error.hint) from error


def write_report(report: ProbeReport, path: Path) -> None:
    """Write the whole report or nothing, over an older one of the same name. Raises ReportError."""
    try:
        files.write_text(path, to_json(report))
    except OSError as error:
        raise ReportError(
            f"can't write {path}: {error.strerror}", "choose a writable directory: --out DIR"
        ) from error
