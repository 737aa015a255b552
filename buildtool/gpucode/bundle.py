"""Bundles of code objects, plain (`__CLANG_OFFLOAD_BUNDLE__`) and compressed (`CCOB`): read, lay out, write.

Plain, after LLVM's ClangOffloadBundler document: little-endian; magic (24 bytes), u64 entry count, then for
each entry u64 offset from the bundle's start, u64 size, u64 id length, id. Compressed: see `Header`.
"""

import hashlib
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from buildtool.core.compression import FAULTS, Unpacker, Zlib, zstd
from buildtool.gpucode.forward import BUNDLE_MAGIC, COMPRESSED_MAGIC, Read, Reader, read_forward
from buildtool.gpucode.source import CHUNK_BYTES, FIRST_BYTES, BadBundle, BadTarget, Source
from buildtool.gpucode.target import SPIRV, TargetId

# Plain bundles.

PAGE_BYTES = 4096  # clang aligns bundles and their payloads to it, so that runtimes can map them
HEAD_BYTES = 1 << 16  # the most bytes that a bundle's entry table may take here
_MAX_ENTRIES = 1024
_MAX_ID_BYTES = 512
MOST_CODES = 1 << 18  # in one section or file; each takes some 400 bytes of memory
_COUNT_END = len(BUNDLE_MAGIC) + 8
_ID = re.compile(r"(host|hip|hipv4|openmp)-(.*?)(?:-{1,2}(gfx[0-9a-z]++[0-9a-z:+-]*+|amdgcnspirv))?-?")


@dataclass(frozen=True)
class Entry:
    """One code object: its id and its place, `offset` bytes after the bundle's start."""

    id: str
    offset: int
    n_bytes: int

    @property
    def is_host(self) -> bool:
        """True for the (empty) host entry that every HIP bundle starts with."""
        return self.id.startswith("host-")

    @cached_property
    def target(self) -> TargetId:
        """What the code runs on. Raises BadBundle for a host entry or an id that names no target."""
        match = _ID.fullmatch(self.id)
        if match and match[3] == "amdgcnspirv":
            return TargetId(SPIRV)
        try:
            return TargetId.parse(match[3] if match and match[3] else "")
        except BadTarget as error:
            raise BadBundle(f"a bundle's entry `{self.id}` names no GPU target") from error


@dataclass(frozen=True)
class Bundle:
    """An entry table, checked: entries are inside the bundle, after the table, and don't overlap."""

    entries: tuple[Entry, ...]
    table_bytes: int

    @property
    def codes(self) -> tuple[Entry, ...]:
        """The entries that hold code for a device."""
        return tuple(entry for entry in self.entries if entry.n_bytes and not entry.is_host)

    @property
    def n_bytes(self) -> int:
        """From the magic to the end of the last payload; an empty entry's claimed place doesn't count."""
        ends = (entry.offset + entry.n_bytes for entry in self.entries if entry.n_bytes)
        return max(ends, default=self.table_bytes)


def parse_bundle(head: bytes, limit: int, *, place: int = 0) -> Bundle:
    """The entry table at the start of `head` (the bundle's first bytes, HEAD_BYTES are enough).

    `limit` is the number of bytes from the bundle's start that its payloads may use; `place` is
    the bundle's position in the file, for messages. Raises BadBundle.
    """
    if not head.startswith(BUNDLE_MAGIC):
        raise BadBundle("no bundle of code objects starts here", place=place)
    count = _u64(head, len(BUNDLE_MAGIC), place)
    if not 1 <= count <= _MAX_ENTRIES:
        raise BadBundle(f"a bundle claims {count} entries, the limits are 1 and {_MAX_ENTRIES}", place=place)
    position = len(BUNDLE_MAGIC) + 8
    entries = []
    for _ in range(count):
        offset, n_bytes, id_bytes = (_u64(head, position + step, place) for step in (0, 8, 16))
        position += 24
        raw_id = head[position : position + id_bytes]
        if id_bytes > _MAX_ID_BYTES or len(raw_id) != id_bytes or not raw_id.isascii():
            raise BadBundle("a bundle's entry has an impossible id", place=place + position)
        position += id_bytes
        entries.append(Entry(raw_id.decode(), offset, n_bytes))
    _check_payloads(entries, position, limit, place)
    return Bundle(tuple(entries), position)


def is_bundle(head: bytes) -> bool:
    """Whether these bytes begin a bundle: programs that read bundles hold the magic in a text."""
    count = int.from_bytes(head[len(BUNDLE_MAGIC) : _COUNT_END], "little")
    return head.startswith(BUNDLE_MAGIC) and 1 <= count <= _MAX_ENTRIES


