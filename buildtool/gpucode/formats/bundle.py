"""Uncompressed bundles of code objects (`__CLANG_OFFLOAD_BUNDLE__`): read the entry table, lay out a new one.

Format: LLVM's ClangOffloadBundler document. Little-endian; magic (24 bytes), u64 entry count, then for
each entry u64 offset from the bundle's start, u64 size, u64 id length, id.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from buildtool.gpucode.errors import BadBundle, BadTarget
from buildtool.gpucode.target import SPIRV, TargetId

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
PAGE_BYTES = 4096  # clang aligns bundles and their payloads to it, so that runtimes can map them
HEAD_BYTES = 1 << 16  # the most bytes that a bundle's entry table may take here
_MAX_ENTRIES = 1024
_MAX_ID_BYTES = 512
MOST_CODES = 1 << 18  # in one section or file; each takes some 400 bytes of memory
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
    if not head.startswith(MAGIC):
        raise BadBundle("no bundle of code objects starts here", place=place)
    count = _u64(head, len(MAGIC), place)
    if not 1 <= count <= _MAX_ENTRIES:
        raise BadBundle(f"a bundle claims {count} entries, the limits are 1 and {_MAX_ENTRIES}", place=place)
    position = len(MAGIC) + 8
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


def _check_payloads(entries: Sequence[Entry], table_bytes: int, limit: int, place: int) -> None:
    if len({entry.id for entry in entries}) != len(entries):
        raise BadBundle("a bundle has two entries with the same id", place=place)
    full = sorted((entry.offset, entry.offset + entry.n_bytes) for entry in entries if entry.n_bytes)
    if any(start < table_bytes or end > limit for start, end in full):
        raise BadBundle("a bundle's code object is outside the bundle", place=place)
    if any(end > start for (_, end), (start, _) in pairwise(full)):
        raise BadBundle("a bundle's code objects overlap", place=place)


def too_many(place: int) -> BadBundle:
    """The fault of a section with more code objects than MOST_CODES."""
    return BadBundle(f"more than {MOST_CODES:,} pieces of GPU code in a row", place=place)


def lay_out(kept: Sequence[Entry], align: int = PAGE_BYTES) -> tuple[bytes, Bundle]:
    """A new bundle of `kept` entries in their order: its entry table as bytes, and as a value.

    Payloads start at multiples of `align`; an empty entry takes no room.
    """
    table_bytes = len(MAGIC) + 8 + sum(24 + len(entry.id) for entry in kept)
    entries = []
    end = table_bytes
    for entry in kept:
        offset = align_up(end, align)
        entries.append(Entry(entry.id, offset, entry.n_bytes))
        end = offset + entry.n_bytes if entry.n_bytes else end
    packed = b"".join(
        struct.pack("<QQQ", entry.offset, entry.n_bytes, len(entry.id)) + entry.id.encode()
        for entry in entries
    )
    return MAGIC + struct.pack("<Q", len(entries)) + packed, Bundle(tuple(entries), table_bytes)


def align_up(value: int, align: int) -> int:
    """The next multiple of `align`, `value` itself if it is one."""
    return -(-value // align) * align


def _u64(data: bytes, position: int, place: int) -> int:
    field = data[position : position + 8]
    if len(field) != 8:
        raise BadBundle("a bundle's entry table is cut off", place=place + position)
    return int.from_bytes(field, "little")
