"""Symbol tables go, and every byte that is loaded stays where it is."""

import random
import struct
from dataclasses import replace

import pytest
from elf_maker import BYTES, GNU, LLD, program

from buildtool.gpucode import elf
from buildtool.gpucode.plan import PrunePlan, streamed
from buildtool.gpucode.source import GpuCodeError, Source
from buildtool.gpucode.strip import plan_strip, verify_stripped
from buildtool.keep.symbols import needed_libraries
from gpucode.maker import Spec, bundles, make_library


def applied(content: bytes, plan: PrunePlan) -> bytes:
    """The plan's result, from a file that streams by in odd pieces."""
    pieces = (content[at : at + 7000] for at in range(0, len(content), 7000))
    made = b"".join(streamed(plan, pieces))
    view = plan.view(Source.of_bytes(content))
    assert made == view.exactly(0, view.size, "all")
    verify_stripped(Source.of_bytes(content), Source.of_bytes(made))
    return made


@pytest.mark.parametrize("order", [GNU, LLD])
def test_symbols_and_debug_information_go_and_the_rest_reads_as_before(order: tuple[str, ...]) -> None:
    content = program(order)
    cut = plan_strip(Source.of_bytes(content))
    assert cut
    made = applied(content, cut)
    assert len(made) == cut.bytes_after < len(content) - 300_000
    before, after = (elf.read_elf(Source.of_bytes(each)) for each in (content, made))
    assert after.segments == before.segments
    assert [each.name for each in after.sections if each.type] == [
        ".text",
        *(n for n in order if n in (".comment", ".shstrtab")),
    ]
    for name in (".text", ".comment"):
        old, new = before.section(name), after.section(name)
        assert old
        assert new
        assert made[new.offset : new.file_end] == content[old.offset : old.file_end]
    assert plan_strip(Source.of_bytes(made)) is None, "nothing is left to cut"


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
    assert plan_strip(Source.of_bytes(content)) is None


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
        if cut := plan_strip(source):
            made = applied(bytes(content), cut)
            read = elf.read_elf(source)
            present = elf.read_elf(Source.of_bytes(made)).segments
            assert [replace(s, align=1) for s in present] == [replace(s, align=1) for s in read.segments]
            for segment in read.segments:
                if segment.type == elf.PT_LOAD:
                    start = max(segment.offset, elf.HEADER_BYTES)
                    assert made[start : segment.file_end] == content[start : segment.file_end]


@pytest.mark.parametrize(("machine", "align"), [(62, 4096), (183, 2 << 20)])
def test_only_x86_64_has_pages_of_4_kib_for_certain(machine: int, align: int) -> None:
    library = make_library(Spec(bundles(["gfx906"]), symbols=True, align=2 << 20, machine=machine)).data
    plan = plan_strip(Source.of_bytes(library), anyway=True)
    assert plan
    made = elf.read_elf(Source.of_bytes(applied(library, plan)))
    assert {each.align for each in made.segments if each.type == elf.PT_LOAD} == {align}


def test_no_error_of_a_reader_leaves_it() -> None:
    def lost(_offset: int, _length: int) -> bytes:
        raise GpuCodeError("gone")

    assert needed_libraries(Source(100, lost)) == ()
    assert plan_strip(Source(100, lost)) is None


def test_a_segment_behind_the_symbols_as_patchelf_makes_moves_by_whole_pages() -> None:
    """libtorch_cpu.so: 93 MB of symbols in front of the segment that patchelf added, and a byte behind it."""
    library = make_library(Spec(bundles(["gfx906"]), symbols=True)).data
    symbols = next(s for s in elf.read_elf(Source.of_bytes(library)).sections if s.name == ".symtab")
    data = bytearray(library + bytes(-len(library) % 4096))
    place, address, added = len(data), 1 << 24, b"added by patchelf " * 400
    (phoff,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    struct.pack_into(
        "<IIQQQQQQ",
        data,
        phoff + 56 * (count - 1),
        1,
        6,
        place,
        address,
        address,
        len(added),
        len(added),
        4096,
    )
    content = bytes(data + added + b"\0")
    plan = plan_strip(Source.of_bytes(content))
    assert symbols.n_bytes < 4096
    assert plan is None, "less than a page would be freed"
    # with a longer table there is something to free
    rows = struct.unpack_from("<Q", content, 40)[0] + 64 * symbols.index
    gap = bytes(5 * 4096)
    longer = bytearray(content[: symbols.offset] + gap + content[symbols.offset :])
    moved = len(gap)
    struct.pack_into("<Q", longer, 40, struct.unpack_from("<Q", longer, 40)[0] + moved)
    struct.pack_into("<Q", longer, phoff + 56 * (count - 1) + 8, place + moved)
    struct.pack_into("<Q", longer, rows + moved + 32, symbols.n_bytes + moved)
    names = rows + moved + 64
    struct.pack_into("<Q", longer, names + 24, struct.unpack_from("<Q", longer, names + 24)[0] + moved)
    plan = plan_strip(Source.of_bytes(bytes(longer)))
    assert plan
    made = applied(bytes(longer), plan)
    assert len(longer) - len(made) in (moved, moved + 1)
    after = elf.read_elf(Source.of_bytes(made))
    at = after.offset_of(address, len(added))
    assert made[at : at + len(added)] == added
    assert at % 4096 == 0
