"""How run_placement.sh measures: wall time and device time of a pass, VRAM by allocator and NVML, host
memory.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Pass = Callable[[], Any]
SAMPLES = 7


def wall_s(one: Pass, *, least_s: float = 0.12, samples: int = SAMPLES) -> float:
    """Median wall time of a pass in the steady state: several in a row, then a wait for the device, then
    divided.
    """
    one()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    one()
    torch.cuda.synchronize()
    single = time.perf_counter() - begun
    times = max(1, min(200, int(least_s / single)))
    found = []
    for _ in range(samples):
        begun = time.perf_counter()
        for _ in range(times):
            one()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) / times)
    return statistics.median(found)


def small_operation_s(times: int = 2000) -> float:
    """Seconds that the host takes for an operation on a few numbers of its own: how fast it is just now."""
    x = torch.ones(8)
    begun = time.perf_counter()
    for _ in range(times):
        torch.add(x, x)
    return (time.perf_counter() - begun) / times


def device_s(one: Pass, times: int = 3) -> float:
    """Seconds of a pass in which the device did anything: the union of its kernels' and copies' spans
    (Kineto).
    """
    from torch.profiler import ProfilerActivity, profile

    one()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(times):
            one()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Memset" not in event.name
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / times / 1e6


def captured(one: Pass) -> tuple[Pass, Any]:
    """The pass as a CUDA graph, and what it returns each time it is replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            one()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = one()
    return graph.replay, output


def line_rate(n_bytes: int = 1 << 30) -> float:
    """Bytes a second from pinned memory to VRAM: 1 GiB at once, the median of 5 behind one another."""
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    return n_bytes / wall_s(lambda: card.copy_(host, non_blocking=True), least_s=0.1, samples=5)


class Vram:
    """This process's VRAM: the allocator's and, through NVML, everything, context and libraries included."""

    def __init__(self) -> None:
        from probes.hardware.nvml import open_nvml

        self._nvml = open_nvml()
        self._driver = 0
        if not torch.cuda.is_initialized():  # what the driver holds on an idle card
            self._driver = self.by_nvml()
        torch.cuda.init()
        self._total = torch.cuda.get_device_properties(0).total_memory
        self.before = 0

    def by_nvml(self) -> int:
        """Bytes that NVML counts as used beyond what the driver held before us. The card is ours."""
        (card, *_) = self._nvml.cards()
        assert isinstance(card.vram_used_bytes, int), card.vram_used_bytes
        return card.vram_used_bytes - self._driver

    def outside(self) -> int:
        """Bytes outside the allocator: the driver's context, loaded kernels, and what was used before we
        came.
        """
        return self.by_nvml() - torch.cuda.memory_reserved()

    @contextmanager
    def capped(self, n_bytes: int) -> Iterator[None]:
        """The allocator refuses more than the budget."""
        free()
        self.before = torch.cuda.memory_allocated()
        torch.cuda.set_per_process_memory_fraction(n_bytes / self._total)
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def peak(self) -> dict[str, int]:
        """Peaks since the cap was set."""
        return {
            "allocated_before": self.before,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "outside_the_allocator": self.outside(),
            "peak": torch.cuda.max_memory_reserved() + self.outside(),
            "nvml_now": self.by_nvml(),
        }


def free() -> None:
    """Give back what nobody holds, and the libraries' workspaces: 32 MiB a stream on Hopper."""
    gc.collect()
    torch.cuda.synchronize()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear:
        clear()
    torch.cuda.empty_cache()
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty:
        empty()


def host_bytes() -> dict[str, int]:
    """This process's resident bytes, by kind, from /proc/self/status."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM", "VmLck", "VmPin"):
            found[name] = int(value.split()[0]) * 1024
    return found


def differing_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements have other bits."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(words) != b.contiguous().view(words)).sum())


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