def read_bundle(start: int, end: int) -> Reader[Bundle]:
    """The bundle at `start`, which must end by `end`: reads a bit more than its table. Raises BadBundle."""
    most = FIRST_BYTES
    while True:
        head = yield Read(start, min(most, end - start), "a bundle's entry table")
        assert isinstance(head, bytes)
        try:
            return parse_bundle(head, end - start, place=start)
        except BadBundle:
            if most >= HEAD_BYTES or most >= end - start:
                raise
        most *= 2


def _check_payloads(entries: Sequence[Entry], table_bytes: int, limit: int, place: int) -> None:
    if len({entry.id for entry in entries}) != len(entries):
        raise BadBundle("a bundle has two entries with the same id", place=place)
    full = sorted((entry.offset, entry.offset + entry.n_bytes) for entry in entries if entry.n_bytes)
    if any(start < table_bytes or end > limit for start, end in full):
        raise BadBundle("a bundle's code object is outside the bundle", place=place)
    if any(end > start for (_, end), (start, _) in pairwise(full)):
        raise BadBundle("a bundle's code objects overlap", place=place)


def too_many_codes(place: int) -> BadBundle:
    """The error for a section with more code objects than MOST_CODES."""
    return BadBundle(f"more than {MOST_CODES:,} pieces of GPU code in a row", place=place)


def _u64(data: bytes, position: int, place: int) -> int:
    field = data[position : position + 8]
    if len(field) != 8:
        raise BadBundle("a bundle's entry table is cut off", place=place + position)
    return int.from_bytes(field, "little")


def lay_out_bundle(kept: Sequence[Entry]) -> tuple[bytes, Bundle]:
    """A new bundle of `kept` entries in their order: its entry table as bytes, and as a value.

    Payloads start at multiples of PAGE_BYTES; an empty entry takes no room.
    """
    table_bytes = len(BUNDLE_MAGIC) + 8 + sum(24 + len(entry.id) for entry in kept)
    entries = []
    end = table_bytes
    for entry in kept:
        offset = align_up(end, PAGE_BYTES)
        entries.append(Entry(entry.id, offset, entry.n_bytes))
        end = offset + entry.n_bytes if entry.n_bytes else end
    packed = b"".join(
        struct.pack("<QQQ", entry.offset, entry.n_bytes, len(entry.id)) + entry.id.encode()
        for entry in entries
    )
    return BUNDLE_MAGIC + struct.pack("<Q", len(entries)) + packed, Bundle(tuple(entries), table_bytes)


