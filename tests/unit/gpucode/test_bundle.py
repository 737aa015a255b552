"""Bundles, raw and compressed: read, checked, written; what contradicts itself is reported with its place."""

import struct
from collections.abc import Iterator

import pytest

from buildtool.gpucode import bundle
from buildtool.gpucode.bundle import (
    BUNDLE_MAGIC,
    Bundle,
    Entry,
    Method,
    Unpacking,
    lay_out_bundle,
    pack,
    parse_bundle,
)
from buildtool.gpucode.nvfatbin import NvEntry, iter_fatbins
from buildtool.gpucode.scan import iter_bundles
from buildtool.gpucode.source import BadBundle, GpuCodeError, Source
from buildtool.gpucode.target import TargetId
from gpucode.maker import DEVICE, code, nv_fatbin, raw_bundle

RAW = raw_bundle({"gfx906": code("gfx906"), "gfx90a:xnack-": code("gfx90a")})


def table(*rows: tuple[int, int, str], count: int | None = None) -> bytes:
    packed = b"".join(struct.pack("<QQQ", o, n, len(i)) + i.encode() for o, n, i in rows)
    return BUNDLE_MAGIC + struct.pack("<Q", len(rows) if count is None else count) + packed


def test_entry_table_of_a_bundle_is_read() -> None:
    found = parse_bundle(RAW, len(RAW))
    assert [entry.is_host for entry in found.entries] == [True, False, False]
    assert [str(entry.target) for entry in found.entries[1:]] == ["gfx906", "gfx90a:xnack-"]
    assert found.n_bytes == len(RAW)


@pytest.mark.parametrize(
    ("entry_id", "target"),
    [
        ("hipv4-amdgcn-amd-amdhsa--gfx9-4-generic", "gfx9-4-generic"),
        ("hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-", "gfx90a:sramecc+:xnack-"),
        ("hip-amdgcn-amd-amdhsa-gfx803", "gfx803"),
        ("hip-spirv64-amd-amdhsa--amdgcnspirv", "spirv"),
        ("openmp-amdgcn-amd-amdhsa--gfx1100", "gfx1100"),
    ],
)
def test_entry_id_gives_its_target(entry_id: str, target: str) -> None:
    assert Entry(entry_id, 0, 1).target == (
        TargetId("spirv") if target == "spirv" else TargetId.parse(target)
    )


def test_entry_id_without_a_target_is_an_error_not_a_guess() -> None:
    with pytest.raises(BadBundle, match="names no GPU target"):
        _ = Entry("hipv4-nvptx64-nvidia-cuda--sm_80", 0, 1).target


DAMAGED = {
    "no magic": b"x" * 64,
    "cut in the count": BUNDLE_MAGIC + b"\1",
    "no entries": table(),
    "far too many entries": table(count=1 << 40),
    "cut in the table": table((4096, 8, DEVICE + "gfx906"), count=2),
    "an id of 4 GiB": BUNDLE_MAGIC + struct.pack("<QQQQ", 1, 4096, 8, 1 << 32),
    "an id that is no text": BUNDLE_MAGIC + struct.pack("<QQQQ", 1, 4096, 8, 2) + b"\xff\xfe",
    "a payload past the end": table((4096, 1 << 60, DEVICE + "gfx906")),
    "a payload in the table": table((8, 64, DEVICE + "gfx906")),
    "payloads that overlap": table((4096, 64, DEVICE + "gfx906"), (4100, 64, DEVICE + "gfx908")),
    "the same id twice": table((4096, 64, DEVICE + "gfx906"), (8192, 64, DEVICE + "gfx906")),
}


@pytest.mark.parametrize("head", DAMAGED.values(), ids=list(DAMAGED))
def test_damaged_entry_table_is_reported(head: bytes) -> None:
    with pytest.raises(BadBundle):
        parse_bundle(head, 1 << 20)


def claiming(version: int, n_bytes: int) -> bytes:
    """A compressed bundle whose header promises so much; it holds the first bytes alone."""
    packed = pack(iter([RAW]), len(RAW), version=version, method=Method.ZSTD)
    at = {1: 8, 2: 12, 3: 16}[version]
    field = n_bytes.to_bytes(8 if version == 3 else 4, "little")
    return packed[:at] + field + packed[at + len(field) :]


