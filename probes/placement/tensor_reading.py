"""Stored tensors read into tensors in memory, converted on the way where their dtypes differ."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from probes.core.errors import CheckpointUnreadable
from probes.placement.checkpoint import Checkpoint
from probes.placement.models.headers import DTYPES, StoredTensor
from probes.placement.packing.staging import HostBuffers, bytes_of

Read = Callable[[memoryview, int], None]  # fills the memory from that byte of the stored tensor on


def read_into(checkpoint: Checkpoint, targets: Mapping[str, torch.Tensor]) -> None:
    """Fill each tensor with the checkpoint's values for its name, converted to the tensor's dtype.

    Raises CheckpointUnreadable, also where a file changes meanwhile, and OverflowError where a number is too
    large for its tensor.
    """
    buffers = HostBuffers()
    for name, target in targets.items():
        stored = torch_dtype(checkpoint.tensors[name])
        if stored is None:
            raise CheckpointUnreadable(
                f"{name} has the dtype {checkpoint.tensors[name].dtype}, which this version of torch lacks"
            )
        read = partial(checkpoint.read_into, name)
        convert_into(read, stored, target, given=target.dtype, buffers=buffers)


def convert_into(
    read: Read, stored: torch.dtype, target: torch.Tensor, *, given: torch.dtype, buffers: HostBuffers
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
            _write_flat(target, start // stored.itemsize, values)

    buffers.each(target.numel() * stored.itemsize, piece)


def _write_flat(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
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
            _write_flat(target[at], start, values[:count])
        first, values = first + count, values[count:]


def require_range(values: torch.Tensor, wanted: torch.dtype) -> None:
    """Raise OverflowError where a finite number would become infinite, as 70,000 does in float16."""
    if not wanted.is_floating_point or torch.finfo(wanted).max >= torch.finfo(values.dtype).max:
        return
    lost = values.isfinite() & values.to(wanted).isinf()
    if lost.any():
        worst = float(values[lost].abs().max())
        raise OverflowError(f"{int(lost.sum()):,} of its numbers don't fit into {wanted}, up to {worst:.4g}")


def torch_dtype(stored: StoredTensor) -> torch.dtype | None:
    """The dtype of a stored tensor; None where this version of torch doesn't know it."""
    dtype: torch.dtype | None = getattr(torch, DTYPES[stored.dtype], None)
    return dtype
