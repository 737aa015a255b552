"""Streams are recognised, hashed and unpacked: every form, every cut, every limit."""

import gzip
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from image_maker import chunks, file, gzip_members, header, plain, zstandard, zstd_frames

from buildtool.core import compression
from buildtool.image import streams
from buildtool.image.errors import LIMITS, ImageError, LimitExceeded, MalformedStream, Truncated
from buildtool.image.streams import LAYER_FORMS, PIECE, Allowance, Form, Meter, decompressed, peek, sniff

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

V7 = header(b"old", magic=bytes(8))
CONTENT = bytes(range(256)) * 12


@pytest.mark.parametrize(
    ("head", "form"),
    [
        (b"", Form.EMPTY),
        (b"\x1f\x8b", Form.GZIP),
        (b"\x1f\x8c", Form.OTHER),
        (b"\x28\xb5\x2f\xfd", Form.ZSTD),
        (b"\x28\xb5\x2f\xfe", Form.OTHER),
        *((bytes([first]) + b"\x2a\x4d\x18", Form.ZSTD) for first in (0x50, 0x5F)),
        (b"\x4f\x2a\x4d\x18", Form.OTHER),
        (b"\x50\x2a\x4d\x19", Form.OTHER),
        (b"hsqs", Form.SQUASHFS),
        (b"\xfd7zXZ\0", Form.XZ),
        (b"BZh9", Form.BZIP2),
        (b"BZx", Form.OTHER),
        (file("a"), Form.TAR),
        (V7, Form.TAR),
        (V7[:511], Form.OTHER),
        (b"x" + V7[1:], Form.OTHER),
        (b"x" * 257 + b"ustar", Form.TAR),
        (b"x" * 256 + b"ustar", Form.OTHER),
        (bytes(512), Form.TAR),
        (bytes(511), Form.OTHER),
        (bytes(511) + b"x", Form.OTHER),
        (b"{}", Form.JSON),
        (b" \n\t\r[", Form.JSON),
        (b"  \n ", Form.JSON),
        (b'"text"', Form.OTHER),
    ],
)
def test_a_blob_is_recognised_by_its_first_bytes(head: bytes, form: Form) -> None:
    assert sniff(head) is form
    assert sniff(head + b"\0" * (len(head) == 512)) is form


def test_a_layer_may_be_packed_in_two_ways_plain_or_empty() -> None:
    assert {form.value for form in LAYER_FORMS} == {"gzip", "zstd", "tar", "empty"}


def test_bytes_are_counted_and_hashed_before_they_are_handed_on() -> None:
    meter = Meter()
    assert meter.digest == f"sha256:{hashlib.sha256().hexdigest()}"
    passed = b""
    for piece in meter.through(chunks(CONTENT, 100)):
        passed += piece
        assert meter.n_bytes == len(passed)
        assert meter.digest == f"sha256:{hashlib.sha256(passed).hexdigest()}"
    assert passed == CONTENT


@pytest.mark.parametrize("size", [1, 99, 100, 101, 5000])
def test_a_stream_whose_beginning_was_looked_at_is_whole(size: int) -> None:
    head, whole = peek(chunks(CONTENT, size), 100)
    assert head == CONTENT[:100]
    assert b"".join(whole) == CONTENT


def test_no_more_of_a_stream_is_taken_than_its_beginning_needs() -> None:
    source = chunks(CONTENT, 100)
    head, _ = peek(source, 200)
    assert head == CONTENT[:200]
    assert next(source) == CONTENT[200:300]
    assert len(peek(chunks(CONTENT, 100))[0]) == 512


def test_an_empty_stream_has_no_beginning_and_no_pieces() -> None:
    head, whole = peek(iter(()))
    assert (head, list(whole)) == (b"", [])


# Unpacking

PACKERS = {
    "gzip": (Form.GZIP, lambda content: gzip.compress(content, 1, mtime=0)),
    "gzip members": (Form.GZIP, gzip_members),
    "gzip with zeros behind": (Form.GZIP, lambda content: gzip_members(content) + bytes(700)),
    "zeros between": (
        Form.GZIP,
        lambda content: b"".join(gzip.compress(content[n::2]) + bytes(9) for n in (0, 1)),
    ),
    "zstd": (Form.ZSTD, zstandard),
    "zstd frames": (Form.ZSTD, zstd_frames),
    "plain": (Form.TAR, plain),
}


def unpacked(packed: bytes, form: Form, chunk: int = 1 << 16) -> bytes:
    return b"".join(decompressed(chunks(packed, chunk), form, place="p"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 16])
