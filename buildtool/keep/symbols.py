"""Symbol tables and debug information of ELF files, which no segment loads: a file without them.

Debuggers and profilers read them, programs don't: what `strip --strip-unneeded` removes. Every byte that is
loaded stays where it is, and so do the section headers of what stays.
"""

import struct
from dataclasses import dataclass

from buildtool.gpucode import elf
from buildtool.gpucode.source import GpuCodeError, Source

_DEBUG = (".debug", ".zdebug", ".gdb_index")
_SHOFF, _SHNUM = 40, 60  # places of fields in the file's header: gABI, chapter 4
_SHF_INFO_LINK = 0x40
_SHT_REL, _SHT_RELA = 9, 4
_PADDING = 64  # at most, between a file's parts


@dataclass(frozen=True)
class Cut:
    """A file without its symbols: its first bytes with `header` over their start, then `tail`."""

    kept_bytes: int
    header: bytes
    tail: bytes

    @property
    def n_bytes(self) -> int:
        """The length of the new file."""
        return self.kept_bytes + len(self.tail)


def needed_libraries(source: Source) -> tuple[str, ...]:
    """What the dynamic linker loads with a file: its interpreter and DT_NEEDED. Empty for no ELF file."""
    try:
        file = elf.read_elf(source)
        names = [
            source.exactly(each.offset, each.file_bytes, "the interpreter").rstrip(b"\0")
            for each in file.segments
            if each.type == elf.PT_INTERP and each.file_bytes < 4096
        ]
        dynamic = next((each for each in file.segments if each.type == elf.PT_DYNAMIC), None)
        if dynamic is not None:
            raw = source.exactly(dynamic.offset, min(dynamic.file_bytes // 16 * 16, 1 << 16), "its entries")
            names += _strings(source, file, list(struct.iter_unpack("<QQ", raw)))
    except GpuCodeError:
        return ()
    return tuple(name.decode("utf-8", "surrogateescape").rpartition("/")[2] for name in names)


def _strings(source: Source, file: elf.Elf, entries: list[tuple[int, int]]) -> list[bytes]:
    """The names of DT_NEEDED (1), which are offsets into DT_STRTAB (5)."""
    table = next((value for tag, value in entries if tag == 5), None)
    if table is None:
        return []
    names = []
    for tag, value in entries:
        if tag == 0:
            break
        if tag == 1:
            start = file.offset_of(table + value, 1)
            names.append(source.read_at(start, 256).partition(b"\0")[0])
    return names


def cut_of(source: Source) -> Cut | None:
    """How a file is written without what no segment loads; None where there is nothing, or it isn't plain.

    Files whose sections, headers and segments aren't all of their bytes stay as they are: a program may read
    what was appended to it.
    """
    try:
        file = elf.read_elf(source)
        file.check_loading(source.size)
        return _cut(source, file)
    except GpuCodeError:
        return None


def _cut(source: Source, file: elf.Elf) -> Cut | None:
    gone = {each.index for each in file.sections if _is_symbols(each)}
    loaded = [each for each in file.sections if each.flags & elf.SHF_ALLOC]
    end = max([each.file_end for each in file.segments], default=0)
    if not gone or not loaded or file.type not in (elf.ET_DYN, elf.ET_EXEC):
        return None
    table_bytes = len(file.sections) * elf.SECTION_BYTES
    behind = sorted(
        [
            (each.offset, each.file_end)
            for each in file.sections
            if each.type and not each.flags & elf.SHF_ALLOC
        ]
        + [(file.sections_offset, file.sections_offset + table_bytes)]
    )
    place = end
    for start, stop in behind:  # nothing else may be there, and nothing of it before
        if start != stop:
            if not place <= start <= place + _PADDING:
                return None
            place = stop
    if place != source.size or max(each.index for each in loaded) > min(gone):
        return None
    raw = source.exactly(file.sections_offset, table_bytes, "the section headers")
    rows = [list(row) for row in struct.iter_unpack(elf.SECTION_FORMAT, raw)]
    numbers = {old: new for new, old in enumerate(index for index in range(len(rows)) if index not in gone)}
    names_index = int.from_bytes(source.exactly(_SHNUM + 2, 2, "the header"), "little")
    if names_index in gone:  # one table for the names of symbols and sections
        return None
    tail = b""
    for index, section in enumerate(file.sections):
        row = rows[index]
        if index in gone or not section.type or section.flags & elf.SHF_ALLOC:
            continue
        tail += bytes(-(end + len(tail)) % 8)
        row[4] = end + len(tail)
        tail += source.exactly(section.offset, section.file_bytes, "a section")
    for index in numbers:
        row = rows[index]
        row[6] = numbers.get(row[6], 0)
        if row[1] in (_SHT_REL, _SHT_RELA) or row[2] & _SHF_INFO_LINK:
            row[7] = numbers.get(row[7], 0)
    tail += bytes(-(end + len(tail)) % 8)
    head = bytearray(source.exactly(0, elf.HEADER_BYTES, "the header"))
    head[_SHOFF : _SHOFF + 8] = struct.pack("<Q", end + len(tail))
    head[_SHNUM : _SHNUM + 4] = struct.pack("<HH", len(numbers), numbers[names_index])
    tail += b"".join(struct.pack(elf.SECTION_FORMAT, *rows[index]) for index in numbers)
    cut = Cut(end, bytes(head), tail)
    return cut if cut.n_bytes < source.size else None


def _is_symbols(section: elf.Section) -> bool:
    named = section.name in (".symtab", ".strtab") or section.name.startswith(_DEBUG)
    return named and not section.flags & elf.SHF_ALLOC
