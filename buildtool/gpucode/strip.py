"""ELF files without symbol tables and debug information, which no segment loads: a plan, and its proof.

Debuggers and profilers read them, programs don't: what `strip --strip-unneeded` removes. Every byte that is
loaded keeps its address; segments move to the front in the file by whole pages: those that patchelf put
behind the symbols, and those of x86-64 that older linkers put at multiples of 2 MiB. Section headers of what
goes become empty ones, so that numbers of sections stay.
"""

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from buildtool.gpucode import elf
from buildtool.gpucode.bundle import PAGE_BYTES, align_up
from buildtool.gpucode.plan import Copy, Patch, Piece, PrunePlan, Zeros
from buildtool.gpucode.source import CHUNK_BYTES, GpuCodeError, Source, VerifyFailed

_DEBUG = (".debug", ".zdebug", ".gdb_index")
_PHOFF, _SHOFF, _NAMES_INDEX = 32, 40, 62  # places of fields in the file's header: gABI, chapter 4
_SHF_INFO_LINK = 0x40
_SHT_REL, _SHT_RELA = 9, 4
_PADDING = 64  # at most, between parts that no segment loads
_ALIGN = 8  # of these parts

Span = tuple[int, int]  # first byte, and the one behind the last


def plan_strip(source: Source, *, anyway: bool = False) -> PrunePlan | None:
    """The file without what no segment loads; None where there is hardly any of it, or the file isn't plain.

    `anyway`: also where hardly anything goes, for a cut that frees pages: of 4 KiB then, not of 2 MiB.
    Files whose sections, headers and segments aren't all of their bytes stay as they are: a program may read
    what was appended to it.
    """
    try:
        file = elf.read_elf(source)
        file.check_loading(source.size)
        return _plan(source, file, anyway=anyway)
    except GpuCodeError:
        return None


def _plan(source: Source, file: elf.Elf, *, anyway: bool) -> PrunePlan | None:
    gone = {each.index for each in file.sections if _is_symbols(each)}
    names_index = int.from_bytes(source.exactly(_NAMES_INDEX, 2, "the header"), "little")
    spans = _loaded(file)
    if names_index in gone or file.type not in (elf.ET_DYN, elf.ET_EXEC):
        return None
    table = (file.sections_offset, file.sections_offset + len(file.sections) * elf.SECTION_BYTES)
    loose = {
        each.index: (each.offset, each.file_end)
        for each in file.sections
        if each.type and not each.flags & elf.SHF_ALLOC and each.file_bytes
    }
    table_is_loaded = any(start <= table[0] and table[1] <= stop for start, stop in spans)
    if not table_is_loaded:
        loose[-1] = table
    if not spans or spans[0][0] or not _is_all(source, spans, sorted(loose.values())):
        return None
    aligns = _aligns(source, file)
    align = max(PAGE_BYTES, *aligns)
    pieces: list[Piece] = []
    moved: dict[int, int] = {}  # of loose parts: where they go
    places: list[int] = []  # of spans: where they go
    waiting = deque(sorted(loose, key=lambda index: loose[index]))
    out = 0
    for number, (start, stop) in enumerate(spans):
        place = out + (start - out) % align
        pieces += [Zeros(place - out), Copy(start, stop - start)]
        places.append(place)
        out = place + stop - start
        behind = spans[number + 1][0] if number + 1 < len(spans) else source.size
        while waiting and loose[waiting[0]][0] < behind:
            index = waiting.popleft()
            first, last = loose[index]
            if index not in gone:
                moved[index] = align_up(out, _ALIGN)
                pieces += [Zeros(moved[index] - out), Copy(first, last - first)]
                out = moved[index] + last - first
    if not anyway and source.size - out <= (_PADDING if gone else PAGE_BYTES):
        return None

    def new(offset: int) -> int:
        """Where what is loaded from a place of the file goes."""
        number = bisect_right(spans, (offset, source.size)) - 1
        start, stop = spans[max(number, 0)]
        return offset - start + places[number] if start <= offset <= stop else offset

    table_place = new(table[0]) if table_is_loaded else moved[-1]
    patches = [Patch.word(_PHOFF, new(file.segments_offset)), Patch.word(_SHOFF, table_place)]
    for number, segment in enumerate(file.segments):
        at = new(file.segments_offset) + number * elf.SEGMENT_BYTES
        moved_to = replace(segment, offset=new(segment.offset), align=aligns[number])
        patches.append(Patch(at, moved_to.pack()))
    raw = source.exactly(table[0], table[1] - table[0], "the section headers")
    for index, fields in enumerate(struct.iter_unpack(elf.SECTION_FORMAT, raw)):
        row = list(fields)
        row[4] = moved.get(index, new(row[4]))
        row[6] = 0 if row[6] in gone else row[6]
        if row[7] in gone and (row[1] in (_SHT_REL, _SHT_RELA) or row[2] & _SHF_INFO_LINK):
            row[7] = 0
        packed = bytes(elf.SECTION_BYTES) if index in gone else struct.pack(elf.SECTION_FORMAT, *row)
        patches.append(Patch(table_place + index * elf.SECTION_BYTES, packed))
    whole = tuple(piece for piece in pieces if piece.n_bytes)
    return PrunePlan(source.size, out, whole, tuple(patches))


