"""Layouts with 3-bit codes (`h14`, `b11`), by torch operations on any device.

The seven most frequent exponents, zero's perhaps among them, get the codes 1 to 7. Code 0 marks an escape:
its sign and mantissa are stored like all others, and its exponent follows in a list. Which of the list's
entries is a weight's is the number of escapes before it; they are counted by blocks of 2,048 weights
(256 in a small tensor).

Parts: `rest` (sign and the upper 7 mantissa bits), `more` (the code's upper bit below the mantissa's lower
bits), `two` (the code's lower 2 bits), `exponents` of the escapes in order, `starts` (escapes before each
block). Elements of a block that share a byte are a half, quarter or eighth of the block apart.
"""

from collections.abc import Callable, Iterator
from typing import Final

import torch

from probes.placement.packing.estimate import DENSE_FROM
from probes.placement.packing.layouts import Layout
from probes.placement.packing.window import Grown, Place, Words, chunk, exponents, true_places

CODES: Final = 7
_BLOCK: Final = 2048  # what the kernel handles
_SMALL_BLOCK: Final = 256


def block_of(weights: int) -> int:
    """Weights in a block: 2,048, or 256 in a small tensor, or all of them made a multiple of 8."""
    return min(_BLOCK if weights >= DENSE_FROM else _SMALL_BLOCK, -(-weights // 8) * 8)


def best_table(counts: torch.Tensor) -> tuple[tuple[int, ...], float]:
    """The exponents that get codes, in ascending order, and the share of weights that they have."""
    chosen = counts.argsort(descending=True, stable=True)[:CODES]
    share = float(counts[chosen].sum() / counts.sum().clamp(min=1))
    return tuple(sorted(chosen.tolist())), share


def encode(
    layout: Layout, words: Words, n: int, *, table: tuple[int, ...], place: Place | None
) -> dict[str, torch.Tensor]:
    """Place the large parts of `n` words, a whole number of blocks, if wanted; the others are returned."""
    block, low_bits = block_of(n), layout.mantissa_bits - 7
    # grown, not listed, as in `window`
    found, counts = Grown(torch.uint8, words.device), Grown(torch.int64, words.device)
    code_of = _coding(layout, table, words.device)
    for span in _chunks(n, block, words.device):
        piece = words.read(span.start, span.stop)
        field = exponents(layout, piece)
        code = code_of(field)
        if place:
            sign = (piece >> layout.exponent_bits) & (1 << layout.mantissa_bits)
            place("rest", span.start, (sign | (piece & ((1 << layout.mantissa_bits) - 1))) >> low_bits)
            low = (piece.to(torch.uint8) & ((1 << low_bits) - 1)) << 1
            more = _shared(low | (code >> 2), bits=low_bits + 1, block=block)
            place("more", span.start * (low_bits + 1) // 8, more)
            place("two", span.start // 4, _shared(code & 3, bits=2, block=block))
        escapes = true_places(((code + CODES) >> 3) ^ 1)  # code 0 alone: the others are 1 to 7
        edges = torch.arange(0, piece.numel() + 1, block, device=words.device)
        counts.append(torch.searchsorted(escapes, edges).diff())
        found.append(field[escapes])
    in_blocks = counts.whole()
    return {
        "exponents": found.whole(),
        "starts": (in_blocks.cumsum(0) - in_blocks).to(torch.int32),
    }


def _coding(
    layout: Layout, table: tuple[int, ...], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes codes of exponents, both in bytes: by arithmetic where the table has neighbours alone."""
    first, last = table[0], table[-1]
    if last - first == CODES - 1:  # what is below the first wraps to large bytes
        return lambda field: (field - first).clamp_(max=CODES).add_(1).bitwise_and_(CODES)
    code_of = torch.zeros(1 << layout.exponent_bits, dtype=torch.uint8, device=device)
    code_of[torch.tensor(table, device=device)] = torch.arange(1, CODES + 1, dtype=torch.uint8, device=device)
    return lambda field: code_of.index_select(0, field.to(torch.int32))


def large_parts(layout: Layout, n: int) -> dict[str, int]:
    """The parts whose bytes are known before the `n` words are."""
    return {"rest": n, "more": n * (layout.mantissa_bits - 6) // 8, "two": n // 4}


def decoded(
    layout: Layout, parts: dict[str, torch.Tensor], table: tuple[int, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of the words in order, each with the index that it begins at."""
    n, low_bits = parts["rest"].numel(), layout.mantissa_bits - 7
    block = n // parts["starts"].numel()
    device = parts["rest"].device
    # filled on the device: a copy from the host can't be captured in a graph
    exponent_of = torch.stack([torch.full((), e, dtype=torch.int16, device=device) for e in (0, *table)])
    for span in _chunks(n, block, device):
        more = _get(parts["more"], span, bits=low_bits + 1, block=block)
        code = _get(parts["two"], span, bits=2, block=block) | ((more & 1) << 2)
        field = exponent_of.index_select(0, code.to(torch.int32))
        field = torch.where(code == 0, _side(parts, code, span, block), field)
        rest = parts["rest"][span].to(torch.int16)
        mantissa = ((rest & 0x7F) << low_bits) | (more >> 1).to(torch.int16)
        yield span.start, (rest >> 7 << layout.sign_shift) | (field << layout.mantissa_bits) | mantissa


def _side(parts: dict[str, torch.Tensor], code: torch.Tensor, span: slice, block: int) -> torch.Tensor:
    """For each weight of a piece the exponent that it would have if it were an escape."""
    exponents = parts["exponents"]
    if not exponents.numel():
        return torch.zeros_like(code, dtype=torch.int16)
    escape = (code == 0).view(-1, block).to(torch.int32)
    rank = escape.cumsum(1, dtype=torch.int32) - escape
    rank += parts["starts"][span.start // block : span.stop // block, None]
    return exponents.index_select(0, rank.view(-1).clamp(max=exponents.numel() - 1)).to(torch.int16)


def _chunks(n: int, block: int, device: torch.device) -> Iterator[slice]:
    step = max(1, chunk(device) // max(block, 1)) * max(block, 1)
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))


def _shared(values: torch.Tensor, *, bits: int, block: int) -> torch.Tensor:
    """Values of a few bits in bytes that they share."""
    per_byte = 8 // bits
    sharing = values.view(-1, per_byte, block // per_byte)
    byte = sharing[:, 0].clone()
    for i in range(1, per_byte):
        byte |= sharing[:, i] << (bits * i)
    return byte.view(-1)


def _get(plane: torch.Tensor, span: slice, *, bits: int, block: int) -> torch.Tensor:
    per_byte = 8 // bits
    byte = plane[span.start // per_byte : span.stop // per_byte].view(-1, 1, block // per_byte)
    return torch.cat([(byte >> (bits * i)) & ((1 << bits) - 1) for i in range(per_byte)], 1).view(-1)
