"""Kernels that unpack whole tensors, and how two weights are decoded at once.

A packed weight of 12 bits becomes a bfloat16 whose exponent field is its code. So a code of 0 is zero by
itself, nothing is added or selected for a weight, and the true power of two is multiplied in afterwards,
which is exact. In PTX, one byte permute spreads two sign-and-mantissa bytes over a 32-bit register and
another one two codes; shifts and logic then serve both weights. Elsewhere Triton compiles the plain text.
"""

# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl


def _ptx(shift: int, *, raised: bool) -> str:
    """Four weights: bytes in $2, codes in $3, two words each in $0 and $1."""
    lines = ["{ .reg .b32 t, v, c, z;"]
    if raised:
        lines += ["mov.b32 c, 0x5F805F80;", "mov.b32 z, 0x80008000;"]  # 2^64 and -0, twice
    for i, (spread, codes) in enumerate((("0x9180", "0x4140"), ("0xB3A2", "0x4342"))):
        lines += [f"prmt.b32 t, $2, 0, {spread};", f"prmt.b32 v, $3, 0, {codes};"]
        lines += [f"shl.b32 v, v, {shift};", "and.b32 v, v, 0x07800780;"]
        word = "t" if raised else f"${i}"
        lines += [f"lop3.b32 {word}, t, 0x807F807F, v, 0xEA;"]
        if raised:
            lines += [f"fma.rn.bf16x2 ${i}, t, c, z;"]
    return " ".join([*lines, "}"])


_LOWER = tl.constexpr(_ptx(7, raised=False))
_UPPER = tl.constexpr(_ptx(3, raised=False))
_LOWER_RAISED = tl.constexpr(_ptx(7, raised=True))
_UPPER_RAISED = tl.constexpr(_ptx(3, raised=True))


