"""Products of a few rows with packed weights, computed without unpacking them first."""

import torch

from probes.placement.packing.kernels import launching
from probes.placement.packing.layouts import B12
from probes.placement.packing.packed import Packed
from probes.placement.packing.tiles import fused


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear` with packed weights, or None where unpacking them first is better.

    `x` has shape (..., k), `packed` (n, k), `bias` (n); the result has shape (..., n), all bfloat16. Sums are
    float32's, rounded once, but in another order than the library's. Elements of `x` from 2^67 on overflow.
    Nothing waits for the device, and no memory is taken except the result's, so a graph can capture it after
    a first call, which compiles the kernel. None also where `x` isn't on the weights' device or it has no
    Triton, and for layouts other than `b12`.
    """
    if packed.layout is not B12 or len(packed.shape) != 2 or not launching.usable(packed.device):
        return None
    n, k = packed.shape
    if x.dtype is not torch.bfloat16 or x.device != packed.device or not x.ndim or x.shape[-1] != k:
        return None
    if bias is not None and (bias.dtype, bias.device, bias.shape) != (x.dtype, x.device, (n,)):
        return None
    narrow = launching.has_narrow_wavefronts(packed.device)
    tile = fused(x.numel() // k, packed.shape, narrow=narrow)
    if tile is None or (torch.is_grad_enabled() and x.requires_grad):
        return None
    y = x.new_empty((*x.shape[:-1], n))
    launching.multiply(
        x.reshape(-1, k),
        packed.parts,
        y.view(-1, n),
        base=packed.base,
        bias=None if bias is None else bias.contiguous(),
        rows=tile.rows,
        columns=tile.columns,
        warps=tile.warps,
        stages=tile.stages,
    )
    return y
