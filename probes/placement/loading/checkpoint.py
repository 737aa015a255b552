"""A checkpoint that is open: which tensors it has, and their bytes. No torch."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from probes.errors import CheckpointUnreadable
from probes.placement.loading.filereading import OpenFile, readers
from probes.placement.models.headers import StoredTensor, read_checkpoint


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
def opened(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint, closed after the block. Raises CheckpointUnreadable."""
    files: dict[Path, OpenFile] = {}
    try:
        with readers() as pool:
            yield Checkpoint(path, files, pool)
    finally:
        for file in files.values():
            file.close()
