"""Layers at the exact limits of what is read: header fields, extensions, whiteouts, links, memory."""

import random
from array import array
from dataclasses import replace

import pytest
from image_maker import chunks, file, folder, hardlink, header, padded, pax, symlink, tar

from buildtool.gpucode.source import GpuCodeError
from buildtool.image import tar as tarwalk
from buildtool.image.errors import LIMITS, LimitExceeded, Limits, MalformedTar, Truncated
from buildtool.image.layer import HASHED_BYTES, LayerIndex, index_layer, split_path
from buildtool.image.merge import Finder, Merged, merge
from buildtool.image.secrets import SCANNED_BYTES
from buildtool.image.streams import Fingerprint
from buildtool.image.tar import Member, TarReader, pax_integer


def walk(content: bytes) -> list[Member]:
    return list(TarReader(chunks(content), place="test.tar"))


def layer(*members: bytes, limits: Limits = LIMITS, room_bytes: int | None = None) -> LayerIndex:
    reader = TarReader(chunks(tar(*members)), place="t")
    return index_layer(reader, place="t", limits=limits, room_bytes=room_bytes)


def merged(*layers: tuple[bytes, ...]) -> Merged:
    return merge([layer(*members) for members in layers])


def patched(block: bytes, at: int, field: bytes) -> bytes:
    """A header with other bytes in one place and the checksum that belongs to them."""
    block = block[:at] + field + block[at + len(field) :]
    summed = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % summed + block[156:]


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63)])
def test_pax_numbers_reach_from_one_end_of_64_bits_to_the_other(number: int) -> None:
    assert pax_integer(b"%d" % number) == number
    with pytest.raises(ValueError, match="64 bits"):
        pax_integer(b"%d" % (number + (1 if number > 0 else -1)))


@pytest.mark.parametrize(("count", "noted"), [(8, False), (9, True), (1000, True)])
def test_extension_headers_in_a_row_are_read_as_an_engine_reads_them(count: int, *, noted: bool) -> None:
    reader = TarReader(chunks(tar(pax({"comment": "x"}) * count + file("a"))), place="t")
    assert list(reader) == [(b"a", tarwalk.FILE, 0, b"")]
    assert (tarwalk.CHAINED in reader.notes) is noted
    with pytest.raises(LimitExceeded, match="chained"):
        walk(tar(pax({"comment": "x"}) * 1001 + file("a")))


def test_extension_headers_of_one_member_do_not_count_for_the_next() -> None:
    one = pax({"comment": "x"}) + file("a")
    reader = TarReader(chunks(tar(*[one] * 9)), place="t")
    assert len(list(reader)) == 9
    assert not reader.notes


@pytest.mark.parametrize("at", [100, 108, 116, 136, 329, 337])
def test_a_header_is_refused_for_a_damaged_number_that_nobody_needs(at: int) -> None:
    """Mode, owner, group, time and device numbers: engines refuse such a header."""
    with pytest.raises(MalformedTar, match="a number that can't be read"):
        walk(tar(patched(file("a"), at, b"8")))


def test_device_numbers_of_a_format_without_any_are_not_looked_at() -> None:
    assert len(walk(tar(patched(header(b"a", magic=bytes(8)), 329, b"12x")))) == 1


@pytest.mark.parametrize("digit", [b"1", b"2"])
def test_bytes_after_the_end_of_a_size_are_noted(digit: bytes) -> None:
    reader = TarReader(chunks(tar(header(b"a", digit + b"\0" + b"7" * 10) + padded(b"xx"))), place="t")
    assert [size for _, _, size, _ in reader] == [int(digit)]
    assert list(reader.notes) == [tarwalk.JUNK]


def test_a_target_that_is_too_long_is_reported_with_its_own_length() -> None:
    longest = LIMITS.path_bytes
    assert len(walk(tar(pax({"linkpath": "t" * (longest - 1)}) + symlink("s", "t")))) == 1
    with pytest.raises(LimitExceeded, match=f"{longest:,} bytes"):
        walk(tar(pax({"linkpath": "t" * longest}) + symlink("s", "t")))


def test_an_absolute_link_below_a_directory_starts_again_at_the_root() -> None:
    below = (folder("a"), symlink("a/link", "/b"), folder("b"), folder("a/b"))
    result = merged(below, (file("a/link/x", b"1"),))
    assert Finder(result).row(b"b/x") == len(below)
    assert Finder(result).row(b"a/link/x") == len(below)
    assert Finder(result).row(b"a/b/x") is None


