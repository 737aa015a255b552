"""What the direct half of a scan holds: every trial of every batch size, by way.

Derived figures aren't stored: throughput with its error, the knee and saturation are functions of these.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probes.core.unknown import Unknown
from probes.records.stats import deviation, effective_n, lag1, median, quantile
from probes.throughput.ceilings import Device

Mode = Literal["fp32", "tf32", "fp16", "bf16", "autocast"]
Backend = Literal["pytorch", "onnxruntime"]
# "copied" from pageable and "pinned" from pinned host memory, within the timed part; "in-place": left in
# host memory and read over the link; "resident": in the device's memory before. The CPU's are resident.
Inputs = Literal["copied", "pinned", "in-place", "resident"]
End = Literal["finished", "out of memory", "too long", "interrupted", "failed", "absent"]


@dataclass(frozen=True)
class ModelFacts:
    """The model that was scanned."""

    tag: ClassVar[str] = "model"
    name: str
    inputs: tuple[str, ...]  # each input's shape without the batch, as 20 x 50
    parameters: int
    weight_bytes: int  # in fp32


@dataclass(frozen=True)
class Way:
    """One way of running the model: a line of every plot."""

    tag: ClassVar[str] = "way"

    device: Device
    backend: Backend
    precision: Mode
    inputs: Inputs
    provider: str = ""  # ONNX Runtime's

    @property
    def label(self) -> str:
        """A name for tables and legends, different for each way of a scan."""
        provider = f" ({self.provider})" if self.provider else ""
        return f"{self.device} {self.backend}{provider} {self.precision} {self.inputs}"


@dataclass(frozen=True)
class Work:
    """What one pass asks for, counted from the operations that torch runs, not measured.

    `op_bytes` is a model: each operation reads its inputs and writes its outputs once, whatever caches
    and fusion save. `least_bytes` is its lower bound: weights, inputs and outputs once.
    """

    tag: ClassVar[str] = "work"
    flop: float  # of products, convolutions and attention; a multiplication and an addition are two
    op_bytes: float
    least_bytes: float
    input_bytes: int
    operations: int  # that do something, views not counted


@dataclass(frozen=True)
class BatchRow:
    """One batch size, measured."""

    tag: ClassVar[str] = "row"
    batch: int
    wall_s: tuple[float, ...]  # of each trial, in order
    pass_s: float | Unknown  # of the pass without copies, by the device's clock, the host far ahead
    work: Work | Unknown
    peak_bytes: int | Unknown  # of the device's memory by torch's allocator; of the process on the CPU
    joules: float | Unknown  # of the device over `powered` passes
    powered: int  # passes
    busy_percent: float | Unknown  # what nvidia-smi calls utilisation, its mean over the trials
    doubt: str = ""  # about the model's outputs


def latest(rows: Iterable[BatchRow]) -> tuple[BatchRow, ...]:
    """The last row of each batch size, which has all of its trials; in the order of the first ones."""
    return tuple({row.batch: row for row in rows}.values())


@dataclass(frozen=True)
class Series:
    """The batch sizes of one way, and how it ended."""

    way: Way
    rows: tuple[BatchRow, ...]
    end: End
    reason: str = ""  # for an end other than finished
    hint: str = ""  # what to install or type


@dataclass(frozen=True)
class DirectScan:
    """The direct half of a scan."""

    tag: ClassVar[str] = "direct"
    model: ModelFacts | Unknown
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Throughput:
    """Inputs per second over the trials of a batch size."""

    n: int  # trials
    mean: float
    error: float | None  # standard error of the mean; None for a single trial
    lag1: float | None  # autocorrelation of successive trials

    @property
    def share(self) -> float | None:
        """The error as a part of the mean."""
        return None if self.error is None else self.error / self.mean


def throughput(row: BatchRow) -> Throughput:
    """Inputs per second. Raises ValueError for a row without trials."""
    if not row.wall_s:
        raise ValueError(f"batch {row.batch} has no trials")
    return of_trials(row.batch, row.wall_s)


def of_trials(batch: int, wall_s: Sequence[float]) -> Throughput:
    """Inputs per second of at least one trial."""
    rates = [batch / seconds for seconds in wall_s]
    mean = math.fsum(rates) / len(rates)
    spread = deviation(rates)
    if spread is None:
        return Throughput(len(rates), mean, None, None)
    return Throughput(len(rates), mean, spread / math.sqrt(effective_n(rates)), lag1(rates))


def error_share(batch: int, wall_s: Sequence[float]) -> float:
    """The error as a part of the mean; infinite for a single trial, whose error isn't known."""
    share = of_trials(batch, wall_s).share
    return math.inf if share is None else share


def latency_s(row: BatchRow) -> tuple[float, float]:
    """The median and the 95th percentile of the seconds from call to end."""
    return median(row.wall_s), quantile(row.wall_s, 0.95)


def joules_per_input(row: BatchRow) -> float | Unknown:
    """The device's energy for one input, idle power included."""
    if isinstance(row.joules, Unknown):
        return row.joules
    if not row.powered:
        return Unknown("no passes were measured with the power gauge")
    return row.joules / (row.powered * row.batch)
