"""Writes layers: a tar's members in one fixed form, hashed and compressed as they come.

The bytes depend on the members alone: no owner, mode, time or name of the host is in them, and how many
cores compress doesn't change them.
"""

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from buildtool.core.compression import zstd
from buildtool.core.errors import DataError
from buildtool.core.model import ZSTD_LEVEL
from buildtool.image.written import LayerFile

PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Compression:
    """How layers are compressed: `zstd` or `gzip`, or not at all where `kind` is empty."""

    kind: str
    level: int = 0

    @property
    def version(self) -> str:
        """What decides the bytes: other versions of a library may give others for the same tar."""
        library = {"zstd": zstd.zstd_version, "gzip": zlib.ZLIB_RUNTIME_VERSION}.get(self.kind, "")
        return f"{self.kind or 'none'} {library} level {self.level}"


ZSTD = Compression("zstd", ZSTD_LEVEL)
COMPRESSIONS = {"zstd": ZSTD, "gzip": Compression("gzip", 6), "none": Compression("")}


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


class LayerWriter:
    """Compresses a tar into an open file, and hashes both."""

    def __init__(self, out: BinaryIO, compression: Compression = ZSTD) -> None:
        self._out = out
        self._kind = compression.kind
        self._tar, self._file = hashlib.sha256(), hashlib.sha256()
        self._n_bytes = 0
        self._compressor = _compressor(compression)

    def write(self, data: bytes) -> None:
        """The tar's next bytes. Raises OSError."""
        self._tar.update(data)
        if piece := self._compressor.compress(data):
            self._keep(piece)

    def finish(self) -> LayerFile:
        """The layer, when all of the tar was written. Raises OSError."""
        self._keep(self._compressor.flush())
        diff_id, digest = f"sha256:{self._tar.hexdigest()}", f"sha256:{self._file.hexdigest()}"
        return LayerFile(diff_id, digest, self._n_bytes, self._kind)

    def _keep(self, piece: bytes) -> None:
        self._file.update(piece)
        self._n_bytes += len(piece)
        self._out.write(piece)


class _Plain:
    """Compresses nothing."""

    def compress(self, data: bytes) -> bytes:
        """The data."""
        return data

    def flush(self) -> bytes:
        """Nothing is left."""
        return b""


def _compressor(compression: Compression) -> _Compressor:
    """A zstd frame, compressed by all cores, a gzip member without name and time, or the tar as it is."""
    if not compression.kind:
        return _Plain()
    if compression.kind == "gzip":
        return zlib.compressobj(compression.level, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    most = zstd.CompressionParameter.nb_workers.bounds()[1]
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: compression.level,
        zstd.CompressionParameter.nb_workers: min(os.cpu_count() or 1, most),
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return zstd.ZstdCompressor(options=options)


class TarMembers:
    """Writes members of root's, all with one time, into a layer; a directory before what is in it.

    Paths have no slash at their ends. Raises DataError for a path that two files would have.
    """

    def __init__(self, layer: LayerWriter, epoch: int) -> None:
        self._layer = layer
        self._epoch = epoch
        self._directories: set[str] = set()
        self._files: set[str] = set()

    def holds(self, path: str) -> bool:
        """Whether a file was written there."""
        return path in self._files

    def file(self, path: str, n_bytes: int, pieces: Iterable[bytes], *, executable: bool = False) -> None:
        """A file with its content. Raises DataError unless that has `n_bytes`, OSError."""
        if path in self._files or path in self._directories:
            raise DataError(f"a layer would have two files at /{path}")
        self._make_directories(path.rpartition("/")[0])
        self._files.add(path)
        info = self._info(path, 0o755 if executable else 0o644)
        info.size = n_bytes
        self._put(info)
        left = n_bytes
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                break
            self._layer.write(piece)
        if left:
            raise DataError(f"/{path} has another length than was announced ({n_bytes:,} bytes)")
        self._layer.write(bytes(-n_bytes % tarfile.BLOCKSIZE))

    def end(self) -> LayerFile:
        """The layer, with the end of its archive."""
        self._layer.write(bytes(2 * tarfile.BLOCKSIZE))
        return self._layer.finish()

    def _make_directories(self, path: str) -> None:
        missing: list[str] = []
        while path and path not in self._directories:
            if path in self._files:
                raise DataError(f"a layer would have a file and a directory at /{path}")
            missing.append(path)
            self._directories.add(path)
            path = path.rpartition("/")[0]
        for each in reversed(missing):
            info = self._info(each, 0o755)
            info.type = tarfile.DIRTYPE
            self._put(info)

    def _info(self, path: str, mode: int) -> tarfile.TarInfo:
        info = tarfile.TarInfo(path)
        info.mode, info.mtime = mode, self._epoch
        return info

    def _put(self, info: tarfile.TarInfo) -> None:
        self._layer.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def pieces_at(path: Path) -> Iterator[bytes]:
    """A file's bytes. Raises OSError."""
    with path.open("rb") as file:
        yield from pieces_of(file)


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """An open file's bytes. Raises OSError."""
    while piece := file.read(PIECE_BYTES):
        yield piece
