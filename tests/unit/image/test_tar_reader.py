"""The header walker against hand-made headers and against the standard library's reader."""

import io
import re
import tarfile

import mutated
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_maker import chunks, file, folder, gnu_long, hardlink, header, padded, pax, symlink, tar

from buildtool.image import tar as tarwalk
from buildtool.image.errors import ImageError, LimitExceeded, MalformedTar, Truncated
from buildtool.image.tar import DEVICE, DIRECTORY, FILE, HARDLINK, SYMLINK, Member, TarReader, octal


def walk(content: bytes, chunk: int = 1 << 16) -> list[Member]:
    return list(TarReader(chunks(content, chunk), place="test.tar"))


def test_all_kinds_are_distinguished() -> None:
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


def test_old_gnu_sparse_maps_are_skipped() -> None:
    # isextended is at byte 482 of the header and at byte 504 of each further block of the map
    tail = bytes(482 - 345) + b"\1" + bytes(512 - 483)
    more = bytes(504) + b"\1" + bytes(7)
    content = tar(
        header(b"sparse", 5, b"S", magic=b"ustar  \0", tail=tail) + more + bytes(512) + padded(b"bytes"),
        file("after", b"x"),
    )
    assert [(name, size) for name, _, size, _ in walk(content)] == [(b"sparse", 5), (b"after", 1)]


def test_pax_sparse_counts_stored_bytes_and_not_the_announced_ones() -> None:
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "real"}
    records["GNU.sparse.realsize"] = str(2**63 - 1)
    content = tar(pax(records) + header(b"GNUSparseFile.1/real", 4) + padded(b"0\n\0\0"))
    assert walk(content) == [(b"real", FILE, 4, b"")]


