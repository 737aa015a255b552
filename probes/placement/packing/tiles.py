"""Which way a product with packed weights is computed, by the number of input rows. Pure, without torch.

The settings are the best of 212 that were timed on an H200, and on AMD GPUs those that compile without
spilling registers (they were never run there): docs/decisions/0025-packed-weights.md.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from probes.placement.packing.grid import is_matrix

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
