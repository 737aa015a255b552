"""Layers that are no plain tar, or hardly one: read with a note, or named as what they are."""

import json
from collections.abc import Callable
from pathlib import Path

import image_maker as make
import pytest
from image_maker import file, header, padded, tar

from buildtool.audit.counts import gather_facts
from buildtool.audit.report import AuditReport, make_report
from buildtool.audit.text import render_table
from buildtool.core.model import Budget
from buildtool.image.archive import StreamArchive, open_archive
from buildtool.image.documents import Platform
from buildtool.image.errors import MalformedStream
from buildtool.image.reader import ImageContents, read_image

ROOT = Path(__file__).parents[3]


def read(members: make.Members) -> ImageContents:
    source = StreamArchive(make.chunks(make.archive(members)), label="odd")
    return read_image(source, label="odd", platform=Platform("linux", "amd64"))


def reported(members: make.Members) -> AuditReport:
    contents = read(members)
    return make_report(contents, gather_facts(contents), Budget(), "test")


@pytest.mark.parametrize("write", [make.docker_25, make.docker_legacy, make.skopeo_archive])
def test_an_empty_plain_layer_is_read(write: Callable[[make.Image], make.Members]) -> None:
    report = reported(write(make.Image([tar(file("f", b"x")), b""], make.plain)))
    assert [layer.n_entries for layer in report.layers] == [1, 0]
    assert report.totals.stored_bytes is None
    assert "layer 1: the end-of-archive marker is missing" in report.notes


def test_an_empty_compressed_layer_is_read() -> None:
    assert reported(make.docker_25(make.Image([b""]))).layers[0].n_entries == 0


def test_what_was_read_although_it_is_odd_is_in_the_notes_of_the_report() -> None:
    odd = tar(header(b"a", b"0000003\0junk") + padded(b"abc"))
    cut = file("b", b"abc")[:515]
    notes = reported(make.docker_25(make.Image([odd, tar(file("c")), odd, cut]))).notes
    assert "layers 0, 2: numbers in headers with other bytes after their end" in notes
    assert "layer 3: the last member's padding is missing" in notes


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_what_is_odd_about_the_archive_itself_is_in_the_notes_as_well(tmp_path: Path, kind: str) -> None:
    """Only the tars of layers had notes; an archive with the same oddities passed without a word."""
    members = make.docker_25(make.Image([tar(file("f", b"x"))]))
    loose = header(b"x", b"00000000013\0", flag=b"x") + padded(b"11 size=+3\n")
    odd = loose + header(b"odd", b"00000000000\0") + padded(b"abc")
    text = odd + header(b"junk", b"0000003\0junk") + padded(b"abc") + make.archive(members)
    path = tmp_path / "image.tar"
    path.write_bytes(text)
    source = StreamArchive(make.chunks(text), label="odd") if kind == "stream" else open_archive(path)
    contents = read_image(source, label="odd", platform=Platform("linux", "amd64"))
    assert contents.notes == (
        "the archive: PAX sizes with leading zeros or a plus sign",
        "the archive: numbers in headers with other bytes after their end",
    )


SQUASHFS = b"hsqs" + bytes(600)


@pytest.mark.parametrize(
    ("blob", "form"),
    [(SQUASHFS, "squashfs"), (b"\xfd7zXZ\0" + bytes(600), "xz"), (b"BZh9" + bytes(600), "bzip2")],
)
def test_a_layer_of_another_form_is_named_as_what_it_is(blob: bytes, form: str) -> None:
    image = make.Image([tar(file("f", b"x"))], lambda _: blob)
    for write in (make.docker_25, make.kaniko):
        with pytest.raises(MalformedStream, match=f"neither tar, gzip nor zstd but {form}"):
            read(write(image))


def test_an_encrypted_layer_is_named_as_what_it_is() -> None:
    image = make.Image([tar(file("f", b"x"))], lambda _: b"\x8e\x11" * 300)
    manifest = image.manifest().replace(b"layer.v1.tar", b"layer.v1.tar+gzip+encrypted")
    parts = make.stored(*image.blobs(), image.config(), manifest)
    layout = {**parts, "index.json": make.index_of(make.descriptor(manifest))}
    directory = {**make.skopeo_directory(image), "manifest.json": manifest}
    for members in (layout, directory):
        with pytest.raises(MalformedStream, match="layer 0 is encrypted") as caught:
            read(members)
        assert "--decryption-key" in caught.value.hint


def test_old_tars_are_recognised_by_the_checksum_that_the_walker_accepts() -> None:
    block = header(b"\xff" * 4, magic=bytes(8))
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:]) + 256
    layer = tar(block[:148] + f"{signed:06o}\0 ".encode() + block[156:])
    assert read(make.docker_25(make.Image([layer], make.plain))).layers[0].index is not None


def test_the_count_of_files_says_that_empty_ones_are_left_out() -> None:
    members = (file("f", b"x"), file("empty"), make.hardlink("g", "f"))
    report = reported(make.docker_25(make.Image([tar(*members)])))
    assert report.totals.n_files == 1
    assert "visible in 1 non-empty file" in render_table(report)
    schema = json.loads((ROOT / "docs/schema/audit-report.schema.json").read_text())
    assert "empty files" in schema["properties"]["totals"]["properties"]["n_files"]["description"]


def test_links_in_a_circle_in_a_layout_directory_are_skipped(tmp_path: Path) -> None:
    root = make.layout_directory(make.docker_25(make.Image([tar(file("f", b"x"))])), tmp_path / "layout")
    (root / "loop").symlink_to("loop")
    (root / "blobs" / "up").symlink_to("..")
    contents = read_image(open_archive(root), label="layout", platform=Platform("linux", "amd64"))
    assert contents.layers[0].unpacked_bytes == 1
