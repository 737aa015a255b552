"""Debug information in programs of unusual layout: segments, decoys, names and headers in odd places."""

import struct

import image_maker as make
import pytest
from elf_maker import BYTES, GNU, LLD, STRIPPED, program

from buildtool.gpucode.source import BadElf
from buildtool.image.debug_info import DebugCounter

LOAD, NOTE = 1, 4
WORD = b".shstrtab"
KEPT = 32 << 10  # bytes on either side of the word in which the names are looked for
ORDER = (".text", ".debug_info", ".symtab", ".shstrtab", ".strtab")
START = 512  # of the first section


def probed(content: bytes, chunk: int = 1 << 16) -> int:
    probe = DebugCounter(len(content))
    for piece in make.chunks(content, chunk):
        probe.feed(piece)
    return probe.debug_bytes()


def with_segments(content: bytes, *spans: tuple[int, int, int]) -> bytes:
    """The program with these segments: kind, first byte, bytes."""
    raw = b"".join(
        struct.pack("<IIQQQQQQ", kind, 5, at, at, at, size, size, 4096) for kind, at, size in spans
    )
    assert 64 + len(raw) <= START
    return (
        content[:56]
        + struct.pack("<H", len(spans))
        + content[58:64]
        + raw.ljust(448, b"\0")
        + content[START:]
    )


def section(content: bytes, index: int) -> int:
    """Where the header of a section is."""
    return int.from_bytes(content[40:48], "little") + 64 * index


def with_field(content: bytes, at: int, value: int, width: int = 8) -> bytes:
    return content[:at] + value.to_bytes(width, "little") + content[at + width :]


def moved_table(content: bytes, at: int) -> bytes:
    """The program with its section headers inside `.text`, and nothing behind its sections."""
    table_at = section(content, 0)
    table = content[table_at:]
    content = with_field(content[:table_at], 40, at)
    return content[:at] + table + content[at + len(table) :]


@pytest.mark.parametrize("order", [GNU, LLD])
def test_names_are_whole_though_every_byte_comes_alone(order: tuple[str, ...]) -> None:
    content = program(order, sizes=dict.fromkeys(BYTES, 60))
    assert probed(content, 1) == 4 * 60


def test_a_program_whose_last_bytes_are_debug_information_is_read() -> None:
    order = (".text", ".symtab", ".strtab", ".shstrtab", ".debug_info")
    names = sum(len(name) + 1 for name in order) + 1
    sizes = {**BYTES, ".debug_info": 200_000 + -names % 8}  # without padding behind it
    content = moved_table(program(order, sizes=sizes), 1024)
    assert probed(content) == sizes[".debug_info"] + 2400 + 99_000
    cut = content[:-1]
    with pytest.raises(BadElf, match="past its end"):
        probed(cut)


def test_section_headers_that_end_too_early_leave_the_file_unread() -> None:
    content = program()
    probe = DebugCounter(len(content))
    probe.feed(content[:-1])
    with pytest.raises(BadElf, match="end too early"):
        probe.debug_bytes()


def test_what_is_no_64_bit_program_or_library_is_not_inspected() -> None:
    content = program()
    assert probed(content[:4] + b"\1" + content[5:]) == 0  # of 32 bits
    for kind, expected in ((1, 0), (2, STRIPPED), (3, STRIPPED), (4, 0)):
        assert probed(with_field(content, 16, kind, 2)) == expected


def test_what_a_segment_loads_is_not_searched_for_names_whatever_the_segments_order() -> None:
    """Ten copies of the word in loaded data push out no names that come before it."""
    order = (".text", ".debug_info", ".shstrtab", ".comment", ".debug_str")
    sizes = {**BYTES, ".comment": 10 * 3 * KEPT}
    content = program(order, sizes=sizes)
    decoy = (WORD.ljust(3 * KEPT, b"\x08")) * 10
    data_at = content.index(b"\x08" * len(decoy))
    content = content.replace(b"\x08" * len(decoy), decoy)
    text, data = (LOAD, 0, START + BYTES[".text"]), (LOAD, data_at, len(decoy))
    behind = (LOAD, data_at + len(decoy), 10)
    for segments in ((text, data), (behind, text, data), (text, (LOAD, 0, 100), data)):
        for chunk in (1 << 16, len(content)):
            assert probed(with_segments(content, *segments), chunk) == 250_000
    with pytest.raises(BadElf, match="names can't be found"):
        probed(with_segments(content, text))


