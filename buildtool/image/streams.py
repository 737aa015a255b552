"""Byte streams: the form of a blob by its first bytes, its hash and length, its content decompressed.

ReadAhead moves the making of chunks into a thread of its own.
"""

import hashlib
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from itertools import chain
from types import TracebackType
from typing import Self

from buildtool.core.compression import FAULTS, Unpacker, Zlib, zstd
from buildtool.image.errors import LIMITS, LimitExceeded, Limits, MalformedStream, Truncated
from buildtool.image.tar import has_right_checksum


class Form(Enum):
    """A blob's form by its first bytes, regardless of its media type."""

    GZIP = "gzip"
    ZSTD = "zstd"
    TAR = "tar"
    EMPTY = "empty"
    JSON = "json"
    SQUASHFS = "squashfs"
    XZ = "xz"
    BZIP2 = "bzip2"
    OTHER = "something else"


# the forms that a layer may have; an empty tar is one
LAYER_FORMS = frozenset({Form.GZIP, Form.ZSTD, Form.TAR, Form.EMPTY})
_MAGIC = {
    b"\x1f\x8b": Form.GZIP,
    b"\x28\xb5\x2f\xfd": Form.ZSTD,
    b"hsqs": Form.SQUASHFS,
    b"\xfd7zXZ\0": Form.XZ,
    b"BZh": Form.BZIP2,
}


def sniff(head: bytes) -> Form:
    """Recognise a blob's form from its first bytes (512 are enough)."""
    if not head:
        return Form.EMPTY
    if head[1:4] == b"\x2a\x4d\x18" and head[:1] >= b"\x50":
        return Form.ZSTD  # a skippable frame comes first
    for magic, form in _MAGIC.items():
        if head.startswith(magic):
            return form
    block = head[:512]  # of zeros where the archive is empty; headers from before `ustar` have only their sum
    if head[257:262] == b"ustar" or (len(block) == 512 and (not any(block) or has_right_checksum(block))):
        return Form.TAR
    first = head.lstrip()[:1]
    return Form.JSON if first in (b"{", b"[") or (head and not first) else Form.OTHER


