"""Walks a tar stream's headers: ustar, PAX, GNU long names, sparse files, base-256 numbers. Extracts nothing.

Reads a stream once, forwards, with bounded memory, and accepts what Go's archive/tar accepts (the
engines' own reader): where the formats leave room, a comment names Go's choice. Damage and oddities
that were read nevertheless go into `notes`.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from struct import Struct
from typing import Final
from zlib import adler32

from buildtool.image.errors import LIMITS, LimitExceeded, Limits, MalformedTar, Truncated

# Numbers in headers.

LARGEST: Final = (1 << 63) - 1
_PADDING: Final = b" \0"
_OCTAL: Final = b"01234567"
_HIGH: Final = bytes(range(128, 256))
# mode, uid, gid, modification time; the size is read apart, and the checksum isn't a number of the member's
_OTHERS: Final = tuple(map(slice, (100, 108, 116, 136), (108, 116, 124, 148)))
_DEVICES: Final = tuple(map(slice, (329, 337), (337, 345)))  # major and minor; V7 headers have none
_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")
_TIME: Final = re.compile(rb"([+-]?[0-9]+)(?:\.[0-9]*)?")


@lru_cache(4096)  # headers repeat sizes and checksums: a hit takes a fifth of the time
def octal(field: bytes) -> int:
    """The number in a field of octal digits, padded with spaces and NULs; 0 for a blank one.

    Raises ValueError for any other byte, among them signs, underscores and the digits 8 and 9, which
    `int` would read or misread.
    """
    digits = field.strip(_PADDING)
    if digits.strip(_OCTAL):
        raise ValueError(f"{field!r} is not an octal number")
    return int(digits or b"0", 8)


def number(field: bytes) -> int:
    """The number in a header's field: octal up to its first NUL, or base 256 (two's complement).

    What follows the NUL is ignored, as in Go. Raises ValueError for anything else and outside 64 bits.
    """
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << 8 * len(field) - 1) - 1)
        value -= 1 << 8 * len(field) - 1 if field[0] & 0x40 else 0
        if not -LARGEST - 1 <= value <= LARGEST:
            raise ValueError(f"{field!r} is beyond 64 bits")
        return value
    digits = field.strip(_PADDING).partition(b"\0")[0]
    if digits.endswith(b" "):
        raise ValueError(f"{field!r} is not an octal number")
    return octal(digits)


def has_junk(field: bytes) -> bool:
    """Does anything except padding follow the number that `number` reads?"""
    return not field[0] & 0x80 and b"\0" in field.strip(_PADDING)


def check_numbers(block: bytes) -> None:
    """Raises ValueError where an unused number of a header can't be read: engines refuse it."""
    known = block[257:263] == b"ustar\0" or block[257:265] == b"ustar  \0"
    fields = _OTHERS + _DEVICES if known else _OTHERS
    for field in fields:
        number(block[field])


def has_right_checksum(block: bytes) -> bool:
    """Is the checksum that of the header, as unsigned bytes or, as some old writers had it, signed ones?"""
    if block[148] & 0x80:
        return False
    try:
        stated = number(block[148:156])
    except ValueError:
        return False
    summed = unsigned_sum(block)
    if stated == summed:
        return True
    rest = block[:148] + block[156:]
    return stated == summed - 256 * (len(rest) - len(rest.translate(None, _HIGH)))


def unsigned_sum(block: bytes) -> int:
    """The sum of a header's bytes, those of the checksum field counted as spaces.

    Adler-32 adds bytes in C, modulo a prime that three parts of a header can't reach.
    """
    parts = (block[:148], block[156:400], block[400:])
    return sum((adler32(part) & 0xFFFF) - 1 for part in parts) + 256


def pax_integer(value: bytes) -> int:
    """A PAX record's number: decimal digits, perhaps with a sign. Raises ValueError, also beyond 64 bits."""
    if not _INTEGER.fullmatch(value):
        raise ValueError(f"{value[:24]!r} is not a decimal number")
    digits = value.lstrip(b"+-").lstrip(b"0")
    if len(digits) > 19:  # before `int`, whose time is quadratic
        raise ValueError("a number beyond 64 bits")
    number = int(digits or b"0") * (-1 if value[:1] == b"-" else 1)
    if not -LARGEST - 1 <= number <= LARGEST:
        raise ValueError("a number beyond 64 bits")
    return number


def check_pax_time(value: bytes) -> None:
    """Raises ValueError where a PAX record's time isn't decimal seconds."""
    match = _TIME.fullmatch(value)
    if not match:
        raise ValueError(f"{value[:24]!r} is not a time")
    pax_integer(match[1])


# Members.

