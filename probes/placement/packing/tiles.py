"""Which way a product with packed weights is computed, by the number of input rows. Pure, without torch.

The settings were measured on one H200 with 8192 x 8192 weights: docs/decisions/0025.
"""

from dataclasses import dataclass
from typing import Final

from probes.placement.packing.grid import is_matrix

MOST_ROWS: Final = 16  # from here on, unpacking first and the library's product are as fast
_PROGRAMS: Final = 256  # about two for each multiprocessor of a large GPU


@dataclass(frozen=True)
class Tile:
    """How a kernel divides the matrix: `rows` of it and 2 x `columns` at once."""

    rows: int
    columns: int
    warps: int
    stages: int


def fused(input_rows: int, shape: tuple[int, ...]) -> Tile | None:
    """The kernel and its tile for `input_rows` times a packed matrix of `shape` (n, k).

    None: unpack the matrix and use the library's product.
    """
    if not 1 <= input_rows <= MOST_ROWS or not is_matrix(shape):
        return None
    n, k = shape
    widest = 256 if input_rows == 1 else 128
    columns = next((c for c in (256, 128, 64) if c <= widest and k // 2 % c == 0), None)
    if columns is None:
        return None
    if input_rows == 1:
        return Tile(_rows(n, most=32, least=4), columns, warps=4, stages=4)
    return Tile(_rows(n, most=64, least=16), columns, warps=4, stages=3)


def _rows(n: int, *, most: int, least: int) -> int:
    """As many rows for a program as leave enough programs for a whole GPU."""
    rows = most
    while rows > least and n // rows < _PROGRAMS:
        rows //= 2
    return rows
