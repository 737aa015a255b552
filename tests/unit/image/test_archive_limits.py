"""Archives at the exact limits of what is read: blobs, documents, memory, links, descriptors, progress."""

import os
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import image_maker as make
import pytest
from image_maker import Image, Members, file, hardlink, header, symlink, tar

from buildtool.core.errors import DataError
from buildtool.image import archive as reading
from buildtool.image.archive import (
    CHUNK,
    Archive,
    Blob,
    Bounds,
    DirectoryArchive,
    FileArchive,
    StreamArchive,
    member_path,
    open_archive,
    read_blob,
)
from buildtool.image.errors import (
    LIMITS,
    ImageError,
    LimitExceeded,
    Limits,
    MalformedDocument,
    MalformedStream,
    MalformedTar,
    NoSuchImage,
    Truncated,
)
from buildtool.image.reader import read_image
from buildtool.image.streams import Form, ReadAhead

KIB, MIB, GIB = 1024, 1024**2, 1024**3
LAYER = tar(file("f", b"x"))
MIXED = bytes(range(251))  # a period that no chunk size has


def streamed(content: bytes, limits: Limits = LIMITS) -> StreamArchive:
    return StreamArchive(make.chunks(content, 1000), label="s", limits=limits)


def filed(content: bytes, path: Path, limits: Limits = LIMITS) -> FileArchive:
    path.write_bytes(content)
    return FileArchive(path, limits=limits)


def read_one(content: bytes, limits: Limits = LIMITS, *, size: int = 1 << 16) -> Blob:
    return read_blob(make.chunks(content, size), "blob", Bounds(limits))


def test_the_bounds_are_those_that_the_documentation_promises() -> None:
    assert Limits() == Limits(
        meta_bytes=MIB,
        meta_depth=1000,
        path_bytes=4096,
        index_bytes=200 * MIB,
        document_bytes=4 * MIB,
        documents_bytes=32 * MIB,
        captured_bytes=128 * MIB,
        captured_file_bytes=16 * MIB,
        unpacked_bytes=256 * GIB,
        unpacked_ratio=100,
        unpacked_free_bytes=GIB,
        window_log=27,  # 128 MiB
        index_depth=4,
        manifests=1024,
        link_steps=4_000_000,
        layers=512,
    )


def test_a_fault_says_where_and_shows_no_control_characters() -> None:
    fault = Truncated("it ends\x1b[2J", place="a\nb.tar")
    assert (fault.place, "\x1b" in fault.message, "\n" in fault.message) == ("a\nb.tar", False, False)
    assert fault.message.startswith("a")
    assert "pull it again" in fault.hint
    refused = NoSuchImage("no\x1b[2J", "choose\x1b[2J")
    assert "\x1b" not in refused.message + refused.hint
    assert NoSuchImage("no").hint == MalformedTar("no", place="p").hint == ""


# One blob.


def test_a_document_is_kept_whole_and_hashed_as_it_is_stored() -> None:
    content = b' {"a": 1}'
    assert read_one(content) == Blob(Form.JSON, make.sha(content), len(content), content)


def test_what_is_neither_document_nor_layer_is_hashed_and_not_kept() -> None:
    content = b"hsqs" + bytes(100_000)
    assert read_one(content) == Blob(Form.SQUASHFS, make.sha(content), len(content))


@pytest.mark.parametrize("size", [100, 1 << 16])
def test_a_document_of_the_largest_size_is_kept_and_a_larger_one_is_only_hashed(size: int) -> None:
    content = b"[" + b" " * 998 + b"]"
    limits = replace(LIMITS, document_bytes=1000)
    assert read_one(content, limits, size=size).document == content
    longer = content + b" "
    assert read_one(longer, limits, size=size) == Blob(Form.JSON, make.sha(longer), 1001)


def test_a_document_beyond_its_limit_is_not_held_in_memory() -> None:
    pieces = (b"[" + b" " * (64 * KIB) for _ in range(100))
    tracemalloc.start()
    try:
        read_blob(pieces, "blob", Bounds(replace(LIMITS, document_bytes=100 * KIB)))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("pack", [make.plain, make.gzipped, make.zstandard])
