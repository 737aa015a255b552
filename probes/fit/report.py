"""What `fit` is asked and what it answers: the classes of `fit --json`, and how such a file is read.

Their docstrings are the descriptions in its JSON Schema. Sizes are in bytes.
"""

import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from probes.core.codec import decode
from probes.core.invocation import probe_command
from probes.core.unknown import Unknown
from probes.records.files import of_schema, reading, word_under
from probes.records.json_schema import document

Task = Literal["inference", "training"]
Optimizer = Literal["sgd", "momentum", "adamw"]
Precision = Literal["fp32", "bf16", "fp16", "amp-bf16", "amp-fp16"]
Axis = Literal["batch", "tokens"]
Cap = Literal["auto", "cgroup", "process"]
Verdict = Literal[
    "fits",
    "gpu_out_of_memory",  # torch's allocator on a GPU, or the driver
    "allocation_refused",  # the C library, for torch's allocator on the CPU or another library's
    "memory_error",  # Python's own objects
    "killed_for_memory",  # by the kernel, for the limit of a cgroup
    "crashed",
    "out_of_time",
]

FIT_SCHEMA: Final = "weir-fit/1"
VERDICTS: Final = {
    "fits": "fits",
    "gpu_out_of_memory": "the GPU's memory is used up",
    "allocation_refused": "an allocation was refused",
    "memory_error": "Python raised MemoryError",
    "killed_for_memory": "killed by the cgroup's limit",
    "crashed": "crashed",
    "out_of_time": "stopped: out of time",
}
NOT_DIVIDED: Final = Unknown("only the peak of a size that fits is divided")
NOT_COMPARED: Final = Unknown("no size was measured")
NOT_BUILT: Final = Unknown("the model wasn't built")
CAPS: Final = typing.get_args(Cap)
TASKS: Final = typing.get_args(Task)
OPTIMIZERS: Final = typing.get_args(Optimizer)
PRECISIONS: Final = typing.get_args(Precision)
SHORT_OF_MEMORY: Final = ("gpu_out_of_memory", "allocation_refused", "memory_error", "killed_for_memory")
WIDTHS: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "amp-bf16": 4, "amp-fp16": 4}  # bytes of a weight
STATES: Final = {"sgd": 0, "momentum": 1, "adamw": 2}  # numbers that the optimizer keeps for each weight


@dataclass(frozen=True)
class Question:
    """One pass or one training step. `batch` is that of a micro-batch where gradients are accumulated."""

    model: str
    task: Task = "inference"
    batch: int = 1
    tokens: int = 1024  # of each sequence
    optimizer: Optimizer = "adamw"
    precision: Precision = "bf16"
    checkpointing: bool = False
    lora_rank: int = 0  # 0: all weights are trained
    lora_targets: tuple[str, ...] = ()  # last parts of the names of linear layers
    accumulate: int = 1  # micro-batches for each step of the optimizer

    @property
    def width(self) -> int:
        """Bytes of a number of the weights."""
        return WIDTHS[self.precision]

    @property
    def is_mixed(self) -> bool:
        """Whether products are computed in another precision than the weights are kept in."""
        return self.precision.startswith("amp")


@dataclass(frozen=True)
class Taken:
    """Bytes at the moment when most is taken, by what takes them."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0  # kept for the backward pass, and alive besides
    kv_cache: int = 0
    workspace: int = 0  # of the libraries that multiply
    context: int = 0  # of the driver: outside torch's allocator
    rounding: int = 0  # of torch's allocator

    @property
    def allocated(self) -> int:
        """What torch's allocator has handed out."""
        tensors = self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache
        return tensors + self.workspace

    @property
    def total(self) -> int:
        """Return the sum of all parts, in bytes."""
        return self.allocated + self.rounding + self.context


@dataclass(frozen=True)
class Phase:
    """A part of a step, such as its backward pass, and the peak while it lasted, measured."""

    name: str
    peak_bytes: int


@dataclass(frozen=True)
class Parts:
    """A trial's peak by what took it, measured. Bytes."""

    weights: int  # with buffers
    optimizer: int
    rest: int  # of the peak: gradients, activations, keys and values, libraries
    phases: tuple[Phase, ...]