def peek(chunks: Iterator[bytes], n_bytes: int = 512) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes of a stream, and the whole stream."""
    chunks_read: list[bytes] = []
    n_read = 0
    for chunk in chunks:
        chunks_read.append(chunk)
        n_read += len(chunk)
        if n_read >= n_bytes:
            break
    first = b"".join(chunks_read)
    return first[:n_bytes], chain([first] if first else (), chunks)


class Meter:
    """Hashes and counts the bytes that flow through it."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.n_bytes = 0

    def through(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the chunks, each hashed and counted before."""
        for chunk in chunks:
            self._hash.update(chunk)
            self.n_bytes += len(chunk)
            yield chunk

    @property
    def digest(self) -> str:
        """`sha256:` and the hex digest of what has passed so far."""
        return f"sha256:{self._hash.hexdigest()}"


_PART_BYTES = 64 << 10  # of content that are hashed at once
# Whether Python's hash is keyed, with a key of this process that nobody can know, and long enough
_IS_KEYED = (
    bool(sys.flags.hash_randomization)
    and os.environ.get("PYTHONHASHSEED", "random") in ("", "random")  # else it is a number that one may know
    and sys.hash_info.algorithm.startswith("siphash")
)


class Fingerprint:
    """Tells the contents of files apart, within one process: feed a content in pieces of any lengths.

    Python's own keyed hash is quicker than SHA-256, which is taken where it isn't keyed.
    (docs/decisions/0137)
    """

    def __init__(self, *, keyed: bool = _IS_KEYED) -> None:
        self._keyed = keyed
        self._sum = hashlib.sha256()
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """The next piece of content."""
        if not self._keyed:
            self._sum.update(piece)
            return
        begin = 0
        if self._rest:
            begin = _PART_BYTES - len(self._rest)
            self._rest += piece[:begin]
            if len(self._rest) < _PART_BYTES:
                return
            self._add(self._rest)
        view, end = memoryview(piece), len(piece) - (len(piece) - begin) % _PART_BYTES
        for at in range(begin, end, _PART_BYTES):
            self._add(view[at : at + _PART_BYTES])
        self._rest = piece[end:]

    def value(self) -> bytes:
        """16 bytes that are equal for equal contents."""
        if self._rest:
            self._add(self._rest)
            self._rest = b""
        return self._sum.digest()[:16]

    def _add(self, part: bytes | memoryview) -> None:
        self._sum.update(b"%d %d" % (len(part), hash(part)))


# Decompression, within what an archive may unpack to.

MORE_UNPACKED = "if you trust the image, allow more, for example: audit --max-unpacked '100 GB'"


class Allowance:
    """How many bytes all blobs of an archive together may unpack to, in relation to the archive's size."""

    def __init__(self, limits: Limits = LIMITS, stored_bytes: int = 0) -> None:
        """`stored_bytes` is the archive's size where it is known beforehand; else `counted` adds it up."""
        self._limits, self._stored, self._unpacked = limits, stored_bytes, 0

    def counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the archive's own bytes, each chunk counted before."""
        for chunk in chunks:
            self._stored += len(chunk)
            yield chunk

    def take(self, n_bytes: int, place: str) -> None:
        """Count bytes that came out of a decompressor. Raises LimitExceeded for too many."""
        self._unpacked += n_bytes
        limits = self._limits
        allowed = max(limits.unpacked_free_bytes, limits.unpacked_ratio * self._stored)
        if self._unpacked > limits.unpacked_bytes:
            message = f"the archive unpacks to more than {limits.unpacked_bytes:,} bytes"
        elif self._unpacked > allowed:
            message = (
                f"{self._stored:,} bytes of archive unpack to more than {allowed:,}: a decompression bomb"
            )
        else:
            return
        raise LimitExceeded(message, place=place, hint=MORE_UNPACKED)


PIECE = 1 << 18  # bytes of output at a time; larger ones cost page faults (measured)
_PORTION_BYTES, _FIRST_PORTION_BYTES = 1 << 16, 1 << 12  # of input for a decompressor
_PART_NAMES = {Form.GZIP: "member", Form.ZSTD: "frame"}
_PADDING = {Form.GZIP: b"\0", Form.ZSTD: b""}  # writers may pad with zeros after the last gzip member


def decompressed(
    chunks: Iterator[bytes],
    form: Form,
    *,
    place: str,
    limits: Limits = LIMITS,
    allowance: Allowance | None = None,
) -> Iterator[bytes]:
    """The plain bytes of a gzip (any number of members), zstd (any number of frames) or plain stream.

    Pieces are at most PIECE bytes, at any ratio. `allowance` is the whole archive's; without one, the
    stream counts as an archive. Raises MalformedStream, Truncated, LimitExceeded.
    """
    if form not in (Form.GZIP, Form.ZSTD):
        yield from chunks
        return
    if allowance is None:
        allowance = Allowance(limits)
        chunks = allowance.counted(chunks)
    for piece in _unpacked(chunks, form, place, limits.window_log):
        allowance.take(len(piece), place)
        yield piece


def _unpacked(chunks: Iterator[bytes], form: Form, place: str, window_log: int) -> Iterator[bytes]:
    """The content of all gzip members or zstd frames, concatenated."""
    unpacker, inside = _unpacker(form, window_log), form is Form.GZIP  # which has one member at least
    portions = _Portions(chunks)
    for portion in portions:
        rest = portion
        while rest or (inside and not unpacker.needs_input):
            if not inside:
                rest = rest.lstrip(_PADDING[form])
                if not rest:
                    break
                unpacker, inside = _unpacker(form, window_log), True
            try:
                piece = unpacker.decompress(rest, PIECE)
            except FAULTS as error:
                raise MalformedStream(
                    f"{form.value} data can't be unpacked ({error})", place=place
                ) from error
            rest = b""
            if unpacker.eof:
                rest, inside = unpacker.unused_data, False
                portions.ended()
            if piece:
                yield piece
    if inside:
        raise Truncated(f"{form.value} data ends inside a {_PART_NAMES[form]}", place=place)


def _unpacker(form: Form, window_log: int) -> Unpacker:
    if form is Form.GZIP:
        return Zlib(wbits=31)
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})


class _Portions:
    """Chunks in portions: small ones after the end of a gzip member or a zstd frame, then larger ones again.

    A decompressor copies all that follows such an end, and a hostile chunk has tens of thousands of them.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._size = chunks, _FIRST_PORTION_BYTES

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            at = 0
            while at < len(chunk):
                portion = chunk[at : at + self._size]
                at += len(portion)
                self._size = min(2 * self._size, _PORTION_BYTES)
                yield portion

    def ended(self) -> None:
        """A member or frame has ended within the portion."""
        self._size = _FIRST_PORTION_BYTES


# Reading ahead.

BATCH = 4  # chunks per queue item: each item wakes a thread (audits take 12 % longer with 1)


class ReadAhead:
    """Makes chunks in a thread. Iterate, inside `with`, for them; what the thread raises is raised here.

    Leaving the block waits for the thread, since it reads the caller's source. After Ctrl-C it doesn't: the
    source may never answer again, and the thread is a daemon that ends with the process.
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
