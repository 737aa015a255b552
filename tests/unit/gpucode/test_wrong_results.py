"""The check of a pruned file notices every kind of wrong result, each by its own name."""

import struct
from dataclasses import replace

import pytest

from buildtool.gpucode.elf import PT_LOAD, PT_PHDR, read_elf
from buildtool.gpucode.source import Source, VerifyFailed
from buildtool.gpucode.target import parse_targets
from buildtool.gpucode.verify import verify_prune
from gpucode.cutting import ALL, cuda, pruned
from gpucode.maker import Library, Spec, bundles, code, make_library, nv_fatbin, raw_bundle

GFX906 = parse_targets("gfx906")
BOTH = ["gfx906", "gfx1100"]


def wrong(old: bytes, new: bytes, targets: str = "gfx906") -> str:
    with pytest.raises(VerifyFailed) as caught:
        verify_prune(Source.of_bytes(old), Source.of_bytes(new), parse_targets(targets))
    return caught.value.message


def put(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@pytest.fixture(scope="module")
def library() -> Library:
    return make_library(Spec(bundles(BOTH), symbols=True))


@pytest.fixture(scope="module")
def good(library: Library) -> bytes:
    return pruned(library.data, "gfx906")


ONE, OTHER = (
    raw_bundle({"gfx906": code("gfx906"), "gfx803": code("gfx803")}),
    raw_bundle({"gfx906": code("x")}),
)


def test_bundle_too_few_or_too_many_is_noticed() -> None:
    two = ONE + bytes(-len(ONE) % 4096) + OTHER
    assert "another number of bundles" in wrong(two, raw_bundle({"gfx906": code("gfx906")}))
    assert "another number of bundles" in wrong(OTHER, two)


def test_entry_too_few_or_too_many_is_noticed() -> None:
    assert "bundle 0 has other entries" in wrong(ONE, ONE)
    both = raw_bundle({"gfx906": code("gfx906"), "gfx906:xnack+": b"more", "gfx803": b"x"})
    assert "bundle 0 has other entries" in wrong(both, raw_bundle({"gfx906": code("gfx906")}))
    assert "bundle 0 has other entries" in wrong(ONE, raw_bundle({"gfx906": code("gfx906")}, host=False))


def test_other_code_is_noticed_and_the_same_code_counted() -> None:
    assert "bundle 0 has other code" in wrong(ONE, OTHER)
    kept = raw_bundle({"gfx906": code("gfx906")})
    assert verify_prune(Source.of_bytes(ONE), Source.of_bytes(kept), GFX906) == 2  # with the host's entry


def test_other_cuda_code_is_noticed() -> None:
    old = cuda([nv_fatbin(ALL)])
    new = pruned(old, "sm_90")
    at = new.index(code("2.90", len(nv_fatbin(ALL[:3])) - 16, 9000)[100:200])
    assert "bundle 0 has other code" in wrong(old, put(new, at, b"?"), "sm_90")


def test_file_without_code_to_prune_is_no_original(good: bytes) -> None:
    plain = make_library(Spec(bundles(BOTH), section=".other", machine=40)).data
    plain = plain.replace(b"__CLANG", b"__GNU__")
    assert "holds no code" in wrong(plain, good)


def test_result_without_its_section_is_noticed(library: Library, good: bytes) -> None:
    at = good.index(b"\0.hip_fatbin\0") + 2
    assert ".hip_fatbin is gone" in wrong(library.data, put(good, at, b"x"))


@pytest.mark.parametrize(("at", "value"), [(16, b"\2"), (48, b"\1"), (49, b"\1")])
def test_other_type_or_flags_of_the_elf_file_are_noticed(
    library: Library, good: bytes, at: int, value: bytes
) -> None:
    assert "its ELF header changed" in wrong(library.data, put(good, at, value))


def test_program_headers_that_no_segment_covers_are_noticed(library: Library, good: bytes) -> None:
    elf = read_elf(Source.of_bytes(good))
    table = good[elf.segments_offset : elf.segments_offset + 56 * len(elf.segments)]
    behind = good + bytes(-len(good) % 8)
    moved = put(behind + table, 32, struct.pack("<Q", len(behind)))
    assert "no segment covers its program headers" in wrong(library.data, moved)


@pytest.mark.parametrize(("headers", "covered"), [(-1, False), (0, True), (1, True)])
def test_program_headers_that_a_segment_covers_in_part_are_noticed(
    library: Library, good: bytes, headers: int, covered: bool
) -> None:
    elf = read_elf(Source.of_bytes(good))
    count = len(elf.segments)
    behind = good + bytes(-len(good) % 8)
    last = max(index for index, segment in enumerate(elf.segments) if segment.type == PT_LOAD)
    load = elf.segments[last]
    n_bytes = len(behind) + 56 * (count + headers) - load.offset
    table = b"".join(
        replace(one, file_bytes=n_bytes, memory_bytes=n_bytes).pack() if index == last else one.pack()
        for index, one in enumerate(elf.segments)
    )
    moved = put(behind + table + bytes(56), 32, struct.pack("<Q", len(behind)))
    if covered:
        assert verify_prune(Source.of_bytes(library.data), Source.of_bytes(moved), GFX906) == 6
    else:
        assert "no segment covers its program headers" in wrong(library.data, moved)


def others(data: bytes) -> list[int]:
    """File positions of the program headers that aren't PT_LOAD or PT_PHDR."""
    elf = read_elf(Source.of_bytes(data))
    return [
        elf.segments_offset + 56 * index
        for index, segment in enumerate(elf.segments)
        if segment.type not in (PT_LOAD, PT_PHDR)
    ]


@pytest.mark.parametrize("field", [4, 16, 24, 32, 40, 48])
def test_changed_segment_is_noticed(library: Library, good: bytes, field: int) -> None:
    for at in others(good):
        changed = put(good, at + field, bytes([good[at + field] ^ 4]))
        assert wrong(library.data, changed)


def test_segment_that_isn_t_where_it_is_loaded_from_is_noticed(library: Library, good: bytes) -> None:
    for at in others(good)[:2]:
        (offset,) = struct.unpack_from("<Q", good, at + 8)
        moved = put(good, at + 8, struct.pack("<Q", offset + 8))
        message = wrong(library.data, moved)
        assert "is not where it is loaded from" in message or "dynamic" in message


def test_pointers_that_are_swapped_or_stay_behind_are_noticed(library: Library, good: bytes) -> None:
    table = read_elf(Source.of_bytes(good)).section(".rela.dyn")
    assert table is not None
    first, second = (good[table.offset + at : table.offset + at + 8] for at in (16, 40))
    swapped = put(put(good, table.offset + 16, second), table.offset + 40, first)
    assert "a pointer lost its bundle" in wrong(library.data, swapped)
    inside = put(good, table.offset + 40, struct.pack("<Q", int.from_bytes(second, "little") + 8))
    assert "a pointer lost its bundle" in wrong(library.data, inside)
    lost = put(good, table.offset + 40, bytes(8))
    assert "a pointer lost its bundle" in wrong(library.data, lost)


def sections_of(data: bytes) -> int:
    return read_elf(Source.of_bytes(data)).sections_offset


@pytest.mark.parametrize("field", [4, 8])
def test_changed_type_or_flags_of_a_section_are_noticed(library: Library, good: bytes, field: int) -> None:
    elf = read_elf(Source.of_bytes(good))
    symtab = elf.section(".symtab")
    assert symtab is not None
    at = sections_of(good) + 64 * symtab.index + field
    assert "section .symtab changed" in wrong(library.data, put(good, at, bytes([good[at] ^ 0x10])))


def test_section_that_is_shorter_or_missing_is_noticed(library: Library, good: bytes) -> None:
    elf = read_elf(Source.of_bytes(good))
    symtab = elf.section(".symtab")
    assert symtab is not None
    at = sections_of(good) + 64 * symtab.index + 32
    assert "section .symtab changed" in wrong(
        library.data, put(good, at, struct.pack("<Q", symtab.n_bytes - 24))
    )
    longer = make_library(Spec(bundles(BOTH), symbols=False)).data
    assert wrong(library.data, pruned(longer, "gfx906"))


def test_changed_byte_of_what_isn_t_loaded_is_noticed_and_moved_symbols_are_not(
    library: Library, good: bytes
) -> None:
    symtab = read_elf(Source.of_bytes(good)).section(".symtab")
    assert symtab is not None
    of_no_code = symtab.offset + 8  # the value of such a symbol; one of the GPU code may move
    for at in (symtab.offset, of_no_code, *(symtab.offset + 24 + n for n in (4, 16)), symtab.file_end - 1):
        assert "changed" in wrong(library.data, put(good, at, bytes([good[at] ^ 1])))
    assert verify_prune(Source.of_bytes(library.data), Source.of_bytes(good), GFX906) == 6


def test_changed_byte_of_what_is_loaded_is_noticed_in_every_segment(library: Library, good: bytes) -> None:
    elf = read_elf(Source.of_bytes(good))
    for name in (".note.gnu.build-id", ".rodata", ".eh_frame_hdr", ".data"):
        found = elf.section(name)
        assert found is not None
        for at in (found.offset, found.file_end - 1):
            assert "bytes near" in wrong(library.data, put(good, at, bytes([good[at] ^ 1])))


def test_every_file_is_a_right_result_of_a_prune_that_takes_nothing(good: bytes) -> None:
    assert verify_prune(Source.of_bytes(good), Source.of_bytes(good), GFX906) == 6


def test_a_symbol_of_another_section_that_changed_is_noticed(library: Library) -> None:
    """Only the symbols of the bundles may get new values."""
    elf = read_elf(Source.of_bytes(library.data))
    table, other = elf.section(".symtab"), elf.section(".data")
    assert table
    assert other
    foreign = put(library.data, table.offset + 24 + 6, struct.pack("<H", other.index))  # the first symbol's
    new = pruned(foreign, "gfx906")
    moved = read_elf(Source.of_bytes(new)).section(".symtab")
    assert moved
    changed = put(new, moved.offset + 24 + 8, b"?")
    assert "bytes near" in wrong(foreign, changed)
