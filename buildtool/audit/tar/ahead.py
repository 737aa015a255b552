"""A stream made in a separate thread, some chunks ahead: zlib, zstd and SHA-256 let other threads run."""

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

BATCH = 4  # chunks handed over at a time: every hand-over wakes a thread (audits take 12 % longer with 1)


class Ahead:
    """Iterate, inside `with`, for the chunks; what goes wrong in making them is raised here.

    Leaving waits for the thread, which shares its source with us. After Ctrl-C it doesn't: the source
    may never answer again, and the thread is a daemon that ends with the process.
    """

    def __init__(self, chunks: Iterator[bytes], depth: int = 4) -> None:
        self._chunks = chunks
        self._made: queue.Queue[list[bytes] | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._maker = threading.Thread(target=self._make, name="ahead", daemon=True)

    def __enter__(self) -> Self:
        self._maker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        while self._maker.is_alive() and kind is not KeyboardInterrupt:
            with suppress(queue.Empty):  # it may wait for room in the queue
                self._made.get_nowait()
            self._maker.join(0.001)

    def __iter__(self) -> Iterator[bytes]:
        while (item := self._made.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield from item

    def _make(self) -> None:
        batch: list[bytes] = []
        end: BaseException | None = None
        try:
            for chunk in self._chunks:
                batch.append(chunk)
                if len(batch) == BATCH:
                    self._made.put(batch)
                    batch = []
                    if self._stop.is_set():
                        return
        except BaseException as error:  # for the consumer, who raises it
            end = error
        self._made.put(batch)
        self._made.put(end)
