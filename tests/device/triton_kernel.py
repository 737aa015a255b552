"""A Triton kernel in a file of its own, which Triton reads the source of."""

import torch
import triton
import triton.language as tl


@triton.jit
def _squared(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, tl.exp(value) * value, mask=at < n)


def squared(tensor: torch.Tensor) -> torch.Tensor:
    """e^x x, by Triton."""
    out = torch.empty_like(tensor)
    n = tensor.numel()
    _squared[(triton.cdiv(n, 1024),)](tensor, out, n, BLOCK=1024)
    return out
