"""The device while a way to run a model is timed: a cap on its memory, and the clock."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from probes.shared.output import say
from probes.shared.units import duration

SAMPLES: Final = 5
LEAST_S: Final = 0.2  # of a sample, so that a clock's step and the last wait don't count
LONG_S: Final = 2.0  # of a pass, from which one before is enough to warm up
MOST_S: Final = 30.0  # of all samples of such a pass
NOTABLE_S: Final = 5.0  # of waiting that is announced
DRAWN: Final = 1 << 22  # numbers, to see how quickly they are drawn
ACROSS: Final = 2048  # width of the matrix, to see how quickly products are computed


def wall_s(one: Callable[[], object]) -> float:
    """Median seconds of a pass: several in a row, then a wait for the device, divided.

    `one` has been called before. The longer it takes, the less often it is called: at least once.
    """
    first = _timed(one, 1)
    if first < LONG_S:
        first = _timed(one, 1)  # that was to warm up
    times = max(1, min(1000, int(LEAST_S / max(first, 1e-6))))
    samples = max(0, min(SAMPLES, int(MOST_S / (first * times))))
    if samples * times * first >= NOTABLE_S:
        say(f"a pass takes {duration(first)}; {samples} more are timed, about {duration(samples * first)}")
    found = [_timed(one, times) for _ in range(samples)]
    return statistics.median(found or [first])


def _timed(one: Callable[[], object], times: int) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    begun = time.perf_counter()
    for _ in range(times):
        one()
    wait()
    return (time.perf_counter() - begun) / times


def announce(what: str, expected_s: float) -> None:
    """Say what is done now and about how long it takes, unless that is soon."""
    if expected_s >= NOTABLE_S:
        say(f"{what}: about {duration(expected_s)}")


def drawing_s(numbers: int, dtype: torch.dtype) -> float:
    """How long the CPU takes to draw random weights: torch's layers draw theirs, then a library all."""
    sample = torch.empty(min(DRAWN, max(numbers, 1)), dtype=dtype)
    begun = time.perf_counter()
    sample.uniform_()
    sample.normal_()
    return (time.perf_counter() - begun) * (numbers / int(sample.numel()))


def products_s(numbers: int, rows: int, dtype: torch.dtype) -> float:
    """How long the CPU takes to multiply so many weights with so many rows, at the rate of one matrix."""
    weights, x = torch.ones(ACROSS, ACROSS, dtype=dtype), torch.ones(rows, ACROSS, dtype=dtype)
    torch.nn.functional.linear(x, weights)  # the library chooses its kernel
    begun = time.perf_counter()
    torch.nn.functional.linear(x, weights)
    return (time.perf_counter() - begun) * (numbers / ACROSS**2)


def _nothing() -> None:
    return None


@contextmanager
def capped(n_bytes: int) -> Iterator[None]:
    """torch's allocator refuses more than this; nothing happens without a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    free()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, n_bytes / total))
    torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def free() -> None:
    """Return what torch's allocator holds unused to the driver."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
