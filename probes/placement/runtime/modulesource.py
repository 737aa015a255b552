"""The values of a model that is already built."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from probes.errors import PlacementError
from probes.placement.models.modules import Entry
from probes.placement.packing.packed import Packed, write_into
from probes.placement.packing.tensors import pack
from probes.placement.runtime.blocks.blockstore import Stored, as_stored
from probes.placement.runtime.blocks.lanes import Lanes
from probes.placement.runtime.blocks.wires import Wire
from probes.placement.runtime.converting import Correction, require_entry
from probes.placement.runtime.storage.valuesource import PackedValues


class ModuleSource:
    """A model that is already built. Its tensors are packed on `device` where they fit there.

    Its own values are released when they have been packed.
    """

    again = False

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """The parameter's own."""
        values = self._values(entry)
        if target.dtype is not entry.given:
            require_entry(entry, values)
        target.copy_(values)

    def _values(self, entry: Entry) -> torch.Tensor:
        if entry.parameter.is_meta:
            raise PlacementError(
                f"{entry.name} has no values yet (it is on meta)", "load a checkpoint: load()"
            )
        return entry.parameter.detach()

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """Packed now."""
        packed = _packed_on(self._device, as_stored(entry, self._values(entry)), dense=dense)
        return _InMemory(packed) if packed else None

    def way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Converted back; what the conversion changed is noted now."""
        return partial(Correction.of(self._values(entry), entry.dtype).undo, entry, view)

    def wire(self, stored: Stored, _lanes: Lanes) -> Wire:
        """A module that is built has no file."""
        raise PlacementError(
            f"{stored.block.name} can't be read from disk: a model that is already built has no file",
            "load the model from its checkpoint with load(), or plan with more host memory",
        )

    def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class _InMemory:
    """One that is in memory."""

    outline: Packed

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Copy."""
        for part, flat in parts:
            write_into(part, flat)
        return True


def _packed_on(device: torch.device, stored: torch.Tensor, *, dense: bool = False) -> Packed | None:
    """The tensor packed on a GPU, which is quicker, or on the host where that has too little memory."""
    if device.type == "cuda":
        with suppress(torch.cuda.OutOfMemoryError):
            packed = pack(stored.to(device), dense=dense)
            return packed.to("cpu") if packed else None
    return pack(stored.cpu(), dense=dense)
