"""Kernels that unpack whole tensors, and how two weights are decoded at once.

A packed weight of 12 bits becomes a bfloat16 whose exponent field is its code. So a code of 0 is zero by
itself, nothing is added or selected for a weight, and the true power of two is multiplied in afterwards,
which is exact. In PTX, one byte permute spreads two sign-and-mantissa bytes over a 32-bit register and
another one two codes; shifts and logic then serve both weights. Elsewhere Triton compiles the plain text.
"""

# mypy: disable-error-code="untyped-decorator"

from typing import Any

import triton
import triton.language as tl


@triton.jit
def lower_words(rest: Any, codes: Any, PTX: tl.constexpr) -> Any:
    """Words of the weights whose codes are in the lower halves of bytes."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, v;
            prmt.b32 t, $2, 0, 0x9180;
            prmt.b32 v, $3, 0, 0x4140;
            shl.b32 v, v, 7;
            and.b32 v, v, 0x07800780;
            lop3.b32 $0, t, 0x807F807F, v, 0xEA;
            prmt.b32 t, $2, 0, 0xB3A2;
            prmt.b32 v, $3, 0, 0x4342;
            shl.b32 v, v, 7;
            and.b32 v, v, 0x07800780;
            lop3.b32 $1, t, 0x807F807F, v, 0xEA; }""",
            "=r,=r,r,r",
            [rest, codes],
            dtype=tl.int16,
            is_pure=True,
            pack=4,
        )
    word = rest.to(tl.int16)
    return ((word & 0x80) << 8) | (word & 0x7F) | ((codes.to(tl.int16) & 15) << 7)


@triton.jit
def upper_words(rest: Any, codes: Any, PTX: tl.constexpr) -> Any:
    """Words of the weights whose codes are in the upper halves of bytes."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, v;
            prmt.b32 t, $2, 0, 0x9180;
            prmt.b32 v, $3, 0, 0x4140;
            shl.b32 v, v, 3;
            and.b32 v, v, 0x07800780;
            lop3.b32 $0, t, 0x807F807F, v, 0xEA;
            prmt.b32 t, $2, 0, 0xB3A2;
            prmt.b32 v, $3, 0, 0x4342;
            shl.b32 v, v, 3;
            and.b32 v, v, 0x07800780;
            lop3.b32 $1, t, 0x807F807F, v, 0xEA; }""",
            "=r,=r,r,r",
            [rest, codes],
            dtype=tl.int16,
            is_pure=True,
            pack=4,
        )
    word = rest.to(tl.int16)
    return ((word & 0x80) << 8) | (word & 0x7F) | ((codes.to(tl.int16) >> 4) << 7)


@triton.jit
def unpack_b12(
    rest: Any,
    codes: Any,
    values: Any,
    positions: Any,
    starts: Any,
    out: Any,
    n: Any,
    rows: Any,
    scale: Any,
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
        at = row * WIDTH
        width = tl.where(row < rows, half, 0)
        for first in range(0, half, BLOCK):
            j = first + tl.arange(0, BLOCK)
            there = j < width
            code = tl.load(codes + row * half + j, mask=there, other=0)
            low = tl.load(rest + at + j, mask=there, other=0)
            high = tl.load(rest + at + half + j, mask=there, other=0)
            one = lower_words(low, code, PTX).to(tl.bfloat16, bitcast=True)
            other = upper_words(high, code, PTX).to(tl.bfloat16, bitcast=True)
            tl.store(out + at + j, (one.to(tl.float32) * scale).to(tl.bfloat16), mask=there & (at + j < n))
            upper = there & (at + half + j < n)
            tl.store(out + at + half + j, (other.to(tl.float32) * scale).to(tl.bfloat16), mask=upper)
    tl.debug_barrier()
    begin = tl.load(starts + group)
    end = tl.load(starts + group + 1)
    for first in range(begin, end, 32):
        i = first + tl.arange(0, 32)
        place = tl.load(positions + i, mask=i < end, other=0).to(tl.int32) & 0xFFFF
        value = tl.load(values + i, mask=i < end, other=0).to(tl.bfloat16, bitcast=True)
        tl.store(out + group * GROUP * WIDTH + place, value, mask=i < end)


@triton.jit
def unpack_f28(
    rest0: Any,
    rest1: Any,
    rest2: Any,
    codes: Any,
    values: Any,
    positions: Any,
    starts: Any,
    out: Any,
    n: Any,
    rows: Any,
    base: Any,
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
    begin = tl.load(starts + group)
    end = tl.load(starts + group + 1)
    for first in range(begin, end, 32):
        i = first + tl.arange(0, 32)
        place = tl.load(positions + i, mask=i < end, other=0).to(tl.int32) & 0xFFFF
        value = tl.load(values + i, mask=i < end, other=0)
        tl.store(out + group * GROUP * WIDTH + place, value, mask=i < end)


@triton.jit
def unpack_ranked(
    rest: Any,
    more: Any,
    two: Any,
    exponents: Any,
    starts: Any,
    out: Any,
    n: Any,
    table_low: Any,
    table_high: Any,
    LOW_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program unpacks a block with 3-bit codes; `out` holds 16-bit words as int16.

    The tables have a byte for each code: 0 to 3 and 4 to 7.
    """
    block = tl.program_id(0).to(tl.int64)
    quarter: tl.constexpr = BLOCK // 4
    bits: tl.constexpr = LOW_BITS + 1
    part: tl.constexpr = BLOCK * bits // 8
    i = tl.arange(0, BLOCK)
    kept = tl.load(rest + block * BLOCK + i).to(tl.int32)
    lower = tl.load(two + block * quarter + i % quarter).to(tl.int32) >> (2 * (i // quarter)) & 3
    upper = tl.load(more + block * part + i % part).to(tl.int32) >> (bits * (i // part)) & ((1 << bits) - 1)
    code = lower | ((upper & 1) << 2)
    escape = (code == 0).to(tl.int32)
    rank = tl.load(starts + block) + tl.cumsum(escape) - escape
    field = (tl.where(code < 4, table_low, table_high) >> (8 * (code & 3))) & 0xFF
    field += tl.load(exponents + rank, mask=escape != 0, other=0).to(tl.int32)
    word = ((kept >> 7) << 15) | (field << (7 + LOW_BITS)) | ((kept & 0x7F) << LOW_BITS) | (upper >> 1)
    place = block * BLOCK + i
    tl.store(out + place, word.to(tl.int16), mask=place < n)