def test_an_opaque_directory_holds_nothing_of_what_was_below() -> None:
    result = merged((folder("d"), file("d/old", b"1")), (file("d/.wh..wh..opq"), file("d/new", b"1")))
    assert Finder(result).names(b"d") == (b"new",)


def test_whiteouts_reach_into_nested_directories() -> None:
    below = (file("a/b/c/gone", b"1"), file("a/b/c/kept", b"1"))
    result = merged(below, (file("a/b/c/.wh.gone"),))
    assert Finder(result).names(b"a/b/c") == (b"kept",)
    assert list(result.visible) == [0, 1]


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (b"a/b", (b"a", b"b")),
        (b"a/b/c", (b"a/b", b"c")),
        (b"/a/b", (b"a", b"b")),
        (b"a/b/../c", (b"a", b"c")),
        (b"a/b/c/../../d", (b"a", b"d")),
        (b"../../a", (b"", b"a")),
        (b"a/..", (b"", b"")),
        (b"./a//b/./c/", (b"a/b", b"c")),
        (b"a//b", (b"a", b"b")),
    ],
)
def test_each_step_upward_takes_one_name_and_stops_at_the_root(
    path: bytes, parts: tuple[bytes, bytes]
) -> None:
    assert split_path(path) == parts


def test_package_databases_are_kept_up_to_their_limit_and_then_said_to_be_unread() -> None:
    status = file("var/lib/dpkg/status", b"1234")
    kept = layer(status, limits=replace(LIMITS, captured_bytes=4))
    assert (b"".join(kept.pieces(0)), kept.unread, kept.captured_bytes) == (b"1234", {}, 4)
    left = layer(status, limits=replace(LIMITS, captured_bytes=3))
    assert (list(left.captured), list(left.unread)) == ([], [0])
    assert left.index_bytes > 0


def test_a_package_database_of_the_largest_size_is_kept_and_a_larger_one_is_not() -> None:
    status = file("var/lib/dpkg/status", b"1234")
    assert list(layer(status, limits=replace(LIMITS, captured_file_bytes=4)).captured) == [0]
    assert list(layer(status, limits=replace(LIMITS, captured_file_bytes=3)).captured) == []


def test_memory_of_an_index_is_bounded_to_the_byte_and_the_limit_is_reported_in_mib() -> None:
    members = [file(f"d{n}/name", b"") for n in range(3)]
    needed = layer(*members).index_bytes
    assert layer(*members, room_bytes=needed).n_entries == 3
    with pytest.raises(LimitExceeded, match="more entries than 3 MiB"):
        layer(*members, limits=replace(LIMITS, index_bytes=3 << 20), room_bytes=needed - 1)


def test_memory_of_a_directory_is_counted_once_with_those_above_it() -> None:
    alone = layer(file("a/b/x")).index_bytes
    beside = layer(file("a/b/x"), file("a/b/y")).index_bytes - alone
    deeper = layer(file("a/b/x"), file("a/b/c/y")).index_bytes - alone
    assert 0 < beside < deeper < alone


def test_a_pax_time_beyond_64_bits_is_refused() -> None:
    assert len(walk(tar(pax({"mtime": f"{2**63 - 1}.5"}) + file("a")))) == 1
    with pytest.raises(MalformedTar, match="a PAX number"):
        walk(tar(pax({"mtime": f"{2**63}.5"}) + file("a")))


def test_large_sums_of_bytes_beyond_ascii_are_right_checksums() -> None:
    long = b"\xff" * 100
    assert walk(tar(header(long, flag=b"2", link=long))) == [(long, tarwalk.SYMLINK, 0, long)]
    assert walk(tar(header(long, prefix=b"p" * 155))) == [(b"p" * 155 + b"/" + long, tarwalk.FILE, 0, b"")]


def test_an_archive_that_ends_inside_its_end_marker_is_cut() -> None:
    assert len(walk(file("a") + bytes(512))) == 1
    with pytest.raises(Truncated, match="end marker"):
        walk(file("a") + bytes(512 + 100))


@pytest.mark.parametrize("name", ["a~", "d/a", "d//a/"])
def test_a_hard_link_finds_the_file_that_it_names(name: str) -> None:
    result = merged((file(name.replace("//", "/").rstrip("/"), b"1"), hardlink("h", name)))
    assert (result.links, result.dangling) == ({1: 0}, ())