@triton.jit
def weights(
    rest: tl.tensor, codes: tl.tensor, UPPER: tl.constexpr, RAISED: tl.constexpr, PTX: tl.constexpr
) -> tl.tensor:
    """The weights, times a power of two, whose codes are in the lower or upper halves of bytes; bfloat16.

    The power is 2^-base, or 2^(64 - base) for `RAISED` ones, whose products with usual inputs are in the
    normal range of float32.
    """
    if PTX:
        return tl.inline_asm_elementwise(
            (_UPPER_RAISED if RAISED else _UPPER) if UPPER else (_LOWER_RAISED if RAISED else _LOWER),
            "=r,=r,r,r",
            [rest, codes],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    word = rest.to(tl.int16)
    code = (codes.to(tl.int16) >> 4) if UPPER else (codes.to(tl.int16) & 15)
    if RAISED:
        code = tl.where(code > 0, code + 64, 0)
    return (((word & 0x80) << 8) | (word & 0x7F) | (code << 7).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpack_b12(
    rest: tl.tensor,
    codes: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """One program unpacks a group of rows to bfloat16, and puts escapes where zeros are for them."""
    half: tl.constexpr = WIDTH // 2
    group = tl.program_id(0).to(tl.int64)
    for r in range(GROUP):
        row = group * GROUP + r
        width = tl.where(row < rows, half, 0)
        unpack_row(rest, codes, out, row, row * WIDTH, width, n, scale, WIDTH, BLOCK, PTX)
    tl.debug_barrier()
    before = tl.load(starts)
    begin = tl.load(starts + group) - before
    end = tl.load(starts + group + 1) - before
    put_escapes(values, positions, out + group * GROUP * WIDTH, begin, end)


@triton.jit
def unpack_row(
    rest: tl.tensor,
    codes: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    to: tl.tensor,
    width: tl.tensor,
    n: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Unpack the first `width` weights of both halves of a row to `out` from `to` on, below n."""
    half: tl.constexpr = WIDTH // 2
    at = row * WIDTH
    for first in range(0, half, BLOCK):
        j = first + tl.arange(0, BLOCK)
        there = j < width
        code = tl.load(codes + row * half + j, mask=there, other=0)
        low = tl.load(rest + at + j, mask=there, other=0)
        high = tl.load(rest + at + half + j, mask=there, other=0)
        one = weights(low, code, False, False, PTX)
        other = weights(high, code, True, False, PTX)
        tl.store(out + to + j, (one.to(tl.float32) * scale).to(tl.bfloat16), mask=there & (to + j < n))
        upper = there & (to + half + j < n)
        tl.store(out + to + half + j, (other.to(tl.float32) * scale).to(tl.bfloat16), mask=upper)


@triton.jit
def put_escapes(
    values: tl.tensor, positions: tl.tensor, out: tl.tensor, begin: tl.tensor, end: tl.tensor
) -> None:
    """Put the escapes `begin` to `end` at their positions from `out` on."""
    for first in range(begin, end, 32):
        i = first + tl.arange(0, 32)
        place = tl.load(positions + i, mask=i < end, other=0).to(tl.int32) & 0xFFFF
        value = tl.load(values + i, mask=i < end, other=0).to(tl.bfloat16, bitcast=True)
        tl.store(out + place, value, mask=i < end)


@triton.jit
def unpack_f28(
    rest0: tl.tensor,
    rest1: tl.tensor,
    rest2: tl.tensor,
    codes: tl.tensor,
    values: tl.tensor,
    positions: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    base: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The same for float32, whose words `out` holds as int32."""
    half: tl.constexpr = WIDTH // 2
    group = tl.program_id(0).to(tl.int64)
    for r in range(GROUP):
        row = group * GROUP + r
        width = tl.where(row < rows, half, 0)
        for side in tl.static_range(2):
            at = row * WIDTH + side * half
            for first in range(0, half, BLOCK):
                j = first + tl.arange(0, BLOCK)
                there = j < width
                byte = tl.load(codes + row * half + j, mask=there, other=0).to(tl.int32)
                code = (byte >> (4 * side)) & 15
                word = tl.load(rest0 + at + j, mask=there, other=0).to(tl.int32)
                word |= tl.load(rest1 + at + j, mask=there, other=0).to(tl.int32) << 8
                top = tl.load(rest2 + at + j, mask=there, other=0).to(tl.int32)
                word |= ((top & 0x7F) << 16) | ((top >> 7) << 31)
                word |= tl.where(code > 0, code + base, 0) << 23
                tl.store(out + at + j, word, mask=there & (at + j < n))
    tl.debug_barrier()
    before = tl.load(starts)
    begin = tl.load(starts + group) - before
    end = tl.load(starts + group + 1) - before
    for first in range(begin, end, 32):
        i = first + tl.arange(0, 32)
        place = tl.load(positions + i, mask=i < end, other=0).to(tl.int32) & 0xFFFF
        value = tl.load(values + i, mask=i < end, other=0)
        tl.store(out + group * GROUP * WIDTH + place, value, mask=i < end)


@triton.jit
def unpack_ranked(
    rest: tl.tensor,
    more: tl.tensor,
    two: tl.tensor,
    exponents: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    blocks: tl.tensor,
    table_low: tl.tensor,
    table_high: tl.tensor,
    LOW_BITS: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """One program unpacks TOGETHER blocks of 2,048 weights with 3-bit codes; `out` holds words as int16.

    The tables have a byte for each code: 0 to 3 and 4 to 7. An eighth of a block is handled at once, so each
    byte is loaded once; the escapes of two eighths are counted in one 32-bit number.
    """
    bits: tl.constexpr = LOW_BITS + 1
    block = (tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER))[:, None]
    kept = block < blocks
    block = block.to(tl.int64)
    j = tl.arange(0, 256)[None, :]
    before = tl.load(starts + block, mask=kept, other=0)
    for pair in tl.static_range(4):
        code0, low0 = _code(more, two, block, j, kept, 2 * pair, bits)
        code1, low1 = _code(more, two, block, j, kept, 2 * pair + 1, bits)
        escapes = (code0 == 0).to(tl.int32) | ((code1 == 0).to(tl.int32) << 16)
        counted = tl.cumsum(escapes, 1)
        total = tl.sum(escapes, 1)[:, None]
        ranks = counted - escapes
        _put(rest, exponents, out, n, block, j, kept, code0, low0, before + (ranks & 0xFFFF),
             table_low, table_high, 2 * pair, LOW_BITS)  # fmt: skip
        before += total & 0xFFFF
        _put(rest, exponents, out, n, block, j, kept, code1, low1, before + (ranks >> 16),
             table_low, table_high, 2 * pair + 1, LOW_BITS)  # fmt: skip
        before += total >> 16


@triton.jit
def _code(
    more: tl.tensor,
    two: tl.tensor,
    block: tl.tensor,
    j: tl.tensor,
    kept: tl.tensor,
    EIGHTH: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """The codes of an eighth of each block, and the lower bits of its mantissas."""
    share: tl.constexpr = EIGHTH % 2  # eighths whose codes' lower bits are in the same bytes: every other
    lower = tl.load(two + block * 512 + share * 256 + j, mask=kept, other=0).to(tl.int32)
    lower = (lower >> (2 * (EIGHTH // 2))) & 3
    parts: tl.constexpr = BITS  # bytes of `more` in a block, in units of 256
    upper = tl.load(more + block * 256 * parts + (EIGHTH % parts) * 256 + j, mask=kept, other=0).to(tl.int32)
    upper = (upper >> (BITS * (EIGHTH // parts))) & ((1 << BITS) - 1)
    return lower | ((upper & 1) << 2), upper >> 1


@triton.jit
def _put(
    rest: tl.tensor,
    exponents: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    block: tl.tensor,
    j: tl.tensor,
    kept: tl.tensor,
    code: tl.tensor,
    low: tl.tensor,
    rank: tl.tensor,
    table_low: tl.tensor,
    table_high: tl.tensor,
    EIGHTH: tl.constexpr,
    LOW_BITS: tl.constexpr,
) -> None:
    """Write the words of an eighth of each block."""
    place = block * 2048 + EIGHTH * 256 + j
    top = tl.load(rest + place, mask=kept, other=0).to(tl.int32)
    field = (tl.where(code < 4, table_low, table_high) >> (8 * (code & 3))) & 0xFF
    field += tl.load(exponents + rank, mask=kept & (code == 0), other=0).to(tl.int32)
    word = ((top >> 7) << 15) | (field << (7 + LOW_BITS)) | ((top & 0x7F) << LOW_BITS) | low
    tl.store(out + place, word.to(tl.int16), mask=kept & (place < n))