@pytest.mark.parametrize(
    ("first", "blocks"), [("1", 1), ("60", 1), ("200", 3), ("x", 0), ("9" * 9, 0), ("5000", 0), ("", 0)]
)
def test_the_map_in_front_of_pax_sparse_content_is_not_stored_content(first: str, blocks: int) -> None:
    """A file of 1,000 stored bytes counted as 1,512, more than it has."""
    pairs = "".join(
        f"{at}\n1\n" for at in range(100, 100 + int(first) if first in ("1", "60", "200") else 101)
    )
    told = padded(f"{first}\n{pairs}".encode())
    body = told + b"x" * 1000
    records = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "real"}
    content = tar(pax(records) + header(b"s", len(body)) + padded(body), file("after", b"y"))
    stored = len(body) - 512 * blocks
    assert stored == 1000 or not blocks
    assert walk(content) == [(b"real", FILE, stored, b""), (b"after", FILE, 1, b"")]
    for chunk in (100, 512, 700):
        reader = TarReader(chunks(content, chunk), place="t")
        assert [len(b"".join(reader.content())) for _ in reader] == [stored, 1]


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
    "a flipped bit in a header": (file("a")[:50] + b"\1" + file("a")[51:], MalformedTar, 0),
    "a negative size": (header(b"a", b"\xff" * 11 + b"\0"), MalformedTar, 0),
    "a size beyond 2^63": (header(b"a", b"\x80" + b"\x7f" * 11), MalformedTar, 0),
    "a size that is no number": (header(b"a", b"0000000x000\0"), MalformedTar, 0),
    "a negative octal size": (header(b"a", b"-0000000012\0"), MalformedTar, 0),
    "a negative PAX size": (pax({"size": "-512"}) + file("a"), MalformedTar, 1024),
    "a PAX size of 5,000 digits": (pax({"size": "9" * 5000}) + file("a"), MalformedTar, 5632),
    "a PAX record longer than its header": (
        header(b"x", 8, b"x") + padded(b"99 a=bc\n") + file("a"),
        MalformedTar,
        1024,
    ),
    "a PAX record of no length": (
        header(b"x", 8, b"x") + padded(b"0 a=bcd\n") + file("a"),
        MalformedTar,
        1024,
    ),
    "a NUL in a PAX path": (pax({"path": b"a\0b"}) + file("a"), MalformedTar, 1024),
    "an unknown type": (header(b"a", flag=b"Z"), MalformedTar, 0),
    "a lone zero block": (bytes(512) + file("a"), MalformedTar, 512),
    "a PAX time that is no time": (pax({"mtime": "noon"}) + file("a"), MalformedTar, 1024),
    "a NUL in a PAX key": (pax({"a\0b": "c"}) + file("a"), MalformedTar, 1024),
    "a global PAX header that can't be read": (
        header(b"x", 8, b"g") + padded(b"99 a=bc\n"),
        MalformedTar,
        1024,
    ),
    "a PAX header of 1 GiB": (header(b"x", 1 << 30, b"x"), LimitExceeded, 0),
    "a GNU name of 1 GiB": (header(b"x", 1 << 30, b"L"), LimitExceeded, 0),
    "5,000 chained PAX headers": (pax({"comment": "x"}) * 5000 + file("a"), LimitExceeded, 1_024_000),
    "a path of 5,000 bytes": (pax({"path": "p" * 5000}) + file("a"), LimitExceeded, 5632),
    "a sparse map without end": (
        header(b"s", 0, b"S", magic=b"ustar  \0", tail=bytes(137) + b"\1" + bytes(29))
        + (bytes(504) + b"\1" + bytes(7)) * 3000,
        LimitExceeded,
        512 + (1 << 20),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_malformed_headers_are_named_with_their_place(case: str) -> None:
    content, fault, at = BROKEN[case]
    with pytest.raises(fault, match=rf"^test\.tar, byte {at:,}: "):
        walk(tar(content))
    with pytest.raises(fault, match=rf"^test\.tar, byte {1536 + at:,}: "):
        walk(tar(file("before", b"x" * 700), content))


def test_every_truncation_inside_a_member_is_detected() -> None:
    long, first, short = gnu_long(b"n" * 600), file("a", b"x" * 700), pax({"path": "b"})
    whole = b"".join((long, first, short, file("b", b"y")))
    starts = {0, len(long), len(long + first), len(long + first + short), len(whole)}
    for cut in range(0, len(whole), 64):
        is_padding = any(not whole[cut:end].strip(b"\0") and cut % 512 for end in starts if cut < end)
        if cut not in starts and not is_padding:
            with pytest.raises(Truncated):
                walk(whole[:cut])
        else:
            reader = TarReader(chunks(whole[:cut]), place="t")
            assert len(list(reader)) <= 2
            assert not reader.ended
            assert reader.notes


# What engines read and readers that are too strict refuse: it is read, and the report has a note.


def noted(content: bytes) -> tuple[list[Member], list[str]]:
    """The members, and what is odd about the tar, whether it comes whole or in small chunks."""
    whole = TarReader(chunks(content), place="test.tar")
    members = list(whole)
    assert walk(content, 7) == members
    return members, list(whole.notes)


@pytest.mark.parametrize("size", ["0003", "+3", "+03", "0" * 60 + "3"])
def test_pax_sizes_with_leading_zeros_or_a_plus_are_read(size: str) -> None:
    content = tar(pax({"size": size}) + header(b"a", 0) + padded(b"abc"), file("b"))
    assert noted(content) == ([(b"a", FILE, 3, b""), (b"b", FILE, 0, b"")], [tarwalk.LOOSE_SIZE])


def test_junk_after_the_nul_of_a_size_or_checksum_is_ignored() -> None:
    odd = header(b"a", b"0000003\0junk") + padded(b"abc")
    checked = header(b"b")
    checked = checked[:155] + b"x" + checked[156:]
    assert noted(tar(odd, checked)) == ([(b"a", FILE, 3, b""), (b"b", FILE, 0, b"")], [tarwalk.JUNK])


@pytest.mark.parametrize("kept", [0, 1, 100])
def test_a_member_without_its_final_padding_is_read(kept: int) -> None:
    content = file("a", b"abc")[: 512 + 3 + kept]
    members = [(b"a", FILE, 3, b"")]
    assert noted(content) == (members, [tarwalk.NO_PADDING, tarwalk.NO_END])


def test_the_padding_of_a_leapt_member_may_be_missing_but_none_of_its_content() -> None:
    for length, notes in ((2048, [tarwalk.NO_END]), (2020, [tarwalk.NO_PADDING, tarwalk.NO_END])):
        source = io.BytesIO((header(b"a", 1500) + padded(b"x" * 1500))[:length])

        def leap(n_bytes: int, source: io.BytesIO = source) -> int:
            here = source.tell()
            return source.seek(min(here + n_bytes, len(source.getvalue()))) - here

        reader = TarReader(iter(lambda source=source: source.read(512), b""), place="t", leap=leap)
        assert [size for _, _, size, _ in reader] == [1500]
        assert (list(reader.notes), reader.offset) == (notes, length)


@pytest.mark.parametrize("flag", [b"x", b"L", b"K"])
def test_an_extension_header_without_its_member_is_dropped(flag: bytes) -> None:
    dangling = pax({"path": "b"}) if flag == b"x" else gnu_long(b"b", flag)
    assert noted(file("a") + dangling) == ([(b"a", FILE, 0, b"")], [tarwalk.DANGLING, tarwalk.NO_END])
    assert noted(tar(file("a"), dangling)) == ([(b"a", FILE, 0, b"")], [tarwalk.DANGLING])


def test_a_size_that_nobody_reads_does_not_matter() -> None:
    negative = b"\xff" * 12
    content = tar(header(b"d/", negative, b"5"), header(b"l", negative, b"2", link=b"d"))
    assert noted(content) == ([(b"d/", DIRECTORY, 0, b""), (b"l", SYMLINK, 0, b"d")], [])


# Names: what Go's reader, and so the engines, take for a member's name.


def test_the_prefix_that_go_before_1_8_wrote_into_gnu_headers_is_kept() -> None:
    assert walk(tar(header(b"foo", prefix=b"a" * 100, magic=b"ustar  \0")))[0][0] == b"a" * 100 + b"/foo"


def test_the_times_of_gnu_headers_are_no_prefix() -> None:
    for times in (
        b"14000000000\0" * 2,
        b"\x80" + bytes(11),
        b"14000000000\0" + b"\x80" + bytes(11),
        b"14000000000\0\0abc",
        b"014000000000\x80" + bytes(11),
        b"014000000000" * 2 + b"x",
    ):
        assert walk(tar(header(b"foo", prefix=times, magic=b"ustar  \0")))[0][0] == b"foo"
    assert walk(tar(header(b"foo", prefix=b"\xe4" * 9, magic=b"ustar  \0")))[0][0] == b"foo"


def test_the_prefix_of_star_ends_where_its_times_begin() -> None:
    tail = b"p" * 131 + b"14000000000\0" * 2 + bytes(8) + b"tar\0"
    assert walk(tar(header(b"foo", tail=tail)))[0][0] == b"p" * 131 + b"/foo"


def test_names_that_wait_are_lost_to_a_global_header() -> None:
    poison = pax({"comment": "x"}, b"g")
    content = tar(pax({"path": "lost"}), poison, file("a"), gnu_long(b"lost"), poison, file("b"))
    assert [name for name, *_ in walk(content)] == [b"a", b"b"]


def test_global_headers_in_a_row_are_no_chain() -> None:
    assert len(walk(tar(*[pax({"comment": "x"}, b"g")] * 30, file("a")))) == 1


def test_sparse_names_of_pax_count_for_known_versions_only_and_last() -> None:
    def name_of(**records: str) -> bytes:
        named = {f"GNU.sparse.{key}": value for key, value in {"name": "real", **records}.items()}
        return walk(tar(pax({"path": "p", **named}) + gnu_long(b"gnu") + file("raw")))[0][0]

    assert name_of(major="1", minor="0") == name_of(major="0", minor="1") == name_of(map="0,1") == b"real"
    assert name_of() == name_of(major="1") == name_of(major="2", minor="0") == b"gnu"


# Numbers: one function reads them, on the quick path and on the careful one.


@pytest.mark.parametrize(
    "digits", [b"00000000018", b"9", b"0000000000 8", b"-1", b"+1", b"1_0", b"0o17", b"\t7"]
)
def test_a_size_with_an_8_or_a_9_neither_hangs_nor_counts_as_minus_one(digits: bytes) -> None:
    reader = TarReader(chunks(tar(header(b"a", digits.ljust(12, b"\0")), file("b"))), place="t")
    with pytest.raises(MalformedTar, match="not an octal number"):
        sum(len(piece) for _ in reader for piece in reader.content())


def test_a_walker_that_would_not_advance_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tarwalk, "octal", lambda field: -512 if len(field) == 12 else octal(field))
    with pytest.raises(MalformedTar, match=r"byte 0: .* doesn't advance"):
        walk(tar(file("a")) + file("b"))