def test_as_many_links_as_containerd_follows_are_followed_and_no_more() -> None:
    def chain(links: int) -> Merged:
        steps = [symlink(f"l{n}", f"l{n + 1}") for n in range(links)]
        return merged((folder(f"l{links}"), file(f"l{links}/x"), *steps))

    assert Finder(chain(255)).row(b"l0/x") == 1
    with pytest.raises(MalformedTar, match="in a circle"):
        Finder(chain(256)).row(b"l0/x")


@pytest.mark.parametrize("path", ["data.bin", "etc/settings.json"])
def test_files_are_hashed_from_64_kib_on(path: str) -> None:
    content = bytes(range(256)) * 256
    assert layer(file(path, content[:-1])).digests == {}
    assert list(layer(file(path, content)).digests) == [0]


@pytest.mark.parametrize("keyed", [True, False])
def test_contents_are_told_apart_by_every_byte_however_they_stream_by(*, keyed: bool) -> None:
    content = random.Random(1).randbytes(200_001)

    def fingerprint(content: bytes, *lengths: int) -> bytes:
        found, at = Fingerprint(keyed=keyed), 0
        for length in (*lengths, len(content)):
            found.feed(content[at : at + length])
            at += length
        return found.value()

    one = fingerprint(content)
    for lengths in ((1,), (65_536,), (65_535, 1, 1), (0, 131_072), (100_000, 50_000), (200_001,), (7,) * 99):
        assert fingerprint(content, *lengths) == one
    others = {one, fingerprint(content[:-1]), fingerprint(content + b"\0"), fingerprint(b"")}
    for at in (0, 65_535, 65_536, 131_071, 200_000):
        others.add(fingerprint(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]))
    assert len(others) == 9


def test_copies_at_other_places_of_a_layer_have_one_fingerprint() -> None:
    content = random.Random(1).randbytes(300_000)
    found = layer(file("a", content), file("b", b"x"), file("c", content), file("d", content[::-1])).digests
    assert found[0] == found[2] != found[3]


# Indexes, whole.

PASSWORD = b"machine example.org login me password correct-horse-battery\n"
KINDS = bytearray([tarwalk.DIRECTORY, tarwalk.FILE, tarwalk.SYMLINK, tarwalk.HARDLINK])


def test_an_index_holds_every_member_in_its_order() -> None:
    content = bytes(range(256)) * (HASHED_BYTES // 256)
    index = layer(
        folder("."),
        folder("d"),
        file("d/large", content),
        symlink("d/soft", "../x"),
        hardlink("hard", "d/large"),
        file("d/.wh.gone"),
        file("root/.netrc", PASSWORD),
        file(".wh..wh..opq"),
        file("var/lib/dpkg/status", b"Package: x"),
        file("d//empty"),
    )
    assert b"".join(index.pieces(5)) == b"Package: x"
    captured = index.captured
    assert index == LayerIndex(
        dirs=[b"", b"d", b"d", b"", b"root", b"var/lib/dpkg", b"d"],
        names=[b"d", b"large", b"soft", b"hard", b".netrc", b"status", b"empty"],
        sizes=array("q", [0, len(content), 0, 0, len(PASSWORD), 10, 0]),
        kinds=KINDS + bytes([tarwalk.FILE] * 3),
        links={2: b"../x", 3: b"d/large"},
        digests=layer(folder("d"), file("d/large", content)).digests,
        captured=captured,
        secrets={4: ("password in .netrc",)},
        secret_values={PASSWORD.split()[-1]},
        whiteouts=[(b"d", b"gone")],
        opaque=[b""],
        captured_bytes=10,
        index_bytes=index.index_bytes,
    )
    assert (index.n_entries, index.path(1), index.path(3)) == (7, b"d/large", b"hard")


@pytest.mark.parametrize(
    ("members", "n_bytes"),
    [
        ((), 0),
        ((file("name", b"x"),), 200 + 270 + 4),
        ((file("a.so", b"x"),), 200 + 270 + 4),
        ((file("a", b"x"), file("bb", b"x")), 200 + 270 + 1 + 270 + 2),
        ((file("d/a"),), (200 + 1 + 300 + 1) + 270 + 1),
        ((file("d/e/a"),), (200 + 3 + 300 + 3 + 300 + 1) + 270 + 1),
        ((symlink("a", "target"),), 200 + 270 + 1 + 200 + 6),
        ((file("a", bytes(HASHED_BYTES)),), 200 + 270 + 1 + 200),
        ((file("a.json", bytes(HASHED_BYTES)),), 200 + 270 + 6 + 200),
        ((file(".netrc", PASSWORD),), 200 + 270 + 6 + 200 + 200 + len(PASSWORD.split()[-1])),
        ((file(".wh.gone"),), 200 + 270 + 8),
    ],
)
def test_memory_of_an_index_is_what_was_measured_for_its_parts(
    members: tuple[bytes, ...], n_bytes: int
) -> None:
    """270 bytes for an entry, 300 for a directory of the tree, 200 for what is looked up by row or path."""
    assert layer(*members).index_bytes == n_bytes


def test_a_kept_file_counts_with_its_compressed_bytes_and_comes_back_in_small_pieces() -> None:
    content = bytes(200_000)
    kept = layer(file("var/lib/dpkg/status", content))
    assert kept.index_bytes == layer(file("var/lib/dpkg/status")).index_bytes + len(kept.captured[0])
    assert len(kept.captured[0]) < 2000
    sizes = [len(piece) for piece in kept.pieces(0)]
    assert (max(sizes), sum(sizes)) == (65_536, 200_000)
    assert kept.digests == {}
    with pytest.raises(KeyError):
        next(kept.pieces(1))


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("var/lib/dpkg/status", True),
        ("var/lib/dpkg/status-old", False),
        ("var/lib/dpkg/status.d/base", True),
        ("var/lib/dpkg/info/a.list", True),
        ("var/lib/dpkg/info/a.md5sums", False),
        ("v/site-packages/a-1.dist-info/RECORD", True),
        ("v/site-packages/a-1.dist-info/METADATA", True),
        ("v/site-packages/a-1.dist-info/WHEEL", False),
        ("v/site-packages/a-1.dist-info/licenses/RECORD", False),
        ("opt/conda/conda-meta/a-1.json", True),
        ("opt/conda/conda-meta/history", False),
        ("lib/dpkg/status", False),
        ("status", False),
    ],
)
def test_package_databases_are_kept_and_nothing_else_is(path: str, kept: bool) -> None:
    assert list(layer(file(path, b"1234")).captured) == [0] * kept


