"""Numbers and checksums of tar headers at the ends of their ranges, and members at the limits of a walk."""

from dataclasses import replace

import pytest
from image_maker import chunks, file, folder, gnu_long, header, padded, pax, symlink, tar

from buildtool.image import tar as tarwalk
from buildtool.image.errors import LIMITS, LimitExceeded, Limits, MalformedTar, Truncated
from buildtool.image.tar import (
    DIRECTORY,
    FILE,
    HARDLINK,
    LARGEST,
    SYMLINK,
    Member,
    TarReader,
    check_pax_time,
    has_junk,
    has_right_checksum,
    number,
    octal,
    pax_integer,
    unsigned_sum,
)


def walk(content: bytes, limits: Limits = LIMITS, chunk: int = 1 << 16) -> list[Member]:
    return list(TarReader(chunks(content, chunk), place="t", limits=limits))


def base256(value: int, width: int) -> bytes:
    """A number as GNU writes it: two's complement, with the first bit set as a sign that it is one."""
    bits = 8 * width
    return ((value & ((1 << bits - 1) - 1)) | 1 << bits - 1).to_bytes(width, "big")


@pytest.mark.parametrize("width", [8, 12])
def test_numbers_in_base_256_are_read_with_their_sign(width: int) -> None:
    reach = min(8 * width - 2, 63)
    values = [0, 1, -1, 255, -256, *(1 << n for n in range(9, reach, 8)), (1 << reach) - 1, -(1 << reach)]
    values += [-(1 << n) for n in range(9, reach, 8)]
    assert [number(base256(value, width)) for value in values] == values


def test_numbers_in_base_256_reach_from_one_end_of_64_bits_to_the_other() -> None:
    assert LARGEST == 9_223_372_036_854_775_807
    for value, fits in ((LARGEST, True), (LARGEST + 1, False), (-LARGEST - 1, True), (-LARGEST - 2, False)):
        if fits:
            assert number(base256(value, 12)) == value
        else:
            with pytest.raises(ValueError, match="beyond 64 bits"):
                number(base256(value, 12))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"0000017\0", 15),
        (b"     17\0", 15),
        (b" 17 \0\0\0\0", 15),
        (b"\0\x0017\0\0\0\0", 15),
        (b"17\0junk8", 15),
        (b"17777777", 4194303),
        (b"        ", 0),
        (b"\0\0\0\0\0\0\0\0", 0),
        (b"\0", 0),
    ],
)
def test_octal_numbers_end_at_their_first_nul(field: bytes, value: int) -> None:
    assert number(field) == value
    assert has_junk(field) is (b"junk" in field)


@pytest.mark.parametrize("field", [b"17 \x00junk", b"1 7\0", b"8\0", b"-1\0", b"17x\0", b"\x7f7\0"])
def test_what_is_no_octal_number_before_its_nul_is_refused(field: bytes) -> None:
    with pytest.raises(ValueError, match="not an octal number"):
        number(field)


def test_no_junk_is_seen_in_numbers_of_base_256() -> None:
    assert not has_junk(b"\x80\0\0\0x\0\0x")


@pytest.mark.parametrize("at", [0, 99, 147, 156, 257, 399, 400, 511])
def test_checksums_are_right_with_bytes_beyond_ascii_anywhere_signed_or_not(at: int) -> None:
    block = bytearray(header(b"name"))
    block[at] = 0xF0
    total = sum(block[:148]) + sum(block[156:]) + 8 * 32
    assert unsigned_sum(bytes(block)) == total
    for told, right in ((total, True), (total - 256, True), (total - 1, False), (total + 256, False)):
        block[148:156] = b"%06o\0 " % told
        assert has_right_checksum(bytes(block)) is right
        assert unsigned_sum(bytes(block)) == total


def test_the_largest_checksum_is_right() -> None:
    block = bytearray(b"\xff" * 512)
    block[148:156] = b"%06o\0 " % (504 * 255 + 8 * 32)
    assert has_right_checksum(bytes(block))


@pytest.mark.parametrize("field", [b"\x80" + bytes(5) + b"\x02\x00", b"nonsense", b"8       "])
def test_a_checksum_that_is_no_octal_number_is_wrong(field: bytes) -> None:
    block = bytearray(header(b"name"))
    block[148:156] = field
    assert not has_right_checksum(bytes(block))