def test_a_layer_has_its_sizes_before_and_after_decompression(pack: make.Packer) -> None:
    layer = tar(file("f", MIXED * 8000))
    packed = pack(layer)
    blob = read_one(packed, size=CHUNK)
    assert (blob.digest, blob.stored_bytes) == (make.sha(packed), len(packed))
    assert (blob.diff_id, blob.tar_bytes) == (make.sha(layer), len(layer))
    assert (blob.document, blob.error) == (None, None)


def test_a_damaged_layer_keeps_its_fault_and_claims_no_digest() -> None:
    blob = read_one(make.gzipped(LAYER)[:-9])
    assert isinstance(blob.error, Truncated)
    assert replace(blob, error=None) == Blob(Form.GZIP)


@pytest.mark.parametrize(
    ("pack", "chunks", "threads"),
    [
        (make.plain, 2, 0),
        (make.gzipped, 2, 0),
        (make.plain, 3, 1),
        (make.gzipped, 3, 2),
    ],
)
def test_only_layers_of_several_chunks_are_worth_threads(
    pack: make.Packer, chunks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[ReadAhead] = []

    def ahead(pieces: Iterator[bytes]) -> ReadAhead:
        begun.append(ReadAhead(pieces))
        return begun[-1]

    monkeypatch.setattr(reading, "ReadAhead", ahead)
    packed = pack(tar(file("f", os.urandom(9000))))
    size = -(-len(packed) // chunks)
    assert read_one(packed, size=size).diff_id
    assert len(begun) == threads


# Archives.


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (b"./a/b", "a/b"),
        (b"/a//b/", "a/b"),
        (b"../a", "a"),
        (b"/~a", "~a"),
        (b"a/./b/../c", "a/c"),
        (b"\xff", "\udcff"),
    ],
)
def test_members_are_called_alike_however_they_are_written(raw: bytes, path: str) -> None:
    assert member_path(raw) == path


def test_blobs_are_found_through_links_of_both_kinds(tmp_path: Path) -> None:
    content = tar(
        file("a/layer.tar", b"{}"),
        symlink("b/soft", "../a/layer.tar"),
        hardlink("b/hard", "a/layer.tar"),
        symlink("b/abs", "/a/layer.tar"),
    )
    for archive in (streamed(content), filed(content, tmp_path / "a.tar")):
        assert archive.paths() == {"a/layer.tar", "b/soft", "b/hard", "b/abs"}
        assert {archive.blob(path).document for path in archive.paths()} == {b"{}"}


def test_names_that_are_not_utf8_lead_to_their_blobs() -> None:
    raw = header(b"l\xff", flag=b"2", link=b"\xfe") + header(b"h\xff", flag=b"1", link=b"\xfe")
    archive = streamed(tar(file(b"\xfe", b"{}"), raw))
    assert archive.blob("l\udcff").document == archive.blob("h\udcff").document == b"{}"


def test_links_are_followed_for_a_few_steps_and_never_in_circles() -> None:
    chain = [symlink(f"l{n}", f"l{n + 1}") for n in range(9)]
    archive = streamed(tar(*chain, file("l9", b"{}"), symlink("a", "b"), symlink("b", "a")))
    assert archive.blob("l1").document == b"{}"
    for path in ("l0", "a", "none"):
        with pytest.raises(KeyError):
            archive.blob(path)


def test_a_doubled_blob_is_harmless_and_a_doubled_list_is_not(tmp_path: Path) -> None:
    blob = file("blobs/sha256/x", b"{}")
    content = tar(blob, blob)
    for archive in (streamed(content), filed(content, tmp_path / "a.tar")):
        assert archive.blob("blobs/sha256/x").document == b"{}"
    with pytest.raises(MalformedTar, match=r"a\.tar: the archive holds manifest\.json twice"):
        filed(tar(*[file("manifest.json", b"[]")] * 2), tmp_path / "a.tar")


ARCHIVES: list[Callable[[bytes, Path, Limits], Archive]] = [
    lambda content, _, limits: streamed(content, limits),
    lambda content, folder, limits: filed(content, folder / "a.tar", limits),
]


