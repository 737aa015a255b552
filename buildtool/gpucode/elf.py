"""ELF files, as far as cutting GPU code needs: headers, sections, dynamic entries. Strict, small, own.

Only 64-bit little-endian. Every offset is checked against the file before it is read; numbers are the
gABI's. pyelftools reads lazily and trusts sizes, which is unsafe on hostile input.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from buildtool.gpucode.source import BadElf, Source

MAGIC = b"\x7fELF"
HEADER_BYTES = 64
SEGMENT_BYTES = 56
SECTION_BYTES = 64
SEGMENT_FORMAT = "<IIQQQQQQ"
SECTION_FORMAT = "<IIQQQQIIQQ"

ET_EXEC, ET_DYN = 2, 3
EM_X86_64, EM_CUDA, EM_AMDGPU = 62, 190, 224
PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_PHDR = 1, 2, 3, 6
PT_GNU_RELRO = 0x6474E552
SHT_SYMTAB, SHT_NOBITS, SHT_DYNSYM = 2, 8, 11
SHF_ALLOC = 2
PAGE_SHIFT = 12  # x86-64's pages
DT_NULL, DT_PLTRELSZ, DT_RELA, DT_RELASZ, DT_RELAENT, DT_REL, DT_JMPREL = 0, 2, 7, 8, 9, 17, 23
DT_RELRSZ, DT_RELR = 35, 36
DT_NEEDED, DT_STRTAB, DT_SONAME = 1, 5, 14

_MAX_SEGMENTS_BYTES = 1 << 16  # as load_elf_phdrs in Linux
_MAX_NAMES_BYTES = 16 << 20
_NAME_BYTES = 256  # of one name; those that are looked for have 20 at most
_MAX_DYNAMIC_BYTES = 1 << 20
_MAX_NAMES = 1000  # of libraries that one needs; torch's need 20


@dataclass(frozen=True)
class Segment:
    """A program header. File positions and sizes in bytes; addresses are virtual."""

    type: int
    flags: int
    offset: int
    address: int
    physical_address: int
    file_bytes: int
    memory_bytes: int
    align: int

    @property
    def file_end(self) -> int:
        """File position after the last byte."""
        return self.offset + self.file_bytes

    @property
    def memory_end(self) -> int:
        """Virtual address after the last byte."""
        return self.address + self.memory_bytes

    def pack(self) -> bytes:
        """The program header's bytes."""
        return struct.pack(SEGMENT_FORMAT, *astuple(self))


@dataclass(frozen=True)
class Section:
    """A section header, its name resolved."""

    index: int
    name: str
    type: int
    flags: int
    address: int
    offset: int
    n_bytes: int

    @property
    def file_bytes(self) -> int:
        """Bytes taken in the file: none for .bss and its like."""
        return 0 if self.type == SHT_NOBITS else self.n_bytes

    @property
    def file_end(self) -> int:
        """File position after the last byte."""
        return self.offset + self.file_bytes


