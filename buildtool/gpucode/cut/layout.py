"""Frees the cut bytes of an ELF file: new headers for a shorter section, every virtual address unchanged.

The loaded segment that holds the section is split in two around the freed pages (or shortened, when
the section ends it). That takes one more program header; the table has no spare room in linkers' output,
so it moves to just behind the shortened section, into addresses that the removed code had: still inside
the first half, so a loaded segment covers it as `dl_iterate_phdr` and PT_PHDR need.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from buildtool.gpucode.cut.edit import Copy, Literal, Patch, Piece, Zeros
from buildtool.gpucode.errors import PruneRefused
from buildtool.gpucode.formats.bundle import PAGE_BYTES, align_up
from buildtool.gpucode.formats.elf import (
    ET_DYN,
    PT_GNU_RELRO,
    PT_INTERP,
    PT_LOAD,
    PT_PHDR,
    SECTION_BYTES,
    SEGMENT_BYTES,
    Elf,
    Section,
    Segment,
)

_E_PHOFF, _E_SHOFF, _E_PHNUM = 32, 40, 56
_SH_OFFSET, _SH_SIZE = 24, 32


@dataclass(frozen=True)
class Room:
    """What surrounds the section: its segment, and where the rest of the file starts.

    `split` when the segment goes on behind the section; `moved_table` when an earlier prune put the
    program headers there; `align` is what file positions must be shifted by a multiple of.
    """

    section: Section
    segment: Segment
    tail_start: int
    split: bool
    moved_table: bool
    align: int


@dataclass(frozen=True)
class Layout:
    """Pieces behind the section's new content (up to the end of the file), and header overwrites.

    `shift` is how far the rest of the file moves to the front; overwrites are at output positions.
    """

    tail: tuple[Piece, ...]
    patches: tuple[Patch, ...]
    shift: int


def find_room(elf: Elf, section: Section, size: int) -> Room:
    """Look at the section's surroundings. Raises PruneRefused when the section can't be shortened safely."""
    segment = _segment_of(elf, section)
    # an earlier prune's table ends the segment and isn't kept: this prune writes its own
    table_end = elf.segments_offset + len(elf.segments) * SEGMENT_BYTES
    moved_table = elf.segments_offset >= section.file_end and table_end == segment.file_end
    split = segment.file_end > section.file_end and not moved_table
    if segment.memory_bytes > segment.file_bytes and not split:
        raise PruneRefused(f"zero-filled memory follows {section.name} in its segment")
    # the kernel hands a program's headers to the loader, and before 5.18 assumed them to be in front
    if split and (elf.type != ET_DYN or any(s.type == PT_INTERP for s in elf.segments)):
        raise PruneRefused("a program's headers can't be moved for every kernel", "prune its libraries only")
    after = [size, elf.sections_offset, *(s.offset for s in elf.sections if s.file_bytes)]
    after += [s.offset for s in elf.segments if s.file_bytes and s.type != PT_PHDR]
    # split: the rest begins right behind, mid-page; both halves then map that page, each its own part
    tail_start = section.file_end if split else min(place for place in after if place >= section.file_end)
    align = max(PAGE_BYTES, *(s.align for s in elf.segments if s.type == PT_LOAD))
    if align & (align - 1):
        raise PruneRefused(f"a segment's alignment of {align} is not a power of two")
    room = Room(section, segment, tail_start, split, moved_table, align)
    _refuse_overlaps(elf, room)
    return room


def _segment_of(elf: Elf, section: Section) -> Segment:
    holders = [
        segment for segment in elf.segments
        if segment.type == PT_LOAD and segment.offset < section.file_end and section.offset < segment.file_end
    ]  # fmt: skip
    whole = [
        segment for segment in holders
        if segment.offset <= section.offset and section.file_end <= segment.file_end
        and section.address - segment.address == section.offset - segment.offset
    ]  # fmt: skip
    if len(holders) != 1 or whole != holders:
        raise PruneRefused(f"{section.name} isn't in exactly one loaded segment")
    return whole[0]


def _refuse_overlaps(elf: Elf, room: Room) -> None:
    start, end = room.section.offset, room.tail_start
    for other in elf.sections:
        if other.file_bytes and other.offset < end and other.file_end > start and other != room.section:
            raise PruneRefused(f"section {other.name} overlaps {room.section.name}")
    last_address = room.section.address + room.section.n_bytes
    for segment in elf.segments:
        in_file = segment.file_bytes and segment.offset < end and segment.file_end > start
        if in_file and segment != room.segment and segment.type != PT_PHDR:
            raise PruneRefused(f"a segment of type {segment.type:#x} overlaps {room.section.name}")
        in_memory = segment.address < last_address and segment.memory_end > room.section.address
        if segment.type == PT_GNU_RELRO and in_memory:
            raise PruneRefused(f"{room.section.name} is made read-only after relocation")
    if start < elf.sections_offset + len(elf.sections) * SECTION_BYTES and elf.sections_offset < end:
        raise PruneRefused(f"the section headers overlap {room.section.name}")


def lay_out_file(elf: Elf, room: Room, new_bytes: int, size: int) -> Layout | None:
    """Headers and tail for a section of `new_bytes`; None when not even one page would be freed."""
    new_end = room.section.offset + new_bytes
    with_table = room.split or room.moved_table
    table_offset = align_up(new_end, 8) if with_table else elf.segments_offset
    count = len(elf.segments) + room.split
    used_end = table_offset + count * SEGMENT_BYTES if with_table else new_end
    shift = (room.tail_start - used_end) // room.align * room.align
    if shift <= 0:
        return None
    segments = _new_segments(elf, room, shift=shift, used_end=used_end, table_offset=table_offset)
    table = b"".join(segment.pack() for segment in segments)
    tail: list[Piece] = []
    if with_table:
        tail += [Zeros(table_offset - new_end), Literal(table)]
    tail += [Zeros(room.tail_start - shift - used_end), Copy(room.tail_start, size - room.tail_start)]
    patches = [
        Patch.word(_E_PHOFF, table_offset),
        Patch.word(_E_SHOFF, _shifted(elf.sections_offset, room, shift)),
        Patch(_E_PHNUM, struct.pack("<H", count)),
        *_section_patches(elf, room, new_bytes, shift),
    ]
    if not with_table:
        patches.append(Patch(table_offset, table))
    return Layout(tuple(piece for piece in tail if piece.n_bytes), tuple(patches), shift)


def _shifted(offset: int, room: Room, shift: int) -> int:
    return offset - shift if offset >= room.tail_start else offset


def _new_segments(elf: Elf, room: Room, *, shift: int, used_end: int, table_offset: int) -> Iterator[Segment]:
    old = room.segment
    for segment in elf.segments:
        if segment == old:
            n_bytes = used_end - old.offset
            yield replace(old, file_bytes=n_bytes, memory_bytes=n_bytes)
            if room.split:
                inside = room.tail_start - old.offset
                yield replace(
                    old,
                    offset=room.tail_start - shift,
                    address=old.address + inside,
                    physical_address=old.physical_address + inside,
                    file_bytes=old.file_bytes - inside,
                    memory_bytes=old.memory_bytes - inside,
                )
        elif segment.type == PT_PHDR and table_offset > room.section.offset:
            address = old.address + table_offset - old.offset
            n_bytes = (len(elf.segments) + room.split) * SEGMENT_BYTES
            yield replace(
                segment, offset=table_offset, address=address, physical_address=address,
                file_bytes=n_bytes, memory_bytes=n_bytes,
            )  # fmt: skip
        else:
            yield replace(segment, offset=_shifted(segment.offset, room, shift))


def _section_patches(elf: Elf, room: Room, new_bytes: int, shift: int) -> Iterator[Patch]:
    table = _shifted(elf.sections_offset, room, shift)
    for section in elf.sections:
        header = table + section.index * SECTION_BYTES
        if section == room.section:
            yield Patch.word(header + _SH_SIZE, new_bytes)
        elif section.offset >= room.tail_start:
            yield Patch.word(header + _SH_OFFSET, section.offset - shift)
