"""A packed tensor: the layouts of its bits, its parts, and its way into and out of one flat buffer.

An outline is a packed tensor that is elsewhere: its parts are on meta, all but `starts`, which says where it
can be cut.

A weight has a sign and a mantissa, which are noise, and an exponent, which in trained and in Gaussian weights
takes few values. So sign and mantissa are stored as they are, and the exponent as a code of 2 or 4 bits.

==========  ==================  ====  =======================================================================
layout      dtype               bits  exponent
==========  ==================  ====  =======================================================================
``b12``     bfloat16            12    4-bit code: base + code; code 0 is zero; escapes in a list
``f28``     float32             28    the same, with 24 bits of sign and mantissa
``b10``     bfloat16            10    2-bit code of a table; code 0 is an escape to a stream of 3-bit codes
``h13``     float16             13    the same, with 11 bits of sign and mantissa
``b12f32``  float32             12    `b12`, for weights whose low 16 bits are all zero
``h13f32``  float32             13    `h13`, for weights that were float16 once
``bf16``    bfloat16            16    as it is, for weights that are converted before each call
==========  ==================  ====  =======================================================================
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Final

import torch

from probes.placement.packing.format import Grid, PackedForm, PartForm, grid


@dataclass(frozen=True)
class Layout:
    """How tensors of `dtype` are packed: as `via`, the same dtype or a narrower one that holds the values."""

    name: str
    dtype: torch.dtype
    via: torch.dtype
    coded_bits: int  # of an exponent's code: 4 with a list of escapes, 2 with a table, 8 as it is

    @property
    def word(self) -> torch.dtype:
        """The integer as wide as `via`."""
        return torch.int32 if self.via is torch.float32 else torch.int16

    @property
    def sign_shift(self) -> int:
        """Where the sign's bit is."""
        return 31 if self.word is torch.int32 else 15

    @property
    def exponent_bits(self) -> int:
        """Bits of an exponent."""
        return 5 if self.via is torch.float16 else 8

    @property
    def mantissa_bits(self) -> int:
        """Bits of a mantissa."""
        return self.sign_shift - self.exponent_bits


B12: Final = Layout("b12", torch.bfloat16, torch.bfloat16, 4)
F28: Final = Layout("f28", torch.float32, torch.float32, 4)
B10: Final = Layout("b10", torch.bfloat16, torch.bfloat16, 2)
H13: Final = Layout("h13", torch.float16, torch.float16, 2)
B12F32: Final = Layout("b12f32", torch.float32, torch.bfloat16, 4)
H13F32: Final = Layout("h13f32", torch.float32, torch.float16, 2)
BF16: Final = Layout("bf16", torch.bfloat16, torch.bfloat16, 8)
LAYOUTS: Final = {layout.name: layout for layout in (B12, F28, B10, H13, B12F32, H13F32, BF16)}