@pytest.mark.thorough
@pytest.mark.parametrize("name", mutated.NAMES)
def test_whatever_a_number_says_the_walker_advances(name: str) -> None:
    for member in mutated.mutated(name, 120):  # the bench has 2,000 of each
        content = mutated.archive_of(member)
        reader, behind, pieces = TarReader(chunks(content, 600), place="t"), 0, 0
        try:
            for _ in reader:
                assert behind < reader.offset <= len(content)
                behind = reader.offset
                for piece in reader.content():
                    pieces += 1
                    assert piece
        except ImageError:
            continue
        finally:
            assert pieces <= len(content) // 100


@pytest.mark.thorough
@given(st.text("01234567 \0" * 4 + "89+-_xo\t", min_size=8, max_size=12))
def test_octal_fields_hold_digits_and_padding_alone(text: str) -> None:
    field = text.encode()
    found = re.fullmatch(rb"[ \0]*([0-7]*)[ \0]*", field)
    if found:
        assert octal(field) == sum((digit - 48) * 8**at for at, digit in enumerate(found[1][::-1]))
    else:
        with pytest.raises(ValueError, match="not an octal number"):
            octal(field)


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]),
    min_size=1,
    max_size=120,
).filter(lambda name: name not in (".", ".."))
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@pytest.mark.thorough
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
