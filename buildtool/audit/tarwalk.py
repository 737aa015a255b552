"""Walks a tar stream's headers: ustar, PAX, GNU long names, sparse files, base-256 numbers. Extracts nothing.

Reads a stream once, forwards, with bounded memory, and accepts what Go's archive/tar accepts (the
engines' own reader): where the formats leave room, a comment names Go's choice.
"""

from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final
from zlib import adler32

from buildtool.audit.faults import LimitExceeded, MalformedTar, Truncated
from buildtool.audit.limits import LIMITS, Limits

FILE: Final = 0
DIRECTORY: Final = 1
SYMLINK: Final = 2
HARDLINK: Final = 3
DEVICE: Final = 4  # character and block devices, named pipes

Member = tuple[bytes, int, int, bytes]  # name, kind, bytes of content in the archive, link name

BLOCK: Final = 512
_ZERO: Final = bytes(BLOCK)
_PADDING: Final = b" \0"
# name, size, checksum, type flag, link name, magic, prefix
_FIELDS: Final = Struct("100s 24x 12s 12x 8s B 100s 6s 82x 155s 12x")
_SPARSE_FLAG: Final = ord("S")
_RARE: Final = frozenset({0, _SPARSE_FLAG})  # type flags that take a second look
_KINDS: Final = {0: FILE, ord("0"): FILE, ord("7"): FILE, _SPARSE_FLAG: FILE, ord("1"): HARDLINK} | {
    ord("2"): SYMLINK, ord("3"): DEVICE, ord("4"): DEVICE, ord("5"): DIRECTORY, ord("6"): DEVICE,
}  # fmt: skip
_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"xgLK"
_META: Final = frozenset(b"xgLKX")  # X: Solaris' PAX
_ADLER_BASE: Final = 65521
_LARGEST: Final = (1 << 63) - 1


