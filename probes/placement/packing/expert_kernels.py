"""Kernels that find experts by a table of addresses, in VRAM or in pinned host memory, which they read in place.

A row of the table has the addresses of one expert's tensors. Which experts are wanted is on the device, too, so
nothing waits for the router that chose them.
"""

# mypy: disable-error-code="untyped-decorator"
import triton
import triton.language as tl

from probes.placement.packing.kernels import put_escapes, unpack_row


@triton.jit
def _counted(counts: tl.tensor, expert: tl.tensor, part: tl.tensor, COUNTED: tl.constexpr) -> None:
    """Note that an expert was chosen: one of the programs that read it does."""
    if COUNTED:
        if part == 0:
            tl.atomic_add(counts + expert, 1)


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
) -> None:
    """One program copies BLOCK of the `words` of one expert."""
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = tl.load(ids + slot)
    i = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    to = out + slot * words + i
    if (expert >= 0) & (expert < experts):
        address = tl.load(table + expert * stride)
        source = address.to(tl.pointer_type(out.dtype.element_ty))
        tl.store(to, tl.load(source + i, mask=i < words, other=0), mask=i < words)
        _counted(counts, expert, part, COUNTED)
    elif expert >= experts:
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
    PTX: tl.constexpr,
) -> None:
    """One program unpacks a group of rows of one expert's `n` weights, as `unpack_b12` does."""
    half: tl.constexpr = WIDTH // 2
    slot, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    expert = tl.load(ids + slot)
    to = out + slot * n
    if (expert >= 0) & (expert < experts):
        row_of = table + expert * stride
        rest = tl.load(row_of).to(tl.pointer_type(tl.uint8))
        codes = tl.load(row_of + 1).to(tl.pointer_type(tl.uint8))
        values = tl.load(row_of + 2).to(tl.pointer_type(tl.int16))
        positions = tl.load(row_of + 3).to(tl.pointer_type(tl.int16))
        starts = tl.load(row_of + 4).to(tl.pointer_type(tl.int32))
        for r in range(GROUP):
            row = group * GROUP + r
            width = tl.where(row < rows, half, 0)
            unpack_row(rest, codes, to, row, row * WIDTH, width, n, scale, WIDTH, BLOCK, PTX)
        tl.debug_barrier()
        before = tl.load(starts)
        begin = tl.load(starts + group) - before
        end = tl.load(starts + group + 1) - before
        put_escapes(values, positions, to + group * GROUP * WIDTH, begin, end)
        _counted(counts, expert, tl.program_id(1), COUNTED)
    elif expert >= experts:
        for first in range(0, GROUP * WIDTH, BLOCK):
            i = group * GROUP * WIDTH + first + tl.arange(0, BLOCK)
            there = (first + tl.arange(0, BLOCK) < GROUP * WIDTH) & (i < n)
            tl.store(to + i, tl.full([BLOCK], float("nan"), tl.bfloat16), mask=there)