@dataclass(frozen=True)
class Trial:
    """One size that was tried for real, in a process of its own. Bytes are above those before the model."""

    size: int  # of the axis
    verdict: Verdict
    seconds: float
    peak_bytes: int | Unknown  # CPU: resident memory; GPU: handed out by torch's allocator
    reserved_bytes: int | Unknown  # GPU: taken by torch's allocator from the driver
    context_bytes: int | Unknown  # GPU: of the driver for this process
    said: str = ""  # the beginning of the error
    parts: Parts | Unknown = NOT_DIVIDED


@dataclass(frozen=True)
class Largest:
    """The largest size of an axis that fits. `fits` is 0 where not even one does."""

    axis: Axis
    fits: int
    fails: int | None  # the smallest size known not to fit; None: none was found
    exact: bool  # the size after `fits` doesn't fit, and no trial contradicts another
    contradictions: tuple[tuple[int, int], ...] = ()  # (size that failed, one as large or larger that fitted)

    @property
    def top(self) -> int:
        """The largest size that fitted in any trial: more than `fits` where trials contradict each other."""
        return max([self.fits, *(good for _, good in self.contradictions)])

    @property
    def ended(self) -> bool:
        """Whether the search came to its end: the size after `fits` is known not to fit, or contradicted."""
        return self.exact or bool(self.contradictions)


@dataclass(frozen=True)
class Knob:
    """One change to the question: what it changes in bytes, predicted, and what it costs."""

    name: str
    saves: int  # bytes at the peak; negative where it takes more
    total: int  # predicted bytes after it
    largest_batch: int  # predicted, after it
    cost: str


@dataclass(frozen=True)
class Built:
    """What the model's own modules say, built without their bytes. Exact, in bytes."""

    weights: int  # with buffers
    trained: int  # of the weights: those that get a gradient


@dataclass(frozen=True)
class Measured:
    """What was found by trials."""

    device: str
    cap: str  # how the budget was enforced, and what counts
    largest: Largest
    trials: tuple[Trial, ...]
    at_size: Taken | Unknown  # traced at the largest size that fits: predicted, not measured
    peak_bytes: int | Unknown  # measured at that size
    seconds: float
    ended: str = ""  # why it ended early, if so
    built: Built | Unknown = NOT_BUILT
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FitReport:
    """What `fit` answers. Everything under `measured` comes from trials; all else is predicted."""

    question: Question
    machine: str
    constants: str  # where the machine's figures come from
    budget_bytes: int  # for everything, the driver's context included; of a measurement: for torch
    predicted_by: str  # "rules", or "two trials"
    predicted: Taken
    moment: str  # when the peak is
    fits: bool
    predicted_largest_batch: Largest | Unknown
    predicted_largest_tokens: Largest | Unknown
    smallest_budget_bytes: int  # predicted: the least budget in which this question fits
    knobs: tuple[Knob, ...]
    measured: Measured | Unknown
    notes: tuple[str, ...] = ()
    predicted_at_largest: Taken | Unknown = NOT_COMPARED  # at the largest size that was measured to fit
    schema: str = FIT_SCHEMA


# ---- the file -----------------------------------------------------------------------------------------

MOST_BYTES: Final = 16 << 20
FAMILY: Final = FIT_SCHEMA.rpartition("/")[0] + "/"  # of any version


def is_fit(path: Path) -> bool:
    """Whether a file holds an answer of `fit`, of any version; a file that can't be read doesn't."""
    return bool(word_under(path, "schema", FAMILY, most_bytes=MOST_BYTES))


def named_fit(path: Path, *, name: Path | None = None) -> tuple[FitReport, str]:
    """The answer in a file, and the text that it was read from. Raises ReportError, which calls it `name`."""
    with reading(name or path, f"make one: {probe_command()} fit MODEL --json FILE"):
        value, text = of_schema(path, FIT_SCHEMA, most_bytes=MOST_BYTES)
        return decode(FitReport, value, "answer"), text


def fit_schema() -> str:
    """The JSON Schema of answers."""
    return document(
        FitReport,
        title="Weir fit",
        description="What a model takes in a pass or a training step, and the largest batch and longest "
        "sequence within a budget. What is under `measured` comes from trials; all else is predicted.",
        versions={"schema": (FIT_SCHEMA,)},
    )
