"""Compressed bundles (`CCOB`, versions 1 to 3, zlib or zstd): read, check, write; memory stays bounded.

Format: LLVM's ClangOffloadBundler document. The hash is the low 64 bits of the MD5 of the unpacked bytes.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from buildtool.compression import FAULTS, Unpacker, Zlib, zstd
from buildtool.gpucode.errors import BadBundle
from buildtool.gpucode.source import CHUNK_BYTES, FIRST_BYTES, Source

MAGIC = b"CCOB"
_FIELDS = {1: "<IQ", 2: "<IIQ", 3: "<QQQ"}  # after magic, u16 version, u16 method
_PREFIX_BYTES = 8
UNPACKED_RATIO = 100  # times the file's own bytes, as for the audit's archives
UNPACKED_FREE_BYTES = 1 << 30  # at any ratio
VERSIONS = tuple(_FIELDS)
# clang's own defaults: level 3 with long-distance matching
_ZSTD_OPTIONS: dict[int, int] = {
    zstd.CompressionParameter.compression_level: 3,
    zstd.CompressionParameter.enable_long_distance_matching: 1,
}


class Method(IntEnum):
    """How the bundle is compressed."""

    ZLIB = 0
    ZSTD = 1


@dataclass(frozen=True)
class Header:
    """A compressed bundle's header. `stored_bytes` (header included) is unknown in version 1: None."""

    version: int
    method: Method
    stored_bytes: int | None
    unpacked_bytes: int
    hash: int

    @property
    def header_bytes(self) -> int:
        """Length of the header itself: 20, 24 or 32."""
        return _PREFIX_BYTES + struct.calcsize(_FIELDS[self.version])


class _Packer(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def read_header(source: Source, start: int, end: int) -> Header:
    """The header at `start` of a bundle that must end by `end`. Raises BadBundle."""
    prefix = source.exactly(start, _PREFIX_BYTES, "a compressed bundle's header")
    version, method = struct.unpack("<HH", prefix[4:])
    if prefix[:4] != MAGIC or version not in _FIELDS or method not in tuple(Method):
        raise BadBundle(
            f"a compressed bundle of version {version}, method {method}; versions 1 to 3, "
            "methods 0 (zlib) and 1 (zstd) are known",
            place=start,
        )
    layout = _FIELDS[version]
    raw = source.exactly(start + _PREFIX_BYTES, struct.calcsize(layout), "a compressed bundle's header")
    *sizes, checksum = struct.unpack(layout, raw)
    stored = sizes[0] if len(sizes) == 2 else None
    header = Header(version, Method(method), stored, sizes[-1], checksum)
    if stored is not None and not header.header_bytes < stored <= end - start:
        raise BadBundle(f"a compressed bundle claims {stored} bytes, {end - start} are there", place=start)
    return header


class Allowance:
    """How much all compressed bundles of a file may unpack to, by their headers."""

    def __init__(self, file_bytes: int) -> None:
        self._allowed = max(UNPACKED_FREE_BYTES, UNPACKED_RATIO * file_bytes)
        self._claimed = 0

    def take(self, header: Header, place: int) -> None:
        """Count a bundle before it is unpacked. Raises BadBundle for too much."""
        self._claimed += header.unpacked_bytes
        if self._claimed > self._allowed:
            raise BadBundle(
                f"its compressed bundles would unpack to more than {self._allowed:,} bytes:"
                " a decompression bomb",
                place=place,
            )


class Unpacking:
    """A compressed bundle being unpacked piece by piece: iterate, or take the `head` alone.

    Never gives more than the header promises. After iterating to the end, size and checksum have
    been verified (else BadBundle) and `stored_bytes` is exact, also for version 1.
    """

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.header = read_header(source, start, end)
        self.stored_bytes = self.header.stored_bytes
        self._source = source
        self._start = start
        self._end = end if self.stored_bytes is None else start + self.stored_bytes

    def head(self, length: int) -> bytes:
        """The first `length` unpacked bytes (fewer if there aren't as many), unverified."""
        head = b""
        for piece in self._pieces():
            head += piece
            if len(head) >= length:
                break
        return head[:length]

    def __iter__(self) -> Iterator[bytes]:
        digest = hashlib.md5(usedforsecurity=False)
        total = 0
        for piece in self._pieces():
            digest.update(piece)
            total += len(piece)
            yield piece
        if total != self.header.unpacked_bytes:
            raise BadBundle(
                f"a compressed bundle unpacks to {total} bytes, its header says {self.header.unpacked_bytes}",
                place=self._start,
            )
        if _hash64(digest.digest()) != self.header.hash:
            raise BadBundle("a compressed bundle fails its checksum", place=self._start)

    def _pieces(self) -> Iterator[bytes]:
        unpacker: Unpacker = Zlib() if self.header.method is Method.ZLIB else zstd.ZstdDecompressor()
        position = self._start + self.header.header_bytes
        left = self.header.unpacked_bytes
        most = FIRST_BYTES
        while not unpacker.eof:
            packed = b""
            hungry = unpacker.needs_input
            if hungry:
                length = min(most, self._end - position)
                packed = self._source.exactly(position, length, "a compressed bundle")
                position, most = position + length, min(2 * most, CHUNK_BYTES)
            try:
                piece = unpacker.decompress(packed, min(CHUNK_BYTES, left + 1))
            except FAULTS as error:
                raise BadBundle(f"a compressed bundle is damaged: {error}", place=self._start) from error
            left -= len(piece)
            if left < 0:
                raise BadBundle("a compressed bundle unpacks to more than its header says", place=self._start)
            if hungry and not packed and not piece and not unpacker.eof:
                raise BadBundle("a compressed bundle is cut off", place=self._start)
            yield piece
        if self.stored_bytes is None:
            self.stored_bytes = position - len(unpacker.unused_data) - self._start


def pack(chunks: Iterable[bytes], unpacked_bytes: int, *, version: int, method: Method) -> bytes:
    """Compress into one bundle of that version. Raises ValueError when the sizes don't fit its fields.

    `unpacked_bytes` is what the chunks add up to. The same input gives the same bytes on one machine.
    """
    digest = hashlib.md5(usedforsecurity=False)
    packed = []
    compressor = _compressor(method, unpacked_bytes)
    for chunk in chunks:
        digest.update(chunk)
        packed.append(compressor.compress(chunk))
    body = b"".join((*packed, compressor.flush()))
    layout = _FIELDS[version]
    total = _PREFIX_BYTES + struct.calcsize(layout) + len(body)
    sizes = (unpacked_bytes,) if version == 1 else (total, unpacked_bytes)
    try:
        fields = struct.pack(layout, *sizes, _hash64(digest.digest()))
    except struct.error as error:
        raise ValueError(f"a bundle of {unpacked_bytes} bytes doesn't fit CCOB version {version}") from error
    return MAGIC + struct.pack("<HH", version, method) + fields + body


def _compressor(method: Method, unpacked_bytes: int) -> _Packer:
    if method is Method.ZLIB:
        return zlib.compressobj(level=6)
    compressor = zstd.ZstdCompressor(options=_ZSTD_OPTIONS)
    compressor.set_pledged_input_size(unpacked_bytes)
    return compressor


def _hash64(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
