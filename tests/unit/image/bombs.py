"""Small archives that unpack to very much, made by repeating what one piece of zeros compresses to."""

import gzip
import sys

import image_maker as make
from image_maker import header

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE = 16 << 20


def zstd_zeros(n_bytes: int) -> bytes:
    """Frames of zeros: some 32 bytes for each MiB."""
    return zstd.compress(bytes(PIECE), 3) * (n_bytes // PIECE)


def gzip_zeros(n_bytes: int) -> bytes:
    """Members of zeros: some 1,000 bytes for each MiB."""
    return gzip.compress(bytes(PIECE), 9, mtime=0) * (n_bytes // PIECE)


def layer_of_zeros(n_bytes: int, *, packed: str = "zstd") -> bytes:
    """A compressed layer whose one file is that long."""
    head = header(b"zeros", b"\x80" + n_bytes.to_bytes(11, "big"))
    if packed == "zstd":
        return zstd.compress(head, 3) + zstd_zeros(n_bytes)
    return gzip.compress(head, 9, mtime=0) + gzip_zeros(n_bytes)


def archive_with(blob: bytes) -> bytes:
    """An archive of an image whose only layer is this blob."""
    return make.archive(make.docker_25(make.Image([make.tar()], lambda _: blob)))


def many_layers(n_layers: int, n_bytes: int) -> bytes:
    """An archive in which each of several layers stays below a limit that all together break."""
    blobs = iter([layer_of_zeros(n_bytes) + zstd.compress(b"%d" % n) for n in range(n_layers)])
    return make.archive(make.docker_25(make.Image([make.tar()] * n_layers, lambda _: next(blobs))))


def packed_archive(n_bytes: int) -> bytes:
    """A compressed archive whose only member is that long."""
    return zstd.compress(header(b"layer.tar", b"\x80" + n_bytes.to_bytes(11, "big")), 3) + zstd_zeros(n_bytes)
