"""Counts debug information inside an ELF file that streams by: what `strip` would remove.

The section headers come after the content that they describe, and their names may be anywhere before. So the
counter keeps the headers, and what surrounds the word `.shstrtab` in the parts that no segment loads.
"""

import struct
from dataclasses import dataclass

from buildtool.gpucode import elf
from buildtool.gpucode.source import BadElf

_HEAD_BYTES = 4096  # linkers put the program headers right behind the file's header
_MOST_SECTIONS = 4096  # libraries have some 40
_NAMES_BYTES = 32 << 10  # libraries' names take some 400 bytes
_MOST_PLACES = 8  # that may be the names: programs that read ELF files hold the word, too
_NAMES_WORD = b".shstrtab"
_DEBUG_NAMES = (b".debug", b".zdebug", b".stab", b".gdb_index", b".line")  # what binutils calls debugging

Span = tuple[int, int]  # first byte of a file, and the one after the last


@dataclass(frozen=True)
class _Table:
    """Where a file's header places its section headers."""

    offset: int
    count: int
    names_index: int

    @property
    def end(self) -> int:
        return self.offset + self.count * elf.SECTION_BYTES


class DebugCounter:
    """Feed a file's content in order, then ask for `debug_bytes`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0  # of the next piece in the file
        self._head = b""
        self._error = ""
        self._table: _Table | None = None
        self._table_bytes = bytearray()
        self._unloaded_spans: list[Span] = []
        self._recent = bytearray()  # the newest bytes of an unloaded part
        self._recent_at = 0
        self._searched = 0  # how far in the file
        self._names: list[tuple[int, bytes]] = []  # where in the file, and what is there

    def feed(self, piece: bytes) -> None:
        """The next piece of content."""
        needed = min(_HEAD_BYTES, self._size)
        if len(self._head) < needed:
            piece = self._head + piece
            self._head = piece[:_HEAD_BYTES]
            if len(self._head) < needed:
                return
            self._read_head()
        if self._table:
            self._take(piece, self._table)

    def debug_bytes(self, other_bytes: int = 0) -> int:
        """Bytes that stripping would remove from the file, which also has `other_bytes` of something else.

        Raises BadElf, with the reason, where that can't be told.
        """
        if self._error:
            raise BadElf(self._error)
        table = self._table
        if not table:
            return 0
        self._search(at_end=True)
        if len(self._table_bytes) != table.end - table.offset:
            raise BadElf("its section headers end too early")
        rows = list(struct.iter_unpack(elf.SECTION_FORMAT, self._table_bytes))
        spans = _debug_spans(rows, table.names_index, self._names_of(rows[table.names_index]))
        covered = _covered(spans)
        if covered + other_bytes > self._size or any(end > self._size for _, end in spans):
            raise BadElf("its sections overlap, or extend past its end")
        return covered

    def _read_head(self) -> None:
        """Plan what to keep, from the first bytes."""
        head = self._head
        if not elf.is_elf64(head):
            return
        kind, machine = struct.unpack_from("<HH", head, 16)
        if kind not in (elf.ET_EXEC, elf.ET_DYN) or machine in (elf.EM_AMDGPU, elf.EM_CUDA):
            return
        offset = struct.unpack_from("<Q", head, 40)[0]
        entry_bytes, count, names_index = struct.unpack_from("<HHH", head, 58)
        if not count:
            return  # a file without sections, as `sstrip` leaves it
        table = _Table(offset, count, names_index)
        if entry_bytes != elf.SECTION_BYTES or table.end > self._size or offset < elf.HEADER_BYTES:
            self._error = "its section headers are outside the file"
        elif count > _MOST_SECTIONS or names_index >= count:
            self._error = "it has too many section headers, or they have no names"
        else:
            self._table = table
            self._unloaded_spans = self._spans_not_loaded(table)

    def _spans_not_loaded(self, table: _Table) -> list[Span]:
        """Where the names can be: in what no segment loads; before that is known, just before the headers."""
        if table.end <= len(self._head):  # as Go writes it: the headers give the position of the names
            at = table.offset + table.names_index * elf.SECTION_BYTES
            offset, n_bytes = struct.unpack_from("<QQ", self._head, at + 24)
            return [(offset, offset + n_bytes)]
        start = struct.unpack_from("<Q", self._head, 32)[0]
        count = struct.unpack_from("<H", self._head, 56)[0]
        if start + count * elf.SEGMENT_BYTES > len(self._head):
            return [(max(0, table.offset - 8 * _NAMES_BYTES), self._size)]
        raw = self._head[start : start + count * elf.SEGMENT_BYTES]
        loaded = sorted(
            (offset, offset + n_bytes)
            for kind, _, offset, _, _, n_bytes, _, _ in struct.iter_unpack(elf.SEGMENT_FORMAT, raw)
            if kind == elf.PT_LOAD
        )
        gaps, reached = [], 0
        for begin, end in (*loaded, (self._size, self._size)):
            if begin > reached:
                gaps.append((reached, begin))
            reached = max(reached, end)
        return gaps

    def _take(self, piece: bytes, table: _Table) -> None:
        end = self._at + len(piece)
        self._table_bytes += piece[max(0, table.offset - self._at) : max(0, table.end - self._at)]
        while self._unloaded_spans and self._unloaded_spans[0][0] < end:
            start, stop = self._unloaded_spans[0]
            start = max(start, self._at)
            if start != self._recent_at + len(self._recent):
                self._search(at_end=True)
                self._recent.clear()
                self._recent_at = start
            self._recent += piece[start - self._at : stop - self._at]
            self._search(at_end=False)
            if stop > end:
                break
            del self._unloaded_spans[0]
        self._at = end

    def _search(self, *, at_end: bool) -> None:
        """Keep the bytes around the names' own name, and drop those too far before it."""
        begin = max(0, self._searched - self._recent_at)
        while (match := self._recent.find(_NAMES_WORD, begin)) >= 0:
            begin = match
            start, end = max(0, match - _NAMES_BYTES), match + 2 * _NAMES_BYTES
            if len(self._recent) < end and not at_end:
                break  # not all that surrounds it is here yet
            near = bytes(self._recent[start:end])
            self._names = [*self._names[1 - _MOST_PLACES :], (self._recent_at + start, near)]
            begin = match + _NAMES_BYTES  # all names that begin before are kept now
        else:
            begin = max(begin, len(self._recent) - len(_NAMES_WORD))
        self._searched = self._recent_at + begin
        past = min(max(0, begin - _NAMES_BYTES), len(self._recent))
        del self._recent[:past]
        self._recent_at += past

    def _names_of(self, row: tuple[int, ...]) -> bytes:
        offset, n_bytes = row[4], row[5]
        for start, near in (*self._names, (0, self._head)):
            if start <= offset and offset + n_bytes <= start + len(near):
                return near[offset - start : offset - start + n_bytes]
        raise BadElf("its section names can't be found")


def _debug_spans(rows: list[tuple[int, ...]], names_index: int, names: bytes) -> list[Span]:
    """Sections that no running program needs: debug information, and symbols that only linkers use."""
    symbols_names = {row[6] for row in rows if row[1] == elf.SHT_SYMTAB} - {names_index}
    return [
        (offset, offset + n_bytes)
        for index, (name, kind, flags, _, offset, n_bytes, *_) in enumerate(rows)
        if kind != elf.SHT_NOBITS
        and not flags & elf.SHF_ALLOC
        and (kind == elf.SHT_SYMTAB or index in symbols_names or names.startswith(_DEBUG_NAMES, name))
    ]


def _covered(spans: list[Span]) -> int:
    """Bytes in one or more of the spans."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
