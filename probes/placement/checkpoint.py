"""A checkpoint that is open: which tensors it has, and their bytes. No torch."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from probes.core.errors import CheckpointUnreadable
from probes.placement.models.headers import FileState, StoredTensor, read_checkpoint
from probes.placement.packing.threads import Threads, run_all

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
                run_all(pool, read, starts)
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
def reader_threads() -> Iterator[ThreadPoolExecutor]:
    """The threads that read, ended with the block."""
    with Threads(THREADS, "weir-read") as pool:
        yield pool


class Checkpoint:
    """The tensors of a safetensors file, or of a folder with one or more."""

    def __init__(self, path: Path, files: dict[Path, OpenFile], pool: ThreadPoolExecutor) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[str, OpenFile] = {}
        self._pool = pool
        for stored in read_checkpoint(path):
            file = files.get(stored.path) or files.setdefault(stored.path, OpenFile(stored.path))
            if not stored.state.is_still(file.begun):
                raise CheckpointUnreadable(f"{stored.path} changed while it was opened", "load it again")
            for tensor in stored.tensors:
                self.tensors[tensor.name] = tensor
                self._files[tensor.name] = file

    def file_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self._files[name].path

    def read_into(self, name: str, target: memoryview, start: int = 0) -> None:
        """Fill `target` with the bytes of a tensor from its byte `start` on. Raises CheckpointUnreadable."""
        self._files[name].read_into(target, self.tensors[name].offset + start, self._pool)

    def expect(self, names: Iterable[str]) -> None:
        """Let the kernel read these tensors ahead."""
        for name in names:
            self._files[name].expect(self.tensors[name].offset, self.tensors[name].n_bytes)

    def drop(self, names: Iterable[str]) -> None:
        """Let the kernel forget these tensors' pages: they won't be read again."""
        for name in names:
            self._files[name].drop(self.tensors[name].offset, self.tensors[name].n_bytes)


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint, closed after the block. Raises CheckpointUnreadable."""
    files: dict[Path, OpenFile] = {}
    try:
        with reader_threads() as pool:
            yield Checkpoint(path, files, pool)
    finally:
        for file in files.values():
            file.close()
