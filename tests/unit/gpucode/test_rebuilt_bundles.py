"""Bundles rebuilt from pieces: payloads in their order, on pages of memory, across chunks, never grown."""

import random
import struct
from collections.abc import Sequence

import pytest

from buildtool.gpucode import bundle
from buildtool.gpucode.bundle import BUNDLE_MAGIC, PAGE_BYTES, Entry, Method, pack, parse_bundle
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.cut_bundles import Cut, cut_bundles
from buildtool.gpucode.plan import Copy, Literal, Zeros, chunks_of, total_bytes
from buildtool.gpucode.scan import iter_bundles, scan_file
from buildtool.gpucode.source import CHUNK_BYTES, PruneRefused, Source, TargetMissing
from buildtool.gpucode.target import parse_targets
from gpucode.cutting import pruned
from gpucode.maker import DEVICE, HOST_ID, code, raw_bundle

GFX906 = parse_targets("gfx906")


def laid_bundle(rows: Sequence[tuple[str, int, bytes]]) -> bytes:
    """A raw bundle with its entries in the order given and each payload at the offset given."""
    head = BUNDLE_MAGIC + struct.pack("<Q", len(rows))
    head += b"".join(struct.pack("<QQQ", at, len(data), len(name)) + name.encode() for name, at, data in rows)
    out = bytearray(max([len(head), *(at + len(data) for _, at, data in rows)]))
    out[: len(head)] = head
    for _, at, data in rows:
        out[at : at + len(data)] = data
    return bytes(out)


def cut(
    data: bytes, targets: str, *, address: int = 0, strict: bool = True, compress: int | None = None
) -> Cut:
    return cut_bundles(
        Source.of_bytes(data), 0, len(data), address=address, targets=parse_targets(targets), strict=strict,
        compress=compress,
    )  # fmt: skip


def written(data: bytes, found: Cut) -> bytes:
    source = Source.of_bytes(data)
    return b"".join(chunk for piece in found.pieces for chunk in chunks_of(piece, source))


def payloads(data: bytes) -> dict[str, bytes]:
    """Every code object of a file that is one bundle, by its entry's id."""
    (place,) = iter_bundles(Source.of_bytes(data), 0, len(data))
    raw = data if place.header is None else b"".join(bundle.Unpacking(Source.of_bytes(data), 0, len(data)))
    return {entry.id: raw[entry.offset : entry.offset + entry.n_bytes] for entry in place.bundle.entries}