@pytest.mark.parametrize("opened", ARCHIVES)
def test_all_layers_share_the_memory_for_the_index_to_the_byte(
    opened: Callable[[bytes, Path, Limits], Archive], tmp_path: Path
) -> None:
    layers = [tar(*(file(f"{name}{n}", b"x") for n in range(9))) for name in ("a", "bb")]
    needed = [read_one(layer).index.index_bytes for layer in layers]  # type: ignore[union-attr]
    content = make.archive({"x": b"{}", "1": layers[0], "2": b"{}", "3": layers[1]})

    def faults(room: int) -> list[ImageError | None]:
        archive = opened(content, tmp_path, replace(LIMITS, index_bytes=room))
        return [archive.blob(path).error for path in ("x", "1", "2", "3")]

    assert faults(sum(needed)) == [None] * 4
    assert faults(sum(needed) - 1)[:3] == [None] * 3
    assert isinstance(faults(sum(needed) - 1)[3], LimitExceeded)


def test_all_documents_of_a_stream_have_one_limit() -> None:
    content = make.archive({"a": b"{}", "l": LAYER, "b": b"[1]", "o": b"\x01\x02"})
    assert streamed(content, replace(LIMITS, documents_bytes=5)).blob("b").document == b"[1]"
    with pytest.raises(LimitExceeded, match="documents"):
        streamed(content, replace(LIMITS, documents_bytes=4))


def test_an_archive_of_more_members_than_its_memory_allows_is_refused(tmp_path: Path) -> None:
    """Links count as well: they are remembered, too."""
    members = [file(f"f{n}") for n in range(3)] + [symlink(f"l{n}", "f0") for n in range(3)]
    limits = replace(LIMITS, index_bytes=4 * KIB)
    assert len(filed(tar(*members[:5]), tmp_path / "a.tar", limits).paths()) == 5
    with pytest.raises(LimitExceeded, match="more members"):
        filed(tar(*members), tmp_path / "a.tar", limits)
    assert len(streamed(tar(*members[:5]), limits).paths()) == 5
    with pytest.raises(LimitExceeded, match="more members"):
        streamed(tar(*members), limits)


def test_an_archive_file_without_its_end_is_truncated(tmp_path: Path) -> None:
    content = make.archive({"a": b"x" * 5000})
    with pytest.raises(Truncated, match="no end marker"):
        filed(tar(file("a", b"x" * 5000))[: -len(make.END)], tmp_path / "a.tar")
    with pytest.raises(Truncated, match="inside a member"):
        filed(content[:2000], tmp_path / "a.tar")


def test_a_file_that_is_cut_inside_a_long_blob_is_truncated(tmp_path: Path) -> None:
    """Content is leapt over, but never beyond the file's end."""
    content = make.archive({"a": MIXED * 4000, "b": b"{}"})
    assert filed(content, tmp_path / "a.tar").blob("b").document == b"{}"
    with pytest.raises(Truncated):
        filed(content[:700_000], tmp_path / "a.tar")


def test_blobs_longer_than_a_chunk_are_read_whole_from_their_place(tmp_path: Path) -> None:
    members = {"a": b"{}", "b": MIXED * 4000, "c": b"[]"}
    archive = filed(make.archive(members), tmp_path / "a.tar")
    assert {path: archive.blob(path).digest for path in members} == {
        path: make.sha(content) for path, content in members.items()
    }
    whole = (tmp_path / "a.tar").read_bytes()
    assert [whole[start : start + length] for start, length in archive.spans()] == list(members.values())


def test_a_stream_is_read_to_its_very_end() -> None:
    """An engine that still has padding to write must not find its reader gone."""
    chunks = make.chunks(make.archive({"a": b"{}"}) + bytes(50_000), 1000)
    StreamArchive(chunks, label="s")
    assert next(chunks, None) is None


