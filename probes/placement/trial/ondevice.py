"""The device while a way to run a model is timed: a cap on its memory, and the clock."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

SAMPLES: Final = 5
LEAST_S: Final = 0.2  # of a sample, so that a clock's step and the last wait don't count


def wall_s(one: Callable[[], object]) -> float:
    """Median seconds of a pass: several in a row, then a wait for the device, divided."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
    one()
    wait()
    begun = time.perf_counter()
    one()
    wait()
    times = max(1, min(1000, int(LEAST_S / max(time.perf_counter() - begun, 1e-6))))
    found = []
    for _ in range(SAMPLES):
        begun = time.perf_counter()
        for _ in range(times):
            one()
        wait()
        found.append((time.perf_counter() - begun) / times)
    return statistics.median(found)


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
