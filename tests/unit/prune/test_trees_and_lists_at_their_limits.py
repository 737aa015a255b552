"""Trees, lists, archives at their limits: the size of a list, what a link needs, locks that are missing."""

import errno
import fcntl
import json
import os
import struct
import tarfile
import zipfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from gpucode.cutting import cuda, pruned
from gpucode.maker import Spec, bundles, make_library, nv_fatbin
from test_archive import LIBRARY, Part, make, targets_of

from buildtool.core.errors import DataError
from buildtool.gpucode.elf import read_elf
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import parse_targets
from buildtool.prune import manifest
from buildtool.prune.archives import prune_tar, prune_wheel
from buildtool.prune.manifest import Deleted, Pruned, TreeResult, journal
from buildtool.prune.trees import Links, prune_file, prune_tree

GFX906 = parse_targets("gfx906")
GONE = Deleted("K_gfx803.co", 7, ("gfx803",))


def listed(path: Path, root: Path) -> None:
    """A prune that deletes one file, with its list at `path`."""
    with journal(path, root, GFX906) as written:
        result = TreeResult(("gfx906",))
        written.announce([GONE])
        result.add([GONE])
        written.finish(result)


def test_a_list_is_written_in_one_order_with_every_figure(tmp_path: Path) -> None:
    listed(tmp_path / "list.json", tmp_path)
    run = {
        "deleted": [{"freed_bytes": 7, "path": "K_gfx803.co", "targets": ["gfx803"]}],
        "finished": True,
        "pruned": [],
        "refused": [],
        "saved_bytes": 7,
        "targets": ["gfx906"],
        "untouched": [],
    }
    document = {"runs": [run], "schema_version": 1}
    assert (tmp_path / "list.json").read_text() == json.dumps(document, indent=1) + "\n"
    assert [path.name for path in tmp_path.iterdir()] == ["list.json"]