def test_packed_bytes_are_the_same_however_their_stream_is_cut(name: str, chunk: int) -> None:
    form, pack = PACKERS[name]
    expected = CONTENT[::2] + CONTENT[1::2] if name == "zeros between" else CONTENT
    assert unpacked(pack(CONTENT), form, chunk) == expected


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_a_stream_that_ends_inside_its_packed_data_is_cut(name: str) -> None:
    form, pack = PACKERS[name]
    packed = pack(CONTENT[:30])
    for length in range(1, len(packed)):
        with pytest.raises(Truncated, match=r"^p: ") as told:
            unpacked(packed[:length], form)
        assert name in str(told.value)
        with pytest.raises(Truncated):
            unpacked(packed + packed[:length], form, 9)


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_damaged_data_is_named_with_its_place(name: str) -> None:
    form, pack = PACKERS[name]
    packed = bytearray(pack(CONTENT[:300]))
    packed[len(packed) // 2] ^= 0xFF
    if form is Form.ZSTD:
        packed[4] ^= 0xFF
    with pytest.raises(ImageError, match=r"^p: "):
        unpacked(bytes(packed), form)
    with pytest.raises(MalformedStream, match=f"^p: {name} data"):
        unpacked(pack(CONTENT) + b"no such thing", form)
    with pytest.raises(ImageError):
        unpacked(pack(CONTENT) + b"~", form)


@pytest.mark.parametrize("name", ["gzip", "zstd"])
def test_pieces_are_bounded_whatever_a_chunk_unpacks_to(name: str) -> None:
    form, pack = PACKERS[name]
    n_bytes = 3 * PIECE + 5
    sizes = [len(piece) for piece in decompressed(iter([pack(bytes(n_bytes))]), form, place="p")]
    assert sum(sizes) == n_bytes
    assert all(sizes)
    assert max(sizes) == PIECE == 262_144


def test_an_empty_stream_is_no_gzip_and_no_frame_of_zstd() -> None:
    assert unpacked(b"", Form.ZSTD) == unpacked(b"", Form.TAR) == b""
    with pytest.raises(Truncated):
        unpacked(b"", Form.GZIP)


def test_every_frame_whose_window_is_too_large_is_refused() -> None:
    small, large = _with_window(17), _with_window(18)
    for window_log, packed in ((18, large + large), (17, small + small)):
        limits = replace(LIMITS, window_log=window_log)
        pieces = decompressed(iter([packed]), Form.ZSTD, place="p", limits=limits)
        assert b"".join(pieces) == CONTENT * 2
    for packed in (large, small + large):
        with pytest.raises(MalformedStream, match=r"^p: zstd data"):
            list(decompressed(iter([packed]), Form.ZSTD, place="p", limits=limits))


def _with_window(log: int) -> bytes:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    return compressor.compress(CONTENT) + compressor.flush()


# How much an archive may unpack to

SMALL = replace(LIMITS, unpacked_bytes=1000, unpacked_free_bytes=100, unpacked_ratio=3)


@pytest.mark.parametrize(("stored", "allowed"), [(0, 100), (33, 100), (34, 102), (200, 600), (5000, 1000)])
def test_an_archive_may_unpack_to_a_free_amount_or_its_ratio_up_to_a_bound(stored: int, allowed: int) -> None:
    Allowance(SMALL, stored).take(allowed, "p")
    parts = Allowance(SMALL, stored)
    parts.take(allowed - 1, "p")
    parts.take(1, "p")
    with pytest.raises(LimitExceeded, match=r"^p: ") as told:
        parts.take(1, "p")
    figures = (
        "more than 1,000 bytes" if allowed == 1000 else f"^p: {stored:,} bytes .* more than {allowed:,}:"
    )
    assert told.match(figures)
    assert "--max-unpacked" in told.value.hint


def test_bytes_of_an_archive_count_as_they_come() -> None:
    allowance = Allowance(SMALL)
    source: Iterator[bytes] = allowance.counted(iter([b"x" * 40, b"x" * 60]))
    next(source)
    allowance.take(120, "p")
    with pytest.raises(LimitExceeded):
        allowance.take(1, "p")
    assert b"".join(source) == b"x" * 60
    allowance.take(179, "p")


def test_what_a_stream_unpacks_to_counts_for_its_archive_but_plain_bytes_do_not() -> None:
    packed = gzip.compress(bytes(60))
    for form, content, n_bytes in ((Form.GZIP, packed, 60), (Form.TAR, bytes(60), 0)):
        allowance = Allowance(SMALL)
        assert len(b"".join(decompressed(iter([content]), form, place="p", allowance=allowance))) == 60
        allowance.take(100 - n_bytes, "p")
        with pytest.raises(LimitExceeded):
            allowance.take(1, "p")


def test_a_stream_without_an_archive_counts_its_own_bytes() -> None:
    packed = gzip.compress(bytes(600))
    limits = replace(SMALL, unpacked_free_bytes=0, unpacked_ratio=1)
    with pytest.raises(LimitExceeded, match=f"^p: {len(packed)} bytes"):
        list(decompressed(iter([packed]), Form.GZIP, place="p", limits=limits))
    assert decompressed(iter([packed]), Form.GZIP, place="p", limits=replace(limits, unpacked_ratio=100))


class Counting:
    """A decompressor that adds up how many bytes it is given: it copies all that follow its stream's end."""

    given = 0

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def decompress(self, data: bytes, most: int) -> bytes:
        Counting.given += len(data)
        return self._inner.decompress(data, most)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("form", "unit"),
    [(Form.GZIP, gzip.compress(b"", mtime=0)), (Form.ZSTD, b"\x50\x2a\x4d\x18" + bytes(4))],
    ids=["gzip", "zstd"],
)
@pytest.mark.parametrize("n_bytes", [1 << 16, 1 << 17])
def test_a_stream_of_very_many_members_is_read_in_linear_time(
    monkeypatch: pytest.MonkeyPatch, form: Form, unit: bytes, n_bytes: int
) -> None:
    """A megabyte of empty gzip members, or of skippable zstd frames, took many seconds in one chunk."""
    gunzip, unzstd = compression.zlib.decompressobj, compression.zstd.ZstdDecompressor
    monkeypatch.setattr(compression.zlib, "decompressobj", lambda wbits: Counting(gunzip(wbits=wbits)))
    monkeypatch.setattr(
        compression.zstd, "ZstdDecompressor", lambda options: Counting(unzstd(options=options))
    )
    Counting.given = 0
    data = unit * (n_bytes // len(unit))
    assert b"".join(streams.decompressed(iter([data]), form, place="x")) == b""
    assert Counting.given < 600 * len(data)
