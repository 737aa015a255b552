"""Products of a few rows with packed weights, and single rows of them, without unpacking them all."""

import torch

from probes.placement.packing import launch
from probes.placement.packing.codecs import decode_window_rows
from probes.placement.packing.format import fused
from probes.placement.packing.packed import B12, Packed


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear` with packed weights, or None where unpacking them first is better.

    `x` has shape (..., k), `packed` (n, k), `bias` (n); the result has shape (..., n), all bfloat16. Sums are
    float32's, rounded once, but in another order than the library's. Elements of `x` from 2^67 on overflow.
    Nothing waits for the device, and no memory is taken except the result's, so a graph can capture it after
    a first call, which compiles the kernel. None also where `x` isn't on the weights' device or it has no
    Triton, and for layouts other than `b12`.
    """
    if packed.layout is not B12 or len(packed.shape) != 2 or not launch.usable(packed.device):
        return None
    n, k = packed.shape
    if x.dtype is not torch.bfloat16 or x.device != packed.device or not x.ndim or x.shape[-1] != k:
        return None
    if bias is not None and (bias.dtype, bias.device, bias.shape) != (x.dtype, x.device, (n,)):
        return None
    narrow = launch.has_narrow_wavefronts(packed.device)
    tile = fused(x.numel() // k, packed.shape, narrow=narrow)
    if tile is None or (torch.is_grad_enabled() and x.requires_grad):
        return None
    y = x.new_empty((*x.shape[:-1], n))
    launch.multiply(
        x.contiguous(),
        packed.parts,
        y,
        base=packed.base,
        bias=None if bias is None else bias.contiguous(),
        rows=tile.rows,
        columns=tile.columns,
        warps=tile.warps,
        stages=tile.stages,
    )
    return y


def rows(packed: Packed, ids: torch.Tensor, *, most_escapes: int) -> torch.Tensor:
    """`torch.nn.functional.embedding` with a packed `b12` matrix: the same bits, of shape (*ids.shape, k).

    `ids` are whole numbers of any shape; no row of the matrix has more than `most_escapes`. Nothing waits for
    the device, so a graph can capture it. Raises IndexError for an id out of range on the CPU; a GPU ends in
    torch's own assertion.
    """
    flat = ids.reshape(-1)
    if launch.usable(packed.device) and flat.numel():
        result = torch.empty((flat.numel(), packed.shape[1]), dtype=torch.bfloat16, device=packed.device)
        launch.unpack_rows(packed.parts, flat, result, base=packed.base)
    else:
        words = decode_window_rows(
            packed.layout, packed.parts, flat, base=packed.base, most_escapes=most_escapes
        )
        result = words.contiguous().view(torch.bfloat16)
    return result.view(*ids.shape, packed.shape[1])
