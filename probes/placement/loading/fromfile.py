"""The values of a model's parameters and buffers, read from a checkpoint when they are asked for."""

from collections.abc import Sequence

import torch
from torch import nn

from probes.errors import PlacementError
from probes.placement.loading.checkpoint import Checkpoint
from probes.placement.loading.fitting import Filling, fit, targets, torch_dtype
from probes.placement.loading.tensorbytes import bring
from probes.placement.packing.disk.content import Origin
from probes.placement.packing.staging import Buffers, bytes_of
from probes.placement.runtime.converting import refusal

COMPARED_BYTES = 16 << 20


class CheckpointValues:
    """Fills tensors, of any device, with the values that the checkpoint has for a model's parameters.

    A parameter is known by itself, not by a name: ties and shared modules have several names.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, *, ignored: Sequence[str] = ()) -> None:
        self._checkpoint = checkpoint
        self._targets = targets(model)
        shaped = checkpoint.tensors
        fillings = fit(self._targets, shaped, where=str(checkpoint.path), ignored=ignored)
        self._fillings = {id(filling.target.tensor): filling for filling in fillings}
        self.buffers = Buffers()
        for filling in fillings:
            self._refuse_unequal_ties(filling)

    def bring(
        self, parameter: torch.Tensor, target: torch.Tensor, *, first: int = 0, buffers: Buffers | None = None
    ) -> None:
        """Fill `target` with the values of a parameter of the model, from the `first` on.

        They are converted where its dtype is another. Raises CheckpointUnreadable, and PlacementError for a
        number that is too large for that dtype.
        """
        name = self._fillings[id(parameter)].sources[0]
        stored = self.dtype(parameter)

        def read(memory: memoryview, start: int) -> None:
            self._checkpoint.read_into(name, memory, first * stored.itemsize + start)

        try:
            bring(read, stored, target, given=parameter.dtype, buffers=buffers or self.buffers)
        except OverflowError as error:
            raise refusal(name, error) from error

    def dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype that the parameter is stored in."""
        name = self._fillings[id(parameter)].sources[0]
        found = torch_dtype(self._checkpoint.tensors[name])
        assert found is not None  # else it didn't fit the model
        return found

    def origin(self, parameter: torch.Tensor, order: tuple[int, ...]) -> Origin | None:
        """Where the parameter's bytes are in a file; None where they are of another dtype there.

        `order`: of its dimensions in memory, from the slowest to the quickest.
        """
        stored = self._checkpoint.tensors[self._fillings[id(parameter)].sources[0]]
        if torch_dtype(stored) is not parameter.dtype:
            return None
        moved = order if order != tuple(range(len(order))) else ()
        path, start = self._checkpoint.file_of(stored.name), stored.offset
        dtype = str(parameter.dtype).removeprefix("torch.")
        return Origin(path, start, start + stored.n_bytes, dtype, stored.shape, moved)

    def fill_buffers(self) -> None:
        """Read the buffers that the checkpoint has. The others keep the values that the factory gave them."""
        for filling in list(self._fillings.values()):
            if not filling.target.is_parameter:
                self._fill_buffer(filling)

    def _fill_buffer(self, filling: Filling) -> None:
        known = filling.target.tensor
        filled = torch.empty_like(known, device="cpu" if known.is_meta else known.device)
        self.bring(known, filled)
        for module, name in filling.target.owners:
            module._buffers[name] = filled
        self._fillings[id(filled)] = filling

    def _refuse_unequal_ties(self, filling: Filling) -> None:
        """Two stored tensors for one parameter must be equal: the model would use one of them for both."""
        first, *others = filling.sources
        for other in others:
            if not self._equal(first, other):
                raise PlacementError(
                    f"the model uses one tensor for {first} and {other}, and {self._checkpoint.path} has "
                    "different values for them",
                    "build the model without tied weights, or save the checkpoint again",
                )

    def _equal(self, one: str, other: str) -> bool:
        stored = [self._checkpoint.tensors[name] for name in (one, other)]
        if (stored[0].dtype, stored[0].n_bytes) != (stored[1].dtype, stored[1].n_bytes):
            return False
        left, right = (torch.empty(COMPARED_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2))
        for start in range(0, stored[0].n_bytes, COMPARED_BYTES):
            count = min(COMPARED_BYTES, stored[0].n_bytes - start)
            for name, buffer in ((one, left), (other, right)):
                self._checkpoint.read_into(name, bytes_of(buffer)[:count], start)
            if not torch.equal(left[:count], right[:count]):
                return False
        return True
