"""Kernels that find experts by a table of addresses, in VRAM or in pinned host memory, which they read in
place.

A row of the table has the addresses of one expert's tensors. Which experts are wanted is on the device,
too, so nothing waits for the router that chose them.
"""

# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917  # Triton takes arguments in order
import triton
import triton.language as tl

from probes.placement.packing.kernels import put_escapes, unpack_row, weights

# Ids below this read and write nothing, as experts do that a product of groups has no rows for. torch refuses
# any other id without an expert; a kernel can't, so it writes NaN.
NOT_READ = tl.constexpr(-(1 << 39))


@triton.jit
def _address(row_of: tl.tensor, KIND: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """A pointer from the table. EVEN: all of them are multiples of 16, so that several numbers load at
    once.
    """
    pointer = tl.load(row_of).to(tl.pointer_type(KIND))
    if EVEN:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _from_begin(expert: tl.tensor, experts: tl.tensor) -> tl.tensor:
    """Ids below zero count from the end. What is still below zero is none: far below, on purpose."""
    return tl.where(expert < 0, expert + experts, expert)


@triton.jit
def _counted(counts: tl.tensor, expert: tl.tensor, part: tl.tensor, COUNTED: tl.constexpr) -> None:
    """Note that an expert was chosen: one of the programs that read it does."""
    if COUNTED and part == 0:
        tl.atomic_add(counts + expert, 1, sem="relaxed")


@triton.jit
def gather(
    ids: tl.tensor,
    table: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    words: tl.tensor,
    experts: tl.tensor,
    stride: tl.tensor,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """One program copies BLOCK of the `words` of one expert."""
    parts = tl.cdiv(words, BLOCK)
    slot, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    expert = _from_begin(tl.load(ids + slot), experts)
    i = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    to = out + slot * words + i
    if (expert >= 0) & (expert < experts):
        source = _address(table + expert * stride, out.dtype.element_ty, EVEN)
        tl.store(to, tl.load(source + i, mask=i < words, other=0), mask=i < words)
        _counted(counts, expert, part, COUNTED)
    elif expert > NOT_READ:
        ones = (tl.zeros([BLOCK], tl.int32) - 1).to(out.dtype.element_ty)  # NaN in any format
        tl.store(to, ones, mask=i < words)


@triton.jit
def unpack_expert(
    ids: tl.tensor,
    table: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    COUNTED: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """One program unpacks a group of rows of one expert's `n` weights, as `unpack_b12` does."""
    half: tl.constexpr = WIDTH // 2
    groups = tl.cdiv(rows, GROUP)
    slot, group = (tl.program_id(0) // groups).to(tl.int64), (tl.program_id(0) % groups).to(tl.int64)
    expert = _from_begin(tl.load(ids + slot), experts)
    to = out + slot * n
    if (expert >= 0) & (expert < experts):
        row_of = table + expert * stride
        rest, codes = _address(row_of, tl.uint8, EVEN), _address(row_of + 1, tl.uint8, EVEN)
        values, positions = _address(row_of + 2, tl.int16, False), _address(row_of + 3, tl.int16, False)
        starts = _address(row_of + 4, tl.int32, False)
        for r in range(GROUP):
            row = group * GROUP + r
            width = tl.where(row < rows, half, 0)
            unpack_row(rest, codes, to, row, row * WIDTH, width, n, scale, WIDTH, BLOCK, PTX)
        tl.debug_barrier()
        before = tl.load(starts)
        begin = tl.load(starts + group) - before
        end = tl.load(starts + group + 1) - before
        put_escapes(values, positions, to + group * GROUP * WIDTH, begin, end)
        _counted(counts, expert, group, COUNTED)
    elif expert > NOT_READ:
        for first in range(0, GROUP * WIDTH, BLOCK):
            i = group * GROUP * WIDTH + first + tl.arange(0, BLOCK)
            there = (first + tl.arange(0, BLOCK) < GROUP * WIDTH) & (i < n)
            tl.store(to + i, tl.full([BLOCK], float("nan"), tl.bfloat16), mask=there)


@triton.jit
def _times(
    x: tl.tensor,
    row_of: tl.tensor,
    rows: tl.tensor,
    input_scale: tl.tensor,
    scale: tl.tensor,
    WEIGHT: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:
    """Rows of an expert's matrix (n, K) times one input row, in float32. WEIGHT: a number of their dtype.

    `row_of`: where the table has the addresses of its parts. Packed rows are multiplied as `one_row` does.
    """
    row = rows.to(tl.int64)
    inside = tl.arange(0, BK)
    if not PACKED:
        matrix = _address(row_of, WEIGHT, EVEN)
        total = tl.zeros([rows.shape[0], BK], tl.float32)
        for k in range(0, K, BK):
            there = k + inside < K
            factor = tl.load(x + k + inside, mask=there, other=0.0).to(tl.float32)
            weight = tl.load(
                matrix + row[:, None] * K + (k + inside)[None, :], mask=there[None, :], other=0.0
            )
            total += weight.to(tl.float32) * factor[None, :]
        return tl.sum(total, 1)
    half: tl.constexpr = K // 2
    rest = _address(row_of, tl.uint8, EVEN) + row[:, None] * K + inside[None, :]
    codes = _address(row_of + 1, tl.uint8, EVEN) + row[:, None] * half + inside[None, :]
    total = tl.zeros([rows.shape[0], BK], tl.float32)
    for k in range(0, half, BK):
        there = k + inside < half
        code = tl.load(codes + k, mask=there[None, :], other=0)
        one = weights(tl.load(rest + k, mask=there[None, :], other=0), code, False, False, PTX)
        other = weights(tl.load(rest + half + k, mask=there[None, :], other=0), code, True, False, PTX)
        x_one = tl.load(x + k + inside, mask=there, other=0.0).to(tl.float32) * input_scale
        x_other = tl.load(x + half + k + inside, mask=there, other=0.0).to(tl.float32) * input_scale
        total += one.to(tl.float32) * x_one[None, :]
        total += other.to(tl.float32) * x_other[None, :]
    values, positions = _address(row_of + 2, tl.int16, False), _address(row_of + 3, tl.int16, False)
    starts = _address(row_of + 4, tl.int32, False)
    before = tl.load(starts)
    begin, end = tl.load(starts + row) - before, tl.load(starts + row + 1) - before
    escaped = tl.zeros([rows.shape[0]], tl.float32)
    for first in range(0, tl.max(end - begin, 0), 8):
        i = begin[:, None] + first + tl.arange(0, 8)[None, :]
        there = i < end[:, None]
        column = tl.load(positions + i, mask=there, other=0).to(tl.int32) & 0xFFFF
        value = tl.load(values + i, mask=there, other=0).to(tl.bfloat16, bitcast=True).to(tl.float32)
        factor = tl.load(x + column, mask=there, other=0.0).to(tl.float32)
        escaped += tl.sum(tl.where(there, value * factor, 0.0), 1)
    return tl.sum(total, 1) * scale + escaped


@triton.jit
def gate_up(
    x: tl.tensor,
    ids: tl.tensor,
    table: tl.tensor,
    counts: tl.tensor,
    hidden: tl.tensor,
    inner: tl.tensor,
    experts: tl.tensor,
    stride: tl.tensor,
    input_scale: tl.tensor,
    scale: tl.tensor,
    TOP: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """hidden = SiLU(G x) * (U x) for each chosen expert, whose matrix (2 x inner, K) is G above U; float32.

    Program (pair, part) has BN rows of both, for one token and one of its TOP experts.
    """
    parts = tl.cdiv(inner, BN)
    pair, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    expert = tl.load(ids + pair)
    rows = part * BN + tl.arange(0, BN)
    there = rows < inner
    to = hidden + pair * inner + rows
    if (expert >= 0) & (expert < experts):
        row_of, token = table + expert * stride, x + pair // TOP * K
        row = tl.minimum(rows, inner - 1)
        weight: tl.constexpr = x.dtype.element_ty
        gate = _times(token, row_of, row, input_scale, scale, weight, K, BK, PACKED, EVEN, PTX)
        up = _times(token, row_of, row + inner, input_scale, scale, weight, K, BK, PACKED, EVEN, PTX)
        tl.store(to, gate / (1.0 + tl.exp(-gate)) * up, mask=there)
        _counted(counts, expert, part, True)
    else:
        # ids of `experts` and more mark rows that other devices compute; below zero there is no expert
        tl.store(to, tl.where(expert < 0, float("nan"), tl.zeros([BN], tl.float32)), mask=there)


@triton.jit
def down(
    hidden: tl.tensor,
    ids: tl.tensor,
    table: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    experts: tl.tensor,
    stride: tl.tensor,
    input_scale: tl.tensor,
    scale: tl.tensor,
    TOP: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    EVEN: tl.constexpr,
    PTX: tl.constexpr,
) -> None:
    """out = the sum of D h over a token's TOP experts, each by its share, in their order.

    Program (token, part) has BN of the `n` outputs.
    """
    parts = tl.cdiv(n, BN)
    token, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    rows = part * BN + tl.arange(0, BN)
    row = tl.minimum(rows, n - 1)
    weight: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([BN], tl.float32)
    for k in range(TOP):
        pair = token * TOP + k
        expert = tl.load(ids + pair)
        if (expert >= 0) & (expert < experts):
            given, row_of = hidden + pair * K, table + expert * stride
            product = _times(given, row_of, row, input_scale, scale, weight, K, BK, PACKED, EVEN, PTX)
            total += product * tl.load(shares + pair).to(tl.float32)
        elif expert < 0:
            total += float("nan")
    tl.store(out + token * n + rows, total.to(out.dtype.element_ty), mask=rows < n)