def align_up(value: int, align: int) -> int:
    """The next multiple of `align`, `value` itself if it is one."""
    return -(-value // align) * align


# Compressed bundles.

_FIELDS = {1: "<IQ", 2: "<IIQ", 3: "<QQQ"}  # after magic, u16 version, u16 method
_PREFIX_BYTES = 8
_MAX_HEADER_BYTES = 32
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


_BEGINNINGS = {Method.ZLIB: b"\x78", Method.ZSTD: b"\x28\xb5\x2f\xfd"}


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


def is_compressed(head: bytes, room: int) -> bool:
    """Whether these bytes, `room` before the end, begin a compressed bundle, not just a text."""
    try:
        header = _parse_header(head, 0, room)
    except BadBundle:
        return False
    body = head[header.header_bytes :]
    return body.startswith(_BEGINNINGS[header.method]) and header.unpacked_bytes > 0


def read_header(start: int, end: int) -> Reader[Header]:
    """The header at `start` of a bundle that must end by `end`. Raises BadBundle."""
    head = yield Read(start, min(_MAX_HEADER_BYTES, end - start), "a compressed bundle's header")
    assert isinstance(head, bytes)
    return _parse_header(head, start, end)


def _parse_header(head: bytes, start: int, end: int) -> Header:
    version, method = struct.unpack("<HH", head[4:_PREFIX_BYTES].ljust(4, b"\0"))
    if head[:4] != COMPRESSED_MAGIC or version not in _FIELDS or method not in tuple(Method):
        raise BadBundle(
            f"a compressed bundle of version {version}, method {method}; versions 1 to 3, "
            "methods 0 (zlib) and 1 (zstd) are known",
            place=start,
        )
    layout = _FIELDS[version]
    raw = head[_PREFIX_BYTES : _PREFIX_BYTES + struct.calcsize(layout)]
    if len(raw) != struct.calcsize(layout):
        raise BadBundle("a compressed bundle's header is cut off", place=start)
    *sizes, checksum = struct.unpack(layout, raw)
    stored = sizes[0] if len(sizes) == 2 else None
    header = Header(version, Method(method), stored, sizes[-1], checksum)
    if stored is not None and not header.header_bytes < stored <= end - start:
        raise BadBundle(f"a compressed bundle claims {stored} bytes, {end - start} are there", place=start)
    return header


def read_head(header: Header, start: int, end: int) -> Reader[tuple[bytes, int]]:
    """The first HEAD_BYTES of a compressed bundle, unpacked and unverified, and its length in the file.

    Version 1 doesn't say where it ends, so it is unpacked and verified whole. Raises BadBundle.
    """
    stored_bytes = header.stored_bytes
    unpacking = _Pieces(header, start, end if stored_bytes is None else start + stored_bytes)
    digest = hashlib.md5(usedforsecurity=False)
    head = b""
    while not unpacking.eof and (stored_bytes is None or len(head) < HEAD_BYTES):
        piece = yield from unpacking.piece()
        digest.update(piece)
        head += piece[: HEAD_BYTES - len(head)]
    if stored_bytes is None:
        unpacking.check(digest.digest())
        stored_bytes = unpacking.stored_bytes
    return head, stored_bytes


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
    """A compressed bundle being unpacked piece by piece: iterate.

    Never gives more than the header promises. After iterating to the end, size and checksum have
    been verified (else BadBundle).
    """

    def __init__(self, source: Source, start: int, end: int) -> None:
        self.header = read_forward(read_header(start, end), source)
        stored_bytes = self.header.stored_bytes
        self._source = source
        self._pieces = _Pieces(self.header, start, end if stored_bytes is None else start + stored_bytes)

    def __iter__(self) -> Iterator[bytes]:
        digest = hashlib.md5(usedforsecurity=False)
        while not self._pieces.eof:
            piece = read_forward(self._pieces.piece(), self._source)
            digest.update(piece)
            yield piece
        self._pieces.check(digest.digest())


class _Pieces:
    """The decompressor of a bundle at `start` of a file, and how far it has come."""

    def __init__(self, header: Header, start: int, end: int) -> None:
        self._header, self._start, self._end = header, start, end
        self._unpacker: Unpacker = Zlib() if header.method is Method.ZLIB else zstd.ZstdDecompressor()
        self._position = start + header.header_bytes
        self._left = header.unpacked_bytes
        self._most = FIRST_BYTES

    @property
    def eof(self) -> bool:
        """Whether all is unpacked."""
        return self._unpacker.eof

    @property
    def stored_bytes(self) -> int:
        """At the end: the bundle's bytes in the file."""
        return self._position - len(self._unpacker.unused_data) - self._start

    def piece(self) -> Reader[bytes]:
        """The next piece, possibly empty. Raises BadBundle."""
        packed = b""
        hungry = self._unpacker.needs_input
        if hungry and self._position < self._end:
            length = min(self._most, self._end - self._position)
            answer = yield Read(self._position, length, "a compressed bundle")
            assert isinstance(answer, bytes)
            packed = answer
            self._position, self._most = self._position + length, min(2 * self._most, CHUNK_BYTES)
        try:
            piece = self._unpacker.decompress(packed, min(CHUNK_BYTES, self._left + 1))
        except FAULTS as error:
            raise BadBundle(f"a compressed bundle is damaged: {error}", place=self._start) from error
        self._left -= len(piece)
        if self._left < 0:
            raise BadBundle("a compressed bundle unpacks to more than its header says", place=self._start)
        if hungry and not packed and not piece and not self._unpacker.eof:
            raise BadBundle("a compressed bundle is cut off", place=self._start)
        return piece

    def check(self, digest: bytes) -> None:
        """Compare size and MD5 of all that was unpacked with the header. Raises BadBundle."""
        if self._left:
            raise BadBundle(
                f"a compressed bundle unpacks to {self._header.unpacked_bytes - self._left} bytes,"
                f" its header says {self._header.unpacked_bytes}",
                place=self._start,
            )
        if _hash64(digest) != self._header.hash:
            raise BadBundle("a compressed bundle fails its checksum", place=self._start)


class _Packer(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


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
    return COMPRESSED_MAGIC + struct.pack("<HH", version, method) + fields + body


def _compressor(method: Method, unpacked_bytes: int) -> _Packer:
    if method is Method.ZLIB:
        return zlib.compressobj(level=6)
    compressor = zstd.ZstdCompressor(options=_ZSTD_OPTIONS)
    compressor.set_pledged_input_size(unpacked_bytes)
    return compressor


def _hash64(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
