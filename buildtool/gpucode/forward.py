"""Reading a file in one pass forward, whether it is at hand (`Source`) or streams by (`Stream`).

A reader is a generator: it yields `Read` and `Find` requests, whose places never go back, and gets what they
ask for. So one reader serves a file of any length in bounded memory, and skips what it doesn't ask for.
"""

from bisect import bisect_left
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from buildtool.gpucode.source import CHUNK_BYTES, GpuCodeError, Source

T = TypeVar("T")


@dataclass(frozen=True)
class Read:
    """Asks for `n_bytes` from the position `at`, all of which the file must have; `what` is for messages."""

    at: int
    n_bytes: int
    what: str


@dataclass(frozen=True)
class Find:
    """Asks for the first position from `at` on where GPU code may begin, `size` where there is none."""

    at: int
    size: int


Reader = Generator[Read | Find, bytes | int, T]

# What GPU code begins with. All writers align it to 8 bytes at least, since processors read its numbers as
# words; so only one byte in eight is looked at.
FATBIN_MAGIC = b"\x50\xed\x55\xba"
BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
COMPRESSED_MAGIC = b"CCOB"
OFFLOAD_MAGIC = b"\x10\xff\x10\xad"
OBJECT_MAGIC = b"\x7fELF\x02\x01\x01"
FRAME_MAGIC = b"\x28\xb5\x2f\xfd"  # zstd's: `frame`
MAGICS = (FATBIN_MAGIC, BUNDLE_MAGIC, COMPRESSED_MAGIC, OFFLOAD_MAGIC, OBJECT_MAGIC, FRAME_MAGIC)
ALIGN_BYTES = 8
_LONGEST = len(BUNDLE_MAGIC)
_FIRST_FIND_BYTES = 256
# (byte of the magic at which to look, its value, the other byte and its value, the magic); bytes that are
# rare in host code come first, and the second leaves few places at which all of a magic is compared
_MARKS = (
    (3, 0xBA, 0, 0x50, FATBIN_MAGIC),
    (0, ord("C"), 3, ord("B"), COMPRESSED_MAGIC),
    (3, 0xAD, 0, 0x10, OFFLOAD_MAGIC),
    (0, 0x7F, 3, ord("F"), OBJECT_MAGIC),
    (3, 0xFD, 0, 0x28, FRAME_MAGIC),
)
_BUNDLE_WORDS = BUNDLE_MAGIC[::ALIGN_BYTES]


def find_magics(block: bytes, base: int) -> list[int]:
    """Where in a block at position `base` of the file GPU code may begin: sorted positions in the file."""
    first = -base % ALIGN_BYTES
    # of each word, bytes 0 and 3; slices with a step make it quick
    columns = {0: block[first : max(len(block) - 3, 0) : ALIGN_BYTES], 3: block[first + 3 :: ALIGN_BYTES]}
    places = []
    for at, value, other_at, other_value, magic in _MARKS:
        find, other = columns[at].find, columns[other_at]
        match = find(value)
        while match >= 0:
            if other[match] == other_value and block.startswith(magic, first + ALIGN_BYTES * match):
                places.append(base + first + ALIGN_BYTES * match)
            match = find(value, match + 1)
    find = columns[0].find
    match = find(_BUNDLE_WORDS)
    while match >= 0:
        if block.startswith(BUNDLE_MAGIC, first + ALIGN_BYTES * match):
            places.append(base + first + ALIGN_BYTES * match)
        match = find(_BUNDLE_WORDS, match + 1)
    return sorted(places)


def read_forward(reader: Reader[T], source: Source) -> T:
    """Answer a reader from a file at hand. Raises what the reader raises, GpuCodeError at the file's end."""
    try:
        request = next(reader)
        while True:
            if isinstance(request, Read):
                answer: bytes | int = source.exactly(request.at, request.n_bytes, request.what)
            else:
                answer = _find_in(source, request)
            request = reader.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def _find_in(source: Source, request: Find) -> int:
    at, most = request.at, _FIRST_FIND_BYTES  # the next may be near, and very many behind it
    while at < request.size:
        n_bytes = min(most, request.size - at)
        for place in find_magics(source.exactly(at, n_bytes, "a section"), at):
            return place
        if at + n_bytes == request.size:
            break
        at, most = at + n_bytes - _LONGEST, min(2 * most, CHUNK_BYTES)
    return request.size


class Stream:
    """Answers a reader from a file that streams by: `feed` all of it in order, then `finish`."""

    def __init__(self, reader: Reader[None]) -> None:
        self._reader = reader
        self._end = 0  # of what was fed
        self._parts: list[bytes] = []  # up to there: what the request may need
        self._request: Read | Find | None = None
        self._advance(None)

    def feed(self, piece: bytes) -> None:
        """The next piece. Raises what the reader raises."""
        self._end += len(piece)
        if self._request is None or self._end <= self._request.at:
            self._parts.clear()
            return
        self._parts.append(piece)
        needed = self._request.n_bytes if isinstance(self._request, Read) else _LONGEST
        if self._end >= self._request.at + needed:
            self._answer(last=False)

    def finish(self) -> None:
        """The file has ended. Raises what the reader raises, GpuCodeError where it asks for more."""
        self._answer(last=True)
        if self._request is not None:
            what = self._request.what if isinstance(self._request, Read) else "a section"
            raise GpuCodeError(f"{what} is missing: the file got shorter", place=self._end)

    def _advance(self, answer: bytes | int | None) -> None:
        try:
            self._request = next(self._reader) if answer is None else self._reader.send(answer)
        except StopIteration:
            self._request = None

    def _answer(self, *, last: bool) -> None:
        """Answer requests from the parts that are here; keep what the next one may need."""
        block = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        base = self._end - len(block)
        places: list[int] | None = None
        while request := self._request:
            if isinstance(request, Read):
                if request.at + request.n_bytes > self._end:
                    break
                self._advance(block[request.at - base : request.at - base + request.n_bytes])
                continue
            if places is None:
                places = find_magics(block, base)
            index = bisect_left(places, request.at)
            if index == len(places) and not (last and self._end >= request.size):
                # a magic may begin in the last bytes
                self._request = Find(max(request.at, self._end - _LONGEST), request.size)
                break
            self._advance(places[index] if index < len(places) else request.size)
        begin = self._end if self._request is None else min(self._request.at, self._end)
        self._parts = [block[begin - base :]] if begin < self._end else []