def _aligns(source: Source, file: elf.Elf) -> list[int]:
    """The segments' alignments; for x86-64, whose pages are of 4 KiB, no more than what is in them needs."""
    raw = source.exactly(file.sections_offset, len(file.sections) * elf.SECTION_BYTES, "the section headers")
    loaded = [row[8] for row in struct.iter_unpack(elf.SECTION_FORMAT, raw) if row[2] & elf.SHF_ALLOC]
    others = [each.align for each in file.segments if each.type != elf.PT_LOAD]
    most = max([PAGE_BYTES, *loaded, *others])
    is_known = file.machine == elf.EM_X86_64 and loaded and _is_power(most)
    return [
        most
        if is_known and each.type == elf.PT_LOAD and each.align > most and _is_power(each.align)
        else each.align
        for each in file.segments
    ]


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _is_symbols(section: elf.Section) -> bool:
    named = section.name in (".symtab", ".strtab") or section.name.startswith(_DEBUG)
    return named and not section.flags & elf.SHF_ALLOC


def _loaded(file: elf.Elf) -> list[Span]:
    """The parts of a file that segments have, in order, joined where they meet."""
    spans: list[Span] = []
    for start, stop in sorted((each.offset, each.file_end) for each in file.segments if each.file_bytes):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return spans


def _is_all(source: Source, spans: Sequence[Span], loose: Sequence[Span]) -> bool:
    """Whether a file has nothing but its segments, other parts and padding, none over another."""
    parts = sorted([*spans, *loose])
    for (_, stop), (start, _) in pairwise(parts):
        if start < stop or (start > stop + _PADDING and source.skip_zeros(stop, start) < start):
            return False
    end = parts[-1][1]
    return source.size - end <= _PADDING and source.skip_zeros(end, source.size) == source.size


def verify_stripped(old: Source, new: Source) -> None:
    """Raises VerifyFailed unless both are loaded as the same bytes, but for places in their headers."""
    before, after = elf.read_elf(old), elf.read_elf(new)
    after.check_loading(new.size)
    aligns = [[each.align for each in before.segments], _aligns(old, before)]
    shape = [
        [(s.type, s.flags, s.address, s.file_bytes, s.memory_bytes) for s in file.segments]
        for file in (before, after)
    ]
    sections = [
        [(s.name, s.type, s.flags, s.address, s.n_bytes) for s in file.sections if s.flags & elf.SHF_ALLOC]
        for file in (before, after)
    ]
    present = [each.align for each in after.segments]
    if shape[0] != shape[1] or sections[0] != sections[1] or present not in aligns:
        raise _wrong("it has other segments or sections")
    places = (
        (_PHOFF, 16),
        (before.segments_offset, len(before.segments) * elf.SEGMENT_BYTES),
        (before.sections_offset, len(before.sections) * elf.SECTION_BYTES),
    )
    for was, now in zip(before.segments, after.segments, strict=True):
        if was.type != elf.PT_LOAD and was.file_bytes:
            loaded_from = after.offset_of(now.address, now.file_bytes) if now.address else now.offset
            if before.offset_of(was.address, was.file_bytes) == was.offset and now.offset != loaded_from:
                raise _wrong(f"segment {now.type:#x} is not where it is loaded from")
        for step in range(0, was.file_bytes, CHUNK_BYTES):
            n_bytes = min(CHUNK_BYTES, was.file_bytes - step)
            left = bytearray(old.exactly(was.offset + step, n_bytes, "a segment"))
            right = bytearray(new.exactly(now.offset + step, n_bytes, "a segment"))
            for start, length in places:
                first = start - was.offset - step
                part = slice(max(first, 0), max(first + length, 0))
                left[part] = right[part]
            if left != right:
                raise _wrong(f"bytes near {was.offset + step:#x} changed")


def _wrong(what: str) -> VerifyFailed:
    return VerifyFailed(f"the stripped file is wrong: {what}", "please report this with the file's name")
