"""Brings one stored tensor into a tensor of the caller's: on the host or in VRAM, converted where dtypes
differ.

Bytes go from the file straight into their place where they can. For VRAM, and for another dtype, they pass
through buffers of fixed size, so that host memory doesn't depend on how large a tensor is.
"""

from collections.abc import Callable

import torch

from probes.placement.packing.staging import Buffers, bytes_of
from probes.placement.runtime.converting import require_range

Read = Callable[[memoryview, int], None]  # fills the memory from that byte of the stored tensor on


def bring(
    read: Read, stored: torch.dtype, target: torch.Tensor, *, given: torch.dtype, buffers: Buffers
) -> None:
    """Fill `target`, of any device and strides, with stored numbers in row-major order.

    They are converted by way of `given`, the model's own dtype. Raises OverflowError where a number is too
    large for it or for the target's.
    """
    if target.is_contiguous() and target.device.type == "cpu" and target.dtype is given is stored:
        read(bytes_of(target), 0)
        return

    def piece(start: int, memory: torch.Tensor) -> None:
        read(bytes_of(memory), start)
        values = memory.view(stored)
        for dtype in (given, target.dtype):
            if dtype is not values.dtype:
                require_range(values, dtype)
                values = values.to(dtype)
        with torch.inference_mode(target.is_inference()):
            _put(target, start // stored.itemsize, values)

    buffers.each(target.numel() * stored.itemsize, piece)


def _put(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """Write flat values into a tensor of any strides, from its number `first` in row-major order on."""
    if target.is_contiguous():
        target.view(-1)[first : first + values.numel()].copy_(values)
        return
    row = target[0].numel()
    while values.numel():
        at, start = divmod(first, row)
        whole = 0 if start else values.numel() // row
        count = whole * row or min(row - start, values.numel())
        if whole:
            target[at : at + whole].copy_(values[:count].view(whole, *target.shape[1:]))
        else:
            _put(target[at], start, values[:count])
        first, values = first + count, values[count:]
