"""What is known of a packed tensor without its bytes: enough to find its parts in a flat buffer. Pure.

A form is written to JSON by `probes.core.codec`. Each part begins at a multiple of 256 bytes, which any
load of a GPU can begin at.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from probes.placement.models.description import DTYPE_BITS

ALIGNMENT: Final = 256  # bytes
_PART_BYTES: Final = {"uint8": 1, "int16": 2, "int32": 4}


PACKED_PARTS: Final = ("rest0", "codes", "values", "positions", "starts")  # of `b12`, as kernels take them


def aligned(n_bytes: int) -> int:
    """The bytes taken by a part of `n_bytes`."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PartForm:
    """One flat part of a packed tensor. `dtype` is torch's name of it."""

    name: str
    dtype: str
    length: int  # elements

    @property
    def n_bytes(self) -> int:
        """Bytes without alignment. Raises ValueError for a dtype that no part has."""
        if self.dtype not in _PART_BYTES or self.length < 0:
            raise ValueError(f"a packed tensor has no part of {self.length} x {self.dtype}")
        return self.length * _PART_BYTES[self.dtype]


@dataclass(frozen=True)
class PackedForm:
    """A packed tensor without its bytes: a layout's name, and what the decoder must know."""

    layout: str
    shape: tuple[int, ...]
    base: int
    table: tuple[int, ...]
    parts: tuple[PartForm, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes in a flat buffer, with alignment."""
        return sum(aligned(part.n_bytes) for part in self.parts)

    def offsets(self) -> tuple[int, ...]:
        """Where each part begins in the flat buffer, in bytes."""
        starts, at = [], 0
        for part in self.parts:
            starts.append(at)
            at += aligned(part.n_bytes)
        return tuple(starts)


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


MOST_ROWS: Final = 16  # input rows, of a fused product
PIECE_BYTES: Final = 16 << 20  # of a table's piece, unpacked for a product of more rows
_PIECE_ROWS: Final = 128  # that a piece's rows are a multiple of, for the library's kernels
_PROGRAMS: Final = 256  # about two for each multiprocessor of a large GPU


@dataclass(frozen=True)
class Tile:
    """How a kernel divides the matrix: `rows` of it and 2 x `columns` at once."""

    rows: int
    columns: int
    warps: int
    stages: int


@lru_cache(4096)
def fused(input_rows: int, shape: tuple[int, ...], *, narrow: bool = False) -> Tile | None:
    """The tile for `input_rows` times a packed matrix of `shape` (n, k).

    None: unpack the matrix and use the library's product. `narrow` is for AMD GPUs whose wavefronts have 32
    threads, where a wide tile spills registers.
    """
    if not 1 <= input_rows <= MOST_ROWS or not is_matrix(shape):
        return None
    n, _ = shape
    if input_rows == 1:
        rows = _rows(n, most=8 if narrow else 16, least=2, programs=2 * _PROGRAMS)
        return Tile(rows, 128 if narrow else 256, warps=4, stages=3)
    rows = _rows(n, most=32, least=16, programs=_PROGRAMS)
    return Tile(rows, 32, warps=4, stages=2) if narrow else Tile(rows, 128, warps=4, stages=3)


def _rows(n: int, *, most: int, least: int, programs: int) -> int:
    """As many rows for a program as leave enough programs for a whole GPU."""
    rows = most
    while rows > least and n // rows < programs:
        rows //= 2
    return rows


def rows_of_expert(shape: tuple[int, ...], count: int) -> int:
    """Rows of a packed tensor that one of `count` experts in it has; 0 where it can't be cut there."""
    cut, each = grid(shape), math.prod(shape) // count
    whole = not cut.padding and cut.width > 0 and each > 0 and not each % cut.width
    rows = each // cut.width if whole else 0
    return 0 if rows % cut.group_rows else rows


def is_table(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether single rows of a packed tensor can be unpacked: a bfloat16 matrix of wide rows."""
    return dtype == "bfloat16" and is_matrix(shape)


def piece_rows(shape: tuple[int, ...]) -> int:
    """How many rows of a bfloat16 table of `shape` are unpacked at once, for a product of many input rows."""
    n, k = shape
    pieces = -(-n * k * 2 // PIECE_BYTES)
    rows = -(-n // pieces)
    return min(n, -(-rows // _PIECE_ROWS) * _PIECE_ROWS)


def piece_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of the memory that such a piece is unpacked into."""
    return piece_rows(shape) * shape[1] * 2


DENSE_FROM: Final = 1 << 17  # weights of a tensor, below which 2-bit codes aren't worth their padding
WORTH_IT: Final = 0.97  # packed over raw bytes; a tensor that saves less stays as it is
LEAST_SAVED: Final = 1024  # bytes likewise: a norm's weights save 256, and each pass pays a kernel for them

# Bits of a weight by part, with escapes and their lists; each part is aligned by itself. How many weights
# escape depends on where their standard deviation is between two powers of two: 24.3 to 28.1 % of 2-bit codes
# and 0.16 to 0.24 % of the 3-bit ones behind them, 0.012 to 0.018 % of 4-bit ones. This is the most.
_TWO: Final = (0.846, 0.008, 0.039, 0.0195)
_PARTS: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "bfloat16": (8.0, 4.0, 0.003, 0.003, 0.016),
        "float32": (8.0, 8.0, 8.0, 4.0, 0.006, 0.003, 0.016),
        "float16": (8.0, 4.0, 1.0, *_TWO),
    }
)
_DENSE: Final = (8.0, 2.0, *_TWO)  # bfloat16 in the layout `b10`


def estimate(dtype: str, n_weights: int, *, dense: bool = False) -> int:
    """Predicted bytes of a packed tensor of Gaussian weights of `dtype` (torch's name) in a flat buffer.

    A tensor that isn't worth packing is counted as it is. `dense` predicts the layout with
    2-bit codes, which only bfloat16 has beside the usual one. Raises KeyError for an unknown dtype.
    """
    raw = -(-n_weights * DTYPE_BITS[dtype] // 8)
    parts = _DENSE if dense and dtype == "bfloat16" else _PARTS.get(dtype, ())
    packed = sum(aligned(int(n_weights * bits / 8)) for bits in parts)
    return packed if parts and worth_it(packed, raw) else raw


def worth_it(packed: int, raw: int) -> bool:
    """Whether a tensor of `raw` bytes is packed if it takes `packed` bytes then: 3 % and 1 KiB less."""
    return packed < WORTH_IT * raw and raw - packed >= LEAST_SAVED