FILE: Final = 0
DIRECTORY: Final = 1
SYMLINK: Final = 2
HARDLINK: Final = 3
DEVICE: Final = 4  # character and block devices, named pipes
Member = tuple[bytes, int, int, bytes]  # name, kind, bytes of content in the archive, link name


def normal_path(path: str) -> str:
    """A path below the root, without `.`, `..` and slashes at its ends."""
    return posixpath.normpath("/" + path).lstrip("/")


BLOCK: Final = 512
_ZERO: Final = bytes(BLOCK)
# name; mode, uid, gid, size and time; checksum, type flag, link name, device numbers, prefix
_FIELDS: Final = Struct("100s 48s 8s B 100s 72x 16s 155s 12x")
_NUMERIC: Final = b"01234567 \0"
_SPARSE_FLAG: Final = ord("S")
_RARE: Final = frozenset({0, _SPARSE_FLAG})  # type flags that take a second look
_KINDS: Final = {0: FILE, ord("0"): FILE, ord("7"): FILE, _SPARSE_FLAG: FILE, ord("1"): HARDLINK} | {
    ord("2"): SYMLINK, ord("3"): DEVICE, ord("4"): DEVICE, ord("5"): DIRECTORY, ord("6"): DEVICE,
}  # fmt: skip
_PAX_GLOBAL, _GNU_NAME, _GNU_LINK = b"gLK"
_META: Final = frozenset(b"xgLKX")  # X: Solaris' PAX
_USUAL_DEPTH: Final = 8
_MAP_DIGITS: Final = 8  # of a sparse map's length: more doesn't fit in an extension header's size
_SPARSE_VERSIONS: Final = frozenset({(b"0", b"0"), (b"0", b"1"), (b"1", b"0")})
JUNK: Final = "numbers in headers with other bytes after their end"
LOOSE_SIZE: Final = "PAX sizes with leading zeros or a plus sign"
CHAINED: Final = "more than 8 extension headers in a row"
NO_PADDING: Final = "the last member's padding is missing"
DANGLING: Final = "an extension header at the end belongs to no member"
NO_END: Final = "the end-of-archive marker is missing"


