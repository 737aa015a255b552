"""Blocks of the tier `disk`: a thread reads them into pinned buffers before they are called.

A few buffers are shared by all blocks. A buffer is filled again when the device has copied what was in it. A
block that nobody announced is read when it is called; where every buffer holds a block that was announced and
has not been called, the oldest of these gives its buffer up.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from probes.placement.packing.staging import HostBuffers, bytes_of
from probes.placement.packing.threads import Threads, renew_in_forks
from probes.placement.runtime.streams import Event, Stream
from probes.placement.runtime.weight_sources import require_range

Fill = Callable[[torch.Tensor], None]  # reads a block into memory of its size


@dataclass(eq=False)
class ReadBuffer:
    """Pinned memory for one block. `copied` is reached when the device has read it."""

    memory: torch.Tensor
    copied: Event
    used: bool = field(default=False)  # `copied` was recorded

    def wait(self) -> None:
        """Let the calling thread wait until the buffer may be overwritten."""
        if self.used:
            self.copied.block()


class ReadAhead:
    """The buffers, and the thread that fills them. Its methods are called by one thread at a time."""

    def __init__(self, buffers: Sequence[ReadBuffer]) -> None:
        self._buffers = tuple(buffers)
        self._free = deque(buffers)
        self._begun: OrderedDict[FileSource, tuple[ReadBuffer, Future[None]]] = OrderedDict()
        self._reader = Threads(1, "weir-read-ahead")
        self.late = 0  # blocks that had to be waited for
        renew_in_forks(self)

    def widen(self, n_bytes: int, wider: Callable[[], Sequence[ReadBuffer]]) -> None:
        """Have buffers for blocks of so many bytes, before any is read; `wider` makes new ones if need be."""
        if n_bytes > self._free[0].memory.numel():
            self._buffers = tuple(wider())
            self._free = deque(self._buffers)

    def begin(self, wire: "FileSource") -> None:
        """Read a block if there is a buffer for it. Returns at once."""
        if wire not in self._begun and self._free:
            self._begin(wire, self._free.popleft())

    def is_read(self, wire: "FileSource") -> bool:
        """Whether the block is in a buffer, or reading it failed."""
        begun = self._begun.get(wire)
        return begun is not None and begun[1].done()

    def send(self, wire: "FileSource", target: torch.Tensor, lane: Stream) -> None:
        """Append to the lane a copy of the block; waits until it is read. Raises CheckpointUnreadable."""
        if wire not in self._begun:
            self._begin(wire, self._free.popleft() if self._free else self._begun.popitem(last=False)[1][0])
        buffer, reading = self._begun.pop(wire)
        self.late += not reading.done()
        try:
            reading.result()
            lane.run(partial(target.copy_, buffer.memory[: target.numel()], non_blocking=True))
            lane.record(buffer.copied)
            buffer.used = True
        finally:
            self._free.append(buffer)

    def recover(self) -> None:
        """Have all buffers again after an interruption at any moment. Waits for what is being read."""
        for _, reading in self._begun.values():
            reading.cancel()
        self._reader.submit(int).result()
        self.renew()

    def renew(self) -> None:
        """Nothing is being read: in a forked child, nobody reads."""
        self._begun.clear()
        self._free = deque(self._buffers)

    def _begin(self, wire: "FileSource", buffer: ReadBuffer) -> None:
        def read() -> None:
            buffer.wait()
            wire.fill(buffer.memory[: wire.n_bytes])

        self._begun[wire] = (buffer, self._reader.submit(read))

    def close(self) -> None:
        """End the thread. What was begun is read to its end."""
        self._reader.shutdown(cancel_futures=True)


@dataclass(frozen=True, eq=False)
class FileSource:
    """One block in a file: where the runtime gets its bytes."""

    ahead: ReadAhead
    n_bytes: int
    fill: Fill

    def announce(self) -> None:
        """Begin to read it."""
        self.ahead.begin(self)

    def ready(self) -> bool:
        """Whether it is read."""
        return self.ahead.is_read(self)

    def send(self, target: torch.Tensor, lane: Stream) -> None:
        """Append to the lane a copy of all bytes into `target`. Raises CheckpointUnreadable."""
        self.ahead.send(self, target[: self.n_bytes], lane)

    def whole(self) -> torch.Tensor:
        """All bytes, read now into memory of their own on the host. Raises CheckpointUnreadable."""
        found = torch.empty(self.n_bytes, dtype=torch.uint8, device="cpu")
        self.fill(found)
        return found

    def recover(self) -> None:
        """Have all buffers again, those of other blocks too."""
        self.ahead.recover()


Read = Callable[[memoryview, int], None]  # fills the memory from that byte of the stored tensor on


def convert_into(
    read: Read, stored: torch.dtype, target: torch.Tensor, *, given: torch.dtype, buffers: HostBuffers
) -> None:
    """Fill `target`, of any device and strides, with stored numbers in row-major order.

    They are converted by way of `given`, the model's own dtype. Raises OverflowError where a number is too
    large for it or for the target's.
    """
    if target.is_contiguous() and target.device.type == "cpu" and target.dtype is given is stored:
        read(bytes_of(target), 0)
        return

    def piece(start: int, memory: torch.Tensor) -> None:
        read(bytes_of(memory), start)
        values = memory.view(stored)
        for dtype in (given, target.dtype):
            if dtype is not values.dtype:
                require_range(values, dtype)
                values = values.to(dtype)
        with torch.inference_mode(target.is_inference()):
            _write_flat(target, start // stored.itemsize, values)

    buffers.each(target.numel() * stored.itemsize, piece)


def _write_flat(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """Write flat values into a tensor of any strides, from its number `first` in row-major order on."""
    if target.is_contiguous():
        target.view(-1)[first : first + values.numel()].copy_(values)
        return
    row = target[0].numel()
    while values.numel():
        at, start = divmod(first, row)
        whole = 0 if start else values.numel() // row
        count = whole * row or min(row - start, values.numel())
        if whole:
            target[at : at + whole].copy_(values[:count].view(whole, *target.shape[1:]))
        else:
            _write_flat(target[at], start, values[:count])
        first, values = first + count, values[count:]
