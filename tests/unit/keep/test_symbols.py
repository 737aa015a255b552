"""Symbol tables go, and every byte that is loaded stays where it is."""

import random

import pytest
from elf_maker import BYTES, GNU, LLD, program

from buildtool.gpucode import elf
from buildtool.gpucode.source import GpuCodeError, Source
from buildtool.keep.symbols import Cut, cut_of, needed_libraries


def applied(content: bytes, cut: Cut) -> bytes:
    return cut.header + content[len(cut.header) : cut.kept_bytes] + cut.tail


@pytest.mark.parametrize("order", [GNU, LLD])
def test_symbols_and_debug_information_go_and_the_rest_reads_as_before(order: tuple[str, ...]) -> None:
    content = program(order)
    cut = cut_of(Source.of_bytes(content))
    assert cut
    made = applied(content, cut)
    assert len(made) == cut.n_bytes < len(content) - 300_000
    before, after = (elf.read_elf(Source.of_bytes(each)) for each in (content, made))
    assert after.segments == before.segments
    assert [each.name for each in after.sections] == [
        "",
        ".text",
        *(n for n in order if n in (".comment", ".shstrtab")),
    ]
    for name in (".text", ".comment"):
        old, new = before.section(name), after.section(name)
        assert old
        assert new
        assert made[new.offset : new.file_end] == content[old.offset : old.file_end]
    assert cut_of(Source.of_bytes(made)) is None, "nothing is left to cut"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF",
        b"text",
        program() + b"appended, which the program reads",
        program((".text", ".comment", ".shstrtab")),
        program((".symtab", ".strtab", ".text", ".shstrtab")),
        program()[:-64],
        program((".text", ".comment", ".shstrtab")).replace(b".shstrtab\0", b".strtab\0\0\0"),
    ],
    ids=["empty", "cut", "text", "appended", "stripped", "symbols first", "shorter", "one table of names"],
)
def test_other_files_stay_as_they_are(content: bytes) -> None:
    assert cut_of(Source.of_bytes(content)) is None


@pytest.mark.thorough
def test_damaged_headers_are_never_a_traceback_nor_lose_loaded_bytes() -> None:
    draw = random.Random(1)
    whole = program(sizes={**BYTES, ".text": 4000, ".debug_info": 500, ".debug_str": 80, ".strtab": 90})
    for _ in range(3000):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            place = draw.choice([draw.randrange(120), len(content) - draw.randint(1, 512)])
            content[place] = draw.choice([0, 1, 2, 0x7F, 0xFF, draw.randrange(256)])
        source = Source.of_bytes(bytes(content))
        needed_libraries(source)
        if cut := cut_of(source):
            made = applied(bytes(content), cut)
            read = elf.read_elf(source)
            assert elf.read_elf(Source.of_bytes(made)).segments == read.segments
            for segment in read.segments:
                if segment.type == elf.PT_LOAD:
                    start = max(segment.offset, elf.HEADER_BYTES)
                    assert made[start : segment.file_end] == content[start : segment.file_end]


def test_no_error_of_a_reader_leaves_it() -> None:
    def lost(_offset: int, _length: int) -> bytes:
        raise GpuCodeError("gone")

    assert needed_libraries(Source(100, lost)) == ()
    assert cut_of(Source(100, lost)) is None
