"""The records that probes make: timings, memory requests and their answers, gauges, gaps. Pure.

Their docstrings are the descriptions in the JSON Schema of reports. Times are in seconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Final, Literal

from probes.core.codec import DERIVED, shown
from probes.core.errors import ReportError
from probes.core.unknown import Unknown

Label = Literal["vram", "host", "paged", "unclear"]
BlockKind = Literal["vram", "zero_copy"]
Behaviour = Literal["refuses", "spills", "uses_gtt", "unknown"]
Scenario = Literal["resident", "zero_copy_weights", "zero_copy_all", "streamed", "packed", "placed"]
Way = Literal["copy_first", "in_place"]
Purpose = Literal["block", "oversize", "forced"]
SmallWork = Literal["layers", "product", "unpack"]
# Classes of operation (probes/placement/models/operations.py), each in a size whose bytes hardly count and in
# a large one; and products of many rows, by dtype
ClassWork = Literal[
    "plain",
    "strided",
    "norm",
    "reduction",
    "scan",
    "attention",
    "convolution",
    "large plain",
    "large strided",
    "large norm",
    "large reduction",
    "large scan",
    "large attention",
    "large convolution",
    "products float16",
    "products bfloat16",
    "products float32",
]
SMALL_LAYERS: Final = 8  # of the work "layers"
SMALL_WIDTH: Final = 768  # of the works "product" and "unpack"
Clock = Literal["device", "wall"]
Samples = tuple[float, ...]  # seconds


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


class Repeated:
    """A case that several processes measured: `repeats` are what the later ones did."""

    device_s: Samples | Unknown
    wall_s: Samples
    repeats: tuple[Any, ...]

    @property
    def leading(self) -> Clock:
        """The clock behind the figure that is shown: the device's, the wall's where there is no other."""
        return "device" if isinstance(self.device_s, tuple) else "wall"

    @property
    def samples_s(self) -> Samples:
        """This process's samples by the leading clock, seconds per operation."""
        return self.device_s if isinstance(self.device_s, tuple) and self.leading == "device" else self.wall_s

    @property
    def times_s(self) -> tuple[Samples, ...]:
        """The samples by the leading clock, of each process."""
        return tuple(process.samples_s for process in (self, *self.repeats))

    @property
    def walls_s(self) -> tuple[Samples, ...]:
        """The samples by the wall clock, of each process."""
        return tuple(process.wall_s for process in (self, *self.repeats))


@dataclass(frozen=True)
class Measurement(Repeated):
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
        return "wall" if self.clock == "wall" else super().leading


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
class Reads(Repeated):
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
    asked: BlockKind  # zero_copy blocks are controls: known to be in host memory
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
class Pass(Repeated):
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
    def devices_s(self) -> tuple[Samples, ...] | Unknown:
        """The samples by the device's clock, of each process that has one."""
        known = tuple(
            process.device_s for process in (self, *self.repeats) if isinstance(process.device_s, tuple)
        )
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


@dataclass(frozen=True)
class Small:
    """How long one process took for work that plans count by: launches, and classes of operation.

    `layers`: SMALL_LAYERS plain layers of a transformer, 256 wide, 16 rows.
    `product`: a row times a matrix of SMALL_WIDTH^2. `unpack`: such a matrix, packed.
    Classes of operation have what one of the `count` operations in the work launches, multiplies and moves.
    """

    tag: ClassVar[str] = "small"
    name: SmallWork | ClassWork
    device_s: Samples | Unknown  # behind a queued wait, so without what handing it over costs
    wall_s: Samples  # synchronised on both sides
    count: int = 1  # of operations
    launches: int = 1  # kernels of each
    flops: int = 0  # of each
    moved_bytes: int = 0  # that each reads and writes


Timed = Measurement | Reads | Pass  # rows with samples, which every round measures again
Case = Measurement | Gap | Reads | Pass  # records of their own; a resumed run keeps them
Record = Measurement | Gap | Reads | Reading | Expectation | Request | Block | Stop | Pass | NumaPlaces

# ---- what files from outside may not hold ------------------------------------------------------------

_TIMES = ("wall_s", "device_s", "read_s")
_LONGEST_S = 1e9  # 30 years
_SIZES = ("payload_bytes", "n_bytes", "batch", "rows")  # of what was measured, so not zero


def require_possible(started: str, runs: Iterable[Sequence[object]]) -> None:
    """Check the beginning of a report and the records of its runs. Raises ReportError naming the place."""
    require_moment(started)
    for i, records in enumerate(runs):
        for j, record in enumerate(records):
            if why := impossible(record):
                raise ReportError(f"report.runs[{i}].records[{j}].{why}")


def require_moment(started: str) -> None:
    """A report's beginning is a time that computers count. Raises ReportError."""
    try:
        datetime.fromisoformat(started).timestamp()
    except (ValueError, OverflowError):
        raise ReportError(f"report.started: expected a date and time, found {shown(started)}") from None


def impossible(record: object) -> str:
    """What no measurement gives: no samples, negative, endless or mostly zero ones, no size.

    Empty for a record that is possible.
    """
    for name in _TIMES:
        samples = getattr(record, name, None)
        if isinstance(samples, tuple) and not _are_times(samples):
            return f"{name}: expected times, found {shown(list(samples))}"
    sizes = {name: getattr(record, name, 1) for name in _SIZES}
    return next((f"{name}: expected a size, found {size}" for name, size in sizes.items() if size < 1), "")


def _are_times(samples: tuple[float, ...]) -> bool:
    """Whether there are any, none of them negative or endless, and more than half of them aren't zero."""
    ordered = sorted(samples)
    return bool(ordered) and ordered[0] >= 0 < ordered[(len(ordered) - 1) // 2] and ordered[-1] < _LONGEST_S
