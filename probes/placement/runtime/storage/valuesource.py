"""What a placement asks of the values of a model: the module itself has them, or a checkpoint."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from probes.placement.models.modules import Entry
from probes.placement.packing.packed import Packed
from probes.placement.runtime.blocks.blockstore import Stored, raw_view
from probes.placement.runtime.blocks.lanes import Lanes
from probes.placement.runtime.blocks.wires import Wire


class PackedValues(Protocol):
    """A packed tensor that may be elsewhere: its outline, and how its bytes come to their places."""

    @property
    def outline(self) -> Packed:
        """The tensor, its parts perhaps on meta, all but `starts`."""

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Write parts of the outline into buffers; False where the values aren't what they were."""


class Source(Protocol):
    """Where a model's values come from: the module itself, or a checkpoint.

    `again`: values may be asked for twice, so packed ones aren't kept in memory until they have their place.
    """

    again: bool

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """Write the values into `target`, of the entry's shape, on the host or in VRAM.

        They are converted where its dtype isn't the model's. Raises PlacementError for a number that it can't
        hold.
        """

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """The values packed, dimensions as in memory (`as_stored`); None where that saves nothing.

        `dense`: with 3-bit codes.
        """

    def way_back(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """How the model's own values are found again once `view` has them converted."""

    def wire(self, stored: Stored, lanes: Lanes) -> Wire:
        """For the tier `disk`: what reads the block in each pass. Raises PlacementError if nothing can."""

    def close(self) -> None:
        """Nothing is asked for any more."""


def own_values(source: Source, entry: Entry) -> torch.Tensor:
    """The model's own values in host memory of their own."""
    view = raw_view(entry, torch.empty(entry.given_bytes, dtype=torch.uint8, device="cpu"), entry.given)
    source.fill(entry, view)
    return view
