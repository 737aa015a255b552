"""How GPU code is looked for: what is copied of a file, what isn't, and content that doesn't fit together."""

import os
import struct
from collections.abc import Iterable

import image_maker as make
import pytest
from elf_maker import KERNELS, PAGE, bundle, library
from test_content_probes import changed, code_in, fatbin

from buildtool.gpucode.source import GpuCodeError
from buildtool.image import gpu_code
from buildtool.image.gpu_code import GpuCodeCounter

HEAD = 16 * PAGE  # of a file, kept until it is known whether the rest is needed


def fed(content: bytes, pieces: Iterable[bytes] | None = None) -> GpuCodeCounter:
    probe = GpuCodeCounter(len(content))
    for piece in pieces or [content]:
        probe.feed(piece)
    return probe


def test_a_fat_binary_that_is_a_file_is_read() -> None:
    content = fatbin(90, 100_000)
    for chunk in (1 << 10, 1 << 16, 1 << 20):
        assert code_in(content, make.chunks(content, chunk)) == {"sm_90": 100_064}
    assert code_in(fatbin(80, 3000), [fatbin(80, 3000)]) == {"sm_80": 3064}


@pytest.mark.parametrize("magic", [b"CCOB", b"\x10\xff\x10\xad"])
@pytest.mark.parametrize("pages", [3, 16, 40])
def test_all_of_a_file_from_a_compressed_bundle_on_is_copied(
    magic: bytes, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = library(magic + b"c" * 300_000, start=pages * PAGE)
    copied = HEAD + len(content) - pages * PAGE
    for limit, fits in ((copied, True), (copied - 1, False)):
        monkeypatch.setattr(gpu_code, "_LARGEST_BYTES", limit)
        for pieces in ([content], [content[:HEAD], content[HEAD:]]):
            with fed(content, pieces) as probe, pytest.raises(GpuCodeError) as told:
                probe.stored_bytes_by_processor()
            assert ("no temporary file" in str(told.value)) is not fits
            if not fits:
                assert f"{limit:,} bytes" in str(told.value)


def test_a_copy_takes_at_most_4_gib_and_names_are_looked_for_in_16_mib() -> None:
    assert (gpu_code._LARGEST_BYTES, gpu_code._NAMES_BYTES) == (4 << 30, 16 << 20)


def test_little_of_a_library_is_copied_for_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_code, "_NAMES_BYTES", PAGE)
    content = library(bundle({"gfx90a": 1_000_000}), start=40 * PAGE)
    headers_at = int.from_bytes(content[40:48], "little")
    with fed(content, make.chunks(content, 1 << 16)) as probe:
        assert probe.stored_bytes_by_processor() == {"gfx90a": 1_000_000}
        assert probe._written == HEAD + PAGE + len(content) - (headers_at - PAGE)


def test_from_a_compressed_bundle_on_a_file_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_code, "_NAMES_BYTES", PAGE)
    content = bytearray(library(bundle({"gfx90a": 1_000_000}), start=40 * PAGE))
    for page in (100, 200):
        content[page * PAGE : page * PAGE + 4] = b"CCOB"
    from_the_first = HEAD + len(content) - 100 * PAGE
    with fed(bytes(content)) as probe:
        assert probe._written == from_the_first
    with fed(bytes(content), make.chunks(bytes(content))) as probe:
        assert probe._written == PAGE + from_the_first  # and the bundle's table, found before


def test_names_as_far_before_the_headers_as_linkers_put_them_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = library(bundle(KERNELS), start=40 * PAGE)
    names_at = content.index(b".hip_fatbin") - 1
    headers_at = int.from_bytes(content[40:48], "little")
    for room, found in ((headers_at - names_at, True), (headers_at - names_at - 8, False)):
        monkeypatch.setattr(gpu_code, "_NAMES_BYTES", room)
        with fed(content, make.chunks(content, 1 << 16)) as probe:
            if found:
                assert probe.stored_bytes_by_processor() == {"gfx90a": 50_000, "gfx1100": 20_000}
            else:
                with pytest.raises(GpuCodeError):
                    probe.stored_bytes_by_processor()


