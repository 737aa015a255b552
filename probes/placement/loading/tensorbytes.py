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
    if not target.is_contiguous():
        whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        bring(read, stored, whole, given=given, buffers=buffers)
        target.copy_(whole)
        return
    if target.device.type == "cpu" and target.dtype is given is stored:
        read(bytes_of(target), 0)
        return
    flat = target.view(-1)

    def piece(start: int, memory: torch.Tensor) -> None:
        read(bytes_of(memory), start)
        values = memory.view(stored)
        for dtype in (given, target.dtype):
            if dtype is not values.dtype:
                require_range(values, dtype)
                values = values.to(dtype)
        first = start // stored.itemsize
        with torch.inference_mode(flat.is_inference()):
            flat[first : first + values.numel()].copy_(values)

    buffers.each(flat.numel() * stored.itemsize, piece)
