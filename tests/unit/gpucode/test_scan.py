"""What is in a file, in which bytes; sums are exact and nothing is guessed."""

import struct
from collections import Counter

import pytest

from buildtool.gpucode import bundle, nvfatbin
from buildtool.gpucode.bundle import Method, pack
from buildtool.gpucode.elf import read_elf
from buildtool.gpucode.scan import UNKNOWN, scan_file
from buildtool.gpucode.source import BadBundle, BadElf, GpuCodeError, Source
from gpucode.maker import Spec, bundles, make_library, nv_fatbin, raw_bundle


def scan(data: bytes) -> Counter[str]:
    found = scan_file(Source.of_bytes(data))
    assert found.total() <= len(data)
    return found


def elf_object(machine: int, flags: int, abi: int = 3) -> bytes:
    return struct.pack("<4sBBBBB7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 64, abi, 3, machine, 1, 0, 0, 0, flags, 64, 0, 0, 0, 0, 0)  # fmt: skip # noqa: E501


def test_library_is_reported_by_target() -> None:
    found = scan(make_library(Spec(bundles(["gfx906", "gfx1100"], count=2, n_bytes=5000))).data)
    assert found == {"gfx906": 10_100, "gfx1100": 10_100}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_compressed_bytes_are_shared_out_without_remainder(version: int) -> None:
    raw = raw_bundle({f"gfx{n}": bytes(range(1, 251)) * n for n in (803, 906, 1100)})
    packed = pack([raw], len(raw), version=version, method=Method.ZSTD)
    found = scan(packed)
    n_bytes = len(packed) - {1: 20, 2: 24, 3: 32}[version]
    assert found.total() == n_bytes
    for number in (803, 906, 1100):
        assert found[f"gfx{number}"] == pytest.approx(n_bytes * number / (803 + 906 + 1100), abs=1)


def test_cuda_fat_binaries_are_reported_by_architecture() -> None:
    section = nv_fatbin([(2, 80, 5000), (2, 90, 7000), (1, 90, 300)]) + nv_fatbin([(2, 80, 64)])
    found = scan(section)
    assert found == {"sm_80": 5192, "sm_90": 7064, "compute_90": 368}


def test_compressed_cuda_code_shows_both_lengths() -> None:
    data = nv_fatbin([(2, 90, 1000)], unpacked=9000)
    assert scan(data) == {"sm_90": 1064}
    ((code,),) = (fatbin.entries for fatbin in nvfatbin.iter_fatbins(Source.of_bytes(data), 0, len(data)))
    assert (code.stored_bytes, code.unpacked_bytes) == (1064, 9000)


@pytest.mark.parametrize(
    ("data", "target"),
    [
        (elf_object(224, 0xE3F), "gfx90a:sramecc+:xnack-"),
        (elf_object(224, 0xFE), UNKNOWN),
        (elf_object(190, 0x5A, 7), "sm_90"),
        (elf_object(190, 0x06005A02, 8), "sm_90"),
    ],
)
def test_code_object_of_its_own_is_recognised_by_its_elf_header(data: bytes, target: str) -> None:
    assert scan(data) == {target: len(data)}


def test_offload_binary_is_recognised_and_called_unknown() -> None:
    assert scan(b"\x10\xff\x10\xad" + bytes(200)) == {UNKNOWN: 204}


@pytest.mark.parametrize(
    "data", [b"", b"x", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(60), elf_object(62, 0)]
)
def test_file_without_gpu_code_gives_an_empty_scan(data: bytes) -> None:
    assert scan(data) == {}


def patched(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


LIBRARY = make_library(Spec(bundles(["gfx906"]))).data
SHOFF = struct.unpack_from("<Q", LIBRARY, 40)[0]
HUGE = (1 << 63).to_bytes(8, "little")


@pytest.mark.parametrize(
    "data",
    [
        LIBRARY[:63] + b"",
        LIBRARY[:-1],
        LIBRARY[: SHOFF + 10],
        patched(LIBRARY, 40, HUGE),
        patched(LIBRARY, 32, HUGE),
        patched(LIBRARY, 20, b"\7"),
        patched(LIBRARY, 54, b"\1\0"),
        patched(LIBRARY, 58, b"\1\0"),
        patched(LIBRARY, 56, b"\xff\xff"),
        patched(LIBRARY, 60, b"\0\0"),
        patched(LIBRARY, 62, b"\xff\xff"),
        patched(LIBRARY, 62, b"\xfe\0"),
        patched(LIBRARY, SHOFF + 64 * 3 + 24, HUGE),
        patched(LIBRARY, SHOFF + 64, b"\xff\xff\xff\x7f"),
    ],
)
def test_damaged_elf_is_reported(data: bytes) -> None:
    if len(data) < 64:
        assert scan(data) == {}
        return
    with pytest.raises(GpuCodeError):
        scan(data)


def test_section_name_that_is_there_twice_is_ambiguous() -> None:
    twice = patched(LIBRARY, SHOFF + 64 * 5, struct.pack("<I", 0))
    elf = read_elf(Source.of_bytes(twice))
    with pytest.raises(BadElf, match="sections named"):
        elf.section("")


@pytest.mark.parametrize(
    "data",
    [
        nv_fatbin([(2, 90, 1000)])[:-1],
        patched(nv_fatbin([(2, 90, 1000)]), 4, b"\2"),
        patched(nv_fatbin([(2, 90, 1000)]), 6, b"\1"),
        patched(nv_fatbin([(2, 90, 1000)]), 16 + 4, bytes(4)),
        patched(nv_fatbin([(2, 90, 1000)]), 16 + 8, HUGE),
        nv_fatbin([(2, 90, 1000)]) + b"junk" * 10,
    ],
)
def test_damaged_cuda_fat_binary_is_reported(data: bytes) -> None:
    with pytest.raises(GpuCodeError):
        scan(data)


def test_section_of_gpu_code_that_begins_with_something_else_is_reported() -> None:
    with pytest.raises(BadBundle, match="begins with something unknown"):
        scan(make_library(Spec([b"a new format" * 500])).data)


RAW = raw_bundle({"gfx906": b"c" * 5000})
PACKED = pack([RAW], len(RAW), version=2, method=Method.ZSTD)


def offload_binary(n_bytes: int) -> bytes:
    return struct.pack("<4sIQ", b"\x10\xff\x10\xad", 1, n_bytes).ljust(n_bytes, b"o")


def test_offload_binary_in_a_library_is_unknown_code() -> None:
    assert scan(make_library(Spec([offload_binary(5000)])).data) == {UNKNOWN: 5000}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (nv_fatbin([(2, 80, 5000), (1, 80, 400), (8, 75, 600)]),
         {"sm_80": 5064, "compute_80": 464, "lto_75": 664}),
        (raw_bundle({"gfx906": b"c" * 5000}), {"gfx906": 5000}),
        (PACKED, None),
        (elf_object(224, 0x3F)[:40] + struct.pack("<Q", 900) + elf_object(224, 0x3F)[48:58]
         + struct.pack("<HHH", 64, 1, 0) + b"c" * 900, {"gfx90a": 964}),
        (offload_binary(700), {UNKNOWN: 700}),
    ],
    ids=["cuda", "bundle", "compressed", "object", "offload"],
)  # fmt: skip
@pytest.mark.parametrize("section", [".rodata.more", ".ldata", ".cask_resource"])
def test_code_is_found_in_a_section_of_any_name(
    code: bytes, expected: dict[str, int] | None, section: str
) -> None:
    """cuFFT keeps 269 MB in `.data`, cublasLt 78 in `.cask_resource`: an image was said to have no code."""
    found = scan(make_library(Spec([code], section=section)).data)
    assert found == expected or (expected is None and found == {"gfx906": len(code) - 24})


