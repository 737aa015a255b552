"""GPU code inside libraries, found while the layer streams by."""

import image_maker as make
import pytest
from elf_maker import KERNELS, PAGE, bundle, library
from image_maker import file, tar

from buildtool.image.layer import LayerIndex, index_layer
from buildtool.image.tar import TarReader


def index(*members: bytes, chunk: int = 1 << 16) -> LayerIndex:
    return index_layer(TarReader(make.chunks(tar(*members), chunk), place="t"), place="t")


@pytest.mark.parametrize("chunk", [1000, 4097, 1 << 16, 1 << 20])
def test_bytes_by_processor_are_found_however_the_stream_is_cut(chunk: int) -> None:
    found = index(file("lib/librocx.so", library(bundle(KERNELS) + bundle({"gfx1100": 7000}))), chunk=chunk)
    assert found.gpu_code == {0: {"gfx90a": 50_000, "gfx1100": 27_000}}
    assert not found.unread


def test_a_library_without_gpu_code_has_none() -> None:
    found = index(file("lib/libc.so", library(b"c" * 100_000, ".text")))
    assert found.gpu_code == {}
    assert found.digests


def test_a_bundle_that_is_a_file_is_read() -> None:
    assert index(file("x.co", bundle(KERNELS))).gpu_code == {0: {"gfx90a": 50_000, "gfx1100": 20_000}}


def test_a_code_object_that_is_a_file_is_all_code() -> None:
    code = bytearray(library(b"k" * 3_000_000, ".text"))
    code[18:20], code[48:52] = b"\xe0\x00", (0x41).to_bytes(4, "little")  # EM_AMDGPU, gfx1100
    assert index(file("Kernels.hsaco", bytes(code))).gpu_code == {0: {"gfx1100": len(code)}}


def test_a_bundle_that_lies_about_itself_is_reported_and_the_file_still_counts() -> None:
    broken = bytearray(library(bundle(KERNELS)))
    broken[3 * PAGE + 24] = 255  # the number of entries
    found = index(file("lib/librocx.so", bytes(broken)), file("after", b"x"))
    assert found.gpu_code == {}
    assert list(found.unread) == [0]
    assert found.n_entries == 2