def test_of_a_file_that_is_all_code_only_the_headers_are_copied() -> None:
    code = bytearray(library(b"k" * 1_000_000, ".text"))
    code[18:20], code[48:52] = b"\xe0\x00", (0x41).to_bytes(4, "little")
    code[40 * PAGE : 40 * PAGE + 4] = b"CCOB"
    headers_at = int.from_bytes(code[40:48], "little")
    with fed(bytes(code), make.chunks(bytes(code))) as probe:
        assert probe.stored_bytes_by_processor() == {"gfx1100": len(code)}
        assert probe._written == HEAD + len(code) - headers_at


def test_a_cubin_that_is_a_file_is_code() -> None:
    code = bytearray(library(b"k" * 100_000, ".text"))
    code[18:20], code[48:52] = b"\xbe\x00", (90).to_bytes(4, "little")  # EM_CUDA, sm_90
    assert code_in(bytes(code), make.chunks(bytes(code))) == {"sm_90": len(code)}


def test_the_first_of_several_containers_in_one_piece_counts() -> None:
    content = bytearray(library(fatbin(90, 60_000), ".nv_fatbin", start=17 * PAGE))
    content[20 * PAGE : 20 * PAGE + 4] = b"CCOB"
    assert code_in(bytes(content), [bytes(content)]) == {"sm_90": 60_064}


@pytest.mark.parametrize("first", [64, 56])
def test_code_right_behind_bytes_that_look_like_its_magic_is_found(first: int) -> None:
    start = 17 * PAGE
    content = bytearray(library(fatbin(80, 3000), ".nv_fatbin", start=start))
    for at in range(start - first, start, 8):
        content[at + 3] = 0xBA
    assert code_in(bytes(content), [bytes(content)]) == {"sm_80": 3064}


def test_nothing_is_kept_of_a_file_without_code() -> None:
    resembling = library(b"abc\xbadefg" * 30_000, ".text")
    text_with_magic = b"x" * PAGE + bundle(KERNELS)
    for content in (bytes(300_000), text_with_magic, library(b"c" * 200_000, ".text"), resembling):
        with GpuCodeCounter(len(content)) as probe:
            for piece in make.chunks(content, 50_000):
                probe.feed(piece)
                assert len(probe._tail) + len(probe._head) + len(probe._carry) <= max(HEAD + 32, 50_000)
            assert probe.stored_bytes_by_processor() == {}
            assert probe._spool is None


def test_a_short_file_is_looked_at_once_it_has_ended() -> None:
    content = bundle({"gfx906": 1000})
    assert len(content) < HEAD
    assert code_in(content, make.chunks(content, 100)) == {"gfx906": 1000}
    assert code_in(content, [content[:1], content[1:]]) == {"gfx906": 1000}
    assert code_in(b"", []) == {}


def test_the_temporary_file_goes_with_the_probe() -> None:
    content = library(bundle(KERNELS))
    with fed(content) as probe:
        assert probe._spool
        assert not probe._spool.closed
    assert probe._spool.closed


def test_what_the_disk_takes_in_small_parts_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, content, at: write(handle, content[:1000], at))
    content = library(fatbin(90, 30_000), ".nv_fatbin", start=17 * PAGE)
    assert code_in(content, make.chunks(content, 1 << 16)) == {"sm_90": 30_064}


def test_a_bundle_outside_of_all_sections_leaves_the_file_unread() -> None:
    content = library(bundle(KERNELS), ".text")
    with fed(content) as probe, pytest.raises(GpuCodeError, match="don't fit together"):
        probe.stored_bytes_by_processor()


def test_code_of_more_bytes_than_the_file_has_leaves_it_unread() -> None:
    content = library(bundle({"gfx906": 60_000}))
    table = 3 * PAGE + 32
    first = table + 24 + len("host-x86_64-unknown-linux-gnu-")
    size_at = first + 8
    assert struct.unpack_from("<Q", content, size_at) == (60_000,)
    with fed(changed(content, size_at, "<Q", 1 << 40)) as probe, pytest.raises(GpuCodeError):
        probe.stored_bytes_by_processor()
