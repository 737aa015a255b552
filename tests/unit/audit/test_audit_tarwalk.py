"""The header walker against hand-made headers and against the standard library's reader."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_maker import chunks, file, folder, gnu_long, hardlink, header, padded, pax, symlink, tar

from buildtool.audit.faults import LimitExceeded, MalformedTar, Truncated
from buildtool.audit.tarwalk import DEVICE, DIRECTORY, FILE, HARDLINK, SYMLINK, Member, TarReader


def walk(content: bytes, chunk: int = 1 << 16) -> list[Member]:
    return list(TarReader(chunks(content, chunk), place="test.tar"))


def test_all_kinds_are_told_apart() -> None:
    content = tar(
        folder("d"), file("d/f", b"abc"), symlink("s", "d/f"), hardlink("h", "d/f"), header(b"p", flag=b"6")
    )
    assert walk(content) == [
        (b"d/", DIRECTORY, 0, b""),
        (b"d/f", FILE, 3, b""),
        (b"s", SYMLINK, 0, b"d/f"),
        (b"h", HARDLINK, 0, b"d/f"),
        (b"p", DEVICE, 0, b""),
    ]


@pytest.mark.parametrize("chunk", [1, 7, 511, 512, 513, 4096])
def test_content_is_whole_however_the_stream_is_cut(chunk: int) -> None:
    contents = [b"", b"x", b"y" * 512, b"z" * 1500]
    reader = TarReader(
        chunks(tar(*(file(str(n), body) for n, body in enumerate(contents))), chunk), place="t"
    )
    assert [b"".join(reader.content()) for _ in reader] == contents
    assert reader.ended


def test_content_that_is_read_by_half_does_not_shift_the_next_member() -> None:
    reader = TarReader(chunks(tar(file("a", b"a" * 3000), file("b", b"b")), 100), place="t")
    names = []
    for name, *_ in reader:
        names.append(name)
        next(reader.content())
    assert names == [b"a", b"b"]


def test_ustar_prefix_pax_and_gnu_names_are_joined() -> None:
    long = b"l" * 300
    content = tar(
        header(b"name", prefix=b"some/prefix"),
        pax({"path": "p" * 200, "size": "3"}) + header(b"short", 0) + padded(b"abc"),
        gnu_long(long)
        + gnu_long(b"t" * 200, b"K")
        + header(b"short", flag=b"2", link=b"t", magic=b"ustar  \0"),
        pax({"path": "pax"}) + gnu_long(b"gnu") + header(b"short"),
    )
    assert walk(content) == [
        (b"some/prefix/name", FILE, 0, b""),
        (b"p" * 200, FILE, 3, b""),
        (long, SYMLINK, 0, b"t" * 200),
        (b"gnu", FILE, 0, b""),
    ]


def test_global_pax_headers_are_ignored_as_engines_do() -> None:
    assert walk(tar(pax({"path": "poison", "size": "99999"}, b"g"), file("a", b"x"))) == [
        (b"a", FILE, 1, b"")
    ]


def test_base_256_sizes_and_blank_sizes_are_read() -> None:
    base256 = b"\x80" + (700).to_bytes(11, "big")
    content = tar(header(b"big", base256) + padded(b"x" * 700), header(b"none", b" " * 12))
    assert [(name, size) for name, _, size, _ in walk(content)] == [(b"big", 700), (b"none", 0)]


def test_old_gnu_sparse_maps_are_passed_over() -> None:
    # isextended is at byte 482 of the header and at byte 504 of each further block of the map
    tail = bytes(482 - 345) + b"\1" + bytes(512 - 483)
    more = bytes(504) + b"\1" + bytes(7)
    content = tar(
        header(b"sparse", 5, b"S", magic=b"ustar  \0", tail=tail) + more + bytes(512) + padded(b"bytes"),
        file("after", b"x"),
    )
    assert [(name, size) for name, _, size, _ in walk(content)] == [(b"sparse", 5), (b"after", 1)]


def test_pax_sparse_counts_stored_bytes_and_not_the_announced_ones() -> None:
    records = {"GNU.sparse.major": "1", "GNU.sparse.name": "real", "GNU.sparse.realsize": str(2**63 - 1)}
    content = tar(pax(records) + header(b"GNUSparseFile.1/real", 4) + padded(b"0\n\0\0"))
    assert walk(content) == [(b"real", FILE, 4, b"")]


def test_directories_from_before_posix_end_in_a_slash() -> None:
    assert walk(tar(header(b"old/", flag=b"\0", magic=bytes(8)))) == [(b"old/", DIRECTORY, 0, b"")]


def test_names_that_are_not_utf8_stay_bytes() -> None:
    assert walk(tar(file(b"\xff\xfe/x")))[0][0] == b"\xff\xfe/x"


def test_signed_checksums_of_old_writers_are_accepted() -> None:
    block = header(b"\xff" * 4)
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:]) + 256
    content = block[:148] + f"{signed:06o}\0 ".encode() + block[156:]
    assert walk(tar(content)) == [(b"\xff" * 4, FILE, 0, b"")]


BROKEN = {
    "a flipped bit in a header": (file("a")[:50] + b"\1" + file("a")[51:], MalformedTar),
    "a negative size": (header(b"a", b"\xff" * 11 + b"\0"), MalformedTar),
    "a size beyond 2^63": (header(b"a", b"\x80" + b"\x7f" * 11), MalformedTar),
    "a size that is no number": (header(b"a", b"0000000x000\0"), MalformedTar),
    "a negative octal size": (header(b"a", b"-0000000012\0"), MalformedTar),
    "a negative PAX size": (pax({"size": "-512"}) + file("a"), MalformedTar),
    "a PAX size of 5,000 digits": (pax({"size": "9" * 5000}) + file("a"), MalformedTar),
    "a PAX record longer than its header": (
        header(b"x", 8, b"x") + padded(b"99 a=bc\n") + file("a"),
        MalformedTar,
    ),
    "a PAX record of no length": (header(b"x", 8, b"x") + padded(b"0 a=bcd\n") + file("a"), MalformedTar),
    "a NUL in a PAX path": (pax({"path": b"a\0b"}) + file("a"), MalformedTar),
    "an unknown type": (header(b"a", flag=b"Z"), MalformedTar),
    "a lone zero block": (bytes(512) + file("a"), MalformedTar),
    "a PAX header without a member": (pax({"path": "x"}), MalformedTar),
    "a PAX header of 1 GiB": (header(b"x", 1 << 30, b"x"), LimitExceeded),
    "a GNU name of 1 GiB": (header(b"x", 1 << 30, b"L"), LimitExceeded),
    "5,000 chained PAX headers": (pax({"comment": "x"}) * 5000 + file("a"), LimitExceeded),
    "a path of 5,000 bytes": (pax({"path": "p" * 5000}) + file("a"), LimitExceeded),
    "a sparse map without end": (
        header(b"s", 0, b"S", magic=b"ustar  \0", tail=bytes(137) + b"\1" + bytes(29))
        + (bytes(504) + b"\1" + bytes(7)) * 3000,
        LimitExceeded,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_headers_are_named_with_their_place(case: str) -> None:
    content, fault = BROKEN[case]
    with pytest.raises(fault, match=r"test\.tar, byte [0-9,]+: "):
        walk(tar(content))


def test_every_truncation_inside_a_member_is_detected() -> None:
    whole = b"".join((gnu_long(b"n" * 600), file("a", b"x" * 700), pax({"path": "b"}), file("b", b"y")))
    clean = {0, len(whole), 1024 + 512 + 512 + 1024}  # between two members: no fault, but no end marker
    for cut in range(0, len(whole), 64):
        if cut not in clean:
            with pytest.raises(Truncated):
                walk(whole[:cut])
    reader = TarReader(chunks(whole), place="t")
    assert len(list(reader)) == 2
    assert not reader.ended


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]),
    min_size=1,
    max_size=120,
).filter(lambda name: name not in (".", ".."))
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=4), st.binary(max_size=1200)), max_size=6),
    FORMATS,
)
def test_what_the_standard_library_writes_is_read_back(
    rows: list[tuple[list[str], bytes]], form: int
) -> None:
    out = io.BytesIO()
    expected = []
    with tarfile.open(fileobj=out, mode="w", format=form) as writer:
        for parts, content in rows:
            info = tarfile.TarInfo("/".join(parts))
            info.size = len(content)
            try:
                writer.addfile(info, io.BytesIO(content))
            except ValueError:
                continue  # too long a name for ustar
            expected.append((info.name.encode("utf-8", "surrogateescape"), content))
    reader = TarReader(chunks(out.getvalue(), 1000), place="t")
    assert [(name, b"".join(reader.content())) for name, *_ in reader] == expected