def test_segments_that_load_nothing_hide_no_names() -> None:
    content = program(ORDER)
    loaded = (LOAD, 0, START + BYTES[".text"])
    whole = (NOTE, 0, len(content))
    assert probed(with_segments(content, whole, loaded)) == 200_000 + 2400 + 99_000


def test_names_in_the_first_page_are_found_though_a_segment_loads_them() -> None:
    content = program((".shstrtab", ".text", ".debug_info"))
    content = with_segments(content, (LOAD, 0, len(content)))
    assert probed(content) == 200_000
    assert probed(content, 100) == 200_000


@pytest.mark.parametrize("decoys", [7, 8])
def test_names_before_seven_other_places_are_found_and_before_eight_are_not(decoys: int) -> None:
    order = (".text", ".debug_info", ".shstrtab", ".comment")
    filler = WORD.rjust(3 * KEPT, b"\x08") * decoys
    content = program(order, sizes={**BYTES, ".comment": len(filler)})
    content = content.replace(b"\x08" * len(filler), filler)
    if decoys == 7:
        assert probed(content) == 200_000
    else:
        with pytest.raises(BadElf, match="names can't be found"):
            probed(content)


def test_names_are_looked_for_in_256_kib_where_the_program_headers_are_out_of_sight() -> None:
    order = (".text", ".debug_info", ".shstrtab", ".strtab")
    names = 1 + sum(len(name) + 1 for name in order)
    for distance, found in ((8 * KEPT, True), (8 * KEPT + 8, False)):
        sizes = {**BYTES, ".strtab": distance - names}
        content = with_field(program(order, sizes=sizes), 32, 1 << 20)
        names_at = content.index(b"\0.text\0")
        sizes[".strtab"] += distance - (section(content, 0) - names_at)  # the padding
        content = with_field(program(order, sizes=sizes), 32, 1 << 20)
        assert section(content, 0) - names_at == distance
        if found:
            assert probed(content) == 200_000
        else:
            with pytest.raises(BadElf, match="names can't be found"):
                probed(content)


def test_program_headers_that_just_fit_into_the_first_page_are_read() -> None:
    order = (".text", ".debug_info", ".shstrtab", ".strtab")
    content = program(order, sizes={**BYTES, ".strtab": 500_000})
    for start, found in ((4096 - 56, True), (4096 - 55, False)):
        moved = with_field(content[:start] + content[64:120] + content[start + 56 :], 32, start)
        if found:
            assert probed(moved) == 200_000
        else:
            with pytest.raises(BadElf, match="names can't be found"):
                probed(moved)


def test_sections_count_whatever_their_order_in_the_file() -> None:
    content = program()
    one, other = (section(content, GNU.index(name) + 1) + 24 for name in (".debug_info", ".debug_str"))
    swapped = bytearray(content)
    swapped[one : one + 16], swapped[other : other + 16] = (
        content[other : other + 16],
        content[one : one + 16],
    )
    assert probed(bytes(swapped)) == STRIPPED
    assert probed(with_field(content, other, 0)) == STRIPPED  # it has 50,000 bytes from the first one on


def test_section_headers_in_the_first_page_say_where_the_names_are_though_a_segment_loads_them() -> None:
    content = program()
    table_at = 4096 - (len(content) - section(content, 0))
    content = moved_table(content, table_at)
    content = with_segments(content, (LOAD, 0, len(content)))
    for chunk in (1000, 1 << 16):
        assert probed(content, chunk) == STRIPPED


def test_section_headers_may_be_anywhere_in_the_stream() -> None:
    content = moved_table(program(), 50_000)
    for chunk in (1000, 1 << 16):
        assert probed(content, chunk) == STRIPPED


def test_little_is_kept_of_parts_without_names() -> None:
    content = with_segments(program(sizes={**BYTES, ".strtab": 1_000_000}), (LOAD, 0, START))
    probe = DebugCounter(len(content))
    for piece in make.chunks(content, 10_000):
        probe.feed(piece)
        assert len(probe._recent) <= KEPT + len(piece)
    assert probe.debug_bytes() == STRIPPED + 901_000


