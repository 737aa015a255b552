"""Ordered queues of device work: one that computes, one that copies, one that unpacks.

The runtime hands work to a lane and orders lanes by marks, as CUDA's streams and events do. `CudaLanes` is
that. `HostLanes` does everything at once, for machines without a GPU. Tests have lanes that put work off for
as long as the marks allow, to find an order that isn't enforced.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Work = Callable[[], object]


class Mark(Protocol):
    """A place in a lane, recorded again and again. A wait for it means its latest recording."""

    def reached(self) -> bool:
        """Whether all work before it is done."""

    def block(self) -> None:
        """Let the calling thread wait until it is reached."""


class Lane(Protocol):
    """Work in order. Marks are of the same `Lanes`."""

    def run(self, work: Work) -> None:
        """Append work."""

    def record(self, mark: Any) -> None:
        """Let the mark be reached when all work so far is done."""

    def wait(self, mark: Any) -> None:
        """Do nothing that follows before the mark is reached."""


class Lanes(Protocol):
    """The three lanes of a device. `compute` is where the model's own operations go."""

    device: torch.device
    compute: Lane
    copy: Lane
    unpack: Lane

    def mark(self) -> Mark:
        """A mark that nothing has recorded yet."""

    def reads(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """The compute lane is about to read these tensors. For tests; does nothing elsewhere."""

    def finish(self) -> None:
        """Wait until every lane is done."""


class _NowMark:
    """Reached already."""

    def reached(self) -> bool:
        return True

    def block(self) -> None:
        """Nothing to wait for."""


class _Now:
    """A lane whose work is done when it is handed over."""

    def run(self, work: Work) -> None:
        work()

    def record(self, mark: Any) -> None:
        """Reached already."""

    def wait(self, mark: Any) -> None:
        """Reached already."""


class HostLanes:
    """Everything in the calling thread, in the order in which it comes."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.compute: Lane = _Now()
        self.copy: Lane = self.compute
        self.unpack: Lane = self.compute

    def mark(self) -> Mark:
        """A mark that is always reached."""
        return _NowMark()

    def reads(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to check."""

    def finish(self) -> None:
        """Nothing is under way."""


class _Event:
    """A CUDA (or HIP) event."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def reached(self) -> bool:
        return bool(self.event.query())

    def block(self) -> None:
        self.event.synchronize()


class _Stream:
    """A CUDA (or HIP) stream of our own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._context = torch.cuda.stream(self.stream)

    def run(self, work: Work) -> None:
        with self._context:
            work()

    def record(self, mark: _Event) -> None:
        mark.event.record(self.stream)

    def wait(self, mark: _Event) -> None:
        self.stream.wait_event(mark.event)


class _Current:
    """Whichever stream is current when work comes: the caller's."""

    def run(self, work: Work) -> None:
        work()

    def record(self, mark: _Event) -> None:
        mark.event.record()

    def wait(self, mark: _Event) -> None:
        mark.event.wait()


class CudaLanes:
    """Two streams of our own beside the caller's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute: Lane = _Current()
        self.copy: Lane = _Stream(device)
        self.unpack: Lane = _Stream(device)

    def mark(self) -> Mark:
        """An event."""
        return _Event()

    def reads(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to check."""

    def finish(self) -> None:
        """Wait for the whole device."""
        torch.cuda.synchronize(self.device)
