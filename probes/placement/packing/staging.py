"""Memory that bytes pass through, piece by piece, between files, the host and a GPU.

A few threads each handle a piece at a time, and each piece has a buffer that is used again. So what this
takes in host memory doesn't depend on how large a tensor is.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from typing import Final, TypeVar

import torch

from probes.placement.packing.threads import Threads, renew_in_forks, run_all

PIECE_BYTES: Final = 2 << 20  # large enough for a disk, small enough to share a layer's matrix among threads
THREADS: Final = min(12, os.cpu_count() or 1)  # with `LOADING_BYTES` of `types.py` in mind

Found = TypeVar("Found")


class HostBuffers:
    """A few threads, each with a buffer, made at first use. Buffers are pinned if a GPU is used by then."""

    def __init__(self, count: int = THREADS) -> None:
        self._count = count
        self._threads: ThreadPoolExecutor | None = None
        self.renew()
        renew_in_forks(self)

    def renew(self) -> None:
        """In a forked child, buffers that its parent's threads had are nobody's."""
        self._made = Lock()
        self._free = self._none_yet()

    def release(self) -> None:
        """Let the memory and the threads go; new ones are made if need be."""
        with self._made:
            threads, self._threads = self._threads, None
        if threads:
            threads.shutdown()
        self._free = self._none_yet()

    def _none_yet(self) -> "SimpleQueue[torch.Tensor | None]":
        free: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        for _ in range(self._count):
            free.put(None)
        return free

    def each(self, n_bytes: int, work: Callable[[int, torch.Tensor], Found]) -> list[Found]:
        """Call `work` for each piece of so many bytes, with its start and a buffer of its size.

        Threads do it, in any order; where one fails, all have ended before its error is raised.
        """
        free = self._free

        def piece(start: int) -> Found:
            memory = free.get()
            try:
                if memory is None:
                    memory = host_buffer(PIECE_BYTES, pinned=torch.cuda.is_initialized())
                return work(start, memory[: n_bytes - start])
            finally:
                free.put(memory)

        starts = range(0, n_bytes, PIECE_BYTES)
        if len(starts) < 2:
            return [piece(start) for start in starts]
        with self._made:
            if self._threads is None:
                self._threads = Threads(self._count, "weir-pieces")
            threads = self._threads
        return run_all(threads, piece, starts)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, writable. It keeps the tensor's memory."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    array = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    array.owner = tensor
    return memoryview(array).cast("B")


def host_buffer(n_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Host memory, pinned if wanted and granted: the driver or the system's limits may refuse it."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
