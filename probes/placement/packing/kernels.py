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
# Two bytes of a word, each below a byte of zeros, or of its sign
_SPREAD_LOWER = tl.constexpr("prmt.b32 $0, $1, 0, 0x4140;")
_SPREAD_UPPER = tl.constexpr("prmt.b32 $0, $1, 0, 0x4342;")
_SIGNED_LOWER = tl.constexpr("prmt.b32 $0, $1, 0, 0x9180;")
_SIGNED_UPPER = tl.constexpr("prmt.b32 $0, $1, 0, 0xB3A2;")


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
    """Unpack 4-bit codes into float32, whose words `out` holds as int32."""
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
def unpack_planes(
    rest: tl.tensor,
    lower: tl.tensor,
    two: tl.tensor,
    stream: tl.tensor,
    starts: tl.tensor,
    positions: tl.tensor,
    exponents: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    blocks: tl.tensor,
    table: tl.tensor,
    table_low: tl.tensor,
    table_high: tl.tensor,
    BLOCK: tl.constexpr,
    LOW_BITS: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """One program unpacks a block of weights with 2-bit codes, and 3-bit ones of escapes; `out` has int16.

    A 32-bit word has a byte of each of four neighbours, which are decoded at once; a table has a byte for
    each code. The 3-bit codes of four are within two of the stream's 16-bit words, whatever bit they begin
    at. They are looked up in the order of the escapes; then all four take their exponents from these and from
    `table`. Listed weights, which have neither code, are put at the end.
    """
    words: tl.constexpr = tl.pointer_type(tl.int32)
    block = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + blocks + 1 + block)
    end = tl.load(starts + blocks + 2 + block)
    weights_before = block * BLOCK
    # most blocks have no more: nobody waits for these at the end
    i = begin + tl.arange(0, 128)
    place, listed = _listed(rest, lower, positions, exponents, weights_before, i, end, BLOCK, LOW_BITS)
    at = stream + tl.load(starts + block).to(tl.int64) * 3
    w = tl.arange(0, BLOCK // 4)
    top = tl.load(rest.to(words) + block * (BLOCK // 4) + w)
    low = top
    if LOW_BITS == 0:
        code = _bits(two, block, w, BLOCK, 2)
    else:
        low = _bits(lower, block, w, BLOCK, 4)
        code = _bits(two, block, w, BLOCK, 1) | ((low & 0x01010101) << 1)
        low = (low >> 1) & 0x07070707
    coded = (code | (code >> 1)) & 0x01010101
    escaped = coded ^ 0x01010101
    three = escaped * 3
    before = (escaped * 0x01010101) << 8  # in each byte, the escapes in those before
    bits = (three * 0x01010101) >> 24
    bit = tl.cumsum(bits, 0) - bits
    at += bit >> 4
    first = tl.load(at, mask=bits > 0, other=0).to(tl.int32) & 0xFFFF
    second = tl.load(at + 1, mask=(bit & 15) + bits > 16, other=0).to(tl.int32)
    following = ((second << 16) | first) >> (bit & 15)
    following = (following & 0x3F) | ((following & 0xFC0) << 10)
    following = (following & 0x00070007) | ((following & 0x00380038) << 5)
    of_escapes = _looked_up(following, table_low, table_high, PTX)
    chosen = code | (coded << 2) | (before & three)
    fields = _looked_up(chosen, of_escapes, table, PTX)
    _put_four(top, fields, low, out, block, n, BLOCK, LOW_BITS, PTX)
    tl.debug_barrier()
    tl.store(out + weights_before + place, listed, mask=i < end)
    for first_one in range(begin + 128, end, 128):
        i = first_one + tl.arange(0, 128)
        place, listed = _listed(rest, lower, positions, exponents, weights_before, i, end, BLOCK, LOW_BITS)
        tl.store(out + weights_before + place, listed, mask=i < end)


@triton.jit
def _listed(
    rest: tl.tensor,
    lower: tl.tensor,
    positions: tl.tensor,
    exponents: tl.tensor,
    weights_before: tl.tensor,
    i: tl.tensor,
    end: tl.tensor,
    BLOCK: tl.constexpr,
    LOW_BITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where in their block the listed weights `i`, as far as before `end`, are; and their words."""
    half: tl.constexpr = BLOCK // 2
    there = i < end
    place = tl.load(positions + i, mask=there, other=0).to(tl.int32)
    exponent = tl.load(exponents + i, mask=there, other=0).to(tl.int32)
    word = tl.load(rest + weights_before + place, mask=there, other=0).to(tl.int32)
    word = ((word & 0x80) << 8) | (exponent << (7 + LOW_BITS)) | ((word & 0x7F) << LOW_BITS)
    if LOW_BITS:
        byte = tl.load(lower + weights_before // 2 + (place & (half - 1)), mask=there, other=0).to(tl.int32)
        word |= (byte >> tl.where(place < half, 1, 5)) & 7
    return place, word.to(tl.int16)


@triton.jit
def _bits(
    plane: tl.tensor, block: tl.tensor, w: tl.tensor, BLOCK: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Words with a byte for each of four neighbours, of a plane of 1, 2 or 4 bits a weight."""
    count: tl.constexpr = BLOCK * BITS // 32
    word = tl.load(plane.to(tl.pointer_type(tl.int32)) + block * count + w % count)
    mask: tl.constexpr = ((1 << BITS) - 1) * 0x01010101
    return (word >> (BITS * (w // count))) & mask


@triton.jit
def _put_four(
    top: tl.tensor,
    fields: tl.tensor,
    low: tl.tensor,
    out: tl.tensor,
    block: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
    LOW_BITS: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """Store a block's weights, of n in all, from the bytes of four neighbours' parts."""
    first = _two_words(top, fields, low, False, LOW_BITS, PTX)
    second = _two_words(top, fields, low, True, LOW_BITS, PTX)
    left = n - block * BLOCK
    i = tl.arange(0, BLOCK // 2)
    pairs = tl.reshape(tl.join(first, second), [BLOCK // 2])
    to = out.to(tl.pointer_type(tl.int32)) + block * (BLOCK // 2) + i
    if left >= BLOCK:
        tl.store(to, pairs)
    else:
        tl.store(to, pairs, mask=2 * i + 1 < left)
        last = tl.sum(tl.where(2 * i + 1 == left, pairs, 0), 0)  # a weight that has no neighbour
        tl.store(out + n - 1, last.to(tl.int16), mask=left % 2 == 1)


@triton.jit
def _looked_up(code: tl.tensor, low: tl.tensor, high: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """A byte of the tables for each byte of `code`, 0 to 7."""
    if PTX:  # a byte permute takes its four selectors in neighbouring half bytes
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 4; or.b32 t, t, $1; prmt.b32 t, t, 0, 0x4420; "
            "prmt.b32 $0, $2, $3, t; }",
            "=r,r,r,r",
            [code, low, high],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    fields = tl.zeros_like(code)
    for i in tl.static_range(4):
        one = (code >> (8 * i)) & 7
        fields |= ((tl.where(one < 4, low, high) >> (8 * (one & 3))) & 0xFF) << (8 * i)
    return fields


@triton.jit
def _two_words(
    top: tl.tensor,
    fields: tl.tensor,
    low: tl.tensor,
    UPPER: tl.constexpr,
    LOW_BITS: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """The 16-bit words of two of four weights, from the bytes of their parts."""
    field = _spread(fields, UPPER, PTX) << (7 + LOW_BITS)
    if PTX:
        signed = _permuted(top, _SIGNED_UPPER if UPPER else _SIGNED_LOWER)
    else:
        signed = _spread(top, UPPER, PTX)
        signed |= (signed & 0x00800080) << 8
    if LOW_BITS == 0:
        return (signed & -0x7F807F81) | field  # 0x807F807F
    mantissa = ((signed & 0x007F007F) << LOW_BITS) | _spread(low, UPPER, PTX)
    return (signed & -0x7FFF8000) | mantissa | field  # 0x80008000


@triton.jit
def _spread(word: tl.tensor, UPPER: tl.constexpr, PTX: tl.constexpr) -> tl.tensor:
    """The lower or upper two bytes of a word, each in 16 bits."""
    if PTX:
        return _permuted(word, _SPREAD_UPPER if UPPER else _SPREAD_LOWER)
    half = (word >> 16) if UPPER else word
    return (half & 0xFF) | ((half & 0xFF00) << 8)


@triton.jit
def _permuted(word: tl.tensor, ASM: tl.constexpr) -> tl.tensor:
    """Bytes of a word in another order, by one of the instructions above."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


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
    """Multiply up to BB input rows with W by the matrix units, which multiply numbers of type FACTORS."""
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
