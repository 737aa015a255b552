"""A packed table in VRAM that is never unpacked as a whole: an embedding, tied with an output layer or not.

A lookup unpacks the rows that it needs, with the same bits. A product is computed straight from the packed
weights where the objective is `fast` and the input has few rows, else with one piece of the table after the
other, unpacked into room that the table has for it.

A library may choose another kernel for a piece than for the whole, one that adds in another order. So with
the objective `exact` pieces serve inputs of a shape only after their products were seen to have the bits of
the whole's, which is read in place in host memory for that; otherwise that product is the result itself.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from probes.placement.packing.format import piece_rows
from probes.placement.packing.packed import Packed
from probes.placement.packing.products import rows


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of products on `cuda` (AMD's GPUs too) or `cpu`; None where autocast is off."""
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None


Product = Callable[[torch.Tensor, Packed, torch.Tensor | None], torch.Tensor | None]


class PackedTable:
    """One packed matrix and the room for a piece of it, both on one device.

    `fused` multiplies few rows with packed weights, or returns None. `fast`: products may round otherwise
    than the library's. `whole`: the weights as that device reads them in host memory, to compare with.
    """

    def __init__(
        self,
        packed: Packed,
        room: torch.Tensor,
        *,
        unpack: Callable[[Packed, torch.Tensor], Any],
        fused: Product,
        fast: bool,
        whole: torch.Tensor | None,
    ) -> None:
        self._packed, self._unpack, self._fused = packed, unpack, fused
        self._fast, self._whole = fast, whole
        self._same: dict[Hashable, bool] = {}  # whether pieces give the whole's bits, by what a product is of
        n, width = packed.shape
        starts = packed.parts["starts"]
        self._most_escapes = int((starts[1:] - starts[:-1]).max())
        each = piece_rows(packed.shape)
        edges = [*range(0, n, each), n]
        escapes = starts[edges].tolist()
        self._pieces = [
            (first, last, packed.piece(first, last, slice(*escape_range)))
            for first, last, *escape_range in zip(edges, edges[1:], escapes, escapes[1:], strict=False)
        ]
        self._piece = room.view(torch.bfloat16)[: each * width].view(each, width) if room.numel() else None

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids`, as `torch.nn.functional.embedding` gives them."""
        return rows(self._packed, ids, most_escapes=self._most_escapes)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """`torch.nn.functional.linear` with the table; None where nothing but the whole table will do."""
        if self._piece is None:
            return None
        if self._fast:
            product = self._fused(x, self._packed, bias)
            return self._in_pieces(x, bias) if product is None else product
        if self._whole is None:
            return None
        return self._in_pieces(x, bias) if self._seen_same(x, bias) else F.linear(x, self._whole, bias)

    def _in_pieces(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts = self._products(x, bias)
        first, last, part = next(parts)
        product = part.new_empty((*part.shape[:-1], self._packed.shape[0]))
        product[..., first:last] = part
        for first, last, part in parts:
            product[..., first:last] = part
        return product

    def _products(
        self, x: torch.Tensor, bias: torch.Tensor | None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The product with each piece, and which columns of the whole product that is."""
        assert self._piece is not None
        for first, last, piece in self._pieces:
            weights = self._piece[: last - first]
            self._unpack(piece, weights)
            yield first, last, F.linear(x, weights, None if bias is None else bias[first:last])

    def _seen_same(self, x: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether products of such inputs have the same bits in pieces: compared once, for random ones.

        Kernels are chosen by shapes and dtypes and not by values. While a graph is recorded nothing can be
        compared: it then holds the whole's product, unless its shape was seen before.
        """
        cast = autocast_dtype(x.device.type)
        key = (tuple(x.shape), x.stride(), x.dtype, None if bias is None else bias.dtype, cast)
        if key not in self._same:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            with torch.no_grad():
                self._same[key] = self._is_same(x, bias)
        return self._same[key]

    def _is_same(self, x: torch.Tensor, bias: torch.Tensor | None) -> bool:
        assert self._whole is not None
        probe = torch.empty_like(x).normal_(generator=torch.Generator(x.device).manual_seed(0))
        whole = F.linear(probe, self._whole, bias)
        return all(
            torch.equal(_bits(part), _bits(whole[..., first:last]))
            for first, last, part in self._products(probe, bias)
        )


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)
