"""Packs a tensor and unpacks it: always the same bits back.

On a GPU that Triton supports, kernels unpack (`launch`); everywhere else torch operations do.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Final

import torch

from probes.placement.packing import codecs, launch
from probes.placement.packing.codecs import Place, best_table, block_of
from probes.placement.packing.format import PackedForm, PartForm, aligned, grid, worth_it
from probes.placement.packing.packed import (
    B10,
    B12,
    B12F32,
    BF16,
    F28,
    H13,
    H13F32,
    LAYOUTS,
    Layout,
    Packed,
    Put,
    outline,
)

_USUAL: Final[Mapping[torch.dtype, Layout]] = MappingProxyType(
    {torch.bfloat16: B12, torch.float16: H13, torch.float32: F28}
)

_SAMPLE: Final = 1 << 20  # weights that the choice of codes is made by
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_LEAST: Final = 0.85  # share of weights with a code, below which no layout saves anything


@dataclass(frozen=True)
class Values:
    """A tensor in the order of memory, whether or not it is in memory as a whole.

    `read` gives the values from one to another, flat, on the device. It may write them into the bytes that it
    is given, if any, on the host.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    read: Callable[[int, int, torch.Tensor | None], torch.Tensor]

    @staticmethod
    def of(tensor: torch.Tensor) -> "Values":
        """Those of a tensor in memory."""
        flat = tensor.detach().resolve_neg().contiguous().view(-1)  # without gradients
        return Values(tensor.dtype, tuple(tensor.shape), flat.device, lambda first, last, _: flat[first:last])

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All values, and where each piece begins."""
        step = codecs.chunk(self.device)
        for first in range(0, prod(self.shape), step):
            yield first, self.read(first, min(first + step, prod(self.shape)), None)


def pack(tensor: torch.Tensor, *, dense: bool = False, layout: Layout | None = None) -> Packed | None:
    """Pack a tensor on its device, or return None where that isn't worth it or its dtype has no layout.

    `dense` chooses 2-bit codes for bfloat16 (10.9 bits a weight instead of 12), from which no product can
    be computed. With a `layout` of its dtype, it is packed so even where that isn't worth it. A subclass of
    Tensor isn't packed: its bits may not be its own.
    """
    if type(tensor) not in _PLAIN or tensor.is_meta:
        return None
    parts: dict[str, torch.Tensor] = {}

    def place(name: str, start: int, piece: torch.Tensor) -> None:
        parts[name][start : start + piece.numel()] = piece

    def allocate(sizes: Mapping[str, int]) -> Place:
        for name, size in sizes.items():
            parts[name] = torch.empty(size, dtype=torch.uint8, device=tensor.device)
        return place

    encoded = _encode(Values.of(tensor), allocate, dense=dense, layout=layout)
    if encoded is None:
        return None
    of, others = encoded
    return Packed(LAYOUTS[of.layout], of.shape, parts | others, base=of.base, table=of.table)


def pack_into(put: Put | None, values: Values, *, dense: bool = False) -> Packed | None:
    """Pack values that may not be in memory as a whole, as `pack` does, and return the outline.

    `put` gets the bytes of the flat buffer, in no order, without the gaps between its parts. Where packing
    isn't worth it, it may have got bytes that are of no use. Without it, only the outline is found, which is
    less work.
    """
    offsets: dict[str, int] = {}

    def place(name: str, start: int, piece: torch.Tensor) -> None:
        assert put
        put(offsets[name] + start, piece.to(torch.uint8))

    def allocate(sizes: Mapping[str, int]) -> Place | None:
        ends = accumulate(aligned(size) for size in sizes.values())
        offsets.update(zip(sizes, (0, *ends), strict=False))
        return place if put else None

    encoded = _encode(values, allocate, dense=dense)
    if encoded is None:
        return None
    of, others = encoded
    for part, offset in zip(of.parts, of.offsets(), strict=True):
        if put and part.name in others:
            put(offset, others[part.name].view(torch.uint8))
    return outline(of, others["starts"].cpu())


def unpack(packed: Packed, out: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor with the bits that it had, written into `out` where given.

    `out` has the same shape. With another floating-point dtype, which a GPU without bfloat16 units needs,
    the values are converted: to float32 exactly, to float16 rounded. Nothing waits for the device, so a graph
    can capture it. Raises ValueError for another shape or device.
    """
    if out is None:
        out = torch.empty(packed.shape, dtype=packed.layout.dtype, device=packed.device)
    if tuple(out.shape) != packed.shape or out.device != packed.device:
        raise ValueError(
            f"a packed tensor of shape {packed.shape} on {packed.device} can't be unpacked into "
            f"one of shape {tuple(out.shape)} on {out.device}"
        )
    with torch.no_grad():
        if not _unpack_by_kernel(packed, out):
            unpack_by_operations(packed, out)
    return out


def unpack_by_operations(packed: Packed, out: torch.Tensor) -> None:
    """Unpack by torch operations alone, in pieces whose temporaries take less than 100 MB."""
    flat = out.view(-1) if out.is_contiguous() else torch.empty_like(out).contiguous().view(-1)
    parts, cut = dict(packed.parts), packed.grid
    if packed.layout is BF16:
        flat.copy_(parts["words"].view(torch.bfloat16))
        if not out.is_contiguous():
            out.copy_(flat.view(packed.shape))
        return
    pieces: Iterator[tuple[int, torch.Tensor]]
    if packed.table:
        pieces = codecs.decode_planes(packed.layout, parts, packed.table)
    else:
        pieces = codecs.decode_window(packed.layout, parts, cut, packed.base)
    for start, words in pieces:
        piece = flat[start : start + words.numel()]
        piece.copy_(_floats(packed.layout, words[: piece.numel()]))
    if packed.table:
        indices, words = codecs.listed_words(packed.layout, parts)
    else:
        indices, words = codecs.escape_indices(parts, cut), parts["values"]
    if words.numel():
        flat[indices] = _floats(packed.layout, words).to(flat.dtype)
    if not out.is_contiguous():
        out.copy_(flat.view(packed.shape))