@dataclass(frozen=True)
class Packed:
    """One packed tensor. `parts` are flat tensors on one device; their dtypes and order are the layout's.

    With 4-bit codes, an exponent is `base` + code. With 2-bit codes, `table` has the exponents of codes 1 to
    3, and then those of the 3-bit codes.
    """

    layout: Layout
    shape: tuple[int, ...]
    parts: Mapping[str, torch.Tensor]
    base: int = 0
    table: tuple[int, ...] = ()

    @property
    def grid(self) -> Grid:
        """How the weights are arranged."""
        return grid(self.shape)

    @cached_property
    def device(self) -> torch.device:
        """Where all parts are."""
        return next(iter(self.parts.values())).device

    @property
    def n_weights(self) -> int:
        """Weights in the tensor."""
        return self.grid.weights

    @property
    def packed_bytes(self) -> int:
        """Bytes of all parts, without alignment."""
        return sum(part.nbytes for part in self.parts.values())

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Packed":
        """A copy on another device."""
        parts = {name: part.to(device, non_blocking=non_blocking) for name, part in self.parts.items()}
        return Packed(self.layout, self.shape, parts, base=self.base, table=self.table)

    def piece(self, first: int, last: int, escapes: slice) -> "Packed":
        """The rows `first` to `last` of a grid of 4-bit codes, in the same memory; `escapes` are theirs."""
        cut = self.grid
        parts = {name: part[first * cut.width : last * cut.width] for name, part in self.parts.items()}
        parts["codes"] = self.parts["codes"][first * cut.width // 2 : last * cut.width // 2]
        parts |= {name: self.parts[name][escapes] for name in ("values", "positions")}
        parts["starts"] = self.parts["starts"][first // cut.group_rows : -(-last // cut.group_rows) + 1]
        return Packed(self.layout, (last - first, cut.width), parts, base=self.base)

    @property
    def unit(self) -> int:
        """Weights that parts of it are multiples of, and so many that they take a multiple of 8 bytes."""
        if self.table:
            return int(self.parts["rest"].numel() // (self.parts["starts"].numel() // 2 - 1))
        return self.grid.width * max(self.grid.group_rows, 4)

    def part(self, first: int, last: int) -> "Packed":
        """The weights `first` to `last`, multiples of `unit` or the last; it may wait for the device.

        The whole, where it can't be cut: a part needs whole rows.
        """
        if (first, last) == (0, self.n_weights):
            return self
        if self.table:
            return self._blocks(first // self.unit, -(-last // self.unit), last - first)
        starts, (top, bottom) = self.parts["starts"], (at // self.grid.width for at in (first, last))
        begin, end = (int(starts[-(-row // self.grid.group_rows)] - starts[0]) for row in (top, bottom))
        return self.piece(top, bottom, slice(begin, end))

    def _blocks(self, first: int, last: int, weights: int) -> "Packed":
        """Blocks of 2-bit codes; where their parts of the stream and of the list begin is counted again."""
        starts = self.parts["starts"].view(2, -1)
        own = starts[:, first : last + 1]
        stream, listed = (slice(*edges) for edges in own[:, [0, -1]].tolist())
        blocks = starts.shape[1] - 1
        parts = {
            name: part[first * part.numel() // blocks : last * part.numel() // blocks]
            for name, part in self.parts.items()
        }
        parts["stream"] = self.parts["stream"].view(-1, 3)[stream].view(-1)
        parts |= {name: self.parts[name][listed] for name in ("positions", "exponents")}
        parts["starts"] = (own - own[:, :1]).reshape(-1)
        return Packed(self.layout, (weights,), parts, table=self.table)

    def cut(self, most: int) -> "list[tuple[int, Packed]]":
        """Equal parts of at most `most` bytes each, where that is possible, and the weight each begins at."""
        n, padded = self.n_weights, not self.table and self.grid.padding
        if self.layout is BF16 or padded:
            return [(0, self)]
        count = 1
        while True:
            step = -(-n // (count * self.unit)) * self.unit
            parts = [(first, self.part(first, min(first + step, n))) for first in range(0, n, step)]
            largest = max(form(part).n_bytes for _, part in parts)
            if largest <= most or step == self.unit:
                return parts
            count = max(count + 1, -(-count * largest // most))


def form(packed: Packed) -> PackedForm:
    """What has to be known to find the packed tensor in a flat buffer; it has a JSON form."""
    parts = tuple(
        PartForm(name, str(part.dtype).removeprefix("torch."), part.numel())
        for name, part in packed.parts.items()
    )
    return PackedForm(packed.layout.name, packed.shape, packed.base, packed.table, parts)


def as_it_is(shape: tuple[int, ...]) -> PackedForm:
    """The form of bfloat16 weights that aren't packed, but converted when they are unpacked."""
    return PackedForm(BF16.name, shape, 0, (), (PartForm("words", "int16", prod(shape)),))


def packed_in(of: PackedForm, flat: torch.Tensor) -> Packed:
    """The packed tensor whose bytes are in `flat`, uint8 of at least `of.n_bytes`. Nothing is copied.

    Raises ValueError for a buffer that is too short or of another dtype, and for an unknown layout.
    """
    _check(of, flat)
    parts = {part.name: view for part, view in zip(of.parts, _views(of, flat), strict=True)}
    return Packed(LAYOUTS[of.layout], of.shape, parts, base=of.base, table=of.table)


Put = Callable[[int, torch.Tensor], None]  # takes bytes of a flat buffer: where they begin there, and uint8


def outline(of: PackedForm, starts: torch.Tensor) -> Packed:
    """The outline of a packed tensor. Parts of it know where in the whole's flat buffer they are."""
    whole = packed_in(of, torch.empty(of.n_bytes, dtype=torch.uint8, device="meta"))
    return replace(whole, parts={**whole.parts, "starts": starts})


def scattered(parts: Iterable[tuple[Packed, torch.Tensor]]) -> Put:
    """What takes the bytes of an outline's flat buffer to where its parts are written.

    `parts`: parts of the outline, and for each a buffer as in `write_into`.
    """
    places = [place for part, flat in parts for place in write_into(part, flat)]

    def put(start: int, piece: torch.Tensor) -> None:
        for begin, view in places:
            low, high = max(begin, start), min(begin + view.numel(), start + piece.numel())
            if low < high:
                view[low - begin : high - begin].copy_(piece[low - start : high - start])

    return put


def write_into(packed: Packed, flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Copy the parts to their places in `flat`, on any device; the gaps that alignment leaves become zero.

    Parts on meta aren't copied: returns where in the whole's flat buffer they begin, and their places, as
    bytes. Raises ValueError for a buffer that is too short or of another dtype.
    """
    of = form(packed)
    _check(of, flat)
    missing = []
    ends = [*of.offsets()[1:], of.n_bytes]
    for part, view, end in zip(packed.parts.values(), _views(of, flat), ends, strict=True):
        if part.is_meta:
            missing.append((part.storage_offset() * part.itemsize, view.view(torch.uint8)))
        else:
            view.copy_(part)
        flat[end - (-part.nbytes % 256) : end] = 0
    return missing


def _check(of: PackedForm, flat: torch.Tensor) -> None:
    if of.layout not in LAYOUTS:
        raise ValueError(f"there is no layout {of.layout!r}; the layouts are {', '.join(LAYOUTS)}")
    if flat.dtype is not torch.uint8 or flat.ndim != 1 or flat.numel() < of.n_bytes:
        raise ValueError(
            f"a packed tensor of {of.n_bytes:,} bytes needs a flat uint8 buffer of that size, "
            f"not {tuple(flat.shape)} of {flat.dtype}"
        )


def _views(of: PackedForm, flat: torch.Tensor) -> list[torch.Tensor]:
    return [
        flat[start : start + part.n_bytes].view(getattr(torch, part.dtype))
        for start, part in zip(of.offsets(), of.parts, strict=True)
    ]
