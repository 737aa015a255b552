"""Makes a layer of a root file system's tar: compressed as the engine's store keeps it, with its digests."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from buildtool.audit.tar.unpack import Meter
from buildtool.compression import zstd
from buildtool.files import replacing
from buildtool.model import ZSTD_LEVEL
from buildtool.prune.flat import LayerFile

_CHUNK = 1 << 20


def pack_layer(tar: Path, packed: Path, *, compress: bool) -> LayerFile:
    """Write `tar` to `packed` as a layer, and remove it. Without `compress` only its place changes.

    Raises as `files.replacing` does.
    """
    plain, stored = Meter(), Meter()
    with tar.open("rb") as file:
        chunks = plain.through(iter(partial(file.read, _CHUNK), b""))
        if not compress:
            for _ in chunks:
                pass
            tar.rename(packed)
            return LayerFile(plain.digest, plain.digest, plain.n_bytes, zstd=False)
        with replacing(packed) as part, part.open("wb") as out:
            for piece in stored.through(_compressed(chunks)):
                out.write(piece)
    tar.unlink()
    return LayerFile(plain.digest, stored.digest, stored.n_bytes, zstd=True)


def _compressed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """A zstd frame, compressed by all cores: how many doesn't change its bytes."""
    most = zstd.CompressionParameter.nb_workers.bounds()[1]
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: ZSTD_LEVEL,
        zstd.CompressionParameter.nb_workers: min(os.cpu_count() or 1, most),
        zstd.CompressionParameter.checksum_flag: 1,
    }
    packer = zstd.ZstdCompressor(options=options)
    for chunk in chunks:
        if piece := packer.compress(chunk):
            yield piece
    yield packer.flush()