def test_only_symbols_have_names_that_go_with_them() -> None:
    content = program()
    comment = GNU.index(".comment") + 1
    for other in (".text", ".debug_info"):
        link = section(content, GNU.index(other) + 1) + 40
        assert probed(with_field(content, link, comment, 4)) == STRIPPED


def test_names_behind_loaded_data_are_found_where_they_are() -> None:
    content = program((".text", ".debug_info", ".comment", ".shstrtab"), sizes={**BYTES, ".comment": 50_000})
    data_at = content.index(b"\x08" * 50_000)
    content = with_segments(content, (LOAD, 0, START + BYTES[".text"]), (LOAD, data_at, 50_000))
    for chunk in (10_000, 1 << 16, len(content)):
        assert probed(content, chunk) == 200_000


def test_a_name_that_begins_behind_the_names_is_none() -> None:
    content = program()
    names_at = section(content, GNU.index(".shstrtab") + 1)
    known = struct.unpack_from("<Q", content, names_at + 32)[0]
    before_debug = (b"\0" + b"".join(name.encode() + b"\0" for name in GNU)).index(b".debug_str")
    assert before_debug < known
    assert probed(with_field(content, names_at + 32, before_debug)) == STRIPPED - BYTES[".debug_str"]


def test_names_that_are_longer_than_what_is_kept_leave_the_file_unread() -> None:
    content = program(LLD)
    names_at = section(content, LLD.index(".shstrtab") + 1)
    assert probed(with_field(content, names_at + 32, 2 * KEPT - 100)) == STRIPPED
    with pytest.raises(BadElf, match="names can't be found"):
        probed(with_field(content, names_at + 32, 2 * KEPT + 100))


def test_no_more_of_a_file_than_its_first_page_is_kept_as_its_head() -> None:
    content = program()
    probe = DebugCounter(len(content))
    probe.feed(content)
    assert len(probe._head) == 4096


def test_an_offset_of_names_or_headers_inside_the_file_header_is_refused() -> None:
    content = program()
    for at, fits in ((63, False), (64, True)):
        table = content[section(content, 0) :]
        moved = content[:at] + table + content[at + len(table) :]
        moved = with_field(moved[:40] + content[40:64] + moved[64:] if fits else moved, 40, at)
        if fits:
            assert probed(moved) == STRIPPED
        else:
            with pytest.raises(BadElf, match="outside the file"):
                probed(with_field(content, 40, at))


def test_as_many_sections_as_libraries_may_have_are_read() -> None:
    content = program(sizes={**BYTES, ".strtab": 400_000})
    table_at = section(content, 0)
    for count in (4096, 4097):
        many = with_field(content[:table_at] + content[table_at:] + bytes(64 * (count - 8)), 60, count, 2)
        if count == 4096:
            assert probed(many) == STRIPPED + 301_000
        else:
            with pytest.raises(BadElf, match="too many section headers"):
                probed(many)


@pytest.mark.parametrize(
    ("name", "is_debug"),
    [
        (".debug_line", True),
        (".zdebug_info", True),
        (".stabstr", True),
        (".gdb_index", True),
        (".line", True),
        (".data", False),
        (".xdebug", False),
    ],
)
def test_debug_sections_are_known_by_how_their_names_begin(name: str, is_debug: bool) -> None:
    content = program((".text", name, ".shstrtab"), sizes={".text": 5000, name: 700})
    assert probed(content) == (700 if is_debug else 0)


def test_loaded_sections_and_those_without_bytes_are_no_debug_information() -> None:
    content = program()
    row = section(content, GNU.index(".debug_str") + 1)
    for at, value in ((row + 4, 8), (row + 8, 2)):  # SHT_NOBITS, SHF_ALLOC
        assert probed(with_field(content, at, value, 4)) == STRIPPED - BYTES[".debug_str"]
    assert probed(with_field(content, row + 8, 4, 4)) == STRIPPED


def test_symbol_names_that_are_the_sections_names_too_are_kept() -> None:
    order = (".text", ".symtab", ".strtab", ".shstrtab")
    content = program(order)
    link = section(content, 2) + 40
    assert probed(content) == 2400 + 99_000
    assert probed(with_field(content, link, order.index(".shstrtab") + 1, 4)) == 2400
