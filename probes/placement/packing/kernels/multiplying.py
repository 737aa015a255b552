"""Kernels that multiply input rows with a matrix of 12-bit packed weights, without unpacking it first.

The weights' exponent fields are their codes (see `decoding`), so a product would be below float32's normal
range. One factor is raised by a power of two before, and the sum is brought back after, both exactly: for one
row its input, by 2^60 (an element of 2^67 or more would overflow); for several rows the weights, by 2^64. The
escapes, zeros so far, are added from their list.
"""

# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from probes.placement.packing.kernels.decoding import weights


@triton.jit
def _corner(
    rest: tl.tensor, codes: tl.tensor, n: tl.tensor, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
) -> tl.tensor:
    """A program's rows, the same within the matrix, and where their first BK bytes of both planes are."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(rows, n - 1).to(tl.int64)
    inside = tl.arange(0, BK)
    low = rest + row[:, None] * K + inside[None, :]
    code = codes + row[:, None] * (K // 2) + inside[None, :]
    return rows, row, inside, low, code


@triton.jit
def _both(
    low: tl.tensor,
    code: tl.tensor,
    k: tl.tensor,
    HALF: tl.constexpr,
    left: tl.tensor,
    RAISED: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """The weights at column k of both halves of rows. `left`: which there are; None for all of them."""
    if left is None:
        c = tl.load(code + k)
        one = weights(tl.load(low + k), c, False, RAISED, PTX)
        other = weights(tl.load(low + HALF + k), c, True, RAISED, PTX)
    else:
        c = tl.load(code + k, mask=left, other=0)
        one = weights(tl.load(low + k, mask=left, other=0), c, False, RAISED, PTX)
        other = weights(tl.load(low + HALF + k, mask=left, other=0), c, True, RAISED, PTX)
    return one, other


@triton.jit
def _escapes(
    positions: tl.tensor,
    values: tl.tensor,
    begin: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """COUNT escapes of each row from `first` on: which there are, their columns and values (float32)."""
    i = begin[:, None] + first + tl.arange(0, COUNT)[None, :]
    there = i < end[:, None]
    column = tl.load(positions + i, mask=there, other=0).to(tl.int32) & 0xFFFF
    value = tl.load(values + i, mask=there, other=0).to(tl.bfloat16, bitcast=True).to(tl.float32)
    return there, column, value


@triton.jit
def one_row(
    x: tl.tensor,
    rest: tl.tensor,
    codes: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    input_scale: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ESCAPES: tl.constexpr,
    BIAS: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """y = W x for one input row: each program multiplies BN rows of W, in pieces of 2 x BK columns."""
    half: tl.constexpr = K // 2
    rows, row, inside, low, code = _corner(rest, codes, n, K, BN, BK)
    total = tl.zeros([BN, BK], tl.float32)
    for k in tl.range(0, half // BK * BK, BK, num_stages=STAGES):
        one, other = _both(low, code, k, half, None, False, PTX)
        x_one = tl.load(x + k + inside).to(tl.float32) * input_scale
        x_other = tl.load(x + half + k + inside).to(tl.float32) * input_scale
        total += one.to(tl.float32) * x_one[None, :]
        total += other.to(tl.float32) * x_other[None, :]
    if half % BK:  # what is left over isn't a whole piece
        k = half // BK * BK
        left = k + inside < half
        one, other = _both(low, code, k, half, left[None, :], False, PTX)
        x_one = tl.load(x + k + inside, mask=left, other=0.0).to(tl.float32) * input_scale
        x_other = tl.load(x + half + k + inside, mask=left, other=0.0).to(tl.float32) * input_scale
        total += one.to(tl.float32) * x_one[None, :]
        total += other.to(tl.float32) * x_other[None, :]
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    escaped = tl.zeros([BN], tl.float32)
    for first in range(0, tl.max(end - begin, 0), ESCAPES):
        there, column, value = _escapes(positions, values, begin, first, end, ESCAPES)
        factor = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
        escaped += tl.sum(value * factor, 1)
    result = tl.sum(total, 1) * scale + escaped
    if BIAS:
        result += tl.load(bias + row).to(tl.float32)
    tl.store(y + rows, result.to(tl.bfloat16), mask=rows < n)


@triton.jit
def _products(
    total: tl.tensor,
    one: tl.tensor,
    other: tl.tensor,
    inputs: tl.tensor,
    half: tl.constexpr,
    mask: tl.tensor,
    FACTORS: tl.constexpr,
) -> tl.tensor:
    """The total and the products of a tile of each half of the columns, through the matrix units."""
    x_one = tl.load(inputs, mask=mask, other=0.0)
    x_other = tl.load(inputs + half, mask=mask, other=0.0)
    total = tl.dot(one.to(FACTORS), x_one.to(FACTORS), total)
    return tl.dot(other.to(FACTORS), x_other.to(FACTORS), total)


@triton.jit
def few_rows(
    x: tl.tensor,
    rest: tl.tensor,
    codes: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    batch: tl.tensor,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BB: tl.constexpr,
    FACTORS: tl.constexpr,
    ESCAPES: tl.constexpr,
    BIAS: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """The same for up to BB input rows, through the matrix units, which multiply numbers of type FACTORS."""
    half: tl.constexpr = K // 2
    rows, row, inside, low, code = _corner(rest, codes, n, K, BN, BK)
    b = tl.arange(0, BB)
    inputs = x + b[None, :] * K + inside[:, None]
    is_input = (b < batch)[None, :]
    total = tl.zeros([BN, BB], tl.float32)
    for k in tl.range(0, half // BK * BK, BK, num_stages=STAGES):
        one, other = _both(low, code, k, half, None, True, PTX)
        total = _products(total, one, other, inputs + k, half, is_input, FACTORS)
    if half % BK:
        k = half // BK * BK
        left = k + inside < half
        is_left = left[:, None] & is_input
        one, other = _both(low, code, k, half, left[None, :], True, PTX)
        total = _products(total, one, other, inputs + k, half, is_left, FACTORS)
    total = total * scale
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    for first in range(0, tl.max(end - begin, 0), ESCAPES):
        there, column, value = _escapes(positions, values, begin, first, end, ESCAPES)
        wanted = there[:, :, None] & (b < batch)[None, None, :]
        factor = tl.load(x + column[:, :, None] + b[None, None, :] * K, mask=wanted, other=0.0)
        total += tl.sum(value[:, :, None] * factor.to(tl.float32), 1)
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    place = y + rows[:, None] + b[None, :] * n
    tl.store(place, total.to(tl.bfloat16), mask=(rows < n)[:, None] & is_input)
