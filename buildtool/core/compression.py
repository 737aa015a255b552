"""Decompressors with one interface: zstd from the standard library or its backport, and zlib."""

import sys
import zlib

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["FAULTS", "Unpacker", "Zlib", "zstd"]

FAULTS = (zlib.error, zstd.ZstdError)  # what they raise for damaged data


class Zlib:
    """zlib's decompressor with the interface of zstd's: it keeps the input that it couldn't take yet."""

    def __init__(self, wbits: int = zlib.MAX_WBITS) -> None:
        self._inner = zlib.decompressobj(wbits)

    @property
    def eof(self) -> bool:
        """Whether the end of the member was read."""
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        """Whether nothing more comes out of the data that it was given."""
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        """The input beyond the end of the member."""
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Up to `max_length` bytes of content."""
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


Unpacker = Zlib | zstd.ZstdDecompressor  # of one zlib or gzip member, or one zstd frame