@pytest.mark.thorough
def test_a_list_may_be_as_large_as_64_mib_and_no_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "list.json"
    path.touch()
    os.truncate(path, (64 << 20) + 1)
    with pytest.raises(DataError, match="larger"):
        listed(path, tmp_path)
    monkeypatch.setattr(manifest, "MAX_BYTES", 1000)
    empty = '{"schema_version": 1, "runs": []}'
    path.write_text(empty.ljust(1001))
    with pytest.raises(DataError, match="larger"):
        listed(path, tmp_path)
    path.write_text(empty.ljust(1000))
    listed(path, tmp_path)
    assert len(json.loads(path.read_text())["runs"]) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(_descriptor: int, _how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    listed(tmp_path / "list.json", tmp_path)
    (tmp_path / "list.json.journal").write_text("")
    listed(tmp_path / "list.json", tmp_path)  # what a killed prune left is taken over all the same
    assert len(json.loads((tmp_path / "list.json").read_text())["runs"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["list.json"]


def test_no_descriptor_of_a_list_stays_open(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    listed(tmp_path / "list.json", tmp_path)
    (tmp_path / "list.json.journal").write_text("odd\n")
    with pytest.raises(DataError, match="not a journal"):
        listed(tmp_path / "list.json", tmp_path)
    (tmp_path / "list.json").write_text("odd")
    with pytest.raises(DataError, match="not a manifest"):
        listed(tmp_path / "list.json", tmp_path)
    assert set(Path("/proc/self/fd").iterdir()) <= before


@pytest.mark.parametrize(
    ("says", "kept"),
    [
        ("{root}/a_gfx803.co", True),
        ("/a_gfx803.co", True),
        ("a_gfx803.co", True),
        ("{root}2/a_gfx803.co", False),
    ],
)
def test_a_file_that_a_link_of_the_tree_needs_is_kept_however_it_is_named(
    tmp_path: Path, says: str, kept: bool
) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    (root / "a_gfx803.co").write_bytes(b"foreign")
    (root / "a_gfx906.co").write_bytes(b"ours")
    (root / "default.co").symlink_to(says.format(root=root))
    (root / "b_gfx803.co").symlink_to("a_gfx906.co")
    gone = {item.path: item.freed_bytes for item in prune_tree(root, GFX906).deleted}
    assert gone == {"b_gfx803.co": 0} | ({} if kept else {"a_gfx803.co": 7})


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_library_that_loses_a_foreign_name_is_cut_under_its_other_one(
    tmp_path: Path, dry_run: bool
) -> None:
    (tmp_path / "A_gfx803.co").write_bytes(LIBRARY)
    (tmp_path / "K_gfx906.co").hardlink_to(tmp_path / "A_gfx803.co")
    result = prune_tree(tmp_path, GFX906, dry_run=dry_run)
    assert [item.path for item in result.deleted] == ["A_gfx803.co"]
    assert [item.path for item in result.pruned] == ["K_gfx906.co"]
    assert (targets_of((tmp_path / "K_gfx906.co").read_bytes()) == {"gfx906"}) is not dry_run


def test_a_damaged_library_is_left_whole_and_reported_with_its_fault(tmp_path: Path) -> None:
    (tmp_path / "liba.so").write_bytes(LIBRARY[:5000])
    (tmp_path / "libb.so").write_bytes(LIBRARY)
    lines: list[str] = []
    result = prune_tree(tmp_path, GFX906, progress=lines.append)
    assert [item.path for item in result.refused] == ["liba.so"]
    assert "past the end" in result.refused[0].reason
    assert [item.path for item in result.pruned] == ["libb.so"]
    assert (tmp_path / "liba.so").read_bytes() == LIBRARY[:5000]
    assert len(lines) == 2


def test_a_member_of_a_wheel_may_be_larger_than_a_zip_could_hold_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "in.whl", "w") as made:
        made.writestr("pkg/liba.so", LIBRARY)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 5000)
    prune_wheel(tmp_path / "in.whl", tmp_path / "out.whl", GFX906)
    with zipfile.ZipFile(tmp_path / "out.whl") as file:
        assert targets_of(file.read("pkg/liba.so")) == {"gfx906"}


def test_a_sparse_member_is_refused_and_not_cut_at_the_wrong_place(tmp_path: Path) -> None:
    pax = (("GNU.sparse.map", "0,1"), ("GNU.sparse.numblocks", "1"), ("GNU.sparse.size", "1"))
    whole = make(tmp_path / "in.tar", [Part("x", b"y", pax=pax)])
    with tarfile.open(whole) as tar:
        assert tar.getmembers()[0].issparse()
    with pytest.raises(DataError):
        prune_tar(whole, tmp_path / "out.tar", GFX906)


def test_a_path_below_a_link_says_nothing_of_another_path() -> None:
    links = Links({"a": "x", "a/b/c": "elsewhere", "d/e": "f"})
    assert links.destination("b/c") == "b/c"
    assert links.destination("a/b/c") == "x/b/c"
    assert links.destination("d/e/../g") == "d/g"


def test_sections_of_gpu_code_may_touch() -> None:
    library = make_library(Spec(bundles(["gfx906"]), behind=".llvm.offloading")).data
    elf = read_elf(Source.of_bytes(library))
    first, second = elf.section(".hip_fatbin"), elf.section(".llvm.offloading")
    assert first
    assert second
    assert first.file_end == second.offset
    found = scan_file(Source.of_bytes(library))
    assert found.keys() == {"gfx906"}


@pytest.mark.parametrize(
    "tags", [[(2, 24)], [(23, 8)], [(35, 8)], [(36, 8)], [(23, 8), (2, 0)], [(36, 8), (35, 0)]]
)
def test_a_table_of_relocations_without_a_place_or_a_length_is_none(tags: list[tuple[int, int]]) -> None:
    library = make_library(Spec(bundles(["gfx906", "gfx803"]))).data
    dynamic = read_elf(Source.of_bytes(library)).section(".dynamic")
    assert dynamic
    rows = [row for row in struct.iter_unpack("<QQ", library[dynamic.offset : dynamic.file_end]) if row[0]]
    text = b"".join(struct.pack("<QQ", *row) for row in [*rows, *tags]).ljust(dynamic.n_bytes, b"\0")
    data = library[: dynamic.offset] + text + library[dynamic.file_end :]
    assert targets_of(pruned(data, "gfx906")) == {"gfx906"}


def test_every_change_is_on_disk_in_the_journal_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with journal(tmp_path / "list.json", tmp_path, GFX906) as written:
        assert synced == ["list.json.journal", tmp_path.name]
        written.announce([GONE])
        assert synced[2:] == ["list.json.journal"]
        written.finish(TreeResult(("gfx906",)))


@pytest.mark.parametrize("made", [False, True])
def test_an_announced_cut_is_listed_only_if_it_was_made(tmp_path: Path, made: bool) -> None:
    cut = Pruned("lib.so", 10, 5, {"gfx906": 1}, {"gfx803": 2})
    (tmp_path / "lib.so").write_bytes(b"x" * (5 if made else 10))
    with suppress(KeyboardInterrupt), journal(tmp_path / "list.json", tmp_path, GFX906) as written:
        written.announce([cut])
        raise KeyboardInterrupt
    assert (tmp_path / "list.json").exists() is made
    if made:
        [run] = json.loads((tmp_path / "list.json").read_text())["runs"]
        assert (run["pruned"], run["finished"], run["saved_bytes"]) == ([asdict(cut)], False, 5)


def test_extended_attributes_are_kept_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, bytes] = {}
    failure = errno.EPERM

    def setxattr(_copy: int, name: str, value: bytes) -> None:
        if name == "trusted.x":
            raise OSError(failure, os.strerror(failure))
        given[name] = value

    monkeypatch.setattr(os, "listxattr", lambda _original: ["trusted.x", "user.a", "user.b"])
    monkeypatch.setattr(os, "getxattr", lambda _original, name: name.encode())
    monkeypatch.setattr(os, "setxattr", setxattr)
    (tmp_path / "liba.so").write_bytes(LIBRARY)
    prune_file(tmp_path / "liba.so", GFX906)
    assert given == {"user.a": b"user.a", "user.b": b"user.b"}
    failure = errno.EIO
    (tmp_path / "libb.so").write_bytes(LIBRARY)
    with pytest.raises(DataError, match="Input/output error"):
        prune_file(tmp_path / "libb.so", GFX906)
    assert (tmp_path / "libb.so").read_bytes() == LIBRARY


def test_a_longer_header_of_a_cuda_fat_binary_is_kept_whole() -> None:
    plain = nv_fatbin([(2, 80, 600), (2, 90, 9000), (2, 70, 9000)])
    longer = plain[:6] + (24).to_bytes(2, "little") + plain[8:16] + b"_header_" + plain[16:]
    out = pruned(cuda([longer]), "sm_80")
    at = out.index(plain[:4])
    assert out[at : at + 8] == longer[:8]
    assert out[at + 16 : at + 24] == b"_header_"