def test_a_broken_transport_is_no_fault_of_the_blob_that_was_under_way() -> None:
    content = make.gzipped(make.archive({"a": os.urandom(100_000), "index.json": b"{}"}))
    with pytest.raises(Truncated, match=r"^s: "):
        streamed(content[:50_000])
    layer = make.gzipped(tar(file("f", os.urandom(100_000))))
    damaged = make.gzipped(make.archive({"a": layer}))
    with pytest.raises(Truncated, match=r"^s: "):
        streamed(damaged[: len(damaged) // 2])


@pytest.mark.parametrize("content", [b"", b"{}" + bytes(600), b"hsqs" + bytes(600)])
def test_a_stream_that_is_no_archive_is_answered_with_what_one_is(content: bytes) -> None:
    with pytest.raises(MalformedStream) as told:
        streamed(content)
    assert (told.value.place, "docker save" in told.value.hint) == ("s", True)


@pytest.mark.parametrize("name", ["index.json", "manifest.json", "oci-layout", "repositories"])
def test_one_of_its_lists_is_enough_to_know_a_layout(name: str, tmp_path: Path) -> None:
    (tmp_path / "blobs/deep").mkdir(parents=True)
    (tmp_path / name).write_bytes(b"{}")
    (tmp_path / "blobs/deep/x").write_bytes(b"[]")
    os.mkfifo(tmp_path / "blobs/pipe")
    archive = DirectoryArchive(tmp_path)
    assert archive.paths() == {name, "blobs/deep/x"}
    assert archive.blob("blobs/deep/x").document == b"[]"
    for path in ("../x", "blobs/pipe", "/etc/passwd"):
        with pytest.raises(KeyError):
            archive.blob(path)


def test_a_layout_that_cannot_be_read_is_reported_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"can't read {tmp_path}/none: No such file"):
        DirectoryArchive(tmp_path / "none")
    (tmp_path / "index.json").write_bytes(b"{}")
    archive = DirectoryArchive(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(DataError, match=f"can't read {tmp_path}/index.json: No such file"):
        archive.blob("index.json")
    with pytest.raises(MalformedDocument) as told:
        DirectoryArchive(tmp_path)
    assert (told.value.place, "docker save" in told.value.hint) == (str(tmp_path), True)


def test_a_pipe_in_the_place_of_an_archive_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=f"{tmp_path}/pipe is not a file\n.*docker save"):
        open_archive(tmp_path / "pipe")


def test_a_disk_that_fails_while_a_blob_is_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = filed(make.archive({"a": b"{}"}), tmp_path / "a.tar")

    def broken(*_: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.pread", broken)
    with pytest.raises(DataError, match=f"can't read {tmp_path}/a.tar: Input/output error\n"):
        archive.blob("a")


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    members = make.docker_25(Image([LAYER]))
    (tmp_path / "a.tar").write_bytes(make.archive(members))
    (tmp_path / "a.tgz").write_bytes(make.gzipped(make.archive(members)))
    make.layout_directory(members, tmp_path / "d")
    before = set(Path("/proc/self/fd").iterdir())
    for name in ("a.tar", "a.tgz", "d"):
        archive = open_archive(tmp_path / name)
        assert archive.blob("index.json").document
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_progress_adds_up_to_the_bytes_that_were_read(tmp_path: Path) -> None:
    members: Members = make.oci_layout(Image([tar(file("f", MIXED * 4000))], make.plain))
    plain = make.archive(members)
    packed = make.gzipped(plain)
    make.layout_directory(members, tmp_path / "d")
    (tmp_path / "a.tar").write_bytes(plain)
    (tmp_path / "a.tgz").write_bytes(packed)
    blobs = sum(len(content) for path, content in members.items() if path != "oci-layout")
    for name, n_bytes in {"a.tar": blobs, "a.tgz": len(packed), "d": blobs}.items():
        ticks: list[int] = []
        archive = open_archive(tmp_path / name, tick=ticks.append)
        read_image(archive, label=name)
        assert sum(ticks) == n_bytes


def test_limits_reach_whatever_opens_an_archive(tmp_path: Path) -> None:
    members = make.docker_25(Image([LAYER]))
    make.layout_directory(members, tmp_path / "d")
    (tmp_path / "a.tar").write_bytes(make.archive(members))
    (tmp_path / "a.tgz").write_bytes(make.gzipped(make.archive(members)))
    limits = replace(LIMITS, document_bytes=10)
    for name in ("d", "a.tar", "a.tgz"):
        archive = open_archive(tmp_path / name, limits=limits)
        assert archive.blob("index.json").document is None
        assert archive.blob("oci-layout").stored_bytes == len(members["oci-layout"])
