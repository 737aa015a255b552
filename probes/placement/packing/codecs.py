"""The codes for exponents: 4 bits within a window, or 2 for the first three and 3 more for the next eight."""

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


FIRST: Final = 3  # exponents with 2-bit codes, which are 1 to 3; code 0 is an escape
NEXT: Final = 8  # with 3-bit codes, in a stream of the escapes'
_BLOCK: Final = 8192  # what the kernel handles
_SMALL_BLOCK: Final = 256
_TOGETHER: Final = 16  # 3-bit codes in three words of the stream; a block's are padded to a multiple


def block_of(weights: int) -> int:
    """Weights in a block: 8,192, or 256 in a small tensor, or all of them made a multiple of 8."""
    return min(_BLOCK if weights >= DENSE_FROM else _SMALL_BLOCK, -(-weights // 8) * 8)


def best_table(counts: torch.Tensor) -> tuple[tuple[int, ...], float]:
    """The exponents with 2-bit codes, then those with 3-bit ones, and the share of weights that all have."""
    chosen = counts.argsort(descending=True, stable=True)[: FIRST + NEXT]
    share = float(counts[chosen].sum() / counts.sum().clamp(min=1))
    return tuple(sorted(chosen[:FIRST].tolist()) + sorted(chosen[FIRST:].tolist())), share


def encode_planes(
    layout: Layout, words: Words, n: int, *, table: tuple[int, ...], place: Place | None
) -> dict[str, torch.Tensor]:
    """Place the large parts of `n` words, a whole number of blocks, if wanted; the others are returned."""
    block, low_bits, device = block_of(n), layout.mantissa_bits - 7, words.device
    # grown, not listed, as in `encode_window`
    stream, positions, listed = (Grown(dtype, device) for dtype in (torch.int16, torch.int16, torch.uint8))
    counts = Grown(torch.int64, device)
    code_of, next_of = _coding(table, device)
    for span in _block_chunks(n, block, device):
        piece = words.read(span.start, span.stop)
        field = exponents(layout, piece)
        code = code_of(field)
        if place:
            sign = (piece >> layout.exponent_bits) & (1 << layout.mantissa_bits)
            place("rest", span.start, (sign | (piece & ((1 << layout.mantissa_bits) - 1))) >> low_bits)
            if low_bits:
                low = (piece.to(torch.uint8) & ((1 << low_bits) - 1)) << 1
                place("low", span.start // 2, _pack_bits(low | (code >> 1), bits=4, block=block))
                place("two", span.start // 8, _pack_bits(code & 1, bits=1, block=block))
            else:
                place("two", span.start // 4, _pack_bits(code, bits=2, block=block))
        escapes = code.logical_not().nonzero().squeeze(1)
        escaped = field[escapes]
        next_code = next_of.index_select(0, escaped.to(torch.int32))
        in_blocks = _by_block(escapes, block, piece.numel())
        stream.append(_streamed(next_code & (NEXT - 1), in_blocks))
        without = (next_code == NEXT).nonzero().squeeze(1)
        places = escapes[without]
        positions.append((places % block).to(torch.int16))
        listed.append(escaped[without])
        counts.append(
            torch.stack((_rounded_up(in_blocks), _by_block(places, block, piece.numel()))).T.reshape(-1)
        )
    ends = torch.nn.functional.pad(counts.whole().view(-1, 2).cumsum(0).T, (1, 0)).to(torch.int32)
    return {
        "stream": stream.whole(),
        "starts": ends.reshape(-1),
        "positions": positions.whole(),
        "exponents": listed.whole(),
    }


def _coding(
    table: tuple[int, ...], device: torch.device
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """What makes 2-bit codes of exponents; and by exponent the 3-bit one, NEXT for what has none."""
    code_of = torch.zeros(256, dtype=torch.uint8, device=device)
    next_of = torch.full((256,), NEXT, dtype=torch.uint8, device=device)
    for code, exponent in enumerate(table[:FIRST], start=1):
        code_of[exponent] = code
    for code, exponent in enumerate(table[FIRST:]):
        next_of[exponent] = code
    if table[FIRST - 1] - table[0] == FIRST - 1:  # by arithmetic; what is below wraps to large bytes
        return lambda field: (field - table[0]).clamp_(max=FIRST).add_(1).bitwise_and_(FIRST), next_of
    return lambda field: code_of.index_select(0, field.to(torch.int32)), next_of


def _by_block(indices: torch.Tensor, block: int, n: int) -> torch.Tensor:
    """How many of the ascending indices below `n` are in each block."""
    return torch.searchsorted(indices, torch.arange(0, n + 1, block, device=indices.device)).diff()


def _rounded_up(counts: torch.Tensor) -> torch.Tensor:
    """The room of so many 3-bit codes in the stream, in units of `_TOGETHER` codes."""
    return (counts + _TOGETHER - 1) // _TOGETHER


def _streamed(codes: torch.Tensor, in_blocks: torch.Tensor) -> torch.Tensor:
    """The words of the stream for 3-bit codes in order, of which each block has so many."""
    room = _rounded_up(in_blocks) * _TOGETHER
    moved = (room.cumsum(0) - room) - (in_blocks.cumsum(0) - in_blocks)
    to = torch.arange(codes.numel(), device=codes.device) + moved.repeat_interleave(in_blocks)
    padded = torch.zeros(int(room.sum()), dtype=torch.uint8, device=codes.device)
    padded[to] = codes
    together = padded  # integers alone: a GPU's power of a floating-point number is off by its last bit
    for bits, dtype in ((3, torch.uint8), (6, torch.int32), (12, torch.int32), (24, torch.int64)):
        pairs = together.view(-1, 2).to(dtype)
        together = pairs[:, 0] | (pairs[:, 1] << bits)
    return together.view(torch.int16).view(-1, 4)[:, :3].reshape(-1)


def _codes_in(stream: torch.Tensor) -> torch.Tensor:
    """The 3-bit codes of a stream, in bytes; of an empty one a single code, which nobody reads."""
    codes = torch.zeros(max(stream.numel() // 3 * _TOGETHER, 1), dtype=torch.uint8, device=stream.device)
    step = chunk(stream.device) // 4
    for first in range(0, stream.numel() // 3, step):
        words = stream[3 * first : 3 * (first + step)].view(-1, 3).to(torch.int64) & 0xFFFF
        together = words[:, 0] | (words[:, 1] << 16) | (words[:, 2] << 32)
        to = codes[_TOGETHER * first :][: _TOGETHER * together.numel()].view(-1, _TOGETHER)
        for at in range(_TOGETHER):
            to[:, at] = together >> (3 * at) & (NEXT - 1)
    return codes


def planes_parts(layout: Layout, n: int) -> dict[str, int]:
    """The parts whose bytes are known before the `n` words are."""
    return (
        {"rest": n, "low": n // 2, "two": n // 8} if layout.mantissa_bits > 7 else {"rest": n, "two": n // 4}
    )


def decode_planes(
    layout: Layout, parts: dict[str, torch.Tensor], table: tuple[int, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of the words in order, each with the index that it begins at; listed ones aren't right yet."""
    n, low_bits, device = parts["rest"].numel(), layout.mantissa_bits - 7, parts["rest"].device
    block = n // blocks_of(parts)
    # filled on the device: a copy from the host can't be captured in a graph
    exponent_of = torch.stack([torch.full((), e, dtype=torch.int16, device=device) for e in (0, *table)])
    next_codes = _codes_in(parts["stream"])
    for span in _block_chunks(n, block, device):
        if low_bits:
            low = _unpack_bits(parts["low"], span, bits=4, block=block)
            code = _unpack_bits(parts["two"], span, bits=1, block=block) | ((low & 1) << 1)
        else:
            low = code = _unpack_bits(parts["two"], span, bits=2, block=block)
        is_escape = code == 0
        escape = is_escape.view(-1, block).to(torch.int32)
        rank = escape.cumsum(1, dtype=torch.int32) - escape
        rank += parts["starts"][span.start // block : span.stop // block, None] * _TOGETHER
        next_code = next_codes.index_select(0, rank.view(-1).clamp(max=next_codes.numel() - 1))
        index = (code | (next_code + (FIRST + 1)) * is_escape).to(torch.int32)
        yield span.start, _words(layout, parts["rest"][span], exponent_of.index_select(0, index), low)


def listed_words(layout: Layout, parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the flat tensor listed weights are, and their words, without waiting for the device."""
    blocks = blocks_of(parts)
    block = parts["rest"].numel() // max(blocks, 1)
    order = torch.arange(parts["positions"].numel(), device=parts["rest"].device, dtype=torch.int32)
    at = torch.searchsorted(parts["starts"][blocks + 1 :], order, right=True) - 1
    indices, half, low = at * block + parts["positions"], block // 2, None
    if layout.mantissa_bits > 7:
        byte = parts["low"][at * half + parts["positions"] % half]
        low = byte >> (4 * (parts["positions"] // half)) & 15
    return indices, _words(layout, parts["rest"][indices], parts["exponents"].to(torch.int16), low)


def _words(layout: Layout, rest: torch.Tensor, field: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """The words of weights, of 4 bits of `low` where mantissas have more than 7 the upper 3."""
    low_bits, rest = layout.mantissa_bits - 7, rest.to(torch.int16)
    mantissa = (rest & 0x7F) << low_bits
    if low_bits and low is not None:
        mantissa |= (low >> 1).to(torch.int16)
    return (rest >> 7 << layout.sign_shift) | (field << layout.mantissa_bits) | mantissa


def blocks_of(parts: Mapping[str, torch.Tensor]) -> int:
    """How many blocks there are: `starts` has where each begins in the stream, and likewise in the list."""
    return int(parts["starts"].numel() // 2 - 1)


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
