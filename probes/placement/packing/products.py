"""Products of a few rows with packed weights, and single rows of them, without unpacking them all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from probes.placement.packing import launch
from probes.placement.packing.format import Grid, fused
from probes.placement.packing.layouts import B12, Layout
from probes.placement.packing.packed import Packed

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
    found, values = Grown(torch.int64, words.device), Grown(layout.word, words.device)
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
        found.append(indices + start)
    return _escapes(values.whole(), found.whole(), cut)


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


def linear(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear` with packed weights, or None where unpacking them first is better.

    `x` has shape (..., k), `packed` (n, k), `bias` (n); the result has shape (..., n), all bfloat16. Sums are
    float32's, rounded once, but in another order than the library's. Elements of `x` from 2^67 on overflow.
    Nothing waits for the device, and no memory is taken except the result's, so a graph can capture it after
    a first call, which compiles the kernel. None also where `x` isn't on the weights' device or it has no
    Triton, and for layouts other than `b12`.
    """
    if packed.layout is not B12 or len(packed.shape) != 2 or not launch.usable(packed.device):
        return None
    n, k = packed.shape
    if x.dtype is not torch.bfloat16 or x.device != packed.device or not x.ndim or x.shape[-1] != k:
        return None
    if bias is not None and (bias.dtype, bias.device, bias.shape) != (x.dtype, x.device, (n,)):
        return None
    narrow = launch.has_narrow_wavefronts(packed.device)
    tile = fused(x.numel() // k, packed.shape, narrow=narrow)
    if tile is None or (torch.is_grad_enabled() and x.requires_grad):
        return None
    y = x.new_empty((*x.shape[:-1], n))
    launch.multiply(
        x.contiguous(),
        packed.parts,
        y,
        base=packed.base,
        bias=None if bias is None else bias.contiguous(),
        rows=tile.rows,
        columns=tile.columns,
        warps=tile.warps,
        stages=tile.stages,
    )
    return y


def rows(packed: Packed, ids: torch.Tensor, *, most_escapes: int) -> torch.Tensor:
    """`torch.nn.functional.embedding` with a packed `b12` matrix: the same bits, of shape (*ids.shape, k).

    `ids` are whole numbers of any shape; no row of the matrix has more than `most_escapes`. Nothing waits for
    the device, so a graph can capture it. Raises IndexError for an id out of range on the CPU; a GPU ends in
    torch's own assertion.
    """
    flat = ids.reshape(-1)
    if launch.usable(packed.device) and flat.numel():
        found = torch.empty((flat.numel(), packed.shape[1]), dtype=torch.bfloat16, device=packed.device)
        launch.unpack_rows(packed.parts, flat, found, base=packed.base)
    else:
        words = decode_window_rows(
            packed.layout, packed.parts, flat, base=packed.base, most_escapes=most_escapes
        )
        found = words.contiguous().view(torch.bfloat16)
    return found.view(*ids.shape, packed.shape[1])
