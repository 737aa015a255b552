"""The protocol of a device under measurement: buffers by kind, operations on them, clocks.

`probes.measure.device` implements it with torch; tests simulate one. Words are 64-bit integers, whose
content is an arithmetic progression, so that what arrived can be compared without a copy of what was sent.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from probes.core.errors import ContentMismatch
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.measure.stacks import Shape, StackPlan
from probes.records.rows import ClassWork, Scenario, SmallWork, Split

WORD_BYTES = 8
# 2^64 over the golden ratio, made odd: neighbours differ in every byte (Knuth's multiplicative hashing)
STEP = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def signed(value: int) -> int:
    """The 64-bit two's complement reading of an integer, as torch's int64 holds it."""
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS // 2 else value


@dataclass(frozen=True)
class Pattern:
    """An arithmetic progression modulo 2^64."""

    start: int
    step: int = STEP

    def plus(self, amount: int) -> "Pattern":
        """The pattern whose words are all larger by `amount`."""
        return Pattern(self.start + amount, self.step)

    def total(self, first_word: int, words: int) -> int:
        """The sum of words first_word .. first_word+words-1, as an int64 sum wraps."""
        indices = words * first_word + words * (words - 1) // 2
        return signed(self.step * indices + self.start * words)


def mismatch(what: str, n_bytes: int) -> ContentMismatch:
    """The error for content that isn't what the operation leaves."""
    return ContentMismatch(
        f"{what} of {binary_bytes(n_bytes)}: the content that arrived is not what was sent",
        "the memory, the link or the driver is faulty; see the kernel's log (dmesg)",
    )


Kind = Literal["pageable", "pinned", "zero_copy", "vram"]
Action = Literal["copy", "copy_then_read", "kernel_copy", "read", "write"]
Operation = Callable[[], object]


@dataclass(frozen=True)
class ClassedWork:
    """An operation of one class, repeated `count` times by a call, and what each of these does."""

    operation: Operation
    count: int = 1
    launches: int = 1
    flops: int = 0
    moved_bytes: int = 0


# Between kernels the copy engine polls for its turn, on an H200 every 8 us. Where less than that is done with
# a copy, its cost depends on how polls happen to fall; four reads of even the smallest buffer take longer.
READS_AFTER = 4
WRITTEN = Pattern(start=0x5DEECE66D1234567, step=0)  # what the action "write" leaves in every word


@dataclass(frozen=True)
class Clocked:
    """A reading of the device's clock.

    `ahead`: the device still had work when the last operation was handed over. Where it had none, the reading
    includes time in which the device waited for the host.
    """

    seconds: float
    ahead: bool


class Span(Protocol):
    """A piece of a buffer, or several of one length at one distance; aligned to words."""

    @property
    def n_bytes(self) -> int:
        """Its length, of all pieces together."""


class Memory(Protocol):
    """A buffer of one kind."""

    @property
    def n_bytes(self) -> int:
        """Return the buffer's length in bytes."""

    def span(self, offset_bytes: int, n_bytes: int) -> Span:
        """A piece of it; both figures are multiples of 8."""

    def spans(self, n_bytes: int, *, stride_bytes: int, count: int) -> Span:
        """The first `count` pieces of `n_bytes`, `stride_bytes` apart, from its beginning."""


class Stack(Protocol):
    """A model whose weights can be placed."""

    def spill(self) -> None:
        """Move all weights out of VRAM: each other way begins there."""

    def input_bytes(self, rows: int) -> int:
        """Bytes of one input."""

    def left_bytes(self, scenario: Scenario, rows: int) -> int:
        """Bytes of the weights, unpacked, that a way leaves in host memory."""

    def split(self, scenario: Scenario, rows: int) -> Split | Unknown:
        """How one pass spends its time, in a separate pass."""

    def passes(self, scenario: Scenario, rows: int) -> Operation:
        """One forward pass, to be repeated. "resident" works before `spill`, the others after it."""

    def difference(self, scenario: Scenario, rows: int) -> float:
        """Run once; largest absolute difference from the resident output, over the largest output."""


class Workbench(Protocol):
    """Buffers, operations on them, clocks."""

    @property
    def has_gpu(self) -> bool:
        """Whether there is memory other than the host's."""

    @property
    def in_turns(self) -> bool:
        """Whether a rest is the other side's turn to measure, however long that takes."""

    def memory(self, kind: Kind, n_bytes: int) -> AbstractContextManager[Memory]:
        """A buffer, freed at the end. Raises OutOfMemory."""

    def fill(self, span: Span, pattern: Pattern) -> None:
        """Write the pattern, indexed from the start of the span's buffer."""

    def matches(self, span: Span, pattern: Pattern) -> bool:
        """Compare every word with the pattern."""

    def words(self, span: Span) -> tuple[int, ...]:
        """The words as int64. For a few: they are copied one by one."""

    def total(self, span: Span) -> int:
        """The sum of the words as int64, read where the device reads."""

    def operation(self, action: Action, target: Span | None, source: Span | None) -> Operation:
        """The action, ready to be repeated.

        `read` sums the source into the target, a word where the device computes. `kernel_copy` adds one to
        each word on the way; after `copy_then_read` kernels read all of the target READS_AFTER times, as real
        work would, and the next copy waits for them.
        """

    def device_s(self, operations: Sequence[Operation], *, lead_s: float) -> Clocked | None:
        """Seconds between device events around the operations, queued behind a wait of `lead_s`.

        None where the device has no clock.
        """

    def wall_s(self, operations: Sequence[Operation]) -> float:
        """Seconds of the host's clock, everything finished before and after."""

    def rest(self, seconds: float) -> None:
        """Do nothing for a while, or let the other side measure."""

    def queue_s(self, operation: Operation) -> float:
        """Seconds that the host needs to hand the operation to the device, without its end."""

    def numa_nodes(self) -> "tuple[int | Unknown, int | Unknown]":
        """The NUMA nodes on which a page of pinned and a page of pageable memory are placed."""

    def vram_free_bytes(self) -> int:
        """Free VRAM by the driver's account. 0 without a GPU."""

    def foreign_vram_bytes(self) -> int:
        """VRAM in use that isn't this process's: other programs', and what its context takes."""

    def small_latencies_s(self) -> tuple[float, float] | None:
        """Seconds from call to end of a small kernel and of a small copy, the middle one of a few each.

        None without a GPU.
        """

    def small(self, name: SmallWork) -> Operation:
        """Small work on the device, ready to be repeated. Raises Unsupported."""

    def class_work(self, name: ClassWork) -> ClassedWork:
        """Operations of one class on the device, or the CPU. Raises Unsupported."""

    def cap_vram(self, n_bytes: int) -> None:
        """Let torch's allocator refuse beyond this many bytes, as a smaller card would."""

    def shape(self, model: str, *, dtype: str, width: int) -> Shape:
        """What the plan must know of a model; `width` is that of an "mlp".

        Raises Unsupported when this image can't build it.
        """

    def stack(self, plan: StackPlan, seed: int) -> AbstractContextManager[Stack]:
        """The model of the scenarios, all weights in VRAM."""