@pytest.mark.parametrize(
    "text",
    [
        b"\x50\xed\x55\xba" + b"\x02\0\x10\0" * 20,
        b"\x50\xed\x55\xba is what a fat binary begins with",
        b"__CLANG_OFFLOAD_BUNDLE__ is a magic that every runtime holds as a text",
        b"CCOB\2\0\1\0 is followed by lengths and by zstd's magic",
        b"\x10\xff\x10\xad" + b"\xff" * 90,
        b"\x7fELF\2\1\1" + bytes(11) + b"\xe0\0" + b"\xff" * 80,
    ],
)
def test_magic_alone_is_no_code(text: bytes) -> None:
    assert scan(make_library(Spec([text * 3], section=".rodata.more")).data) == {}


def test_a_file_of_nothing_but_magics_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read to be judged: a gigabyte of them would take minutes."""
    data = make_library(Spec([b"\x50\xed\x55\xba\2\0\0\0" * 100], section=".rodata.more")).data
    for most, fits in ((100, True), (99, False)):
        monkeypatch.setattr("buildtool.gpucode.scan.MOST_LOOKALIKES", most)
        if fits:
            assert scan(data) == {}
        else:
            with pytest.raises(BadBundle, match="look like GPU code and aren't"):
                scan(data)


@pytest.mark.thorough
def test_sections_that_share_bytes_are_counted_once() -> None:
    data = make_library(Spec(bundles(["gfx906"]))).data
    table, count = int.from_bytes(data[40:48], "little"), int.from_bytes(data[60:62], "little")
    rows = [data[table + 64 * n :][:64] for n in range(count)]
    largest = max(rows, key=lambda row: int.from_bytes(row[32:40], "little"))
    many = count + 20_000
    hostile = data[:60] + many.to_bytes(2, "little") + data[62:table] + b"".join([*rows, *[largest] * 20_000])
    assert scan_file(Source.of_bytes(hostile)) == scan_file(Source.of_bytes(data))


def tiny_bundle(method: Method) -> bytes:
    """Of version 1, which doesn't say where it ends."""
    raw = raw_bundle({"gfx906": b""})
    return pack([raw], len(raw), version=1, method=method)