@pytest.mark.parametrize(
    ("text", "value"),
    [(b"0", 0), (b"-0", 0), (b"+7", 7), (b"-7", -7), (b"0007", 7), (b"-" + b"0" * 50 + b"8", -8)],
)
def test_decimal_numbers_of_pax_are_read_with_sign_and_zeros(text: bytes, value: int) -> None:
    assert pax_integer(text) == value


@pytest.mark.parametrize("text", [b"", b"-", b"+-1", b"1 ", b" 1", b"0x1", b"1.0", b"1_0", b"1\n"])
def test_what_is_no_decimal_number_is_no_number_of_pax(text: bytes) -> None:
    with pytest.raises(ValueError, match="is not a decimal number"):
        pax_integer(text)


def test_a_long_wrong_number_is_reported_by_its_first_24_bytes() -> None:
    for check in (pax_integer, check_pax_time):
        with pytest.raises(ValueError, match=r"^b'x{24}' is not"):
            check(b"x" * 5000)


@pytest.mark.parametrize("text", [b"0", b"1.5", b"-1.", b"+1.25", b"1." + b"9" * 100])
def test_times_of_pax_may_have_a_fraction(text: bytes) -> None:
    check_pax_time(text)


@pytest.mark.parametrize("text", [b"", b".5", b"1.5.5", b"1e3", b"1,5", b"noon", b"1.5\n"])
def test_what_is_no_time_is_no_time_of_pax(text: bytes) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        check_pax_time(text)


def test_blank_octal_fields_are_nothing() -> None:
    assert (octal(b""), octal(b" \0 \0"), octal(b"0777 \0")) == (0, 0, 511)


# Members at the limits of a walk


def test_an_extension_header_of_the_largest_size_is_read_and_a_larger_one_is_not() -> None:
    limits = replace(LIMITS, meta_bytes=600)
    assert walk(tar(gnu_long(b"n" * 599), file("a")), limits) == [(b"n" * 599, FILE, 0, b"")]
    with pytest.raises(LimitExceeded, match="an extension header of 601 bytes"):
        walk(tar(gnu_long(b"n" * 600), file("a")), limits)


def sparse(blocks: int) -> bytes:
    """A file in old GNU's sparse form whose map goes on for so many blocks."""
    tail = bytes(482 - 345) + bytes([blocks > 0]) + bytes(512 - 483)
    more = b"".join(bytes(504) + bytes([n < blocks - 1]) + bytes(7) for n in range(blocks))
    return header(b"s", 5, b"S", magic=b"ustar  \0", tail=tail) + more + padded(b"bytes")


def test_a_sparse_map_of_the_largest_size_is_skipped_and_a_larger_one_is_not() -> None:
    limits = replace(LIMITS, meta_bytes=1024)
    for blocks in (0, 1, 2):
        members = walk(tar(sparse(blocks), file("a")), limits, 700)
        assert members == [(b"s", FILE, 5, b""), (b"a", FILE, 0, b"")]
    with pytest.raises(LimitExceeded, match="a sparse map without end"):
        walk(tar(sparse(3), file("a")), limits)
    with pytest.raises(Truncated, match=r"^t, byte 1,024: .* inside a sparse map"):
        walk(sparse(2)[: 512 + 512 + 100])


def test_names_are_as_long_as_linux_allows() -> None:
    limits = replace(LIMITS, path_bytes=300)
    for name, link in ((b"n" * 299, b"t"), (b"n", b"t" * 299)):
        content = tar(gnu_long(name), gnu_long(link, b"K"), symlink("x", "x"))
        assert walk(content, limits) == [(name, SYMLINK, 0, link)]
    for kind in (file("x"), folder("x")):
        with pytest.raises(LimitExceeded, match="a path of 300 bytes"):
            walk(tar(gnu_long(b"n" * 300), kind), limits)


def test_a_long_name_ends_at_its_first_nul() -> None:
    assert walk(tar(gnu_long(b"one\0two\0three"), file("a"))) == [(b"one", FILE, 0, b"")]


def test_names_of_pax_and_gnu_end_with_their_member() -> None:
    extensions = pax({"path": "p", "linkpath": "l", "size": "0"}) + gnu_long(b"g") + gnu_long(b"k", b"K")
    content = tar(extensions, symlink("a", "x"), symlink("b", "y"), header(b"c", flag=b"1", link=b"z"))
    assert walk(content) == [
        (b"g", SYMLINK, 0, b"k"),
        (b"b", SYMLINK, 0, b"y"),
        (b"c", HARDLINK, 0, b"z"),
    ]


