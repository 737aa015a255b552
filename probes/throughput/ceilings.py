"""The ceilings of a machine as values, and which sizes of an operation are tried for the largest rate. Pure.

The raw seconds are kept; n, median and error are derived from them as everywhere (`probes.records.stats`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probes.core.errors import OutOfMemory
from probes.core.unknown import Unknown
from probes.records.rows import Clock
from probes.records.stats import error_of_median, median

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16")
Device = Literal["cpu", "gpu"]

FALLEN = 0.9  # of the best rate: below it, larger operations don't reach more


@dataclass(frozen=True)
class Ceiling:
    """The largest rate seen: FLOP/s, bytes/s or operations/s, as the place that holds it says."""

    tag: ClassVar[str] = "ceiling"
    of: str  # what was done: "product of 4096 x 4096 matrices"
    work: float  # of one operation: FLOP, bytes or operations
    seconds: tuple[float, ...]  # of one operation each, in order of measurement
    clock: Clock

    @property
    def n(self) -> int:
        """Return the number of samples."""
        return len(self.seconds)

    @property
    def median(self) -> float:
        """The rate, per second."""
        return self.work / median(self.seconds)

    @property
    def error(self) -> float | None:
        """The standard error of the rate, per second; None for a single sample."""
        error_s = error_of_median(self.seconds)
        return None if error_s is None else self.median * error_s / median(self.seconds)


@dataclass(frozen=True)
class FlopCeiling:
    """FLOP/s of matrix products in one precision. A multiplication and an addition are two FLOP."""

    precision: Precision
    rate: Ceiling | Unknown


@dataclass(frozen=True)
class DeviceCeilings:
    """What one device can do at most, each with nothing else going on."""

    device: Device
    name: str  # as torch or the kernel reports it
    flop: tuple[FlopCeiling, ...]
    memory: Ceiling | Unknown  # bytes/s of a copy within the device's memory, read and write both counted
    to_device: Ceiling | Unknown  # bytes/s from pinned host memory
    from_device: Ceiling | Unknown  # bytes/s to pinned host memory
    launches: Ceiling | Unknown  # operations/s that the host hands over, one after another

    def flops(self, precision: str) -> Ceiling | Unknown:
        """FLOP/s in a precision; unknown for one that wasn't measured."""
        found = (one.rate for one in self.flop if one.precision == precision)
        return next(found, Unknown(f"no ceiling was measured in {precision}"))


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of every device that a run measures."""

    tag: ClassVar[str] = "ceilings"
    devices: tuple[DeviceCeilings, ...]

    def on(self, device: str) -> DeviceCeilings | Unknown:
        """Return the ceilings of one device."""
        found = (one for one in self.devices if one.device == device)
        return next(found, Unknown(f"no ceilings of the {device} were measured"))


def rates(
    sizes: Sequence[int],
    measure: Callable[[int], Ceiling],
    *,
    work: Callable[[int], float],
    longest_s: float,
) -> dict[int, Ceiling] | Unknown:
    """The rate of each size, from the smallest up.

    It ends where rates fall, memory is refused, or one operation would take more than `longest_s` by the best
    rate so far. Unknown where not even the first fits.
    """
    ceilings: dict[int, Ceiling] = {}
    best = 0.0
    for size in sizes:
        if best and work(size) / best > longest_s:
            break
        try:
            ceilings[size] = measure(size)
        except OutOfMemory as error:
            if not ceilings:
                return Unknown(error.message)
            break
        if ceilings[size].median < FALLEN * best:
            break
        best = max(best, ceilings[size].median)
    return ceilings or Unknown("no sizes to measure")


def contenders(by_size: Mapping[int, Ceiling]) -> list[int]:
    """The sizes whose rate comes near the best one: under lasting load, any of them may be the fastest."""
    best = largest(by_size.values())
    return [size for size, ceiling in by_size.items() if ceiling.median >= FALLEN * best.median]


def largest(ceilings: Iterable[Ceiling]) -> Ceiling:
    """The one with the largest rate."""
    return max(ceilings, key=lambda ceiling: ceiling.median)