class TarReader:
    """One pass over a tar stream. Iterate for its members; `content()` gives the current one's bytes.

    `ended` tells, afterwards, whether the end-of-archive marker was seen. Raises MalformedTar,
    Truncated and LimitExceeded with the byte offset in the stream.
    """

    def __init__(
        self,
        chunks: Iterator[bytes],
        *,
        place: str,
        limits: Limits = LIMITS,
        leap: Callable[[int], int] | None = None,
    ) -> None:
        """`leap(n)` moves a seekable source forwards by up to n bytes and returns how far it went."""
        self._chunks = chunks
        self._leap = leap
        self._place = place
        self._limits = limits
        self._buffer = b""
        self._at = 0  # of the next unread byte in the buffer
        self._base = 0  # offset in the stream of the buffer's first byte
        self._left = 0  # unread bytes of the current member's content
        self._meta: dict[bytes, bytes] = {}  # extension records that wait for their member
        self._depth = 0
        self.ended = False

    @property
    def offset(self) -> int:
        """Bytes of the stream that are behind us: where the current member's unread content begins."""
        return self._base + self._at

    def __iter__(self) -> Iterator[Member]:
        """Every member in the archive's order. What of its content isn't read is skipped."""
        unpack, kinds, longest = _FIELDS.unpack, _KINDS, self._limits.path_bytes
        buffer, at = self._buffer, self._at
        while True:
            if len(buffer) - at < BLOCK:
                self._at = at
                if not self._fill(BLOCK):
                    return
                buffer, at = self._buffer, self._at
            block = buffer[at : at + BLOCK]
            name, digits, checksum, flag, link, magic, prefix = unpack(block)
            self._at = at = at + BLOCK
            digits = digits.strip(_PADDING)
            # adler32 sums bytes in C, modulo a prime and off by one; the checksum field counts as spaces
            summed = (adler32(block[156:], adler32(block[:148])) & 0xFFFF) + 255
            if digits.isdigit() and (summed - _octal(checksum)) % _ADLER_BASE == 0:
                size = _octal(digits)
            elif block == _ZERO:
                self._end()
                return
            else:
                size = self._careful_size(block)
            if flag in _META:
                self._read_meta(flag, size)
                buffer, at = self._buffer, self._at
                continue
            name = name.split(b"\0", 1)[0]
            if prefix[0] and magic == b"ustar\0":
                name = prefix.split(b"\0", 1)[0] + b"/" + name
            kind = kinds.get(flag, -1)
            link = link.split(b"\0", 1)[0] if kind in (SYMLINK, HARDLINK) else b""
            if self._meta or flag in _RARE:
                name, kind, size, link = self._amended(block, flag, (name, kind, size, link))
                buffer, at = self._buffer, self._at
            if kind or len(name) >= longest:
                size = self._checked(kind, name, link)
            self._left = size
            yield name, kind, size, link
            if size:
                at += size + (-size & 511)
                if self._left != size or at > len(buffer):
                    self._skip(-size & 511)
                    buffer, at = self._buffer, self._at
                self._left = 0

    def content(self) -> Iterator[bytes]:
        """The current member's content in pieces, until the next member is asked for."""
        while self._left:
            if self._at >= len(self._buffer):
                self._fill(1)
            piece = self._buffer[self._at : self._at + self._left]
            self._at += len(piece)
            self._left -= len(piece)
            yield piece

    def drain(self) -> None:
        """Read the stream to its end, so that whatever hashes it sees all of it."""
        self._base += len(self._buffer)
        self._buffer, self._at = b"", 0
        for chunk in self._chunks:
            self._base += len(chunk)

    def _fill(self, need: int) -> bool:
        """Have `need` bytes in the buffer. False where the stream ends between two members."""
        rest = self._buffer[self._at :]
        self._base += self._at
        parts, have = [rest] if rest else [], len(rest)
        while have < need:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            have += len(chunk)
        self._buffer, self._at = b"".join(parts), 0
        if have < need and (have or self._left or self._meta):
            raise Truncated("the archive ends inside a member", place=self._here())
        return have >= need

    def _skip(self, padding: int) -> None:
        """Pass over what is left of the current member and its padding, holding one chunk at a time."""
        self._left += padding
        here = len(self._buffer) - self._at
        if self._leap and self._left > here:
            self._base += len(self._buffer)
            self._buffer, self._at = b"", 0
            leapt = self._leap(self._left - here)
            self._base += leapt
            self._left -= here + leapt
        for _ in self.content():
            pass

    def _end(self) -> None:
        """The first zero block was read: a second one, or the end of the stream, ends the archive."""
        if self._meta:
            raise MalformedTar("an extension header without its member", place=self._here())
        if self._fill(BLOCK) and self._buffer[self._at : self._at + BLOCK] != _ZERO:
            raise MalformedTar("a lone zero block between members", place=self._here())
        self.ended = True

    def _careful_size(self, block: bytes) -> int:
        """The content's size from a header that the quick reading refused. Raises MalformedTar."""
        summed = sum(block) - sum(block[148:156]) + 256
        high = sum(1 for byte in block[:148] + block[156:] if byte > 127)
        # some old writers summed signed bytes; Go accepts both
        if _octal(block[148:156]) not in (summed, summed - 256 * high):
            raise MalformedTar("a header's checksum is wrong", place=self._here(-BLOCK))
        return self._number(block[124:136])

    def _number(self, field: bytes) -> int:
        """An octal or base-256 number field. Raises MalformedTar unless 0 <= number < 2^63."""
        digits = field.strip(_PADDING)
        if field[0] & 0x80:  # base 256, two's complement in 95 bits
            number = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
            number -= 1 << 95 if field[0] & 0x40 else 0
        elif not digits:
            number = 0
        else:
            number = _octal(digits) if digits.isdigit() else -1
        if not 0 <= number <= _LARGEST:
            raise MalformedTar(f"a size of {field!r}", place=self._here(-BLOCK))
        return number

    def _read_meta(self, flag: int, size: int) -> None:
        """Take in one extension header. Raises LimitExceeded for large or deeply chained ones."""
        self._depth += 1
        if size > self._limits.meta_bytes:
            raise LimitExceeded(f"an extension header of {size:,} bytes", place=self._here(-BLOCK))
        if self._depth > self._limits.meta_depth:
            raise LimitExceeded("extension headers chained without end", place=self._here(-BLOCK))
        padded = size + (-size & 511)
        self._left = padded  # so that the end of the stream here counts as inside a member
        self._fill(padded)
        self._left = 0
        body = self._buffer[self._at : self._at + size]
        self._at += padded
        if flag == _GNU_NAME:
            self._meta[b"gnu.name"] = body.split(b"\0", 1)[0]
        elif flag == _GNU_LINK:
            self._meta[b"gnu.link"] = body.split(b"\0", 1)[0]
        elif flag != _PAX_GLOBAL:  # engines ignore global headers
            gnu = {key: self._meta[key] for key in (b"gnu.name", b"gnu.link") if key in self._meta}
            self._meta = self._pax_records(body) | gnu | {b"": b""}

    def _pax_records(self, body: bytes) -> dict[bytes, bytes]:
        records: dict[bytes, bytes] = {}
        at = 0
        while at < len(body):
            space = body.find(b" ", at, at + 20)
            digits = body[at:space]
            end = at + int(digits) if space > 0 and digits.isdigit() else 0
            key, equals, value = body[space + 1 : end - 1].partition(b"=")
            if not (space < end <= len(body) and body[end - 1] == 10 and equals and key):
                raise MalformedTar("a PAX record that can't be read", place=self._here())
            records[key] = value
            at = end
        return records

    def _amended(self, block: bytes, flag: int, plain: Member) -> Member:
        """The member with its extension headers' say, which is then used up."""
        name, kind, size, link = plain
        meta, self._meta, self._depth = self._meta, {}, 0
        name = meta.get(b"gnu.name") or meta.get(b"GNU.sparse.name") or meta.get(b"path") or name
        link = meta.get(b"gnu.link") or meta.get(b"linkpath") or link
        if b"\0" in name or b"\0" in link:
            raise MalformedTar("a path with a NUL in a PAX record", place=self._here(-BLOCK))
        digits = meta.get(b"size")
        if digits:
            size = int(digits) if digits.isdigit() and len(digits) < 20 else -1
            if not 0 <= size <= _LARGEST:
                raise MalformedTar(f"a PAX size of {digits[:24]!r}", place=self._here(-BLOCK))
        if flag == _SPARSE_FLAG:
            self._pass_sparse_map(block)
        if flag == 0 and name.endswith(b"/"):
            kind = DIRECTORY  # before POSIX a directory was a file with a slash
        return name, kind, size, link

    def _pass_sparse_map(self, block: bytes) -> None:
        """Old GNU sparse: blocks of the map that stand before the content and aren't in its size."""
        passed, more = 0, block[482]
        while more:
            passed += BLOCK
            if passed > self._limits.meta_bytes:
                raise LimitExceeded("a sparse map without end", place=self._here())
            self._left = BLOCK
            self._fill(BLOCK)
            more = self._buffer[self._at + 504]
            self._at += BLOCK
        self._left = 0

    def _checked(self, kind: int, name: bytes, link: bytes) -> int:
        """The size of what has no content (Go ignores their size field). Raises for what can't be read."""
        if kind < 0:
            raise MalformedTar("a member of unknown type", place=self._here(-BLOCK))
        if max(len(name), len(link)) >= self._limits.path_bytes:
            longest = max(len(name), len(link))
            raise LimitExceeded(f"a path of {longest:,} bytes", place=self._here(-BLOCK))
        return 0

    def _here(self, back: int = 0) -> str:
        return f"{self._place}, byte {self.offset + back:,}"


def _octal(field: bytes) -> int:
    """A number in octal digits, -1 where they aren't."""
    try:
        return int(field.strip(_PADDING), 8)
    except ValueError:
        return -1
