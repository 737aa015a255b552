"""Where a moving block's bytes come from: memory that holds them, or files that are read ahead."""

from functools import partial
from typing import Protocol

import torch

from probes.placement.runtime.blocks.lanes import Lane


class Wire(Protocol):
    """The source of one block's bytes, laid out as its `Stored` says."""

    def announce(self) -> None:
        """The block is called soon: begin to get its bytes, in another thread. Returns at once."""

    def ready(self) -> bool:
        """Whether `send` wouldn't make the calling thread wait."""

    def send(self, target: torch.Tensor, lane: Lane) -> None:
        """Append to the lane a copy of all bytes into `target`. Waits for the bytes where they aren't ready.

        What the copy reads stays unchanged until the lane has done it.
        """

    def whole(self) -> torch.Tensor:
        """All bytes, on whatever device they are. For reads that no call announced; may be slow."""

    def recover(self) -> None:
        """A step was interrupted, perhaps here: forget what was announced. All copies have been made."""


class Held:
    """Bytes that stay in memory, of the host or in VRAM."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def announce(self) -> None:
        """Nothing to get."""

    def ready(self) -> bool:
        """Always."""
        return True

    def send(self, target: torch.Tensor, lane: Lane) -> None:
        """One copy; asynchronous where the bytes are pinned."""
        lane.run(partial(target.copy_, self._flat, non_blocking=True))

    def whole(self) -> torch.Tensor:
        """The bytes themselves."""
        return self._flat

    def recover(self) -> None:
        """Nothing changes here."""
