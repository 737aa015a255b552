"""The codes for exponents: 4 bits within a window, 3 for the seven most frequent ones, or 2 for the first 3.

Of 2-bit codes one is an escape to a stream of 3-bit codes, for the next eight exponents.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from probes.placement.packing.format import DENSE_FROM, Grid
from probes.placement.packing.packed import Layout

# Weights handled at once: a bound for temporaries, which stay in the caches of a CPU's cores.
CHUNK: Final = 1 << 22


CPU_CHUNK: Final = 1 << 20


_WINDOW: Final = 15


_HIGHEST_BASE: Final = 127  # 2**base is a factor of the products and must be a float32


_POSITION_BITS: Final = 16


Place = Callable[[str, int, torch.Tensor], None]  # bytes of a part, as any integers, and their index there


@dataclass(frozen=True)
class Words:
    """The words that are packed. `read` gives those from one to another, flat, on the device."""

    device: torch.device
    read: Callable[[int, int], torch.Tensor]


class Grown:
    """A flat tensor that pieces are appended to. Its room doubles, so each number is copied about once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._room = torch.empty(0, dtype=dtype, device=device)
        self._used = 0

    def append(self, piece: torch.Tensor) -> None:
        """Add a piece at the end."""
        end = self._used + piece.numel()
        if end > self._room.numel():
            room = self._room.new_empty(max(end, 2 * self._room.numel()))
            room[: self._used] = self._room[: self._used]
            self._room = room
        self._room[self._used : end] = piece
        self._used = end

    def whole(self) -> torch.Tensor:
        """All of it, in memory of that size."""
        return self._room[: self._used].clone()


def best_base(counts: torch.Tensor) -> tuple[int, float]:
    """The base whose window holds most weights, and the share that it holds.

    `counts` has how often each exponent occurs. The window never holds exponent 0: zeros need no code.
    """
    sums = counts.to(torch.float64, copy=True).unfold(0, _WINDOW, 1).sum(1)[1 : _HIGHEST_BASE + 2]
    base = int(sums.argmax())
    return base, float(sums[base] / counts.sum().clamp(min=1))


def encode_window(
    layout: Layout, words: Words, cut: Grid, *, base: int, place: Place | None
) -> dict[str, torch.Tensor]:
    """Place the large parts of the words (flat, padded to whole rows), if wanted; the others are returned."""
    half = cut.width // 2
    # grown, not listed: small tensors that stay between large ones that go would leave holes in the heap
    indices_found, values = Grown(torch.int64, words.device), Grown(layout.word, words.device)
    for first, last in row_chunks(cut, words.device):
        start = first * cut.width
        piece = words.read(start, last * cut.width)
        code, indices = _window_codes(layout, piece, base)
        if place:
            rest = (piece >> layout.exponent_bits) & (1 << layout.mantissa_bits)
            rest |= piece & ((1 << layout.mantissa_bits) - 1)
            rest.index_fill_(0, indices, 0)
            for i in range(_window_planes(layout)):
                place(f"rest{i}", start, rest >> (8 * i) if i else rest)
            pair = code.view(last - first, 2, half)
            place("codes", first * half, (pair[:, 0] | (pair[:, 1] << 4)).view(-1))
        values.append(piece[indices])
        indices_found.append(indices + start)
    return _escapes(values.whole(), indices_found.whole(), cut)


