"""Brings one stored tensor into a tensor of the caller's: on the host or in VRAM, converted where dtypes
differ.

Bytes go from the file straight into their place where they can. For VRAM, and for another dtype, they pass
through a staging buffer of fixed size, so that host memory doesn't depend on how large a tensor is.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch

from probes.placement.runtime.converting import require_range

STAGING_BYTES: Final = 32 << 20

Read = Callable[[memoryview, int], None]  # fills the memory from that byte of the stored tensor on


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host, writable. It's valid as long as the tensor is."""
    n_bytes = tensor.numel() * tensor.element_size()
    if not n_bytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_uint8 * n_bytes).from_address(tensor.data_ptr())).cast("B")


def host_buffer(n_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Host memory, pinned if wanted and granted: the driver or the system's limits may refuse it."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(n_bytes, dtype=torch.uint8)


class Staging:
    """The buffer that bytes pass through. It is pinned where that is possible, for the copy to VRAM."""

    def __init__(self, n_bytes: int = STAGING_BYTES, *, pinned: bool) -> None:
        self._memory = host_buffer(n_bytes, pinned=pinned)

    def bring(self, read: Read, stored: torch.dtype, target: torch.Tensor) -> None:
        """Fill `target`, of any device and strides, with stored numbers in row-major order.

        Raises OverflowError where a number is too large for the target's dtype.
        """
        if not target.is_contiguous():
            whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            self.bring(read, stored, whole)
            target.copy_(whole)
        elif target.device.type == "cpu" and target.dtype is stored:
            read(bytes_of(target), 0)
        else:
            self._in_pieces(read, stored, target.view(-1))

    def _in_pieces(self, read: Read, stored: torch.dtype, flat: torch.Tensor) -> None:
        piece = self._memory.numel() // stored.itemsize
        for start in range(0, flat.numel(), piece):
            count = min(piece, flat.numel() - start)
            staged = self._memory[: count * stored.itemsize]
            read(bytes_of(staged), start * stored.itemsize)
            values = staged.view(stored)
            require_range(values, flat.dtype)
            flat[start : start + count].copy_(values)  # waits: the staging buffer is used again
