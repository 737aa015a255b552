"""Decompression bombs are refused early, with what to type for an image that is honest all the same."""

from collections.abc import Iterator
from pathlib import Path

import bombs
import image_maker as make
import pytest
from image_maker import file, pax, symlink, tar

from buildtool.audit.kinds import Kind
from buildtool.audit.treemap import TreeCounter
from buildtool.cli import audit as command
from buildtool.image import merge as merging
from buildtool.image.archive import StreamArchive, open_archive
from buildtool.image.documents import Platform
from buildtool.image.errors import LIMITS, LimitExceeded, Limits
from buildtool.image.layer import LayerIndex, index_layer
from buildtool.image.merge import Finder, merge
from buildtool.image.reader import read_image
from buildtool.image.streams import Allowance, Form, decompressed
from buildtool.image.tar import TarReader

pytestmark = pytest.mark.thorough

MIB = 1 << 20
SMALL = Limits(unpacked_free_bytes=8 * MIB, unpacked_ratio=20)


def chunked(content: bytes) -> Iterator[bytes]:
    return make.chunks(content, 1 << 12)


def read_stream(content: bytes, limits: Limits = SMALL) -> None:
    archive = StreamArchive(chunked(content), label="bomb", limits=limits)
    read_image(archive, label="bomb", platform=Platform("linux", "amd64"), limits=limits)


def read_file(content: bytes, folder: Path, limits: Limits = SMALL) -> None:
    (folder / "bomb.tar").write_bytes(content)
    archive = open_archive(folder / "bomb.tar", limits=limits)
    read_image(archive, label="bomb", platform=Platform("linux", "amd64"), limits=limits)