def test_members_that_end_in_dots_are_what_their_path_leads_to() -> None:
    index = layer(folder("a/b/."), folder("a/b/.."), folder("a/.."), folder(".."), file("..a"), folder("/"))
    assert [index.path(row) for row in range(index.n_entries)] == [b"a/b", b"a", b"..a"]


@pytest.mark.parametrize("n_bytes", [1, 65_535, 65_536, 65_537, 3 * 65_536])
def test_a_kept_file_comes_back_to_its_last_byte(n_bytes: int) -> None:
    content = bytes(n_bytes - 1) + b"x"
    assert b"".join(layer(file("var/lib/dpkg/status", content)).pieces(0)) == content


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh..."])
def test_a_whiteout_of_a_directory_itself_is_refused(name: str) -> None:
    with pytest.raises(MalformedTar, match=r"^t: "):
        layer(file(f"d/{name}"))


def test_names_that_only_begin_like_a_whiteout_are_distinguished() -> None:
    index = layer(file("a/.wh.x.wh."), file("a/.wh-x"), file("a/.wh..wh.plnk"), file("a/.wh..wh..opq"))
    assert (index.names, index.whiteouts, index.opaque) == ([b".wh-x"], [(b"a", b"x.wh.")], [b"a"])


def test_a_large_file_of_text_is_both_hashed_and_searched_and_a_larger_one_only_hashed() -> None:
    text = b"password=correct-horse-battery\n"
    longest = text + b"#" * (SCANNED_BYTES - len(text))
    for content, found in ((longest, [0]), (longest + b"#", [])):
        index = layer(file("app/settings.conf", content))
        assert (list(index.secrets), list(index.digests)) == (found, [0])


def test_what_breaks_while_code_is_looked_for_is_noted_and_the_file_is_hashed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: object) -> object:
        raise GpuCodeError("half a bundle")

    monkeypatch.setattr("buildtool.image.gpu_code.GpuCodeCounter.stored_bytes_by_processor", broken)
    index = layer(file("a.so", bytes(HASHED_BYTES)))
    assert (index.unread, list(index.digests), index.gpu_code) == ({0: "half a bundle"}, [0], {})


def test_a_layer_is_read_to_its_very_end() -> None:
    """Whatever hashes it must see the bytes behind the end marker, too."""
    pieces = chunks(tar(file("a")) + bytes(100_000), 1000)
    index_layer(TarReader(pieces, place="t"), place="t")
    assert next(pieces, None) is None
