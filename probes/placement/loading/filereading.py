"""Reads pieces of a file into memory of the caller's: in parallel, and only while it is the file that was
opened.

A mapping would be shorter, but a file that is cut while it is mapped kills the process with SIGBUS. Pieces
are copied by several threads, because one thread copies from the page cache at a third of the memory's rate.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from probes.errors import CheckpointUnreadable
from probes.placement.models.headers import FileState
from probes.placement.packing.threads import Threads, of_all

PIECE_BYTES: Final = 8 << 20  # of one read: large enough for a disk, small enough to share among threads
THREADS: Final = 4
_REPEAT = (
    "the checkpoint must stay as it is while a model is loaded or, with the tier disk, used; load it again"
)


class OpenFile:
    """One open file of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not to wait for a pipe
        except OSError as error:
            raise CheckpointUnreadable(f"{path} can't be read: {error.strerror or error}") from error
        self.begun = FileState.of(self._descriptor)

    def close(self) -> None:
        """Close it; twice does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def read_into(self, target: memoryview, offset: int, pool: ThreadPoolExecutor) -> None:
        """Fill `target` (bytes, writable) from `offset` on.

        Raises CheckpointUnreadable when the disk fails, or the file has changed since it was opened.
        """
        starts = range(0, len(target), PIECE_BYTES)

        def read(at: int) -> None:
            self._piece(target[at : at + PIECE_BYTES], offset + at)

        try:
            if len(starts) < 2:  # so threads of others may read pieces
                list(map(read, starts))
            else:
                of_all(pool, read, starts)
        except OSError as error:
            raise CheckpointUnreadable(f"{self.path} can't be read: {error.strerror or error}") from error
        if not self.begun.is_still(FileState.of(self._descriptor)):
            raise CheckpointUnreadable(f"{self.path} changed while it was read", _REPEAT)

    def _piece(self, target: memoryview, offset: int) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], offset)
            if not count:
                raise CheckpointUnreadable(
                    f"{self.path} ended at byte {offset:,}: it was cut while it was read", _REPEAT
                )
            target, offset = target[count:], offset + count

    def expect(self, offset: int, n_bytes: int) -> None:
        """Let the kernel read this part ahead."""
        os.posix_fadvise(self._descriptor, offset, n_bytes, os.POSIX_FADV_WILLNEED)

    def drop(self, offset: int, n_bytes: int) -> None:
        """Let the kernel forget this part: it has been read for the last time."""
        os.posix_fadvise(self._descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)


@contextmanager
def readers() -> Iterator[ThreadPoolExecutor]:
    """The threads that read, ended with the block."""
    with Threads(THREADS, "weir-read") as pool:
        yield pool
