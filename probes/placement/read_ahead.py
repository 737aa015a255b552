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

from probes.placement.packing.threads import Threads, renew_in_forks
from probes.placement.runtime.streams import Event, Stream
from probes.placement.runtime.weight_sources import WeightSource

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

    def begin(self, weight_source: "FileSource") -> None:
        """Begin to read a block if there is a buffer for it. Returns at once."""
        if weight_source not in self._begun and self._free:
            self._begin(weight_source, self._free.popleft())

    def is_read(self, weight_source: "FileSource") -> bool:
        """Whether the block is in a buffer, or reading it failed."""
        begun = self._begun.get(weight_source)
        return begun is not None and begun[1].done()

    def send(self, weight_source: "FileSource", target: torch.Tensor, stream: Stream) -> None:
        """Append to the stream a copy of the block; waits until it is read. Raises CheckpointUnreadable."""
        if weight_source not in self._begun:
            self._begin(
                weight_source, self._free.popleft() if self._free else self._begun.popitem(last=False)[1][0]
            )
        buffer, reading = self._begun.pop(weight_source)
        self.late += not reading.done()
        try:
            reading.result()
            stream.run(partial(target.copy_, buffer.memory[: target.numel()], non_blocking=True))
            stream.record(buffer.copied)
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

    def _begin(self, weight_source: "FileSource", buffer: ReadBuffer) -> None:
        def read() -> None:
            buffer.wait()
            weight_source.fill(buffer.memory[: weight_source.n_bytes])

        self._begun[weight_source] = (buffer, self._reader.submit(read))

    def close(self) -> None:
        """End the thread. What was begun is read to its end."""
        self._reader.shutdown(cancel_futures=True)


@dataclass(frozen=True, eq=False)
class FileSource(WeightSource):
    """The weight source of one block that is read from a file in each pass."""

    ahead: ReadAhead
    n_bytes: int
    fill: Fill

    def announce(self) -> None:
        """Begin to read the block."""
        self.ahead.begin(self)

    def ready(self) -> bool:
        """Return whether the block has been read."""
        return self.ahead.is_read(self)

    def send(self, target: torch.Tensor, stream: Stream) -> None:
        """Append to the stream a copy of all bytes into `target`. Raises CheckpointUnreadable."""
        self.ahead.send(self, target[: self.n_bytes], stream)

    def whole(self) -> torch.Tensor:
        """All bytes, read now into memory of their own on the host. Raises CheckpointUnreadable."""
        memory = torch.empty(self.n_bytes, dtype=torch.uint8, device="cpu")
        self.fill(memory)
        return memory

    def recover(self) -> None:
        """Have all buffers again, those of other blocks too."""
        self.ahead.recover()