def test_a_global_header_belongs_to_no_member() -> None:
    reader = TarReader(chunks(tar(file("a"), pax({"comment": "x"}, b"g"))), place="t")
    assert (len(list(reader)), reader.notes) == (1, {})


def test_the_last_extension_header_of_a_kind_counts() -> None:
    content = tar(pax({"path": "first", "linkpath": "kept"}), pax({"path": "second"}), symlink("a", "x"))
    assert walk(content) == [(b"second", SYMLINK, 0, b"x")]


def test_an_empty_pax_value_is_as_good_as_none() -> None:
    content = tar(pax({"path": "", "linkpath": "", "size": "", "uid": "", "mtime": ""}), symlink("a", "x"))
    assert walk(content) == [(b"a", SYMLINK, 0, b"x")]


@pytest.mark.parametrize("key", ["uid", "gid", "mtime", "atime", "ctime", "size"])
def test_every_number_of_pax_that_engines_read_has_to_be_one(key: str) -> None:
    for flag in (b"0", b"5"):
        with pytest.raises(MalformedTar, match=r"^t, byte 1,024: a PAX number"):
            walk(tar(pax({key: "x"}), header(b"a", flag=flag)))


def test_a_pax_size_counts_only_for_what_has_content() -> None:
    assert walk(tar(pax({"size": "-5"}), folder("d"))) == [(b"d/", DIRECTORY, 0, b"")]
    assert walk(tar(pax({"size": "700"}), folder("d"), file("a"))) == [
        (b"d/", DIRECTORY, 0, b""),
        (b"a", FILE, 0, b""),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"6 a=b\n7 c=de\n8 e=f\n",
        b"6 a=b\n6 =bc\n",
        b"6 a=b\n5 ab\n",
        b"6 a=b 6 c=d\n",
        b" 6 a=b\n",
        b"6a=b\n",
        b"\n",
        b"-2 a=b\n\n",
    ],
)
def test_every_record_of_a_pax_header_has_its_length_a_key_and_an_end(body: bytes) -> None:
    with pytest.raises(MalformedTar, match="a PAX record that can't be read"):
        walk(tar(header(b"x", len(body), b"x") + padded(body), file("a")))


@pytest.mark.parametrize("key", ["path", "linkpath", "uname", "gname"])
def test_a_nul_is_refused_in_texts_of_pax_and_taken_in_other_values(key: str) -> None:
    with pytest.raises(MalformedTar, match="with a NUL"):
        walk(tar(pax({key: b"a\0b"}), file("a")))
    assert len(walk(tar(pax({"SCHILY.xattr.x": b"a\0b"}), file("a")))) == 1


@pytest.mark.parametrize("flag", [b"x", b"X"])
def test_headers_of_solaris_are_those_of_pax(flag: bytes) -> None:
    assert walk(tar(pax({"path": "p"}, flag), file("a"))) == [(b"p", FILE, 0, b"")]


@pytest.mark.parametrize("flag", [b"0", b"7", b"\0"])
def test_contiguous_and_old_files_are_files(flag: bytes) -> None:
    assert walk(tar(header(b"a", 3, flag) + padded(b"abc"))) == [(b"a", FILE, 3, b"")]


@pytest.mark.parametrize("flag", [b"3", b"4", b"6"])
def test_devices_and_pipes_have_no_content(flag: bytes) -> None:
    content = tar(header(b"a", 700, flag, link=b"x"), file("b"))
    assert walk(content) == [(b"a", tarwalk.DEVICE, 0, b""), (b"b", FILE, 0, b"")]


def test_what_is_left_of_a_stream_is_counted_to_its_end() -> None:
    content = tar(file("a", b"x")) + b"rest" * 1000
    for chunk in (100, 1 << 16):
        reader = TarReader(chunks(content, chunk), place="t")
        assert len(list(reader)) == 1
        reader.drain()
        assert reader.offset == len(content)
        assert reader.ended
        assert reader.notes == {}


def test_an_offset_is_where_the_members_content_begins() -> None:
    reader = TarReader(chunks(tar(file("a", b"x" * 700), file("b", b"y")), 100), place="t")
    found = [(name, reader.offset) for name, *_ in reader]
    assert found == [(b"a", 512), (b"b", 512 + 1024 + 512)]
