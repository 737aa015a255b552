"""Pointers that a cut would lose: into removed bytes, inside them, disagreeing, or twice; each is refused."""

import struct
from dataclasses import replace

import pytest

from buildtool.gpucode.cut import MovedBundles, plan_prune, pointer_patches, relr_addresses
from buildtool.gpucode.elf import read_elf
from buildtool.gpucode.scan import HIP
from buildtool.gpucode.source import PruneRefused, Source
from buildtool.gpucode.target import parse_targets
from gpucode.cutting import pruned, targets_in
from gpucode.maker import Library, Spec, bundles, make_library

GFX906 = parse_targets("gfx906")
BOTH = bundles(["gfx906", "gfx803"])


def put(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def tag_place(data: bytes, tag: int) -> int:
    """Where the value of a dynamic entry stands in the file."""
    dynamic = read_elf(Source.of_bytes(data)).section(".dynamic")
    assert dynamic is not None
    for at in range(dynamic.offset, dynamic.file_end, 16):
        if struct.unpack_from("<Q", data, at) == (tag,):
            return at + 8
    raise AssertionError(f"no tag {tag}")


def refused(data: bytes) -> str:
    with pytest.raises(PruneRefused) as caught:
        plan_prune(Source.of_bytes(data), GFX906)
    return caught.value.message


def with_relocations_inside(library: Library, *, at: int) -> bytes:
    """The library with its table of relocations in a code object of the section that is cut."""
    elf = read_elf(Source.of_bytes(library.data))
    table = elf.section(".rela.dyn")
    assert table is not None
    moved = put(library.data, library.fatbin + at, library.data[table.offset : table.file_end])
    return put(moved, tag_place(moved, 7), struct.pack("<Q", library.fatbin_address + at))


@pytest.mark.parametrize("at", [8192, 4096 + 16])
def test_pointer_that_is_in_the_section_itself_is_refused(at: int) -> None:
    data = with_relocations_inside(make_library(Spec(BOTH)), at=at)
    assert "a pointer to a bundle is in .hip_fatbin itself" in refused(data)


def test_relocation_of_an_address_in_the_section_is_refused_at_both_of_its_ends() -> None:
    library = make_library(Spec(BOTH, extra_rela=[(0, 8, 0)]))
    section = read_elf(Source.of_bytes(library.data)).section(".hip_fatbin")
    assert section is not None
    first, end = section.address, section.address + section.n_bytes
    for address in (first, end - 1):
        data = make_library(Spec(BOTH, extra_rela=[(address, 8, 0)])).data
        assert "writes into .hip_fatbin" in refused(data)
    for address in (first - 8, end):
        assert targets_in(pruned(make_library(Spec(BOTH, extra_rela=[(address, 8, 0)])).data, "gfx906"))


def test_relocation_of_another_kind_that_reaches_a_wrapper_s_pointer_is_refused() -> None:
    library = make_library(Spec(BOTH, extra_rela=[(0, 8, 0)]))
    pointer = library.wrappers_address + 8
    for row in ((pointer, 1, 0), (pointer, 8, 0x40), (pointer, 37, 0)):
        data = make_library(Spec(BOTH, extra_rela=[row])).data
        assert "a form that is not known" in refused(data)


def test_relative_relocation_with_a_symbol_into_a_bundle_is_refused() -> None:
    library = make_library(Spec(BOTH, extra_rela=[(0, 8, 0)]))
    data_at = library.wrappers_address + 24 * 3
    row = (data_at, 5 << 32 | 8, library.fatbin_address)
    assert "a form that is not known" in refused(make_library(Spec(BOTH, extra_rela=[row])).data)


def test_absolute_relocation_whose_addend_happens_to_be_in_the_section_is_no_pointer() -> None:
    library = make_library(Spec(BOTH, extra_rela=[(0, 8, 0)]))
    row = (library.wrappers_address + 24 * 3, 7 << 32 | 1, library.fatbin_address)
    assert targets_in(pruned(make_library(Spec(BOTH, extra_rela=[row])).data, "gfx906")) == {"gfx906"}


def test_pointer_elsewhere_in_the_data_follows_its_bundle_too() -> None:
    library = make_library(Spec(BOTH, extra_rela=[(0, 8, 0)]))
    at = library.wrappers_address + 24 * 3  # `.data` begins behind the wrappers
    filled = library.fatbin_address + library.bundle_starts[2]
    spec = Spec(BOTH, extra_rela=[(at, 8, filled)])
    data = make_library(spec).data
    at_in_file = make_library(spec).wrappers + 24 * 3
    out = pruned(put(data, at_in_file, bytes(8)), "gfx906")
    elf = read_elf(Source.of_bytes(out))
    table = elf.section(".rela.dyn")
    assert table is not None
    rows = list(struct.iter_unpack("<QQq", out[table.offset : table.file_end]))
    assert rows[3][2] == rows[2][2] != filled
    assert out[elf.offset_of(rows[3][2], 24) :].startswith(b"__CLANG_OFFLOAD_BUNDLE__")


def test_pointer_that_is_relocated_twice_is_refused() -> None:
    library = make_library(Spec(BOTH, extra_rela=[(0, 8, 0)]))
    row = (library.wrappers_address + 8, 8, library.fatbin_address)
    assert "relocated twice" in refused(make_library(Spec(BOTH, extra_rela=[row])).data)


def test_pointer_in_the_file_that_disagrees_with_its_relocation_is_refused() -> None:
    library = make_library(Spec(BOTH, words_in_file=True))
    data = put(library.data, library.wrappers + 8, struct.pack("<Q", 77))
    assert "disagree" in refused(data)


def test_wrapper_without_a_pointer_is_named_by_its_own_address() -> None:
    library = make_library(Spec(BOTH))
    table = read_elf(Source.of_bytes(library.data)).section(".rela.dyn")
    assert table is not None
    data = put(library.data, table.offset + 24, struct.pack("<QQq", 0, 0, 0))
    assert f"the wrapper at {library.wrappers_address + 24:#x} points to no bundle" in refused(data)


def test_nothing_moves_in_a_library_without_its_wrappers_section() -> None:
    data = make_library(Spec(BOTH, wrapper_section=".somethingElse")).data
    out = pruned(data, "gfx906")
    assert len(out) == len(data)
    assert targets_in(out) == {"gfx906"}


@pytest.mark.parametrize("tag", [17, 9])
def test_relocations_of_another_form_are_refused(tag: int) -> None:
    data = make_library(Spec(BOTH)).data
    changed = put(data, tag_place(data, 9) - 8, struct.pack("<QQ", tag, 32))
    assert ("REL relocations" if tag == 17 else "unknown length") in refused(changed)


def test_symbol_in_the_middle_of_a_bundle_stays_and_one_at_its_start_follows() -> None:
    library = make_library(Spec(BOTH, symbols=True))
    symtab = read_elf(Source.of_bytes(library.data)).section(".symtab")
    assert symtab is not None
    middle = library.fatbin_address + 40
    data = put(library.data, symtab.offset + 24 + 8, struct.pack("<Q", middle))
    out = pruned(data, "gfx906")
    table = read_elf(Source.of_bytes(out)).section(".symtab")
    assert table is not None
    values = [value for *_, value, _ in struct.iter_unpack("<IBBHQQ", out[table.offset : table.file_end])]
    assert values[1] == middle
    assert values[2] < library.fatbin_address + library.bundle_starts[1]


def test_symbol_of_another_section_never_follows_a_bundle() -> None:
    library = make_library(Spec(BOTH, symbols=True))
    symtab = read_elf(Source.of_bytes(library.data)).section(".symtab")
    assert symtab is not None
    foreign = put(library.data, symtab.offset + 2 * 24 + 6, struct.pack("<H", 0xFFF1))
    out = pruned(foreign, "gfx906")
    table = read_elf(Source.of_bytes(out)).section(".symtab")
    assert table is not None
    (value,) = struct.unpack_from("<Q", out, table.offset + 2 * 24 + 8)
    assert value == library.fatbin_address + library.bundle_starts[1]


def test_relr_words_and_bitmaps_give_every_address_once_in_order() -> None:
    words = [0x1000, 0b1011, 1 << 63 | 1, 0x9000, 1, 0b101]
    table = struct.pack(f"<{len(words)}Q", *words)
    source = Source.of_bytes(b"front---" + table)
    after = 0x1008 + 63 * 8
    assert list(relr_addresses(source, 8, len(table))) == [
        0x1000, 0x1008, 0x1018, after + 62 * 8, 0x9000, 0x9008 + 63 * 8 + 8,
    ]  # fmt: skip
    assert list(relr_addresses(source, 8, 0)) == []


def test_one_pointer_in_the_section_itself_is_refused_beside_others_that_are_not() -> None:
    data = with_relocations_inside(make_library(Spec(BOTH, symbols=True)), at=8192)
    assert "is in .hip_fatbin itself" in refused(data)


@pytest.mark.parametrize("relr", [True, False])
def test_pointer_may_be_the_last_word_of_a_segment_and_of_a_file(relr: bool) -> None:
    library = make_library(Spec(BOTH, relr=relr, words_in_file=True))
    end = library.wrappers + 24 * (len(BOTH) - 1) + 16  # behind the last wrapper's pointer
    elf = read_elf(Source.of_bytes(library.data))
    segments = tuple(
        replace(one, file_bytes=end - one.offset) if one.offset <= library.wrappers < one.file_end else one
        for one in elf.segments
    )
    sections = tuple(
        replace(one, n_bytes=24 * (len(BOTH) - 1)) if one.offset == library.wrappers else one
        for one in elf.sections
    )
    short = replace(elf, segments=segments, sections=sections)
    fatbin = short.section(".hip_fatbin")
    assert fatbin is not None
    moved = {library.fatbin_address + start: library.fatbin_address for start in library.bundle_starts}
    found = pointer_patches(Source.of_bytes(library.data[:end]), short, HIP, MovedBundles(fatbin, moved))
    places = [library.wrappers + 24 * at + 8 for at in range(len(BOTH))]
    assert [patch.offset for patch in found if patch.offset >= library.wrappers] == places


def test_pointer_to_what_follows_the_section_is_no_pointer_to_a_bundle() -> None:
    library = make_library(Spec(BOTH, extra_rela=[(0, 8, 0)]))
    section = read_elf(Source.of_bytes(library.data)).section(".hip_fatbin")
    assert section is not None
    row = (library.wrappers_address + 24 * 3, 8, section.address + section.n_bytes)
    data = make_library(Spec(BOTH, extra_rela=[row])).data
    data = put(data, library.wrappers + 24 * 3, bytes(8))
    assert targets_in(pruned(data, "gfx906")) == {"gfx906"}


def test_a_bitmap_without_an_address_before_it_begins_at_zero() -> None:
    table = struct.pack("<QQ", 0b1011, 0b11)
    assert list(relr_addresses(Source.of_bytes(table), 0, 16)) == [0, 16, 63 * 8]