@dataclass(frozen=True)
class Elf:
    """The headers of an ELF file."""

    type: int
    machine: int
    flags: int
    abi_version: int
    segments_offset: int
    sections_offset: int
    segments: tuple[Segment, ...]
    sections: tuple[Section, ...]

    def section(self, name: str) -> Section | None:
        """The one section of that name, None if there is none. Raises BadElf when there are several."""
        named = [section for section in self.sections if section.name == name]
        if len(named) > 1:
            raise BadElf(f"the file has {len(named)} sections named {name}")
        return named[0] if named else None

    def offset_of(self, address: int, length: int) -> int:
        """The file position of `length` bytes at a virtual address. Raises BadElf where there is none."""
        for segment in self._loads:
            inside = address - segment.address
            if inside >= 0 and inside + length <= segment.file_bytes:
                return segment.offset + inside
        raise BadElf(f"no loaded segment holds {length} bytes at address {address:#x}")

    @cached_property
    def _loads(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.type == PT_LOAD)

    @cached_property
    def _loaded_until(self) -> tuple[list[int], list[int]]:
        """Where loaded segments begin in the file, in order, and up to where those so far reach."""
        return _reach((segment.offset, segment.file_end) for segment in self._loads)

    @cached_property
    def _sections_until(self) -> tuple[list[int], list[int]]:
        return _reach((section.offset, section.file_end) for section in self.sections if section.file_bytes)

    def is_loaded(self, start: int, end: int) -> bool:
        """Whether one segment loads all between two file positions."""
        return _is_within(self._loaded_until, start, end)

    def is_in_section(self, start: int, end: int) -> bool:
        """Whether one section has all between two file positions."""
        return _is_within(self._sections_until, start, end)

    def check_loading(self, size: int) -> None:
        """Check that the headers agree on what is loaded, from a file of `size` bytes, and where to.

        Raises BadElf, also for files of debug information, whose segments have no content.
        """
        loads = self._loads
        for segment in loads:
            if segment.file_end > size or segment.memory_bytes < segment.file_bytes:
                raise BadElf("a loaded segment reaches past the end of the file", place=segment.offset)
            if max(segment.address, segment.physical_address) + segment.memory_bytes > 1 << 64:
                raise BadElf("a loaded segment reaches past the last address", place=segment.offset)
            if (segment.offset - segment.address) % max(segment.align, 1):
                raise BadElf("a loaded segment's place and address disagree", place=segment.offset)
        for lower, upper in pairwise(loads):
            if lower.memory_end - 1 >> PAGE_SHIFT >= upper.address >> PAGE_SHIFT:
                raise BadElf("loaded segments overlap in memory", place=upper.offset)
        for section in self.sections:
            if section.flags & SHF_ALLOC and section.file_bytes:
                loaded_from = self.offset_of(section.address, section.n_bytes)
                if loaded_from != section.offset:
                    raise BadElf(
                        f"section {section.name} is not where it is loaded from", place=section.offset
                    )
        for segment in self.segments:
            if segment.type == PT_PHDR and (
                segment.offset != self.segments_offset
                or segment.offset != self.offset_of(segment.address, segment.memory_bytes)
            ):
                raise BadElf("PT_PHDR isn't where the program headers are", place=segment.offset)


