"""Where weights come from: the whole model's when it is placed, one block's in each pass.

`ModelWeights` is the first, of which `ModuleWeights` is a model that is already built (`loading.py` has one
for checkpoints). `WeightSource` is the second, in host memory or VRAM (`read_ahead.py` has one for files).
Conversions between dtypes that lose numbers are refused or noted here.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from probes.core.errors import PlacementError
from probes.placement.models.modules import Entry
from probes.placement.packing.packed import Packed, write_into
from probes.placement.packing.tensors import pack, unpack
from probes.placement.runtime.buffers import StoredBlock, as_stored, room_for
from probes.placement.runtime.streams import Stream, Streams
from probes.placement.tensor_reading import require_range


class WeightSource:
    """The source of one block's bytes, laid out as its `StoredBlock` says; here they stay in memory."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def announce(self) -> None:
        """The block is called soon: begin to get its bytes, in another thread. Returns at once."""

    def ready(self) -> bool:
        """Whether `send` wouldn't make the calling thread wait."""
        return True

    def send(self, target: torch.Tensor, stream: Stream) -> None:
        """Append to the stream a copy of all bytes into `target`. Waits for bytes that aren't ready.

        What the copy reads stays unchanged until the stream has done it.
        """
        stream.run(partial(target.copy_, self._flat, non_blocking=True))

    def whole(self) -> torch.Tensor:
        """All bytes, on whatever device they are. For reads that no call announced; may be slow."""
        return self._flat

    def recover(self) -> None:
        """A step was interrupted, perhaps here: forget what was announced. All copies have been made."""


class PackedValues(Protocol):
    """A packed tensor that may be elsewhere: its outline, and how its bytes come to their places."""

    @property
    def outline(self) -> Packed:
        """The tensor, its parts perhaps on meta, all but `starts`."""

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Write parts of the outline into buffers; False where the values aren't what they were."""


class ModelWeights(Protocol):
    """Where a model's values come from: the module itself, or a checkpoint.

    `rereadable`: values may be asked for twice, so packed ones needn't stay in memory until they are placed.
    """

    rereadable: bool

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """Write the values into `target`, of the entry's shape, on the host or in VRAM.

        They are converted where its dtype isn't the model's. Raises PlacementError for a number that it can't
        hold.
        """

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """The values packed, dimensions as in memory (`as_stored`); None where that saves nothing.

        `dense`: with 2-bit codes.
        """

    def restorer(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """How the model's own values are found again once `view` has them converted."""

    def weight_source(self, stored: StoredBlock, streams: Streams) -> WeightSource:
        """For the tier `disk`: what reads the block in each pass. Raises PlacementError if nothing can."""

    def close(self) -> None:
        """Nothing is asked for any more."""


def given_values(source: ModelWeights, entry: Entry) -> torch.Tensor:
    """The model's own values in host memory of their own."""
    view = room_for(entry, "cpu", entry.given)
    source.fill(entry, view)
    return view


class ModuleWeights:
    """A model that is already built. Its tensors are packed on `device` where they fit there.

    Its own values are released when they have been packed.
    """

    rereadable = False

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def fill(self, entry: Entry, target: torch.Tensor) -> None:
        """Copy the parameter's values into `target`."""
        values = self._values(entry)
        if target.dtype is not entry.given:
            require_entry_range(entry, values)
        target.copy_(values)

    def _values(self, entry: Entry) -> torch.Tensor:
        if entry.parameter.is_meta:
            raise PlacementError(
                f"{entry.name} has no values yet (it is on meta)", "load a checkpoint: load()"
            )
        return entry.parameter.detach()

    def packed(self, entry: Entry, *, dense: bool) -> PackedValues | None:
        """The values packed now, on the GPU if there is one."""
        packed = _packed_on(self._device, as_stored(entry, self._values(entry)), dense=dense)
        return _PackedInMemory(packed) if packed else None

    def restorer(self, entry: Entry, view: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Converted back; what the conversion changed is noted now."""
        return partial(Correction.of(self._values(entry), entry.dtype).undo, entry, view)

    def weight_source(self, stored: StoredBlock, _streams: Streams) -> WeightSource:
        """A module that is built has no file."""
        raise PlacementError(
            f"{stored.block.name} can't be read from disk: a model that is already built has no file",
            "load the model from its checkpoint with load(), or plan with more host memory",
        )

    def close(self) -> None:
        """Do nothing: no file is open."""


@dataclass(frozen=True)
class _PackedInMemory:
    """A packed tensor in memory."""

    outline: Packed

    def write(self, parts: Sequence[tuple[Packed, torch.Tensor]]) -> bool:
        """Copy each part into its place; True: all are written."""
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


@dataclass(frozen=True, eq=False)
class Correction:
    """The numbers that a conversion changes: where they are, and what they were.

    From bfloat16 to float16 these are numbers below 2^-17 with bits that float16 doesn't hold, to float32
    only those that aren't numbers. So it is small as a rule, and the converted values need no copy.
    """

    places: tuple[torch.Tensor, ...]
    values: torch.Tensor

    @staticmethod
    def of(values: torch.Tensor, dtype: torch.dtype) -> "Correction":
        """What converting these values changes."""
        bits = _BITS[values.dtype.itemsize]
        plain = values.contiguous()
        lost = plain.view(bits) != plain.to(dtype).to(values.dtype).view(bits)
        places = lost.nonzero(as_tuple=True)  # of a single number, too, as if it had a dimension
        return Correction(places, torch.atleast_1d(plain)[places])

    def undo(self, entry: Entry, converted: torch.Tensor) -> torch.Tensor:
        """The values as the model had them, in host memory."""
        values = room_for(entry, "cpu", entry.given)
        values.copy_(converted)
        torch.atleast_1d(values)[self.places] = self.values
        return values


_BITS = {2: torch.int16, 4: torch.int32}
_FIRST_BEYOND = 143  # the biased exponent of 2^16 in bfloat16; float16 ends below it


def require_entry_range(entry: Entry, values: torch.Tensor) -> None:
    """Raise PlacementError, naming the parameter, where what it computes in doesn't hold the values."""
    if entry.dtype is torch.float16 and entry.converts:
        try:
            require_range(values, entry.dtype)
        except OverflowError as error:
            raise conversion_error(entry.name, error) from error


def require_packed_range(entry: Entry, packed: Packed) -> None:
    """Raise PlacementError, naming the parameter, where float16 doesn't hold the packed values.

    They are unpacked only where their exponents leave a doubt.
    """
    if entry.dtype is not torch.float16 or not entry.converts:
        return
    if packed.table:
        largest, others = max(packed.table), packed.parts["exponents"]
    else:
        largest, others = packed.base + 15, (packed.parts["values"] >> 7) & 255
    if largest >= _FIRST_BEYOND or bool((others >= _FIRST_BEYOND).any()):
        require_entry_range(entry, unpack(packed.to("cpu")))


def conversion_error(name: str, why: object) -> PlacementError:
    """The error for a tensor with a number that is too large."""
    return PlacementError(
        f"{name} can't be converted: {why}",
        "plan with compute='float32' (--compute float32), or build the model in float32, which holds all of "
        "them, or in the checkpoint's own dtype",
    )
