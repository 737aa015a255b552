"""The kernel that looks up rows of a packed table, and unpacks only those."""

# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from probes.placement.packing.kernels.decoding import put_escapes, unpack_row


@triton.jit
def rows_b12(
    ids: tl.tensor,
    first: tl.tensor,
    rest: tl.tensor,
    codes: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """One program unpacks the row of one id. `first` has where its escapes begin; `out` has `n` weights."""
    to = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + to).to(tl.int64)
    unpack_row(rest, codes, out, row, to * WIDTH, WIDTH // 2, n, scale, WIDTH, BLOCK, PTX)
    tl.debug_barrier()
    before = tl.load(starts)
    begin = tl.load(first + to) - before
    end = tl.load(starts + row + 1) - before
    put_escapes(values, positions, out + to * WIDTH, begin, end)