class TarReader:
    """One pass over a tar stream. Iterate for its members; `content()` gives the current one's bytes.

    Afterwards, `ended` says whether the end-of-archive marker was seen, and `notes` what was odd. Raises
    MalformedTar, Truncated and LimitExceeded with the byte offset in the stream.
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
        self._offset_of_buffer = 0  # offset in the stream of the buffer's first byte
        self._left = 0  # unread bytes of the current member's content
        self._pax: dict[bytes, bytes] = {}  # records that wait for their member
        self._gnu: dict[int, bytes] = {}  # long names that do, by type flag
        self._n_pending = 0  # extension headers that wait
        self.ended = False
        self.notes: dict[str, None] = {}  # in the order in which they were found

    @property
    def offset(self) -> int:
        """Bytes of the stream read so far: where the current member's unread content begins."""
        return self._offset_of_buffer + self._at

    def __iter__(self) -> Iterator[Member]:  # noqa: PLR0912  one loop: calls would halve its speed
        """Every member in the archive's order. Unread content is skipped."""
        unpack, kinds, longest = _FIELDS.unpack, _KINDS, self._limits.path_bytes
        buffer, at, behind = self._buffer, self._at, -1
        while True:
            if len(buffer) - at < BLOCK:
                self._at = at
                if not self._has_header():
                    return
                buffer, at = self._buffer, self._at
            block = buffer[at : at + BLOCK]
            name, numbers, checksum, flag, link, devices, prefix = unpack(block)
            self._at = at = at + BLOCK
            if self._offset_of_buffer + at <= behind:
                raise MalformedTar("reading doesn't advance here", place=self._here(-BLOCK))
            behind = self._offset_of_buffer + at
            try:  # Adler-32 sums bytes in C; modulo a prime, which ASCII can't reach
                if numbers.strip(_NUMERIC) or devices.strip(_NUMERIC) or not block.isascii():
                    raise ValueError
                if octal(checksum) != (adler32(block[156:], adler32(block[:148])) & 0xFFFF) + 255:
                    raise ValueError
                size = octal(numbers[24:36])
            except ValueError:
                if block == _ZERO:
                    self._end()
                    return
                size = self._careful_size(block, flag)
            if flag in _META:
                self._read_meta(flag, size)
                buffer, at = self._buffer, self._at
                continue
            name = name.partition(b"\0")[0]
            if prefix[0]:
                name = _prefixed(name, block)
            kind = kinds.get(flag, -1)
            link = link.partition(b"\0")[0] if kind in (SYMLINK, HARDLINK) else b""
            if self._n_pending or flag in _RARE:
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
        while self._left > 0:
            if self._at >= len(self._buffer) and not self._fill(1):
                raise Truncated("the archive ends inside a member", place=self._here())
            piece = self._buffer[self._at : self._at + self._left]
            self._at += len(piece)
            self._left -= len(piece)
            yield piece

    def drain(self) -> None:
        """Read the stream to its end, so that its hash covers all of it."""
        self._offset_of_buffer += len(self._buffer)
        self._buffer, self._at = b"", 0
        for chunk in self._chunks:
            self._offset_of_buffer += len(chunk)

    def _fill(self, need: int) -> int:
        """Fill the buffer to `need` bytes, fewer where the stream ends; returns how many there are."""
        rest = self._buffer[self._at :]
        self._offset_of_buffer += self._at
        parts, have = [rest] if rest else [], len(rest)
        while have < need:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            have += len(chunk)
        self._buffer, self._at = b"".join(parts), 0
        return have

    def _has_header(self) -> bool:
        """Is there another header? False where the stream ends between two members. Raises Truncated."""
        have = self._fill(BLOCK)
        if 0 < have < BLOCK:
            raise Truncated("the archive ends inside a header", place=self._here())
        if not have:
            self._note_dangling()
            self.notes[NO_END] = None
        return have > 0

    def _skip(self, padding: int) -> None:
        """Skip the rest of the current member and its padding, holding one chunk at a time."""
        here = len(self._buffer) - self._at
        if self._leap and self._left > here:
            self._offset_of_buffer += len(self._buffer)
            self._buffer, self._at = b"", 0
            leapt = self._leap(self._left - here)
            self._offset_of_buffer += leapt
            self._left -= here + leapt
        for _ in self.content():
            pass
        self._pass_padding(padding)

    def _pass_padding(self, padding: int) -> None:
        if len(self._buffer) - self._at < padding and self._fill(padding) < padding:
            self.notes[NO_PADDING] = None  # Go ends there without an error
            padding = len(self._buffer)
        self._at += padding

    def _end(self) -> None:
        """The first zero block was read: a second one, or the end of the stream, ends the archive."""
        self._note_dangling()
        have = self._fill(BLOCK)
        if 0 < have < BLOCK:
            raise Truncated("the archive ends inside its end marker", place=self._here())
        if have and self._buffer[self._at : self._at + BLOCK] != _ZERO:
            raise MalformedTar("a lone zero block between members", place=self._here())
        self.ended = True

    def _note_dangling(self) -> None:
        if self._n_pending:
            self.notes[DANGLING] = None  # Go drops it

    def _careful_size(self, block: bytes, flag: int) -> int:
        """The content's size from a header that the quick reading refused. Raises MalformedTar."""
        if not has_right_checksum(block):
            raise MalformedTar("a header's checksum is wrong", place=self._here(-BLOCK))
        try:
            size = number(block[124:136])
            check_numbers(block)
        except ValueError as error:
            raise MalformedTar(f"a number that can't be read ({error})", place=self._here(-BLOCK)) from error
        if has_junk(block[124:136]) or has_junk(block[148:156]):
            self.notes[JUNK] = None
        return self._content_size(size, _KINDS.get(flag, FILE))

    def _content_size(self, size: int, kind: int) -> int:
        """The size, if it can be one: Go ignores that of what has no content. Raises MalformedTar."""
        if size < 0 and kind <= FILE:
            raise MalformedTar(f"a size of {size:,} bytes", place=self._here(-BLOCK))
        return max(size, 0)

    def _read_meta(self, flag: int, size: int) -> None:
        """Take in one extension header. Raises LimitExceeded for large or deeply chained ones."""
        self._n_pending += 1
        if size > self._limits.meta_bytes:
            raise LimitExceeded(f"an extension header of {size:,} bytes", place=self._here(-BLOCK))
        if self._n_pending > self._limits.meta_depth:
            raise LimitExceeded("extension headers chained without end", place=self._here(-BLOCK))
        if self._n_pending > _USUAL_DEPTH:
            self.notes[CHAINED] = None  # Go reads any number
        self._left = size
        body = b"".join(self.content())
        self._pass_padding(-size & 511)
        if flag in (_GNU_NAME, _GNU_LINK):
            self._gnu[flag] = body.partition(b"\0")[0]
            return
        self._pax = self._pax_records(body)
        # a separate member for Go, which takes the pending records; engines ignore it
        if flag == _PAX_GLOBAL:
            self._pax, self._gnu, self._n_pending = {}, {}, 0

    def _pax_records(self, body: bytes) -> dict[bytes, bytes]:
        """The records of one header. Raises MalformedTar."""
        records: dict[bytes, bytes] = {}
        at = 0
        while at < len(body):
            space = body.find(b" ", at)
            try:
                end = at + pax_integer(body[at:space])
            except ValueError:
                end = 0
            key, equals, value = body[space + 1 : end - 1].partition(b"=")
            if not (at < space < end <= len(body) and body[end - 1] == 10 and equals and key):
                raise MalformedTar("a PAX record that can't be read", place=self._here())
            if b"\0" in (value if key in (b"path", b"linkpath", b"uname", b"gname") else key):
                raise MalformedTar("a PAX record with a NUL", place=self._here())
            records[key] = value
            at = end
        return records

    def _amended(self, block: bytes, flag: int, plain: Member) -> Member:
        """The member as its extension headers, which are then used up, describe it."""
        name, kind, size, link = plain
        pax, gnu, self._pax, self._gnu, self._n_pending = self._pax, self._gnu, {}, {}, 0
        name = gnu.get(_GNU_NAME) or pax.get(b"path") or name
        link = gnu.get(_GNU_LINK) or pax.get(b"linkpath") or link
        try:
            for key in (b"uid", b"gid"):
                pax_integer(pax.get(key) or b"0")
            for key in (b"mtime", b"atime", b"ctime"):
                check_pax_time(pax.get(key) or b"0")
            if pax.get(b"size"):
                size = self._content_size(pax_integer(pax[b"size"]), kind)
                if pax[b"size"] != b"%d" % size:
                    self.notes[LOOSE_SIZE] = None
        except ValueError as error:
            raise MalformedTar(
                f"a PAX number that can't be read ({error})", place=self._here(-BLOCK)
            ) from error
        if flag == _SPARSE_FLAG:
            self._pass_sparse_map(block)
        if flag == 0 and name.endswith(b"/"):
            kind = DIRECTORY  # before POSIX, a directory was a file whose name ends in a slash
        if flag != _SPARSE_FLAG and _is_sparse(pax):
            name = pax.get(b"GNU.sparse.name") or name  # Go takes it last, and for versions it knows
            if pax.get(b"GNU.sparse.major") == b"1" and kind == FILE:
                map_bytes = self._map_before_content(size)
                self._at += map_bytes
                size -= map_bytes
        return name, kind, size, link

    def _pass_sparse_map(self, block: bytes) -> None:
        """Old GNU sparse: blocks of the map that stand before the content and aren't in its size."""
        passed, more = 0, block[482]
        while more:
            passed += BLOCK
            if passed > self._limits.meta_bytes:
                raise LimitExceeded("a sparse map without end", place=self._here())
            if self._fill(BLOCK) < BLOCK:
                raise Truncated("the archive ends inside a sparse map", place=self._here())
            more = self._buffer[self._at + 504]
            self._at += BLOCK

    def _map_before_content(self, size: int) -> int:
        """PAX sparse 1.0: bytes of the map, lines of numbers in whole blocks, that the size includes.

        0 for one that can't be read: then all counts as content.
        """
        length = lines = 0
        wanted = 1  # the first line says how many pairs of lines follow
        while lines < wanted:
            end = length + BLOCK
            if end > min(size, self._limits.meta_bytes):
                return 0
            if len(self._buffer) - self._at < end and self._fill(2 * end) < end:
                return 0
            block = self._buffer[self._at + length : self._at + end]
            if not length:
                first = block.partition(b"\n")[0]
                if not first.isdigit() or len(first) > _MAP_DIGITS:
                    return 0
                wanted += 2 * int(first)
            lines += block.count(b"\n")
            length = end
        return length

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


def _prefixed(name: bytes, block: bytes) -> bytes:
    """The name with its prefix, in the formats that have one. Go reads the same."""
    magic = block[257:265]
    prefix = block[345:500].partition(b"\0")[0]
    if magic[:6] == b"ustar\0":
        if block[508:] == b"tar\0":  # star keeps two times behind a shorter prefix
            prefix = prefix[:131]
    elif magic != b"ustar  \0" or _has_gnu_times(block) or not prefix.isascii():
        return name
    return prefix + b"/" + name


def _has_gnu_times(block: bytes) -> bool:
    """GNU headers have two times where ustar has the prefix; those of Go before 1.8 had a prefix there."""
    try:
        for field in (block[345:357], block[357:369]):
            if field[0]:
                number(field)
    except ValueError:
        return False
    return True


def _is_sparse(pax: dict[bytes, bytes]) -> bool:
    """Do these records describe a sparse file of a version that Go knows?"""
    version = pax.get(b"GNU.sparse.major", b""), pax.get(b"GNU.sparse.minor", b"")
    return version in _SPARSE_VERSIONS or (version == (b"", b"") and bool(pax.get(b"GNU.sparse.map")))