@pytest.mark.parametrize(("version", "n_bytes"), [(1, 2 << 30), (2, 2 << 30), (3, 2 << 30), (3, 1 << 60)])
def test_a_decompression_bomb_in_a_bundle_is_refused_before_it_is_unpacked(
    version: int, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = claiming(version, n_bytes)
    monkeypatch.setattr(bundle, "_Pieces", None)
    with pytest.raises(BadBundle, match="decompression bomb"):
        list(iter_bundles(Source.of_bytes(data), 0, len(data)))


def test_bundles_that_are_a_decompression_bomb_only_together_are_refused() -> None:
    data = claiming(3, 600 << 20)
    assert len(list(iter_bundles(Source.of_bytes(data), 0, len(data)))) == 1
    with pytest.raises(BadBundle, match="decompression bomb"):
        list(iter_bundles(Source.of_bytes(data * 2), 0, 2 * len(data)))


def test_error_names_the_place_in_the_file() -> None:
    with pytest.raises(BadBundle, match="at byte 0x5000"):
        parse_bundle(b"", 0, place=0x5000)


def test_new_layout_reads_back_and_starts_payloads_on_pages() -> None:
    kept = [Entry("host-x86_64-unknown-linux-gnu-", 4096, 0), Entry(DEVICE + "gfx906", 4096, 5000)]
    head, laid = lay_out_bundle(kept)
    assert parse_bundle(head, laid.n_bytes) == laid
    assert [entry.offset for entry in laid.entries] == [4096, 4096]
    assert laid.n_bytes == 4096 + 5000


def test_run_of_bundles_may_have_only_zeros_between() -> None:
    good = bytes(4096) + RAW + bytes(10_000) + RAW + bytes(77)
    starts = [place.start for place in iter_bundles(Source.of_bytes(good), 0, len(good))]
    assert starts == [4096, 4096 + len(RAW) + 10_000]
    bad = RAW + bytes(100) + b"?" + RAW
    with pytest.raises(BadBundle, match="something unknown"):
        list(iter_bundles(Source.of_bytes(bad), 0, len(bad)))


def test_magic_inside_code_is_not_taken_for_a_bundle() -> None:
    nested = raw_bundle({"gfx906": code("x", n_bytes=4096) + RAW})
    assert len(list(iter_bundles(Source.of_bytes(nested), 0, len(nested)))) == 1


VERSIONS = [(version, method) for version in bundle.VERSIONS for method in Method]


@pytest.mark.parametrize(("version", "method"), VERSIONS)
def test_compressed_bundle_comes_back_as_it_was(version: int, method: Method) -> None:
    packed = pack(iter([RAW[:100], RAW[100:]]), len(RAW), version=version, method=method)
    data = bytes(16) + packed + bytes(500)
    unpacking = Unpacking(Source.of_bytes(data), 16, len(data))
    assert b"".join(unpacking) == RAW
    [place] = iter_bundles(Source.of_bytes(data), 16, len(data))
    assert place.stored_bytes == len(packed)
    assert unpacking.header.header_bytes == {1: 20, 2: 24, 3: 32}[version]


def test_hash_is_the_low_half_of_the_md5() -> None:
    packed = pack([b"a"], 1, version=2, method=Method.ZLIB)
    assert packed[16:24] == bytes.fromhex("0cc175b9c0f1b6a8")


@pytest.mark.parametrize(("version", "method"), VERSIONS)
def test_flipped_byte_of_a_compressed_bundle_never_gives_other_code(version: int, method: Method) -> None:
    packed = pack([RAW], len(RAW), version=version, method=method)
    for at in range(0, len(packed), max(len(packed) // 60, 1)):
        spoilt = bytearray(packed)
        spoilt[at] ^= 0x20
        try:
            got = b"".join(Unpacking(Source.of_bytes(bytes(spoilt)), 0, len(spoilt)))
        except GpuCodeError:
            continue
        assert got == RAW  # a bit that the decompressor doesn't look at


@pytest.mark.thorough
@pytest.mark.parametrize("method", list(Method))
def test_bomb_stops_at_the_size_that_the_header_promises(method: Method) -> None:
    packed = bytearray(pack([bytes(8 << 20)], 8 << 20, version=2, method=method))
    packed[12:16] = (1000).to_bytes(4, "little")
    seen = 0

    def count() -> Iterator[bytes]:
        nonlocal seen
        for chunk in Unpacking(Source.of_bytes(bytes(packed)), 0, len(packed)):
            seen += len(chunk)
            yield chunk

    with pytest.raises(BadBundle, match="more than its header says"):
        list(count())
    assert seen <= 1000


def test_compressed_bundle_that_is_cut_off_is_reported() -> None:
    packed = pack([RAW], len(RAW), version=1, method=Method.ZSTD)
    with pytest.raises(GpuCodeError):
        list(Unpacking(Source.of_bytes(packed[:-9]), 0, len(packed) - 9))


def test_unknown_version_or_method_is_reported() -> None:
    packed = pack([RAW], len(RAW), version=3, method=Method.ZSTD)
    for at, value in ((4, 4), (6, 2)):
        odd = packed[:at] + bytes([value]) + packed[at + 1 :]
        with pytest.raises(BadBundle, match="versions 1 to 3"):
            Unpacking(Source.of_bytes(odd), 0, len(odd))


def test_size_that_a_version_cannot_hold_is_an_error() -> None:
    with pytest.raises(ValueError, match="doesn't fit"):
        pack([b""], 1 << 33, version=2, method=Method.ZLIB)


def test_bundle_without_any_payload_ends_with_its_table() -> None:
    assert Bundle((Entry("host-x", 0, 0),), 60).n_bytes == 60


GFX906_ID, GFX908_ID = f"{DEVICE}gfx906", f"{DEVICE}gfx908"


def test_payloads_may_touch_the_table_each_other_and_the_end() -> None:
    start = len(table((0, 0, GFX906_ID), (0, 0, GFX908_ID)))
    head = table((start, 64, GFX906_ID), (start + 64, 36, GFX908_ID))
    assert parse_bundle(head, start + 100).n_bytes == start + 100
    for limit, odd in (
        (start + 99, head),
        (start + 100, table((start - 1, 64, GFX906_ID), (start + 64, 36, GFX908_ID))),
        (start + 100, table((start, 65, GFX906_ID), (start + 64, 36, GFX908_ID))),
    ):
        with pytest.raises(BadBundle, match=r"outside the bundle|overlap"):
            parse_bundle(odd, limit)


@pytest.mark.parametrize(("count", "believed"), [(1, True), (1024, True), (1025, False)])
def test_a_table_of_1024_entries_is_believed_and_a_longer_one_not(count: int, believed: bool) -> None:
    head = table(*((0, 0, f"{DEVICE}{index}") for index in range(count)))
    if believed:
        assert len(parse_bundle(head, len(head)).entries) == count
    else:
        with pytest.raises(BadBundle, match="1025 entries"):
            parse_bundle(head, len(head))


@pytest.mark.parametrize(("length", "believed"), [(0, True), (512, True), (513, False)])
def test_an_id_of_512_characters_is_believed_and_a_longer_one_not(length: int, believed: bool) -> None:
    head = table((0, 0, "x" * length))
    if believed:
        assert parse_bundle(head, len(head)).entries == (Entry("x" * length, 0, 0),)
    else:
        with pytest.raises(BadBundle, match="impossible id") as caught:
            parse_bundle(head, len(head), place=1000)
        assert caught.value.place == 1000 + 32 + 24


def test_a_fat_binary_that_claims_bytes_behind_its_section_is_refused() -> None:
    fatbin = nv_fatbin([(2, 80, 600)])
    source = Source.of_bytes(bytes(4096) + fatbin + bytes(4096))
    [found] = iter_fatbins(source, 4096, 4096 + len(fatbin))
    assert (found.start, found.n_bytes, found.header_bytes) == (4096, len(fatbin), 16)
    assert found.entries == (NvEntry(2, 80, 4096 + 16, 64, 64 + 600, 600),)
    with pytest.raises(BadBundle, match=f"claims {len(fatbin)} bytes, {len(fatbin) - 1} are there"):
        list(iter_fatbins(source, 4096, 4096 + len(fatbin) - 1))


def test_a_bundle_that_claims_bytes_behind_its_section_is_refused() -> None:
    source = Source.of_bytes(bytes(4096) + RAW + bytes(4096))
    [found] = iter_bundles(source, 4096, 4096 + len(RAW))
    assert (found.start, found.stored_bytes, found.header) == (4096, len(RAW), None)
    with pytest.raises(BadBundle, match="outside the bundle") as caught:
        list(iter_bundles(source, 4096, 4096 + len(RAW) - 1))
    assert caught.value.place == 4096


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("more", [-1, 1])
def test_a_size_that_is_not_what_unpacks_is_reported_though_the_checksum_is_right(
    version: int, more: int
) -> None:
    packed = claiming(version, len(RAW) + more)
    with pytest.raises(BadBundle, match=r"header says|more than its header says"):
        list(Unpacking(Source.of_bytes(packed), 0, len(packed)))


def test_a_table_that_is_cut_off_is_reported_at_its_place() -> None:
    with pytest.raises(BadBundle, match="cut off") as caught:
        parse_bundle(table((4096, 8, GFX906_ID), count=2), 1 << 20, place=1000)
    assert caught.value.place == 1000 + 32 + 24 + len(GFX906_ID)


@pytest.mark.parametrize(("n_bytes", "believed"), [(63, False), (64, True), (65536, True), (65537, False)])
def test_a_header_of_cuda_code_is_believed_up_to_64_kib(n_bytes: int, believed: bool) -> None:
    entry = struct.pack("<HHIQ12xI8xQ8xQ", 2, 0x101, n_bytes, 8, 80, 0, 0).ljust(n_bytes + 8, b"\0")
    source = Source.of_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, n_bytes + 8) + entry[: n_bytes + 8])
    if believed:
        assert [one.architecture for one in next(iter_fatbins(source, 0, source.size)).entries] == [80]
    else:
        with pytest.raises(GpuCodeError):
            list(iter_fatbins(source, 0, source.size))