@pytest.mark.thorough
@pytest.mark.parametrize("n_bytes", [1 << 16, 1 << 18])
@pytest.mark.parametrize(
    "one", [tiny_bundle(Method.ZLIB), tiny_bundle(Method.ZSTD), nv_fatbin([])], ids=["zlib", "zstd", "cuda"]
)
def test_very_many_tiny_containers_are_read_in_linear_time(one: bytes, n_bytes: int) -> None:
    """What follows a container isn't read with it: 2 MB of tiny ones took a minute."""
    data = one * (n_bytes // len(one))
    source = Source.of_bytes(data)
    read = 0

    def read_at(offset: int, length: int) -> bytes:
        nonlocal read
        read += length
        return source.read_at(offset, length)

    scan_file(Source(len(data), read_at))
    assert read < 300 * len(data)


@pytest.mark.parametrize(
    ("data", "n_codes"),
    [
        (nv_fatbin([(2, 90, 0)] * 6), 6),
        (nv_fatbin([(2, 90, 0)] * 3) * 2, 6),
        (nv_fatbin([]) * 6, 6),
        (raw_bundle({"gfx906": b"x", "gfx1100": b"y"}) * 2, 4),
    ],
    ids=["one fat binary", "two", "empty ones", "bundles"],
)
def test_more_code_objects_than_any_file_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, data: bytes, n_codes: int
) -> None:
    """Each takes memory, and 4 GB of headers alone unpack from 40 MB of a layer."""
    for most, fits in ((n_codes, True), (n_codes - 1, False)):
        for module in (bundle, nvfatbin):
            monkeypatch.setattr(module, "MOST_CODES", most)
        if fits:
            scan(data)
        else:
            with pytest.raises(BadBundle, match="pieces of GPU code in a row"):
                scan(data)