def _reach(spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Where spans begin, in order, and up to where those so far reach."""
    ordered = sorted(spans)
    return [start for start, _ in ordered], list(accumulate((end for _, end in ordered), max))


def _is_within(reach: tuple[list[int], list[int]], start: int, end: int) -> bool:
    """Whether one of the spans has all between two positions."""
    number = bisect_right(reach[0], start)
    return number > 0 and end <= reach[1][number - 1]


def head_of(source: Source) -> bytes:
    """A file's first bytes: enough for an ELF header, and to recognise a bundle."""
    return source.exactly(0, min(HEADER_BYTES, source.size), "the first bytes")


def is_elf64(head: bytes) -> bool:
    """Whether a file with these first bytes claims to be a 64-bit little-endian ELF."""
    return len(head) >= HEADER_BYTES and head[:6] == MAGIC + b"\x02\x01"


def read_elf(source: Source) -> Elf:
    """All headers. Raises BadElf for what contradicts itself, GpuCodeError for what isn't there."""
    head = source.exactly(0, HEADER_BYTES, "the ELF header")
    if not is_elf64(head) or head[6] != 1:
        raise BadElf("not a 64-bit little-endian ELF file", place=0)
    (
        type_, machine, version, _entry, phoff, shoff, flags,
        header_bytes, phentsize, phnum, shentsize, shnum, shstrndx,
    ) = struct.unpack("<HHIQQQIHHHHHH", head[16:])  # fmt: skip
    if version != 1 or header_bytes != HEADER_BYTES:
        raise BadElf("the ELF header's version or size is wrong", place=0)
    if phnum == 0xFFFF or shstrndx == 0xFFFF or (shnum == 0 and shoff):
        raise BadElf("extended numbering of headers is not supported", place=0)
    if (phnum and phentsize != SEGMENT_BYTES) or (shnum and shentsize != SECTION_BYTES):
        raise BadElf("headers have an unknown length", place=0)
    if phnum * SEGMENT_BYTES > _MAX_SEGMENTS_BYTES:
        raise BadElf(f"the ELF header claims {phnum} program headers", place=0)
    raw_segments = source.exactly(phoff, phnum * SEGMENT_BYTES, "the program header table")
    segments = tuple(Segment(*fields) for fields in struct.iter_unpack(SEGMENT_FORMAT, raw_segments))
    return Elf(
        type_, machine, flags, head[8], phoff, shoff, segments,
        _read_sections(source, shoff, count=shnum, names_index=shstrndx),
    )  # fmt: skip


def _read_sections(source: Source, offset: int, *, count: int, names_index: int) -> tuple[Section, ...]:
    raw = source.exactly(offset, count * SECTION_BYTES, "the section header table")
    rows = list(struct.iter_unpack(SECTION_FORMAT, raw))
    for row in rows:
        if row[1] not in (0, SHT_NOBITS) and row[4] + row[5] > source.size:
            raise BadElf("a section reaches past the end of the file", place=row[4])
    if not rows:
        return ()
    if names_index >= count or rows[names_index][5] > _MAX_NAMES_BYTES:
        raise BadElf("the section names can't be found", place=offset)
    names = source.exactly(rows[names_index][4], rows[names_index][5], "the section names")
    return tuple(
        Section(index, _name(names, row[0]), row[1], row[2], row[3], row[4], row[5])
        for index, row in enumerate(rows)
    )


def _name(names: bytes, start: int) -> str:
    """A section's name, cut where it is too long: 65,000 sections may share one of 16 MiB."""
    end = names.find(b"\0", start, start + _NAME_BYTES)
    if end < 0 and start + _NAME_BYTES >= len(names):
        raise BadElf("a section's name can't be found")
    return names[start : end if end >= 0 else start + _NAME_BYTES].decode("utf-8", "replace")


def read_dynamic(source: Source, elf: Elf) -> dict[int, int]:
    """Tags of the dynamic segment, the last of each; empty for a static file. Raises BadElf."""
    return dict(_dynamic_entries(source, elf))


def dynamic_names(source: Source, elf: Elf, tag: int) -> list[str]:
    """The names under a tag of the dynamic segment, such as DT_NEEDED, cut where too long. Raises BadElf."""
    entries = list(_dynamic_entries(source, elf))
    table, starts = dict(entries).get(DT_STRTAB), [value for key, value in entries if key == tag]
    if len(starts) > _MAX_NAMES:
        raise BadElf(f"the dynamic segment has {len(starts):,} names of one kind")
    places = [elf.offset_of(table + start, 1) for start in starts] if table is not None else []
    names = (source.read_at(place, _NAME_BYTES).partition(b"\0")[0] for place in places)
    return [name.decode("utf-8", "surrogateescape") for name in names]


def _dynamic_entries(source: Source, elf: Elf) -> Iterator[tuple[int, int]]:
    dynamic = [segment for segment in elf.segments if segment.type == PT_DYNAMIC]
    if not dynamic:
        return
    if len(dynamic) > 1 or dynamic[0].file_bytes > _MAX_DYNAMIC_BYTES:
        raise BadElf("the dynamic segment is impossible", place=dynamic[0].offset)
    n_bytes = dynamic[0].file_bytes // 16 * 16
    raw = source.exactly(dynamic[0].offset, n_bytes, "the dynamic segment")
    for tag, value in struct.iter_unpack("<QQ", raw):
        if tag == DT_NULL:
            return
        yield tag, value


def iter_records(
    source: Source, offset: int, n_bytes: int, layout: str
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(file position, fields) of every record of a table; a remainder shorter than a record is an error."""
    step = struct.calcsize(layout)
    if n_bytes % step:
        raise BadElf(f"a table's length isn't a multiple of {step}", place=offset)
    block = step * 8192
    for start in range(offset, offset + n_bytes, block):
        raw = source.exactly(start, min(block, offset + n_bytes - start), "a table")
        for index, fields in enumerate(struct.iter_unpack(layout, raw)):
            yield start + index * step, fields
