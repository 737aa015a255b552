"""Writes the values of blocks into the memory of their tiers, and notes how each comes to the host again."""

from collections.abc import Callable
from functools import partial

import torch

from probes.errors import PlacementError
from probes.placement.models.modules import Block, Entry
from probes.placement.packing.packed import packed_in
from probes.placement.packing.tensors import unpack
from probes.placement.runtime.blocks.blockstore import Item, raw_view
from probes.placement.runtime.blocks.homes import Homes
from probes.placement.runtime.converting import require_entry, require_packed
from probes.placement.runtime.storage.laying import Settled
from probes.placement.runtime.storage.valuesource import PackedValues, Source, own_values


class Filler:
    """Brings values from their source to memory, and lets the parameters' homes know where."""

    def __init__(self, source: Source, homes: Homes) -> None:
        self.source, self.homes = source, homes
        self._ways_back: dict[int, Callable[[], torch.Tensor]] = {}

    def fill(self, one: Settled, memory: torch.Tensor) -> None:
        """Write the block's bytes, and let its parameters have theirs there.

        Raises PlacementError for values that changed meanwhile or that can't be converted.
        """
        for index, item in enumerate(one.stored.items):
            if item.form is None:
                self._fill_plain(item.entry, item.raw(memory))
                continue
            if packed := one.packed[index]:
                _fill_packed(item, packed, memory)
            else:
                self.source.fill(item.entry, item.given(memory))
                require_entry(item.entry, item.given(memory))
            self.homes.later(item.entry, partial(_unpacked_from, item, memory))
        one.packed = ()

    def keep_on_host(self, block: Block) -> None:
        """A model that is built has its values there already; one on meta gets memory for them."""
        for entry in block.entries:
            if entry.parameter.is_meta or entry.converts:
                self._fill_plain(
                    entry, raw_view(entry, torch.empty(entry.n_bytes, dtype=torch.uint8, device="cpu"))
                )
            else:
                self.homes.adopt(entry, entry.parameter.detach())

    def leave_on_disk(self, block: Block) -> None:
        """Each pass reads the block. Raises PlacementError for values that can't be converted."""
        for entry in block.entries:
            if entry.converts and entry.dtype is torch.float16:  # no pass looks for large numbers
                require_entry(entry, own_values(self.source, entry))
            self.homes.later(entry, partial(own_values, self.source, entry))

    def see(self, one: Settled, seen: torch.Tensor) -> None:
        """Let the parameters of a block that was filled have its memory as the GPU sees it."""
        assert one.memory is not None
        for item in one.stored.items:
            fetch = self._ways_back.get(id(item.entry)) or partial(item.raw, one.memory)
            self.homes.adopt(item.entry, item.raw(seen), fetch)

    def forget(self) -> None:
        """Release what the notes hold."""
        self._ways_back.clear()

    def _fill_plain(self, entry: Entry, view: torch.Tensor) -> None:
        self.source.fill(entry, view)
        self.homes.adopt(entry, view, self._way_back(entry, view))

    def _way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """How the values come to the host again; None where `view` has them there."""
        if entry.converts:
            self._ways_back[id(entry)] = self.source.way_back(entry, view)
            return self._ways_back[id(entry)]
        return None if view.device.type == "cpu" else partial(_itself, view)


def _fill_packed(item: Item, packed: PackedValues, memory: torch.Tensor) -> None:
    places = [memory[unit.offset :][: unit.n_bytes] for unit in item.units]
    parts = [packed.outline.part(unit.first, unit.last) for unit in item.units]
    if not packed.write(list(zip(parts, places, strict=True))):
        raise PlacementError(f"{item.entry.name} changed while it was loaded", "load it again")
    for unit, place in zip(item.units, places, strict=True):
        assert unit.form
        require_packed(item.entry, packed_in(unit.form, place))


def _itself(view: torch.Tensor) -> torch.Tensor:
    """The values where they are: a copy beside them may not fit."""
    return view


def _unpacked_from(item: Item, memory: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(item.entry.given_bytes, dtype=torch.uint8, device="cpu")
    item.write(item.bytes(memory).cpu(), flat.view(item.entry.given), unpack)
    return raw_view(item.entry, flat, item.entry.given)
