"""Debug information inside programs and libraries, found while the layer streams by."""

import random

import image_maker as make
import pytest
from elf_maker import BYTES, GNU, LLD, STRIPPED, program
from image_maker import file, tar

from buildtool.gpucode.source import BadElf
from buildtool.image.debug_info import DebugCounter
from buildtool.image.layer import LayerIndex, index_layer
from buildtool.image.tar import TarReader


def probed(content: bytes, chunk: int = 1 << 16) -> int:
    probe = DebugCounter(len(content))
    for piece in make.chunks(content, chunk):
        probe.feed(piece)
    return probe.debug_bytes()


def index(*members: bytes) -> LayerIndex:
    return index_layer(TarReader(make.chunks(tar(*members)), place="t"), place="t")


@pytest.mark.parametrize("order", [GNU, LLD])
@pytest.mark.parametrize("chunk", [997, 4096, 1 << 16, 1 << 20])
def test_what_stripping_takes_out_is_counted_however_the_stream_is_cut(
    order: tuple[str, ...], chunk: int
) -> None:
    assert probed(program(order), chunk) == STRIPPED


def test_names_far_before_the_section_headers_are_found() -> None:
    assert probed(program(LLD, sizes={**BYTES, ".strtab": 3_000_000})) == STRIPPED - 99_000 + 3_000_000


def test_names_are_found_where_the_program_headers_are_out_of_sight() -> None:
    content = program()
    assert probed(program(segments_at=len(content) - 200)) == STRIPPED


def test_section_headers_at_the_start_are_read_too() -> None:
    content = bytearray(program())
    at = int.from_bytes(content[40:48], "little")
    table = content[at:]
    content[1024 : 1024 + len(table)], content[40:48] = table, (1024).to_bytes(8, "little")
    assert probed(bytes(content)) == STRIPPED


def test_a_stripped_program_and_what_is_no_program_have_none() -> None:
    order = (".text", ".comment", ".shstrtab")
    assert probed(program(order)) == 0
    assert probed(b"\x7fELF" + bytes(100_000)) == 0
    assert probed(bytes(100_000)) == 0
    without_sections = bytearray(program())
    without_sections[60:62] = bytes(2)
    assert probed(bytes(without_sections)) == 0


def test_words_that_look_like_names_do_not_mislead() -> None:
    content = program(sizes={**BYTES, ".debug_str": 0}).replace(
        b"\x0b" * 200_000, b".shstrtab".ljust(20) * 10_000
    )
    assert probed(content) == STRIPPED - 50_000


@pytest.mark.thorough
def test_a_file_of_nothing_but_names_costs_no_more_memory() -> None:
    probe = DebugCounter(len(content := program(sizes={**BYTES, ".strtab": 9_000_000})))
    for piece in make.chunks(content.replace(b"\x07" * 9_000_000, b".shstrtab" * 1_000_000)):
        probe.feed(piece)
        assert len(probe._recent) + sum(len(near) for _, near in probe._names) < 2 << 20
    assert probe.debug_bytes() == STRIPPED - 99_000 + 9_000_000


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (40, b"\xff" * 8, "outside the file"),
        (58, b"\x28\0", "outside the file"),
        (60, b"\xff\xff", "outside the file"),
        (62, b"\xff\xff", "have no names"),
    ],
)
def test_a_header_that_lies_leaves_the_file_unread_with_a_reason(offset: int, value: bytes, why: str) -> None:
    content = bytearray(program())
    content[offset : offset + len(value)] = value
    found = index(file("usr/lib/x.so", bytes(content)))
    assert found.debug == {}
    assert why in found.unread[0]


def test_sections_that_reach_past_the_end_or_are_on_code_are_not_believed() -> None:
    content = bytearray(program())
    content[-3 * 64 - 32 : -3 * 64 - 24] = (1 << 62).to_bytes(8, "little")
    with pytest.raises(BadElf, match="past its end"):
        probed(bytes(content))
    probe = DebugCounter(len(content))
    probe.feed(program())
    with pytest.raises(BadElf, match="overlap"):
        probe.debug_bytes(other_bytes=100_000)


def test_sections_on_one_another_count_once() -> None:
    content = bytearray(program())
    names = content[-5 * 64 : -4 * 64]
    content[-4 * 64 + 24 : -4 * 64 + 40] = names[24:40]  # .debug_str where .debug_info is
    assert probed(bytes(content)) == STRIPPED - 50_000


@pytest.mark.thorough
def test_no_damage_makes_it_fail_otherwise_or_count_more_than_there_is() -> None:
    chance = random.Random(11)
    content = program(sizes={**BYTES, ".text": 3000, ".debug_info": 9000, ".strtab": 2000, ".debug_str": 700})
    unread = 0
    for _ in range(1500):
        broken = bytearray(content)
        for _ in range(chance.randint(1, 6)):
            where = chance.choice((range(64), range(64, 130), range(len(content) - 520, len(content))))
            broken[chance.choice(where)] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        cut = chance.choice((len(broken), chance.randrange(1, len(broken))))
        probe = DebugCounter(len(broken))
        for piece in make.chunks(bytes(broken[:cut]), chance.choice((100, 4000, 1 << 16))):
            probe.feed(piece)
        try:
            assert 0 <= probe.debug_bytes() <= len(content)
        except BadElf:
            unread += 1
    assert 300 < unread < 1400
