"""How GPU code is looked for in what streams by: what is kept of it, and what doesn't fit together."""

import struct
from collections.abc import Iterable

import image_maker as make
import pytest
from elf_maker import KERNELS, PAGE, bundle, library
from test_content_probes import changed, code_in, fatbin

from buildtool.gpucode.bundle import Method, pack
from buildtool.gpucode.elf import EM_AMDGPU
from buildtool.gpucode.source import GpuCodeError
from buildtool.image.gpu_code import GpuCodeCounter

MACH_GFX1030 = 0x36
HEAD = 16 * PAGE  # of a file, kept for its segments' alignment


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


@pytest.mark.thorough
@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("method", Method)
def test_a_compressed_bundle_is_read_however_the_stream_is_cut(version: int, method: Method) -> None:
    raw = bundle(KERNELS)
    packed = pack([raw], len(raw), version=version, method=method)
    content = library(packed + bytes(-len(packed) % PAGE) + bundle({"gfx803": 777}), start=40 * PAGE)
    at_once = code_in(content, [content])
    assert at_once.keys() == {"gfx90a", "gfx1100", "gfx803"}
    for chunk in (100, 4097, 1 << 16):
        assert code_in(content, make.chunks(content, chunk)) == at_once


def test_little_of_a_file_is_kept_while_it_streams_by() -> None:
    content = library(bundle({"gfx90a": 3_000_000}) + fatbin(90, 2_000_000), start=40 * PAGE)
    probe = GpuCodeCounter(len(content))
    for piece in make.chunks(content, 50_000):
        probe.feed(piece)
        assert sum(map(len, probe._stream._parts)) + len(probe._head) <= HEAD + 50_000 + PAGE
    assert probe.stored_bytes_by_processor() == {"gfx90a": 3_000_000, "sm_90": 2_000_064}


def test_a_cubin_that_is_a_file_is_code() -> None:
    code = bytearray(library(b"k" * 100_000, ".text"))
    code[18:20], code[48:52] = b"\xbe\x00", (90).to_bytes(4, "little")  # EM_CUDA, sm_90
    assert code_in(bytes(code), make.chunks(bytes(code))) == {"sm_90": len(code)}


def test_what_looks_like_code_inside_of_code_is_none() -> None:
    inner = bundle({"gfx906": 5000})
    content = bytearray(library(fatbin(90, 60_000), ".nv_fatbin", start=17 * PAGE))
    content[20 * PAGE : 20 * PAGE + len(inner)] = inner
    assert code_in(bytes(content), [bytes(content)]) == {"sm_90": 60_064}
    assert code_in(bytes(content), make.chunks(bytes(content), 5000)) == {"sm_90": 60_064}


@pytest.mark.parametrize("first", [64, 56])
def test_code_right_behind_bytes_that_look_like_its_magic_is_found(first: int) -> None:
    start = 17 * PAGE
    content = bytearray(library(fatbin(80, 3000), ".nv_fatbin", start=start))
    for at in range(start - first, start, 8):
        content[at + 3] = 0xBA
    assert code_in(bytes(content), [bytes(content)]) == {"sm_80": 3064}


def test_a_file_without_code_has_none() -> None:
    resembling = library(b"abc\xbadefg" * 30_000, ".text")
    text_with_magic = b"x" * PAGE + bundle(KERNELS)
    for content in (bytes(300_000), text_with_magic, library(b"c" * 200_000, ".text"), resembling):
        assert code_in(content, make.chunks(content, 50_000)) == {}


def test_a_short_file_is_looked_at_once_it_has_ended() -> None:
    content = bundle({"gfx906": 1000})
    assert len(content) < HEAD
    assert code_in(content, make.chunks(content, 100)) == {"gfx906": 1000}
    assert code_in(content, [content[:1], content[1:]]) == {"gfx906": 1000}
    assert code_in(b"", []) == {}


@pytest.mark.parametrize("shift", [0, 64])
def test_a_bundle_in_any_section_is_counted(shift: int) -> None:
    """Where nothing shows what points to it, a prune puts zeros, which saves no unpacked bytes."""
    content = library(bundle(KERNELS), ".text", start=3 * PAGE + shift)
    probe = fed(content)
    assert probe.stored_bytes_by_processor() == {"gfx90a": 50_000, "gfx1100": 20_000}
    assert probe.fixed == (set() if shift == 0 else {"gfx90a", "gfx1100"})


def test_a_runtimes_own_kernels_are_no_saving() -> None:
    """ROCr holds a code object for each card in .rodata: a prune was advised that leaves them all there."""
    kernel = bytearray(library(bytes(2000), ".text"))
    kernel[18:20] = EM_AMDGPU.to_bytes(2, "little")
    kernel[48:52] = MACH_GFX1030.to_bytes(4, "little")
    probe = fed(library(bytes(kernel), ".rodata", start=3 * PAGE))
    assert set(probe.stored_bytes_by_processor()) == {"gfx1030"} == probe.fixed


@pytest.mark.parametrize("n_bytes", [60_000, 1 << 16, (1 << 16) + 5])
def test_a_file_that_ends_inside_of_its_code_is_unread(n_bytes: int) -> None:
    content = library(bundle(KERNELS), start=40 * PAGE)
    with pytest.raises(GpuCodeError):
        fed(content, [content[: 40 * PAGE + 10]]).stored_bytes_by_processor()
    with pytest.raises(GpuCodeError):
        code_in(fatbin(90, n_bytes)[:-1], [fatbin(90, n_bytes)[:-1]])


def test_code_of_more_bytes_than_the_file_has_leaves_it_unread() -> None:
    content = library(bundle({"gfx906": 60_000}))
    table = 3 * PAGE + 32
    first = table + 24 + len("host-x86_64-unknown-linux-gnu-")
    size_at = first + 8
    assert struct.unpack_from("<Q", content, size_at) == (60_000,)
    with pytest.raises(GpuCodeError):
        fed(changed(content, size_at, "<Q", 1 << 40)).stored_bytes_by_processor()
