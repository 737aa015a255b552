"""Content that streams by is read whatever its place: magics at every offset, names at every distance."""

import struct
from collections.abc import Iterable
from itertools import pairwise

import image_maker as make
import pytest
from elf_maker import BYTES, GNU, KERNELS, PAGE, STRIPPED, bundle, library, program

from buildtool.audit.claims import FOREIGN_CODE, ClaimCounter, is_foreign, saved_bytes, targets_if_valid
from buildtool.gpucode.source import BadElf
from buildtool.image.debug_info import DebugCounter
from buildtool.image.gpu_code import GpuCodeCounter

MAGIC = struct.pack("<I", 0xBA55ED50)


def fatbin(architecture: int, n_bytes: int) -> bytes:
    """A CUDA fat binary with one cubin."""
    entry = struct.pack("<HHIQI8xI8xQ8xQ", 2, 0x101, 64, n_bytes, 0, architecture, 0, 0) + b"k" * n_bytes
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry


def code_in(content: bytes, pieces: Iterable[bytes]) -> dict[str, int]:
    probe = GpuCodeCounter(len(content))
    for piece in pieces:
        probe.feed(piece)
    return dict(probe.stored_bytes_by_processor())


@pytest.mark.thorough
@pytest.mark.parametrize("shift", range(0, 64, 8))
@pytest.mark.parametrize("chunk", [1 << 16, (1 << 16) + 3, 70_001])
def test_cuda_code_is_found_at_every_multiple_of_eight(shift: int, chunk: int) -> None:
    content = library(fatbin(90, 3000), ".nv_fatbin", start=(1 << 16) + 4096 + shift)
    assert code_in(content, make.chunks(content, chunk)) == {"sm_90": 3064}


@pytest.mark.thorough
@pytest.mark.parametrize("before", range(1, 40))
def test_cuda_code_is_found_where_its_magic_is_cut_between_two_pieces(before: int) -> None:
    start = (1 << 16) + 4096
    content = library(fatbin(90, 3000), ".nv_fatbin", start=start)
    cuts = [0, 1 << 16, start - 32, start + before - 20, len(content)]
    pieces = [content[a:b] for a, b in pairwise(cuts)]
    assert code_in(content, pieces) == {"sm_90": 3064}


def test_cuda_code_behind_bytes_that_look_like_its_magic_is_found() -> None:
    start = (1 << 16) + 8 * PAGE
    content = bytearray(library(fatbin(80, 3000), ".nv_fatbin", start=start))
    for at in range(1 << 16, start - 64, 8):
        content[at + 3] = MAGIC[3]
    assert code_in(bytes(content), make.chunks(bytes(content), 5000)) == {"sm_80": 3064}


@pytest.mark.parametrize("chunk", [1 << 16, 4096 + 17, 99_991])
@pytest.mark.parametrize("pages", [1, 16, 17, 40])
def test_bundles_are_found_on_every_page_however_the_stream_is_cut(chunk: int, pages: int) -> None:
    content = library(bundle(KERNELS), start=pages * PAGE)
    assert code_in(content, make.chunks(content, chunk)) == {"gfx90a": 50_000, "gfx1100": 20_000}


def test_second_bundle_far_behind_the_first_is_counted_too() -> None:
    apart = bundle(KERNELS) + bytes(50 * PAGE) + bundle({"gfx803": 777})
    content = library(apart)
    found = code_in(content, make.chunks(content, 10_007))
    assert found == {"gfx90a": 50_000, "gfx1100": 20_000, "gfx803": 777}


def stripped(content: bytes, pieces: Iterable[bytes]) -> int:
    probe = DebugCounter(len(content))
    for piece in pieces:
        probe.feed(piece)
    return probe.debug_bytes()


@pytest.mark.parametrize("distance", [0, 1000, 32 << 10, (32 << 10) + 1, 64 << 10, 200_000])
def test_names_are_found_at_every_distance_before_the_headers(distance: int) -> None:
    order = (".text", ".debug_info", ".symtab", ".shstrtab", ".strtab")
    content = program(order, sizes={**BYTES, ".strtab": distance})
    expected = BYTES[".debug_info"] + BYTES[".symtab"] + distance
    for chunk in (1 << 16, 30_011):
        assert stripped(content, make.chunks(content, chunk)) == expected


@pytest.mark.parametrize("head", [1, 63, 64, 4095, 4096, 4097])
def test_first_piece_of_any_length_is_understood(head: int) -> None:
    content = program()
    assert stripped(content, [content[:head], content[head:]]) == STRIPPED


def test_byte_by_byte_is_the_same_as_at_once() -> None:
    content = program(GNU, sizes=dict.fromkeys(BYTES, 60))
    expected = stripped(content, [content])
    assert expected == 4 * 60
    assert stripped(content, (content[at : at + 1] for at in range(len(content)))) == expected


def changed(content: bytes, at: int, layout: str, value: int) -> bytes:
    new = bytearray(content)
    struct.pack_into(layout, new, at, value)
    return bytes(new)


def test_names_section_with_the_last_number_is_believed_and_one_behind_isn_t() -> None:
    content = program()
    (count,) = struct.unpack_from("<H", content, 60)
    with pytest.raises(BadElf, match="have no names"):
        stripped(changed(content, 62, "<H", count), [changed(content, 62, "<H", count)])
    assert stripped(content, [content]) == STRIPPED  # its names are the last section


@pytest.mark.parametrize("machine", [190, 224])
def test_code_of_cards_is_not_searched_for_debug_information(machine: int) -> None:
    content = changed(program(), 18, "<H", machine)
    assert stripped(content, [content]) == 0


def test_something_else_beside_debug_information_has_to_fit_into_the_file() -> None:
    content = program()
    probe = DebugCounter(len(content))
    probe.feed(content)
    assert probe.debug_bytes(other_bytes=len(content) - STRIPPED) == STRIPPED
    with pytest.raises(BadElf, match="overlap"):
        probe.debug_bytes(other_bytes=len(content) - STRIPPED + 1)


def test_code_is_foreign_when_none_of_its_processors_serves_a_wanted_card() -> None:
    wanted = targets_if_valid(["gfx906", "gfx1100"])
    assert is_foreign("gfx803", wanted)
    assert is_foreign("gfx803+gfx1030", wanted)
    assert not is_foreign("gfx803+gfx906", wanted)
    assert not is_foreign("gfx906+gfx803", wanted)
    assert not is_foreign("gfx11-generic", wanted)
    assert not is_foreign("sm_90", wanted)
    assert not is_foreign("gfx803+sm_90", wanted)
    assert not is_foreign("gfx803", [])
    assert targets_if_valid(["gfx906", "no target"]) == []


def test_bytes_are_claimed_once_by_all_the_findings_that_want_them_gone() -> None:
    counter = ClaimCounter(targets_if_valid(["gfx906"]))
    counter.add(10, ["doubled"])
    counter.add(3200, ["doubled", FOREIGN_CODE])
    counter.add(7, [FOREIGN_CODE])
    counter.add(5, [])
    counter.add(0, ["doubled"])
    assert counter.claims == {("doubled",): 10, ("doubled", FOREIGN_CODE): 3200, (FOREIGN_CODE,): 7}
    assert saved_bytes(counter.claims, [FOREIGN_CODE]) == 3207
    assert saved_bytes(counter.claims, ["doubled"]) == 3210
    assert saved_bytes(counter.claims, ["doubled", FOREIGN_CODE]) == 3217
    assert saved_bytes(counter.claims, []) == 0