def window_parts(layout: Layout, cut: Grid) -> dict[str, int]:
    """The parts whose bytes are known before the words are."""
    n = cut.rows * cut.width
    return {f"rest{i}": n for i in range(_window_planes(layout))} | {"codes": n // 2}


def decode_window(
    layout: Layout, parts: dict[str, torch.Tensor], cut: Grid, base: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of the words in order, each with the index that it begins at; escapes are still zero."""
    codes = parts["codes"].view(cut.rows, 1, cut.width // 2)
    for first, last in row_chunks(cut, codes.device):
        span = slice(first * cut.width, last * cut.width)
        planes = [parts[f"rest{i}"][span] for i in range(_window_planes(layout))]
        yield span.start, _window_words(layout, codes[first:last], planes, base)


def decode_window_rows(
    layout: Layout, parts: Mapping[str, torch.Tensor], ids: torch.Tensor, *, base: int, most_escapes: int
) -> torch.Tensor:
    """The words of the rows `ids` (flat) of a matrix whose rows have their own lists of escapes.

    No row has more than `most_escapes` of them. Raises IndexError for an id out of range, on the CPU.
    """
    starts = parts["starts"]
    rows = starts.numel() - 1
    byte = parts["codes"].view(rows, 1, -1).index_select(0, ids)
    width = 2 * byte.shape[2]
    planes = [parts[f"rest{i}"].view(rows, width).index_select(0, ids) for i in range(_window_planes(layout))]
    words = _window_words(layout, byte, [plane.view(-1) for plane in planes], base).view(-1, width)
    if not most_escapes:
        return words
    begin, end = (edge.index_select(0, ids)[:, None] - starts[0] for edge in (starts[:-1], starts[1:]))
    which = begin + torch.arange(most_escapes, device=ids.device, dtype=torch.int32)
    there = which < end
    which = which * there  # of what isn't there, any
    column = parts["positions"][which].to(torch.int64) & ((1 << _POSITION_BITS) - 1)
    padded = torch.nn.functional.pad(words, (0, 1))  # what isn't there goes to a column that is cut off
    padded.scatter_(1, torch.where(there, column, width), parts["values"][which])
    return padded[:, :width]


def _window_words(
    layout: Layout, byte: torch.Tensor, planes: Sequence[torch.Tensor], base: int
) -> torch.Tensor:
    """The words, flat, of rows with these codes, of shape (rows, 1, width / 2); escapes are still zero."""
    code = torch.cat((byte & 15, byte >> 4), 1).view(-1)
    words = ((code + base) * ((code + _WINDOW) >> 4)).to(layout.word) << layout.mantissa_bits  # 0 of code 0
    rest = planes[0].to(layout.word)
    for i, plane in enumerate(planes[1:], start=1):
        rest |= plane.to(layout.word) << (8 * i)
    words |= rest & ((1 << layout.mantissa_bits) - 1)
    words |= (rest >> layout.mantissa_bits) << layout.sign_shift
    return words


def escape_indices(parts: dict[str, torch.Tensor], cut: Grid) -> torch.Tensor:
    """Where in the flat tensor the escapes are, without waiting for the device."""
    positions = parts["positions"].to(torch.int64) & ((1 << _POSITION_BITS) - 1)
    order = torch.arange(positions.numel(), device=positions.device, dtype=torch.int32)
    order += parts["starts"][0]
    group = torch.searchsorted(parts["starts"], order, right=True) - 1
    return group * (cut.group_rows * cut.width) + positions


def row_chunks(cut: Grid, device: torch.device) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are handled at once."""
    step = max(1, chunk(device) // max(cut.width, 1))
    for first in range(0, cut.rows, step):
        yield first, min(first + step, cut.rows)


def chunk(device: torch.device) -> int:
    """How many weights are handled at once."""
    return CPU_CHUNK if device.type == "cpu" else CHUNK


def _window_planes(layout: Layout) -> int:
    return (layout.mantissa_bits + 1) // 8


def _window_codes(layout: Layout, words: torch.Tensor, base: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes, in bytes, and the indices of the escapes.

    Of bytes, a CPU calculates with many at once; comparing takes it twenty times as long.
    """
    code = exponents(layout, words)
    code -= base + 1  # what is below the window wraps to large bytes, like what is above it
    code.clamp_(max=_WINDOW)
    code += 1
    others = true_places(code >> 4)
    code &= _WINDOW
    return code, others[(words[others] << 1) != 0]


def exponents(layout: Layout, words: torch.Tensor) -> torch.Tensor:
    """The words' exponents, in bytes."""
    field = (words >> layout.mantissa_bits).to(torch.uint8)
    return field if layout.exponent_bits == 8 else field & ((1 << layout.exponent_bits) - 1)


def true_places(flags: torch.Tensor) -> torch.Tensor:
    """The indices of the ones among flat bytes that are 0 or 1.

    On a CPU, where they are few, 8 are looked at at once, which is 8 times as quick.
    """
    whole = flags.numel() // 8 * 8
    if flags.device.type != "cpu":
        return flags.nonzero().squeeze(1)
    eights = flags[:whole].view(torch.int64).nonzero()
    if eights.numel() > whole // 32:
        return flags.nonzero().squeeze(1)
    near = (eights * 8 + torch.arange(8, device=eights.device)).view(-1)
    near = torch.cat((near, torch.arange(whole, flags.numel(), device=flags.device)))
    return near[flags[near].to(torch.bool)]


def _escapes(values: torch.Tensor, indices: torch.Tensor, cut: Grid) -> dict[str, torch.Tensor]:
    size = cut.group_rows * cut.width
    edges = torch.arange(cut.groups + 1, device=values.device) * size
    return {
        "values": values,
        "positions": (indices % max(size, 1)).to(torch.int16),
        "starts": torch.searchsorted(indices, edges).to(torch.int32),
    }


CODES: Final = 7


_BLOCK: Final = 2048  # what the kernel handles


_SMALL_BLOCK: Final = 256


def block_of(weights: int, *, large: int = _BLOCK) -> int:
    """Weights in a block: 2,048, or 256 in a small tensor, or all of them made a multiple of 8."""
    return min(large if weights >= DENSE_FROM else _SMALL_BLOCK, -(-weights // 8) * 8)


def best_table(counts: torch.Tensor) -> tuple[tuple[int, ...], float]:
    """The exponents that get codes, in ascending order, and the share of weights that they have."""
    chosen = counts.argsort(descending=True, stable=True)[:CODES]
    share = float(counts[chosen].sum() / counts.sum().clamp(min=1))
    return tuple(sorted(chosen.tolist())), share


def encode_ranked(
    layout: Layout, words: Words, n: int, *, table: tuple[int, ...], place: Place | None
) -> dict[str, torch.Tensor]:
    """Place the large parts of `n` words, a whole number of blocks, if wanted; the others are returned."""
    block, low_bits = block_of(n), layout.mantissa_bits - 7
    # grown, not listed, as in `window`
    escaped, counts = Grown(torch.uint8, words.device), Grown(torch.int64, words.device)
    code_of = _ranked_coding(layout, table, words.device)
    for span in _block_chunks(n, block, words.device):
        piece = words.read(span.start, span.stop)
        field = exponents(layout, piece)
        code = code_of(field)
        if place:
            sign = (piece >> layout.exponent_bits) & (1 << layout.mantissa_bits)
            place("rest", span.start, (sign | (piece & ((1 << layout.mantissa_bits) - 1))) >> low_bits)
            low = (piece.to(torch.uint8) & ((1 << low_bits) - 1)) << 1
            more = _pack_bits(low | (code >> 2), bits=low_bits + 1, block=block)
            place("more", span.start * (low_bits + 1) // 8, more)
            place("two", span.start // 4, _pack_bits(code & 3, bits=2, block=block))
        escapes = true_places(((code + CODES) >> 3) ^ 1)  # code 0 alone: the others are 1 to 7
        edges = torch.arange(0, piece.numel() + 1, block, device=words.device)
        counts.append(torch.searchsorted(escapes, edges).diff())
        escaped.append(field[escapes])
    in_blocks = counts.whole()
    return {
        "exponents": escaped.whole(),
        "starts": (in_blocks.cumsum(0) - in_blocks).to(torch.int32),
    }


def _ranked_coding(
    layout: Layout, table: tuple[int, ...], device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes codes of exponents, both in bytes: by arithmetic where the table has neighbours alone."""
    first, last = table[0], table[-1]
    if last - first == CODES - 1:  # what is below the first wraps to large bytes
        return lambda field: (field - first).clamp_(max=CODES).add_(1).bitwise_and_(CODES)
    code_of = torch.zeros(1 << layout.exponent_bits, dtype=torch.uint8, device=device)
    code_of[torch.tensor(table, device=device)] = torch.arange(1, CODES + 1, dtype=torch.uint8, device=device)
    return lambda field: code_of.index_select(0, field.to(torch.int32))


def ranked_parts(layout: Layout, n: int) -> dict[str, int]:
    """The parts whose bytes are known before the `n` words are."""
    return {"rest": n, "more": n * (layout.mantissa_bits - 6) // 8, "two": n // 4}


def decode_ranked(
    layout: Layout, parts: dict[str, torch.Tensor], table: tuple[int, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of the words in order, each with the index that it begins at."""
    n, low_bits = parts["rest"].numel(), layout.mantissa_bits - 7
    block = n // parts["starts"].numel()
    device = parts["rest"].device
    # filled on the device: a copy from the host can't be captured in a graph
    exponent_of = torch.stack([torch.full((), e, dtype=torch.int16, device=device) for e in (0, *table)])
    for span in _block_chunks(n, block, device):
        more = _unpack_bits(parts["more"], span, bits=low_bits + 1, block=block)
        code = _unpack_bits(parts["two"], span, bits=2, block=block) | ((more & 1) << 2)
        field = exponent_of.index_select(0, code.to(torch.int32))
        field = torch.where(code == 0, _escaped_exponents(parts, code, span, block), field)
        rest = parts["rest"][span].to(torch.int16)
        mantissa = ((rest & 0x7F) << low_bits) | (more >> 1).to(torch.int16)
        yield span.start, (rest >> 7 << layout.sign_shift) | (field << layout.mantissa_bits) | mantissa


def _escaped_exponents(
    parts: dict[str, torch.Tensor], code: torch.Tensor, span: slice, block: int
) -> torch.Tensor:
    """For each weight of a piece the exponent that it would have if it were an escape."""
    exponents = parts["exponents"]
    if not exponents.numel():
        return torch.zeros_like(code, dtype=torch.int16)
    escape = (code == 0).view(-1, block).to(torch.int32)
    rank = escape.cumsum(1, dtype=torch.int32) - escape
    rank += parts["starts"][span.start // block : span.stop // block, None]
    return exponents.index_select(0, rank.view(-1).clamp(max=exponents.numel() - 1)).to(torch.int16)


def _block_chunks(n: int, block: int, device: torch.device) -> Iterator[slice]:
    step = max(1, chunk(device) // max(block, 1)) * max(block, 1)
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))


def _pack_bits(values: torch.Tensor, *, bits: int, block: int) -> torch.Tensor:
    """Values of a few bits in bytes that they share."""
    per_byte = 8 // bits
    sharing = values.view(-1, per_byte, block // per_byte)
    byte = sharing[:, 0].clone()
    for i in range(1, per_byte):
        byte |= sharing[:, i] << (bits * i)
    return byte.view(-1)


def _unpack_bits(plane: torch.Tensor, span: slice, *, bits: int, block: int) -> torch.Tensor:
    per_byte = 8 // bits
    byte = plane[span.start // per_byte : span.stop // per_byte].view(-1, 1, block // per_byte)
    return torch.cat([(byte >> (bits * i)) & ((1 << bits) - 1) for i in range(per_byte)], 1).view(-1)


PLANES: Final = (3, 8)  # exponents with 2-bit codes, which are 1 to 3; and with 3-bit ones, of their escapes
PLANES_BLOCK: Final = 8192
_TOGETHER: Final = 16  # 3-bit codes in three words; a block's are padded to a multiple


def best_tables(counts: torch.Tensor) -> tuple[tuple[int, ...], float]:
    """The exponents of the 2-bit codes, then those of the 3-bit ones, and the share that has one of both."""
    chosen = counts.argsort(descending=True, stable=True)[: sum(PLANES)]
    share = float(counts[chosen].sum() / counts.sum().clamp(min=1))
    return tuple(sorted(chosen[: PLANES[0]].tolist()) + sorted(chosen[PLANES[0] :].tolist())), share


def planes_parts(n: int) -> dict[str, int]:
    """The parts whose bytes are known before the `n` words are."""
    return {"rest": n, "two": n // 4}


def encode_planes(
    layout: Layout, words: Words, n: int, *, table: tuple[int, ...], place: Place | None
) -> dict[str, torch.Tensor]:
    """Place the large parts of `n` bfloat16 words, whole blocks, if wanted; the others are returned."""
    block, device = block_of(n, large=PLANES_BLOCK), words.device
    three, starts = Grown(torch.int16, device), Grown(torch.int32, device)
    positions, others = Grown(torch.int16, device), Grown(torch.uint8, device)
    in_list = Grown(torch.int64, device)
    code_of = torch.zeros(256, dtype=torch.uint8, device=device)
    next_of = torch.full((256,), PLANES[1], dtype=torch.uint8, device=device)
    code_of[list(table[: PLANES[0]])] = torch.arange(1, PLANES[0] + 1, dtype=torch.uint8, device=device)
    next_of[list(table[PLANES[0] :])] = torch.arange(PLANES[1], dtype=torch.uint8, device=device)
    used = torch.zeros((), dtype=torch.int64, device=device)
    shifts = 3 * torch.arange(_TOGETHER, device=device)
    for span in _block_chunks(n, block, device):
        piece = words.read(span.start, span.stop)
        field = exponents(layout, piece)
        code = code_of.index_select(0, field.to(torch.int32))
        if place:
            place("rest", span.start, (piece >> 8 & 0x80) | (piece & 0x7F))
            place("two", span.start // 4, _pack_bits(code, bits=2, block=block))
        escapes = (code == 0).nonzero().squeeze(1)
        escaped = field[escapes]
        next_code = next_of.index_select(0, escaped.to(torch.int32))
        in_blocks = (code == 0).view(-1, block).sum(1)
        padded = (in_blocks + _TOGETHER - 1) // _TOGETHER * _TOGETHER
        start = padded.cumsum(0) - padded
        starts.append((used + start) // _TOGETHER)
        used += padded.sum()
        codes = torch.zeros(int(padded.sum()), dtype=torch.int64, device=device)
        to = torch.arange(escapes.numel(), device=device)
        to += (start - (in_blocks.cumsum(0) - in_blocks)).repeat_interleave(in_blocks)
        codes[to] = (next_code & 7).to(torch.int64)
        together = (codes.view(-1, _TOGETHER) << shifts).sum(1)
        three.append(together.view(torch.int16).view(-1, 4)[:, :3].reshape(-1))
        others_here = (next_code == PLANES[1]).nonzero().squeeze(1)
        listed = escapes[others_here]
        positions.append((listed % block).to(torch.int16))
        others.append(escaped[others_here])
        in_list.append(torch.bincount(listed // block, minlength=in_blocks.numel()))
    ends = in_list.whole().cumsum(0)
    return {
        "three": three.whole(),
        "starts": starts.whole(),
        "positions": positions.whole(),
        "exponents": others.whole(),
        "listed": torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
    }


def decode_planes(
    parts: dict[str, torch.Tensor], table: tuple[int, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of the words in order, each with the index that it begins at; listed ones are wrong yet."""
    n = parts["rest"].numel()
    block, device = n // parts["starts"].numel(), parts["rest"].device
    first, second = (
        torch.stack([torch.full((), e, dtype=torch.int16, device=device) for e in exponents])
        for exponents in ((0, *table[: PLANES[0]]), table[PLANES[0] :])
    )
    three = torch.nn.functional.pad(parts["three"].to(torch.int32) & 0xFFFF, (0, 2))
    for span in _block_chunks(n, block, device):
        code = _unpack_bits(parts["two"], span, bits=2, block=block)
        escape = (code == 0).view(-1, block).to(torch.int32)
        rank = escape.cumsum(1) - escape
        rank += parts["starts"][span.start // block : span.stop // block, None] * _TOGETHER
        bit = (3 * rank).view(-1)
        at = torch.clamp(bit >> 4, max=three.numel() - 2)
        next_code = ((three[at] | (three[at + 1] << 16)) >> (bit & 15)) & 7
        field = torch.where(code == 0, second[next_code], first.index_select(0, code.to(torch.int32)))
        rest = parts["rest"][span].to(torch.int16)
        yield span.start, (rest & 0x80) << 8 | field << 7 | rest & 0x7F


def listed_words(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the flat tensor the listed weights are, and their words, without waiting for the device."""
    block = parts["rest"].numel() // parts["starts"].numel()
    order = torch.arange(parts["positions"].numel(), device=parts["rest"].device, dtype=torch.int32)
    indices = (torch.searchsorted(parts["listed"], order, right=True) - 1) * block + parts["positions"]
    rest = parts["rest"][indices].to(torch.int16)
    return indices, (rest & 0x80) << 8 | parts["exponents"].to(torch.int16) << 7 | rest & 0x7F