NOISE = random.Random(37).randbytes(3 * CHUNK_BYTES)
LARGE = {
    "gfx803": NOISE[: CHUNK_BYTES + 5],
    "gfx906:xnack-": NOISE[100 : CHUNK_BYTES // 2],
    "gfx1100": NOISE[50 : CHUNK_BYTES + 4096],
    "gfx906:xnack+": NOISE[7 : 2 * CHUNK_BYTES + 77],
    "gfx90a": NOISE[:9000],
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", list(Method))
def test_code_larger_than_a_chunk_comes_out_of_a_compressed_bundle_whole(method: Method) -> None:
    raw = raw_bundle(LARGE)
    out = pruned(pack([raw], len(raw), version=3, method=method), "gfx906")
    kept = payloads(out)
    assert {name: data for name, data in kept.items() if data} == {
        DEVICE + name: data for name, data in LARGE.items() if name.startswith("gfx906")
    }


@pytest.mark.thorough
def test_compressed_bundle_whose_table_and_payloads_differ_in_order_is_cut_right() -> None:
    first, second = NOISE[: CHUNK_BYTES + 9], NOISE[9 : CHUNK_BYTES + 70_000]
    rows = [
        (HOST_ID, PAGE_BYTES, b""),
        (DEVICE + "gfx906:xnack+", 3 << 21, second),
        (DEVICE + "gfx906:xnack-", PAGE_BYTES, first),
        (DEVICE + "gfx803", 2 << 21, NOISE[:70_000]),
    ]
    raw = laid_bundle(rows)
    kept = payloads(pruned(pack([raw], len(raw), version=3, method=Method.ZSTD), "gfx906"))
    assert kept == {HOST_ID: b"", DEVICE + "gfx906:xnack+": second, DEVICE + "gfx906:xnack-": first}


def test_kept_payloads_stay_in_the_order_in_which_they_are_behind_the_host_entry() -> None:
    rows = [
        (DEVICE + "gfx906:xnack+", 5 * PAGE_BYTES, b"b" * 5000),
        (DEVICE + "gfx906:xnack-", 3 * PAGE_BYTES, b"a" * 5000),
        (DEVICE + "gfx803", PAGE_BYTES, b"c" * 5000),
        (HOST_ID, 9 * PAGE_BYTES, b""),
    ]
    out = pruned(laid_bundle(rows), "gfx906")
    kept = parse_bundle(out, len(out)).entries
    assert [entry.id for entry in kept] == [HOST_ID, DEVICE + "gfx906:xnack-", DEVICE + "gfx906:xnack+"]
    assert [entry.offset for entry in kept] == sorted(entry.offset for entry in kept)


@pytest.mark.parametrize("address", [0, 0x7000, 0x1234, 0x7FF8])
def test_bundles_start_on_pages_of_memory_wherever_their_section_is_loaded(address: int) -> None:
    lead = bytes(-address % PAGE_BYTES)
    one, other = (raw_bundle({"gfx906": code("gfx906", i), "gfx803": code("gfx803", i)}) for i in (1, 2))
    gap = bytes(-len(one) % PAGE_BYTES)
    data = lead + one + gap + other
    found = cut(data, "gfx906", address=address)
    assert list(found.moved) == [len(lead), len(lead) + len(one) + len(gap)]
    assert [(address + new) % PAGE_BYTES for new in found.moved.values()] == [0, 0]
    out = written(data, found)
    assert found.n_bytes == len(out) == total_bytes(found.pieces)
    assert [out[new : new + len(BUNDLE_MAGIC)] for new in found.moved.values()] == [
        BUNDLE_MAGIC,
        BUNDLE_MAGIC,
    ]
    assert list(found.moved.values())[1] < found.n_bytes - 9000
    assert all(new <= old for old, new in found.moved.items())


def test_part_of_a_file_is_cut_at_its_own_place() -> None:
    one = raw_bundle({"gfx906": code("gfx906", 1), "gfx803": code("gfx803", 1)})
    data = b"in front".ljust(PAGE_BYTES, b".") + one + b"behind"
    found = cut_bundles(
        Source.of_bytes(data), PAGE_BYTES, PAGE_BYTES + len(one), address=0x5000, targets=GFX906, strict=True,
        compress=None,
    )  # fmt: skip
    assert found.moved == {0: 0}
    assert payloads(written(data, found))[DEVICE + "gfx906"] == code("gfx906", 1)


def test_run_that_loses_nothing_counts_as_unchanged_and_has_no_empty_pieces() -> None:
    data = raw_bundle({"gfx906": code("gfx906")})
    found = cut(data, "gfx906")
    assert not found.changed
    assert found.pieces == (Copy(0, len(data)),)
    assert not Cut().changed
    both = raw_bundle({"gfx906": code("gfx906"), "gfx803": code("gfx803")})
    changed = cut(both, "gfx906")
    assert changed.changed
    assert all(piece.n_bytes for piece in changed.pieces)


def test_one_cut_bundle_among_whole_ones_makes_the_run_changed() -> None:
    whole = raw_bundle({"gfx906": code("gfx906")})
    both = raw_bundle({"gfx906": code("gfx906"), "gfx803": code("gfx803")})
    for data in (
        whole + bytes(-len(whole) % PAGE_BYTES) + both,
        both + bytes(-len(both) % PAGE_BYTES) + whole,
    ):
        found = cut(data, "gfx906")
        assert found.changed
        assert found.removed_bytes == {"gfx803": 9000}
        assert found.kept_bytes == {"gfx906": 18_000}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_bundle_that_nothing_is_taken_from_is_compressed_when_asked_for(version: int) -> None:
    raw = raw_bundle({"gfx906": b"code " * 3000})
    found = cut(raw, "gfx906", compress=version)
    assert found.changed
    (piece,) = found.pieces
    assert isinstance(piece, Literal)
    assert piece.n_bytes < len(raw)
    assert payloads(piece.data) == {HOST_ID: b"", DEVICE + "gfx906": b"code " * 3000}


def test_compressed_bundle_that_nothing_is_taken_from_is_copied_as_it_is() -> None:
    raw = raw_bundle({"gfx906": b"code " * 3000})
    packed = pack([raw], len(raw), version=2, method=Method.ZLIB)
    for compress in (None, 1, 2, 3):
        found = cut(packed, "gfx906", compress=compress)
        assert not found.changed
        assert found.pieces == (Copy(0, len(packed)),)


def test_compressed_bundle_keeps_version_and_method_when_another_is_asked_for_raw_ones() -> None:
    raw = raw_bundle({"gfx906": b"code " * 3000, "gfx803": b"more " * 3000})
    packed = pack([raw], len(raw), version=2, method=Method.ZLIB)
    out = written(packed, cut(packed, "gfx906", compress=3))
    header = bundle.Unpacking(Source.of_bytes(out), 0, len(out)).header
    assert (header.version, header.method) == (2, Method.ZLIB)


def test_file_that_a_cut_would_make_longer_stays_as_it_is() -> None:
    tight = laid_bundle(
        [(HOST_ID, 512, b""), (DEVICE + "gfx906", 512, b"a" * 100), (DEVICE + "gfx803", 612, b"b" * 100)]
    )
    plan = plan_prune(Source.of_bytes(tight), GFX906)
    assert not plan.changed
    assert plan.pieces == (Copy(0, len(tight)),)
    assert plan.bytes_after == len(tight)
    assert plan.kept_bytes == {"gfx906": 100, "gfx803": 100}
    assert plan.removed_bytes == {}


def test_file_that_a_cut_would_leave_as_long_stays_as_it_is() -> None:
    even = laid_bundle(
        [(DEVICE + "gfx906", PAGE_BYTES - 900, b"a" * 900), (DEVICE + "gfx803", 200, b"b" * 9)]
    )
    longer = even + bytes(PAGE_BYTES + 900 - len(even))
    assert len(written(longer, cut(longer, "gfx906"))) == len(longer)
    assert not plan_prune(Source.of_bytes(longer), GFX906).changed


def test_file_that_gets_a_byte_shorter_is_cut() -> None:
    even = laid_bundle(
        [(DEVICE + "gfx906", PAGE_BYTES - 900, b"a" * 900), (DEVICE + "gfx803", 200, b"b" * 9)]
    )
    longer = even + bytes(PAGE_BYTES + 901 - len(even))
    plan = plan_prune(Source.of_bytes(longer), GFX906)
    assert plan.changed
    assert plan.bytes_before - plan.bytes_after == 1


def test_bundle_that_would_lose_all_its_code_is_refused_also_beside_empty_entries() -> None:
    good = raw_bundle({"gfx906": code("gfx906"), "gfx803": code("gfx803")})
    good += bytes(-len(good) % PAGE_BYTES)
    foreign = raw_bundle({"gfx803": code("gfx803"), "gfx906": b"", "gfx1100": code("gfx1100")})
    with pytest.raises(PruneRefused, match="bundle 1 would be left without code for gfx906"):
        cut(good + foreign, "gfx906")
    assert cut(good + foreign, "gfx906", strict=False).removed_bytes == {"gfx803": 9000}


def test_bundle_with_code_for_one_of_two_cards_is_enough_for_it() -> None:
    good = raw_bundle({"gfx906": code("gfx906"), "gfx803": code("gfx803")})
    good += bytes(-len(good) % PAGE_BYTES)
    found = cut(good + raw_bundle({"gfx803": code("gfx803"), "gfx906": code("gfx906")}), "gfx906,gfx803")
    assert not found.changed


def test_empty_entry_for_a_card_is_no_code_for_it() -> None:
    with pytest.raises(TargetMissing, match="no code for gfx906, but code for gfx803"):
        cut(raw_bundle({"gfx906": b"", "gfx803": code("gfx803")}), "gfx906")


def test_host_code_is_refused_even_beside_an_empty_host_entry() -> None:
    raw = raw_bundle(
        {HOST_ID: b"", "host-other": b"machine code", "gfx906": code("x"), "gfx803": code("y")}, host=False
    )
    with pytest.raises(PruneRefused, match="host code"):
        cut(raw, "gfx906")


def test_bundle_too_large_for_the_version_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(*_: object, **__: object) -> bytes:
        raise ValueError("a bundle of 5000000000 bytes doesn't fit CCOB version 2")

    monkeypatch.setattr(bundle, "pack", overflow)
    with pytest.raises(PruneRefused, match="doesn't fit CCOB version 2") as caught:
        cut(raw_bundle({"gfx906": code("gfx906")}), "gfx906", compress=2)
    assert "version 3" in str(caught.value.hint)


def test_empty_entries_are_kept_and_take_no_room() -> None:
    raw = raw_bundle({"gfx906": code("gfx906"), "gfx906:xnack+": b"", "gfx803": code("gfx803")})
    for data in (raw, pack([raw], len(raw), version=3, method=Method.ZSTD)):
        out = written(data, cut(data, "gfx906"))
        assert payloads(out) == {
            HOST_ID: b"",
            DEVICE + "gfx906": code("gfx906"),
            DEVICE + "gfx906:xnack+": b"",
        }
    assert len(written(raw, cut(raw, "gfx906"))) == PAGE_BYTES + 9000


def test_padding_is_given_in_chunks_and_sums_up() -> None:
    chunks = list(chunks_of(Zeros(2 * CHUNK_BYTES + 3), Source.of_bytes(b"")))
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 3]
    assert not any(map(any, chunks))


def test_scan_of_a_cut_file_finds_the_kept_code_alone() -> None:
    raw = raw_bundle(LARGE)
    out = pruned(raw, "gfx90a")
    found = scan_file(Source.of_bytes(out))
    assert found == {"gfx90a": 9000}
    assert Entry(DEVICE + "gfx90a", 0, 1).target == parse_targets("gfx90a")[0]
