"""How the weights of a tensor are arranged before they are packed: as rows of one width. Pure.

Two weights whose 4-bit codes share a byte are half a row apart, so that both halves of a row are read with
contiguous loads. For a matrix the rows are its own, which a product needs.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_NARROWEST: Final = 256
_WIDEST: Final = 65_536  # one program of a kernel unpacks a whole group of rows
_FLAT: Final = 16_384  # weights from which a flat tensor is cut into rows; padding takes below 1.6 %
_GROUP: Final = 4_096  # weights whose escapes are listed together, unless a row by itself is wide enough
NARROWEST_PRODUCT: Final = 512  # a row this wide has its own list of escapes, which a product needs


@dataclass(frozen=True)
class Grid:
    """Rows of `width` weights (even); the last `padding` ones of the last row don't exist."""

    rows: int
    width: int
    weights: int

    @property
    def padding(self) -> int:
        """Weights that the grid has too many."""
        return self.rows * self.width - self.weights

    @property
    def group_rows(self) -> int:
        """Rows whose escapes are listed together: a power of 2."""
        if not 0 < self.width < NARROWEST_PRODUCT:
            return 1
        return 1 << math.ceil(math.log2(_GROUP / self.width))

    @property
    def groups(self) -> int:
        """How many groups of rows there are."""
        return -(-self.rows // self.group_rows)


@lru_cache(4096)
def grid(shape: tuple[int, ...]) -> Grid:
    """The grid of a tensor: the innermost dimensions that together have 256 weights or more are a row.

    Where their number is odd, or the row would be wider than 65,536 weights, the tensor is cut as if it were
    flat: into rows of 256, or one row where there are few.
    """
    weights = math.prod(shape)
    width = 1
    for size in reversed(shape):
        width *= size
        if width >= _NARROWEST:
            break
    if width % 2 or not _NARROWEST <= width <= _WIDEST:
        width = _NARROWEST if weights >= _FLAT else weights + weights % 2
    return Grid(-(-weights // width) if width else 0, width, weights)


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether the grid has the rows of a matrix, with a list of escapes for each: what a product needs."""
    cut = grid(shape)
    return len(shape) == 2 and (cut.rows, cut.width) == shape and cut.width >= NARROWEST_PRODUCT
