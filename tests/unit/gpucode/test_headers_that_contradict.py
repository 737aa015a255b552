"""ELF headers that contradict themselves or the file: each contradiction is refused, neighbours are not."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from buildtool.cli.program import main
from buildtool.core.errors import Exit
from buildtool.gpucode.cut import find_surroundings, lay_out_file
from buildtool.gpucode.elf import (
    ET_DYN,
    PT_DYNAMIC,
    PT_GNU_RELRO,
    PT_INTERP,
    PT_LOAD,
    PT_PHDR,
    SHF_ALLOC,
    SHT_NOBITS,
    Elf,
    Section,
    Segment,
    iter_records,
    read_dynamic,
    read_elf,
)
from buildtool.gpucode.source import CHUNK_BYTES, BadElf, GpuCodeError, PruneRefused, Source
from gpucode.maker import Spec, bundles, make_library

PAGE = 0x1000
PT_NOTE = 4


def load(offset: int, address: int, n_bytes: int, *, memory: int | None = None, align: int = PAGE) -> Segment:
    return Segment(
        PT_LOAD, 4, offset, address, address, n_bytes, n_bytes if memory is None else memory, align
    )


def other(kind: int, offset: int, address: int, n_bytes: int) -> Segment:
    return Segment(kind, 4, offset, address, address, n_bytes, n_bytes, 8)


def section(name: str, offset: int, address: int, n_bytes: int, *, kind: int = 1, index: int = 1) -> Section:
    return Section(index, name, kind, SHF_ALLOC if address else 0, address, offset, n_bytes)


def elf(
    *segments: Segment, sections: tuple[Section, ...] = (), table: int = 64, headers: int = 1 << 24
) -> Elf:
    return Elf(ET_DYN, 62, 0, 0, table, headers, segments, sections)


def wrong(made: Elf, size: int = 1 << 24) -> str:
    with pytest.raises(BadElf) as caught:
        made.check_loading(size)
    return caught.value.message


def test_segment_may_end_with_the_file_and_not_behind_it() -> None:
    made = elf(load(0, 0, 0x1800))
    made.check_loading(0x1800)
    assert "past the end of the file" in wrong(made, 0x17FF)


def test_segment_with_less_memory_than_content_is_refused() -> None:
    elf(load(0, 0, 0x1000, memory=0x3000)).check_loading(0x1000)
    assert "past the end" in wrong(elf(load(0, 0, 0x1000, memory=0xFFF)), 0x1000)


@pytest.mark.parametrize("field", ["address", "physical_address"])
def test_segment_may_end_at_the_last_address_and_not_behind_it(field: str) -> None:
    last = replace(load(0, 0, 0x1800), **{field: (1 << 64) - 0x2000})
    elf(replace(last, memory_bytes=0x2000)).check_loading(0x1800)
    assert "last address" in wrong(elf(replace(last, memory_bytes=0x2001)))


def test_library_at_the_last_addresses_is_refused_and_stays(tmp_path: Path) -> None:
    made = make_library(Spec(bundles(["gfx906", "gfx803"])))
    data = bytearray(made.data)
    segment = next(at for at in range(64, 400, 56) if data[at] == 1 and data[at + 8 : at + 16] != bytes(8))
    struct.pack_into("<Q", data, segment + 24, (1 << 64) - 0x2000)
    library = tmp_path / "lib.so"
    library.write_bytes(data)
    assert main(["prune", str(library), "--targets", "gfx906"]) == Exit.DATA
    assert library.read_bytes() == data


def test_place_and_address_agree_modulo_the_alignment() -> None:
    elf(load(0x800, 0x1800, 16)).check_loading(0x1000)
    elf(load(0x801, 0x1800, 16, align=1)).check_loading(0x1000)
    elf(load(0x801, 0x1800, 16, align=0)).check_loading(0x1000)
    assert "place and address disagree" in wrong(elf(load(0x801, 0x1800, 16, align=2)))
    assert "place and address disagree" in wrong(elf(load(0x800, 0x1000, 16)))


@pytest.mark.parametrize(("end", "fine"), [(0x2000, True), (0x2001, False), (0x2FFF, False), (0x1FFF, True)])
def test_segments_share_no_page_of_memory(end: int, fine: bool) -> None:
    made = elf(load(0, 0x1000, 0x800, memory=end - 0x1000), load(0x1000, 0x2000, 0x800))
    if fine:
        made.check_loading(1 << 24)
    else:
        assert "overlap in memory" in wrong(made)


def test_section_is_where_it_is_loaded_from() -> None:
    segment = load(0x1000, 0x5000, 0x1000)
    elf(segment, sections=(section(".a", 0x1010, 0x5010, 16),)).check_loading(1 << 24)
    elf(segment, sections=(section(".bss", 7, 0x9000, 16, kind=SHT_NOBITS),)).check_loading(1 << 24)
    elf(segment, sections=(section(".comment", 7, 0, 16),)).check_loading(1 << 24)
    assert "not where it is loaded" in wrong(elf(segment, sections=(section(".a", 0x1018, 0x5010, 16),)))
    assert "no loaded segment holds" in wrong(elf(segment, sections=(section(".a", 0x1FF8, 0x5FF8, 16),)))


def test_header_of_the_program_headers_says_where_they_are() -> None:
    segment = load(0, 0, 0x1000)
    elf(segment, other(PT_PHDR, 64, 64, 112)).check_loading(1 << 24)
    assert "PT_PHDR" in wrong(elf(segment, other(PT_PHDR, 72, 72, 112)))
    assert "PT_PHDR" in wrong(elf(segment, other(PT_PHDR, 64, 72, 112)))


def test_address_is_found_in_the_content_of_a_loaded_segment_alone() -> None:
    made = elf(other(PT_NOTE, 0, 0x5000, 64), load(0x1000, 0x5000, 0x100, memory=0x200))
    assert made.offset_of(0x5000, 0x100) == 0x1000
    assert made.offset_of(0x50FF, 1) == 0x10FF
    for address, length in ((0x5000, 0x101), (0x5100, 1), (0x4FFF, 1)):
        with pytest.raises(BadElf, match="no loaded segment holds"):
            made.offset_of(address, length)


def test_ends_of_segments_and_sections() -> None:
    segment = load(0x1000, 0x5000, 0x100, memory=0x200)
    assert (segment.file_end, segment.memory_end) == (0x1100, 0x5200)
    assert section(".bss", 0x1100, 0x5100, 0x100, kind=SHT_NOBITS).file_end == 0x1100
    assert section(".data", 0x1100, 0x5100, 0x100).file_end == 0x1200


LIBRARY = make_library(Spec(bundles(["gfx906"], count=1))).data
(SHOFF,) = struct.unpack_from("<Q", LIBRARY, 40)
(COUNT,) = struct.unpack_from("<H", LIBRARY, 60)


def put(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def row(index: int, field: int, value: int) -> bytes:
    """The library with one 64-bit field of a section header changed."""
    return put(LIBRARY, SHOFF + 64 * index + field, struct.pack("<Q", value))


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"\x7fELG", "not a 64-bit little-endian"),
        (4, b"\1", "not a 64-bit little-endian"),
        (5, b"\2", "not a 64-bit little-endian"),
        (6, b"\2", "not a 64-bit little-endian"),
        (20, b"\2", "version or size"),
        (52, b"\x41", "version or size"),
        (56, b"\xff\xff", "extended numbering"),
        (56, b"\x93\x04", "claims 1171 program headers"),
        (62, b"\xff\xff", "extended numbering"),
        (60, b"\0\0", "extended numbering"),
        (54, b"\x39", "unknown length"),
        (58, b"\x41", "unknown length"),
    ],
)
def test_header_that_is_not_understood_is_refused_at_its_place(at: int, value: bytes, message: str) -> None:
    with pytest.raises(BadElf, match=message) as caught:
        read_elf(Source.of_bytes(put(LIBRARY, at, value)))
    assert caught.value.place == 0


def test_section_may_end_with_the_file_and_not_behind_it() -> None:
    size = len(LIBRARY)
    for index in (3, COUNT - 2):
        assert read_elf(
            Source.of_bytes(
                row(index, 24, size - (read_elf(Source.of_bytes(LIBRARY)).sections[index].n_bytes))
            )
        )
        with pytest.raises(BadElf, match="a section reaches past the end") as caught:
            read_elf(Source.of_bytes(row(index, 32, size)))
        assert caught.value.place == read_elf(Source.of_bytes(LIBRARY)).sections[index].offset


def test_only_sections_without_content_may_claim_more_than_the_file() -> None:
    empty = put(row(3, 32, 1 << 40), SHOFF + 64 * 3 + 4, struct.pack("<I", SHT_NOBITS))
    assert read_elf(Source.of_bytes(empty)).sections[3].file_bytes == 0
    null = put(row(3, 32, 1 << 40), SHOFF + 64 * 3 + 4, struct.pack("<I", 0))
    assert read_elf(Source.of_bytes(null)).sections[3].n_bytes == 1 << 40
    with pytest.raises(BadElf):
        read_elf(Source.of_bytes(put(row(3, 32, 1 << 40), SHOFF + 64 * 3 + 4, struct.pack("<I", 1))))


@pytest.mark.parametrize("index", [COUNT, COUNT + 1, 0xFFFE])
def test_names_in_a_section_that_isn_t_there_are_refused(index: int) -> None:
    with pytest.raises(BadElf, match="names can't be found"):
        read_elf(Source.of_bytes(put(LIBRARY, 62, struct.pack("<H", index))))


def test_names_of_more_than_16_mib_are_not_read() -> None:
    def sized(n_bytes: int) -> Source:
        head = row(COUNT - 1, 32, n_bytes)
        size = 1 << 26
        return Source(size, lambda at, length: head[at : at + length].ljust(min(length, size - at), b"\0"))

    assert read_elf(sized(16 << 20)).sections
    with pytest.raises(BadElf, match="names can't be found"):
        read_elf(sized((16 << 20) + 1))


def test_name_that_is_no_text_is_read_with_marks_and_one_without_an_end_refused() -> None:
    names = read_elf(Source.of_bytes(LIBRARY)).sections[-1]
    spoilt = put(LIBRARY, names.offset + 1, b"\xff")
    assert read_elf(Source.of_bytes(spoilt)).sections[1].name.startswith("\ufffd")
    with pytest.raises(BadElf, match="name can't be found"):
        read_elf(Source.of_bytes(put(LIBRARY, SHOFF + 64, struct.pack("<I", names.n_bytes))))


def dynamic(*rows: tuple[int, int], more: bytes = b"", count: int = 1) -> tuple[Source, Elf]:
    data = b"".join(struct.pack("<QQ", *one) for one in rows) + more
    return Source.of_bytes(data), elf(*(other(PT_DYNAMIC, 0, 0, len(data)) for _ in range(count)))


def test_dynamic_entries_end_at_the_null_entry_and_the_last_of_each_counts() -> None:
    assert read_dynamic(*dynamic((7, 1), (8, 2), (7, 3), (0, 0), (9, 4))) == {7: 3, 8: 2}
    assert read_dynamic(*dynamic((7, 1), (8, 2), more=b"short")) == {7: 1, 8: 2}
    assert read_dynamic(Source.of_bytes(b""), elf()) == {}


def test_dynamic_segment_is_there_once_and_of_a_sane_size() -> None:
    with pytest.raises(BadElf, match="dynamic segment is impossible") as caught:
        read_dynamic(*dynamic((7, 1), count=2))
    assert caught.value.place == 0
    most = (1 << 20) // 16
    assert len(read_dynamic(*dynamic(*((i, i) for i in range(1, most + 1))))) == most
    with pytest.raises(BadElf, match="dynamic segment is impossible"):
        read_dynamic(*dynamic(*((i, i) for i in range(1, most + 2))))


def test_records_of_a_long_table_have_their_places() -> None:
    count = 2 * 8192 + 5
    data = b"head" + struct.pack(f"<{count}Q", *range(count))
    found = list(iter_records(Source.of_bytes(data), 4, 8 * count, "<Q"))
    assert found == [(4 + 8 * i, (i,)) for i in range(count)]
    with pytest.raises(BadElf, match="multiple of 8") as caught:
        list(iter_records(Source.of_bytes(data), 4, 8 * count - 1, "<Q"))
    assert caught.value.place == 4


def test_source_gives_exactly_what_is_asked_for_or_says_where_it_isn_t() -> None:
    source = Source.of_bytes(b"0123456789")
    assert source.exactly(0, 10, "all") == b"0123456789"
    assert source.exactly(10, 0, "nothing") == b""
    for offset, length in ((-1, 2), (2, -1), (5, 6), (11, 0)):
        with pytest.raises(GpuCodeError, match="a table reaches past the end of the file \\(10 bytes\\)"):
            source.exactly(offset, length, "a table")
    shrunk = Source(20, lambda offset, length: b"0123456789"[offset : offset + length])
    with pytest.raises(GpuCodeError, match="got shorter") as caught:
        shrunk.exactly(8, 4, "a table")
    assert caught.value.place == 8


def test_zeros_are_skipped_across_chunks_up_to_the_first_other_byte() -> None:
    data = bytes(2 * CHUNK_BYTES + 5) + b"~" + bytes(9)
    source = Source.of_bytes(data)
    assert source.skip_zeros(3, len(data)) == 2 * CHUNK_BYTES + 5
    assert source.skip_zeros(3, CHUNK_BYTES) == CHUNK_BYTES
    assert source.skip_zeros(2 * CHUNK_BYTES + 6, len(data)) == len(data)
    assert [len(chunk) for chunk in source.chunks(1, CHUNK_BYTES + 1, "it")] == [CHUNK_BYTES, 1]


FATBIN = section(".hip_fatbin", 0x2000, 0x12000, 0x8000, index=2)
AROUND = load(0x1000, 0x11000, 0xA000)  # file 0x1000 to 0xb000, the section from 0x2000 to 0xa000
SIZE = 0x20000


def room_of(
    *more: Segment, sections: tuple[Section, ...] = (), headers: int = 0x18000, around: Segment = AROUND
):  # type: ignore[no-untyped-def]
    made = elf(around, *more, sections=(FATBIN, *sections), headers=headers)
    return made, find_surroundings(made, FATBIN, SIZE)


def refusal(
    *more: Segment, sections: tuple[Section, ...] = (), headers: int = 0x18000, around: Segment = AROUND
) -> str:
    with pytest.raises(PruneRefused) as caught:
        room_of(*more, sections=sections, headers=headers, around=around)
    return caught.value.message


def test_section_that_its_segment_goes_on_behind_is_split_right_behind_it() -> None:
    _, room = room_of()
    assert (room.tail_start, room.split, room.moved_table, room.align) == (0xA000, True, False, PAGE)


def test_largest_alignment_of_a_loaded_segment_counts_and_must_be_a_power_of_two() -> None:
    assert room_of(load(0x10000, 0x30000, 64, align=0x10000))[1].align == 0x10000
    assert room_of(replace(other(PT_NOTE, 0x10000, 0, 64), align=3 * PAGE))[1].align == PAGE
    assert "not a power of two" in refusal(load(0x12000, 0x30000, 64, align=3 * PAGE))


def test_section_in_two_segments_or_half_in_one_is_refused() -> None:
    for around in (
        load(0x2008, 0x12008, 0x9000),
        load(0x1000, 0x11000, 0x8000),
        load(0x1000, 0x10000, 0xA000),
    ):
        assert "isn't in exactly one loaded segment" in refusal(around=around)
    assert "exactly one" in refusal(load(0x9FFF, 0x30FFF, 0x100))
    assert "exactly one" in refusal(around=load(0x10000, 0x40000, 64))
    assert room_of(load(0xB000, 0x30000, 0x100))[1].split
    assert room_of(load(0x1000, 0x30000, 0x1000))[1].split  # it ends where the section begins
    assert room_of(around=load(0x2000, 0x12000, 0x9000))[1].split
    assert not room_of(around=load(0x2000, 0x12000, 0x8000))[1].split


def test_section_without_followers_frees_everything_up_to_the_next_content() -> None:
    around = load(0x1000, 0x11000, 0x9000)
    assert room_of(around=around)[1].tail_start == 0x18000  # the section headers
    assert room_of(around=around, headers=SIZE)[1].tail_start == SIZE
    after = section(".data", 0xC000, 0x1C000, 64, index=3)
    assert room_of(around=around, sections=(after,))[1].tail_start == 0xC000
    bss = section(".bss", 0xB000, 0x1B000, 64, kind=SHT_NOBITS, index=3)
    assert room_of(around=around, sections=(bss,))[1].tail_start == 0x18000
    assert room_of(other(PT_NOTE, 0xD000, 0, 64), around=around)[1].tail_start == 0xD000
    assert room_of(other(PT_NOTE, 0xD000, 0, 0), around=around)[1].tail_start == 0x18000


def test_other_sections_may_touch_the_section_and_not_overlap_it() -> None:
    for offset, n_bytes in ((0x1F00, 0x100), (0xA000, 8)):
        room_of(sections=(section(".x", offset, offset + 0x10000, n_bytes, index=3),))
    for offset, n_bytes in ((0x1F00, 0x101), (0x9FFF, 8), (0x3000, 8), (0x1000, 0x9800)):
        overlapping = section(".x", offset, offset + 0x10000, n_bytes, index=3)
        assert "section .x overlaps .hip_fatbin" in refusal(sections=(overlapping,))


def test_other_segments_may_touch_the_section_and_not_overlap_it() -> None:
    for offset, n_bytes in ((0x1F00, 0x100), (0xA000, 8), (0x3000, 0)):
        room_of(other(PT_NOTE, offset, 0, n_bytes))
    room_of(other(PT_PHDR, 0x3000, 0, 64))
    for offset, n_bytes in ((0x1F00, 0x101), (0x9FFF, 8), (0x3000, 8)):
        assert "a segment of type 0x4 overlaps" in refusal(other(PT_NOTE, offset, 0, n_bytes))


def test_memory_that_is_made_read_only_may_touch_the_section_and_not_overlap_it() -> None:
    for address, n_bytes in ((0x11F00, 0x100), (0x1A000, 8)):
        room_of(replace(other(PT_GNU_RELRO, 0, address, n_bytes), file_bytes=0))
    for address, n_bytes in ((0x11F00, 0x101), (0x19FFF, 8)):
        relro = replace(other(PT_GNU_RELRO, 0, address, n_bytes), file_bytes=0)
        assert "read-only after relocation" in refusal(relro)


def test_section_headers_may_touch_the_section_and_not_overlap_it() -> None:
    n_bytes = 64  # of one header: the section is the only one
    room_of(headers=0x2000 - n_bytes)
    room_of(headers=0xA000)
    for headers in (0x2001 - n_bytes, 0x9FFF, 0x4000):
        assert "section headers overlap" in refusal(headers=headers)


def test_program_and_fixed_executable_are_refused_only_where_a_table_must_move() -> None:
    assert "can't be moved for every kernel" in refusal(other(PT_INTERP, 0x100, 0x100, 8))
    ends_it = load(0x1000, 0x11000, 0x9000)
    assert not room_of(other(PT_INTERP, 0x100, 0x100, 8), around=ends_it)[1].split


def test_freed_bytes_are_whole_pages_and_less_than_one_is_nothing() -> None:
    around = load(0x1000, 0x11000, 0x9000)
    made, room = room_of(around=around)  # free up to 0x18000
    for new_bytes, shift in ((0x8000, 0xE000), (0x7001, 0xE000), (0x7000, 0xF000), (0x15000, 0x1000)):
        found = lay_out_file(made, room, new_bytes, SIZE)
        assert found is not None
        assert found.shift == shift
    assert lay_out_file(made, room, 0x15001, SIZE) is None
    assert lay_out_file(made, room, 0x16000, SIZE) is None


def test_moved_table_is_aligned_to_a_word_behind_the_section() -> None:
    made, room = room_of()
    for new_bytes in (0x2001, 0x2007, 0x2008, 0x2009):
        found = lay_out_file(made, room, new_bytes, SIZE)
        assert found is not None
        (table,) = (patch for patch in found.patches if patch.offset == 32)
        assert int.from_bytes(table.data, "little") == 0x2000 + (new_bytes + 7) // 8 * 8
        assert all(piece.n_bytes for piece in found.tail)


def test_sections_that_share_a_long_name_do_not_each_hold_all_of_it() -> None:
    """65,000 headers may name one string of 16 MiB: a library of 20 MB took a terabyte of memory."""
    names = b"x" * 100_000 + b"\0"
    count, table_at = 50, 64 + len(names)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", ET_DYN, 62, 1, 0, 0, table_at, 0, 64, 56, 0, 64, count, 0)
    rows = b"".join(struct.pack("<IIQQQQIIQQ", n, 3, 0, 0, 64, len(names), 0, 0, 1, 0) for n in range(count))
    elf = read_elf(Source.of_bytes(head + names + rows))
    assert len(elf.sections) == count
    assert sum(len(section.name) for section in elf.sections) < len(names)
    assert {section.name.strip("x") for section in elf.sections} == {""}