def _unpack_by_kernel(packed: Packed, out: torch.Tensor) -> bool:
    """False where no kernel does it."""
    layout, cut = packed.layout, packed.grid
    fits = out.is_contiguous() and out.dtype is layout.dtype is layout.via
    if not fits or layout is BF16 or not launch.usable(packed.device):
        return False
    if packed.table:
        return launch.unpack_planes(packed.parts, out, table=packed.table, low_bits=layout.mantissa_bits - 7)
    launch.unpack_window(
        packed.parts, out, rows=cut.rows, width=cut.width, group_rows=cut.group_rows, base=packed.base
    )
    return True


def _encode(
    values: Values,
    allocate: Callable[[Mapping[str, int]], Place | None],
    *,
    dense: bool,
    layout: Layout | None = None,
) -> tuple[PackedForm, dict[str, torch.Tensor]] | None:
    """Place the large parts, for which `allocate` gets the bytes. Returns the form and the other parts."""
    n = prod(values.shape)
    if values.dtype not in _USUAL or not n:
        return None
    always = layout is not None
    layout = layout or _narrowest(values, dense=dense)
    code = _code(layout, values, least=-1.0 if always else _LEAST)
    if code is None:
        return None
    base, table = code

    def read(first: int, last: int) -> torch.Tensor:
        piece = _words(layout, values.read(first, min(last, n), None))
        padding = table[0] << layout.mantissa_bits if table else 0
        return torch.nn.functional.pad(piece, (0, last - n), value=padding) if last > n else piece

    words = codecs.Words(values.device, read)
    if table:
        padded = n + -n % block_of(n)
        sizes = codecs.planes_parts(layout, padded)
        others = codecs.encode_planes(layout, words, padded, table=table, place=allocate(sizes))
    else:
        cut = grid(values.shape)
        sizes = codecs.window_parts(layout, cut)
        others = codecs.encode_window(layout, words, cut, base=base, place=allocate(sizes))
    parts = [PartForm(name, "uint8", size) for name, size in sizes.items()]
    parts += [
        PartForm(name, str(part.dtype).removeprefix("torch."), part.numel()) for name, part in others.items()
    ]
    of = PackedForm(layout.name, values.shape, base, table, tuple(parts))
    return (of, others) if always or worth_it(of.n_bytes, n * values.dtype.itemsize) else None


def _narrowest(values: Values, *, dense: bool) -> Layout:
    """The layout for weights: one of 16 bits for float32 weights where the others say nothing."""
    if values.dtype is not torch.float32:
        return B10 if dense and values.dtype is torch.bfloat16 else _USUAL[values.dtype]
    narrow = half = True
    for _, piece in values.pieces():
        narrow = narrow and not bool((piece.view(torch.int32) & 0xFFFF).any())
        half = half and _is_half(piece)
        if not narrow and not half:
            return F28
    return B12F32 if narrow else H13F32


def _is_half(piece: torch.Tensor) -> bool:
    half = piece.to(torch.float16)
    # a NaN's bits depend on who converts it
    return not half.isnan().any() and torch.equal(
        half.to(torch.float32).view(torch.int32), piece.view(torch.int32)
    )


def _code(layout: Layout, values: Values, *, least: float) -> tuple[int, tuple[int, ...]] | None:
    """The base or table that most weights have a code with; None where less than a share `least` has one."""
    # an odd step: no column of a matrix is preferred; and a sample that says no may be wrong
    for step in (prod(values.shape) // _SAMPLE | 1, 1):
        counts, zeros = _counts(layout, values, step)
        if layout.coded_bits == 2:
            base, (table, share) = 0, best_table(counts)
        else:
            table, (base, share) = (), codecs.best_base(counts)
            share += zeros
        if share >= least:
            return base, table
        if step == 1:
            break
    return None


def _counts(layout: Layout, values: Values, step: int) -> tuple[torch.Tensor, float]:
    """How often each exponent occurs in every `step`-th weight, and the share of zeros."""
    bins = 1 << layout.exponent_bits
    counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
    zeros = torch.zeros((), dtype=torch.int64, device=values.device)
    for start, piece in values.pieces():
        words = _words(layout, piece[-start % step :: step])
        field = (words >> layout.mantissa_bits) & (bins - 1)
        counts += torch.bincount(field.to(torch.int32), minlength=bins)
        zeros += ((words << 1) == 0).sum()
    return counts, float(zeros / counts.sum().clamp(min=1))


def _words(layout: Layout, piece: torch.Tensor) -> torch.Tensor:
    """Weights as the integers that are packed."""
    if layout is B12F32:
        return (piece.view(torch.int32) >> 16).to(torch.int16)
    return piece.to(layout.via).view(layout.word)


def _floats(layout: Layout, words: torch.Tensor) -> torch.Tensor:
    """The weights that words are."""
    if layout is B12F32:
        return (words.to(torch.int32) << 16).view(torch.float32)
    floats = words.view(layout.via)
    return floats.to(torch.float32) if layout is H13F32 else floats
