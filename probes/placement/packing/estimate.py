"""Predicts how many bytes a tensor takes when it is packed, for plans. Pure, without torch.

The exponents of trained weights are as concentrated as those of Gaussian ones: 2.6 bits of information
(DFloat11, arXiv 2504.11651), so one kind of weights is known so far. The figures are those of
`tests/bench/placement_packing.py`, which measures them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from probes.placement.models.description import DTYPE_BITS
from probes.placement.packing.forms import aligned

Kind = Literal["gaussian"]

DENSE_FROM: Final = 1 << 17  # weights of a tensor, below which 3-bit codes aren't worth their padding
WORTH_IT: Final = 0.97  # packed over raw bytes; a tensor that saves less stays as it is
LEAST_SAVED: Final = 1024  # bytes likewise: a norm's weights save 256, and each pass pays a kernel for them

# Bits of a weight by part, with escapes and their lists; each part is aligned by itself. How many weights
# escape depends on where their standard deviation is between two powers of two: 2.1 to 3.0 % of 3-bit codes,
# 0.012 to 0.018 % of 4-bit ones. This is the most.
_PARTS: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "bfloat16": (8.0, 4.0, 0.003, 0.003, 0.016),
        "float32": (8.0, 8.0, 8.0, 4.0, 0.006, 0.003, 0.016),
        "float16": (8.0, 4.0, 2.0, 0.24, 0.016),
    }
)
_DENSE: Final = (8.0, 1.0, 2.0, 0.24, 0.016)  # bfloat16 in the layout `b11`


def estimate(dtype: str, n_weights: int, kind: Kind = "gaussian", *, dense: bool = False) -> int:
    """Predicted bytes of a packed tensor of `dtype` (torch's name), aligned as in a flat buffer.

    A tensor that isn't worth packing is counted as it is. `dense` predicts the layout with
    3-bit codes, which only bfloat16 has beside the usual one. Raises KeyError for an unknown dtype or kind.
    """
    if kind != "gaussian":
        raise KeyError(kind)
    raw = -(-n_weights * DTYPE_BITS[dtype] // 8)
    parts = _DENSE if dense and dtype == "bfloat16" else _PARTS.get(dtype, ())
    packed = sum(aligned(int(n_weights * bits / 8)) for bits in parts)
    return packed if parts and worth_it(packed, raw) else raw


def worth_it(packed: int, raw: int) -> bool:
    """Whether a tensor of `raw` bytes is packed if it takes `packed` bytes then: 3 % and 1 KiB less."""
    return packed < WORTH_IT * raw and raw - packed >= LEAST_SAVED
