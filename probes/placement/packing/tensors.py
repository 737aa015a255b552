"""Packs a tensor and unpacks it: always the same bits back.

On a GPU that Triton supports, kernels unpack (`launch`); everywhere else torch operations do.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import torch

from probes.placement.packing import ranked, window
from probes.placement.packing.estimate import worth_it
from probes.placement.packing.grid import grid
from probes.placement.packing.kernels import launching
from probes.placement.packing.layouts import B11, B12, B12F32, BF16, F28, H14, H14F32, Layout
from probes.placement.packing.packed import Packed, form

_USUAL: Final[Mapping[torch.dtype, Layout]] = MappingProxyType(
    {torch.bfloat16: B12, torch.float16: H14, torch.float32: F28}
)
_SAMPLE: Final = 1 << 20  # weights that the choice of codes is made by
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_LEAST: Final = 0.85  # share of weights with a code, below which no layout saves anything


def pack(tensor: torch.Tensor, *, dense: bool = False) -> Packed | None:
    """Pack a tensor on its device, or return None where that isn't worth it or its dtype has no layout.

    `dense` chooses 3-bit codes for bfloat16 (11.2 bits a weight instead of 12), from which no product can
    be computed. A subclass of Tensor isn't packed: its bits may not be its own.
    """
    if type(tensor) not in _PLAIN or tensor.dtype not in _USUAL or not tensor.numel() or tensor.is_meta:
        return None
    with torch.no_grad():
        flat = tensor.detach().resolve_neg().contiguous().view(-1)
        layout, words = _narrowest(flat, dense=dense)
        packed = _pack(layout, words, tuple(tensor.shape))
    return packed if packed and worth_it(form(packed).n_bytes, packed.raw_bytes) else None


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
        pieces = ranked.decoded(packed.layout, parts, packed.table)
    else:
        pieces = window.decoded(packed.layout, parts, cut, packed.base)
    for start, words in pieces:
        piece = flat[start : start + words.numel()]
        piece.copy_(_floats(packed.layout, words[: piece.numel()]))
    if not packed.table and parts["values"].numel():
        indices = window.escape_indices(parts, cut)
        flat[indices] = _floats(packed.layout, parts["values"]).to(flat.dtype)
    if not out.is_contiguous():
        out.copy_(flat.view(packed.shape))


def _unpack_by_kernel(packed: Packed, out: torch.Tensor) -> bool:
    """False where no kernel does it."""
    layout, cut = packed.layout, packed.grid
    fits = out.is_contiguous() and out.dtype is layout.dtype is layout.via
    if not fits or layout is BF16 or not launching.usable(packed.device):
        return False
    if packed.table:
        return launching.unpack_ranked(
            packed.parts, out, table=packed.table, low_bits=layout.mantissa_bits - 7
        )
    launching.unpack_window(
        packed.parts, out, rows=cut.rows, width=cut.width, group_rows=cut.group_rows, base=packed.base
    )
    return True


def _narrowest(flat: torch.Tensor, *, dense: bool) -> tuple[Layout, torch.Tensor]:
    """The layout for weights, and their words: 16 bits of float32 weights where the others say nothing."""
    if flat.dtype is torch.float32:
        words = flat.view(torch.int32)
        if not (words & 0xFFFF).any():
            return B12F32, (words >> 16).to(torch.int16)
        half = flat.to(torch.float16)
        # a NaN's bits depend on who converts it
        if not half.isnan().any() and torch.equal(half.to(torch.float32).view(torch.int32), words):
            return H14F32, half.view(torch.int16)
        return F28, words
    layout = B11 if dense and flat.dtype is torch.bfloat16 else _USUAL[flat.dtype]
    return layout, flat.view(torch.int16)


def _pack(layout: Layout, words: torch.Tensor, shape: tuple[int, ...]) -> Packed | None:
    sampled = words[:: (words.numel() // _SAMPLE) | 1]  # an odd step: no column of a matrix is preferred
    for sample in (sampled, words):  # a sample that says no may be wrong
        counts = _exponent_counts(layout, sample)
        if layout.coded_bits == 3:
            table, share = ranked.best_table(counts)
            base = 0
        else:
            base, share = window.best_base(counts)
            share, table = share + _zeros(sample), ()
        if share >= _LEAST:
            break
        if sample.numel() == words.numel():
            return None
    if layout.coded_bits == 3:
        padding = -words.numel() % ranked.block_of(words.numel())
        padded = torch.nn.functional.pad(words, (0, padding), value=table[0] << layout.mantissa_bits)
        return Packed(layout, shape, ranked.encode(layout, padded, table), table=table)
    cut = grid(shape)
    padded = torch.nn.functional.pad(words, (0, cut.padding)) if cut.padding else words
    return Packed(layout, shape, window.encode(layout, padded, cut, base), base=base)


def _exponent_counts(layout: Layout, words: torch.Tensor) -> torch.Tensor:
    """How often each exponent occurs."""
    bins = 1 << layout.exponent_bits
    counts = torch.zeros(bins, dtype=torch.int64, device=words.device)
    for piece in words.split(window.chunk(words.device)):
        field = (piece >> layout.mantissa_bits) & (bins - 1)
        counts += torch.bincount(field.to(torch.int32), minlength=bins)
    return counts


def _zeros(words: torch.Tensor) -> float:
    """The share of zeros, which need no code."""
    return float(((words << 1) == 0).sum() / max(words.numel(), 1))


def _floats(layout: Layout, words: torch.Tensor) -> torch.Tensor:
    """The weights that words are."""
    if layout is B12F32:
        return (words.to(torch.int32) << 16).view(torch.float32)
    floats = words.view(layout.via)
    return floats.to(torch.float32) if layout is H14F32 else floats