BOMBS = {
    "zstd": lambda: bombs.archive_with(bombs.layer_of_zeros(16 << 30)),
    "gzip": lambda: bombs.archive_with(bombs.layer_of_zeros(1 << 30, packed="gzip")),
    "a compressed archive": lambda: bombs.packed_archive(16 << 30),
    "many layers": lambda: bombs.many_layers(8, 64 << 20),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_archive_that_unpacks_to_gigabytes_is_refused_early(kind: str, tmp_path: Path) -> None:
    content = BOMBS[kind]()
    for read in (read_stream, lambda content: read_file(content, tmp_path)):
        with pytest.raises(
            LimitExceeded, match=r"bytes of archive unpack to more than [0-9,]+: a decompression bomb"
        ) as told:
            read(content)
        assert "--max-unpacked" in told.value.hint


def test_all_layers_together_have_one_limit() -> None:
    layers = [tar(file("f", bytes([n]) * (3 * MIB))) for n in range(4)]
    content = make.archive(make.docker_25(make.Image(layers)))
    with pytest.raises(LimitExceeded, match="unpacks to more than 10,485,760 bytes"):
        read_stream(content, Limits(unpacked_bytes=10 * MIB))
    read_stream(content, Limits(unpacked_bytes=13 * MIB))


def test_a_layer_that_is_read_again_and_again_counts_each_time(tmp_path: Path) -> None:
    layer = tar(file("f", bytes(MIB)))
    content = make.archive(make.docker_25(make.Image([layer] * 40)))
    with pytest.raises(LimitExceeded, match="unpack"):
        read_file(content, tmp_path)


def test_an_honest_file_of_zeros_is_no_bomb() -> None:
    allowance = Allowance(LIMITS, 10_000)
    allowance.take(1 << 30, "an archive of any size may hold 1 GiB")
    with pytest.raises(LimitExceeded):
        allowance.take(1, "and not more")
    allowance = Allowance(LIMITS, 11 << 20)
    allowance.take(1100 << 20, "and 100 times its own bytes")


def test_the_order_of_blobs_does_not_decide_what_a_file_may_unpack_to(tmp_path: Path) -> None:
    zeros = bombs.layer_of_zeros(64 * MIB)
    head = make.archive({"index.json": b"{}", "blobs/sha256/" + "0" * 64: zeros, "x": b"\1" * (4 << 20)})
    (tmp_path / "a.tar").write_bytes(head)
    archive = open_archive(tmp_path / "a.tar", limits=SMALL)
    assert archive.blob("blobs/sha256/" + "0" * 64).error is None


def test_a_lone_stream_is_its_own_archive() -> None:
    with pytest.raises(LimitExceeded, match="a decompression bomb"):
        sum(map(len, decompressed(chunked(bombs.zstd_zeros(1 << 30)), Form.ZSTD, place="s", limits=SMALL)))


def test_the_command_line_can_allow_more() -> None:
    parser = command.argparse.ArgumentParser()
    command.add_arguments(parser)
    limits = command._audit_options(parser.parse_args(["a.tar", "--max-unpacked", "3 GiB"])).limits
    assert (limits.unpacked_bytes, limits.unpacked_free_bytes) == (3 << 30, 3 << 30)
    assert command._audit_options(parser.parse_args(["a.tar"])).limits == LIMITS


# Trees that cost much more than their bytes.


def layer(*members: bytes) -> LayerIndex:
    return index_layer(TarReader(make.chunks(tar(*members)), place="t"), place="t")


DEEP = "d/" * 2000


def test_whiteouts_of_one_deep_directory_descend_to_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    below = layer(pax({"path": DEEP + "kept"}) + file("s", b"x"))
    upper = layer(*(pax({"path": f"{DEEP}.wh.{n}"}) + file("s") for n in range(300)))
    steps = 0
    get = merging._Merger._below

    def counted(self: merging._Merger, directory: bytes, own: set[tuple[bytes, bytes]]) -> object:
        nonlocal steps
        steps += DEEP[:-3].encode() not in self._known
        return get(self, directory, own)

    monkeypatch.setattr(merging._Merger, "_below", counted)
    assert sum(merge([below, upper]).visible) == 1
    assert steps == 1


def test_links_that_lengthen_every_path_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "LIMITS", Limits(link_steps=100_000))
    links = [pax({"linkpath": "d/../" * 200 + f"l{n + 1}"}) + symlink(f"l{n}", "x") for n in range(100)]
    base = layer(*links, make.folder("l100"), make.folder("d"))
    for members in ([file(f"l0/y{n}/x") for n in range(100)], [file(f"l0/y{n}/.wh.x") for n in range(100)]):
        with pytest.raises(LimitExceeded, match="symbolic links lead through more than 100,000 names"):
            merge([base, layer(*members)])
    finder = Finder(merge([base]))
    with pytest.raises(LimitExceeded, match="symbolic links"):
        [finder.row(b"l0/y%d/x" % n) for n in range(100)]


def test_deep_paths_count_for_the_memory_that_their_directories_take() -> None:
    paths = (pax({"path": f"y{n}/{DEEP}f"}) + file("s", b"x") for n in range(100))
    with pytest.raises(LimitExceeded, match="more entries than 200 MiB of memory can index"):
        layer(*paths)
    shared = layer(*(pax({"path": f"{DEEP}y{n}/f"}) + file("s", b"x") for n in range(100)))
    assert shared.index_bytes < 10 * MIB


def test_directories_of_a_deep_tree_are_added_up_once_each() -> None:
    counter = TreeCounter(10**9)
    common = b"/".join([b"d"] * 500)
    for n in range(1000):
        where = common + b"/%d" % n
        counter.add(where, b"f", 10, layer=0, owner=0, kind=Kind.DATA, targets=(), parts={}, visible=True)
    counter.add(
        b"big", b"f", 10**9 - 10_000, layer=0, owner=0, kind=Kind.DATA, targets=(), parts={}, visible=True
    )
    rows = counter.tree(lambda owner, directory, layer: ("unowned", "")).rows
    assert {row.path: row.unpacked_bytes for row in rows} == {"": 10_000, "big/f": 10**9 - 10_000}
