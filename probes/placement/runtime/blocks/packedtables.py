"""A packed table in VRAM that is never unpacked as a whole: an embedding, tied with an output layer or not.

A lookup unpacks the rows that it needs, with the same bits. A product is computed straight from the packed
weights where the objective allows it and the input has few rows, else with one piece of the table after the
other, unpacked into room that the table has for it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from probes.placement.models.modules import Block, Entry
from probes.placement.packing.forms import aligned
from probes.placement.packing.packed import Packed
from probes.placement.packing.products import rows
from probes.placement.packing.tiles import is_table, piece_bytes, piece_rows
from probes.placement.runtime.blocks.blockstore import memory_order

Product = Callable[[torch.Tensor, Packed, torch.Tensor | None], torch.Tensor | None]


def can_be_table(block: Block) -> bool:
    """Whether the block is one matrix whose rows can be unpacked one by one."""
    (first, *more) = block.entries
    dtype = str(first.dtype).removeprefix("torch.")
    plain = not first.converts and memory_order(first) == (0, 1)
    return not more and plain and is_table(first.shape, dtype)


def room_of(entry: Entry) -> int:
    """Bytes beside the packed table that its products need: none where it is only looked up."""
    looked_up = all(isinstance(owner, nn.Embedding) for owner, _ in entry.owners)
    return 0 if looked_up else aligned(piece_bytes(entry.shape))


class Table:
    """One packed matrix and the room for a piece of it, both on one device.

    `fused` multiplies few rows with packed weights, or returns None; None: every product has the library's
    own kernels.
    """

    def __init__(
        self,
        packed: Packed,
        room: torch.Tensor,
        *,
        unpack: Callable[[Packed, torch.Tensor], Any],
        fused: Product | None,
    ) -> None:
        self._packed, self._unpack, self._fused = packed, unpack, fused
        n, width = packed.shape
        starts = packed.parts["starts"]
        self._most_escapes = int((starts[1:] - starts[:-1]).max())
        each = piece_rows(packed.shape)
        edges = [*range(0, n, each), n]
        escapes = starts[edges].tolist()
        self._pieces = [
            (first, last, packed.piece(first, last, slice(*found)))
            for first, last, *found in zip(edges, edges[1:], escapes, escapes[1:], strict=False)
        ]
        self._piece = room.view(torch.bfloat16)[: each * width].view(each, width) if room.numel() else None

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows `ids`, as `torch.nn.functional.embedding` gives them."""
        return rows(self._packed, ids, most_escapes=self._most_escapes)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """`torch.nn.functional.linear` with the table; None where it has no room for a piece."""
        found = self._fused(x, self._packed, bias) if self._fused else None
        if found is not None or self._piece is None:
            return found
        for first, last, piece in self._pieces:
            weights = self._piece[: last - first]
            self._unpack(piece, weights)
            part = F.linear(x, weights, None if bias is None else bias[first:last])
            if found is None:
                found = part.new_empty((*part.shape[:-1], self._packed.shape[0]))
            found[..., first:last] = part
        return found
