"""Files on disk: replaced whole or not at all, with everything that isn't content kept."""

import os
from pathlib import Path

import pytest
from gpucode.maker import Spec, bundles, code, make_library

from buildtool.core.errors import EnvironmentMissing
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import PruneRefused, Source, TargetMissing, VerifyFailed
from buildtool.gpucode.target import parse_targets
from buildtool.prune import trees
from buildtool.prune.trees import prune_file, prune_tree

LIBRARY = make_library(Spec(bundles(["gfx906", "gfx803", "gfx1100"]))).data
GFX906 = parse_targets("gfx906")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libmath.so.1"
    path.write_bytes(LIBRARY)
    path.chmod(0o751)
    os.utime(path, ns=(10**18, 10**18 + 7))
    return path


def targets_in(path: Path) -> set[str]:
    data = path.read_bytes()
    return set(scan_file(Source.of_bytes(data)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_pruned_file_keeps_mode_and_times(library: Path) -> None:
    plan = prune_file(library, GFX906)
    status = library.stat()
    assert status.st_size == plan.bytes_after < len(LIBRARY)
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o751, 10**18 + 7)
    assert names(library.parent) == ["libmath.so.1"]


def test_file_written_elsewhere_leaves_the_original(library: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.so"
    prune_file(library, GFX906, out=out)
    assert library.read_bytes() == LIBRARY
    assert targets_in(out) == {"gfx906"}


def test_link_to_a_library_stays_a_link(library: Path, tmp_path: Path) -> None:
    link = tmp_path / "libmath.so"
    link.symlink_to(library.name)
    prune_file(link, GFX906)
    assert link.is_symlink()
    assert targets_in(library) == {"gfx906"}


def test_hard_link_outside_is_a_reason_to_refuse(library: Path, tmp_path: Path) -> None:
    os.link(library, tmp_path / "other.so")
    with pytest.raises(PruneRefused, match="hard links elsewhere"):
        prune_file(library, GFX906)
    assert library.read_bytes() == LIBRARY


def test_refused_file_is_untouched_and_nothing_is_left_behind(library: Path) -> None:
    before = library.stat()
    with pytest.raises(PruneRefused):
        prune_file(library, parse_targets("gfx1030"))
    after = library.stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    assert names(library.parent) == ["libmath.so.1"]


def test_failed_check_leaves_the_original(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise VerifyFailed("a byte is wrong")

    monkeypatch.setattr(trees, "verify_prune", fail)
    with pytest.raises(VerifyFailed):
        prune_file(library, GFX906)
    assert library.read_bytes() == LIBRARY
    assert names(library.parent) == ["libmath.so.1"]


def test_full_disk_leaves_the_original(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(EnvironmentMissing, match="no space left"):
        prune_file(library, GFX906)
    assert library.read_bytes() == LIBRARY
    assert names(library.parent) == ["libmath.so.1"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    blas = root / "usr/lib/rocblas/library"
    blas.mkdir(parents=True)
    for name in ("gfx906.co", "gfx1100.co", "lazy_gfx1100.dat", "fallback.dat"):
        (blas / f"TensileLibrary_{name}").write_bytes(code(name, n_bytes=3000))
    (blas / "TensileLibrary_gfx1036.co").write_bytes(b"x" * 70)
    (blas / "TensileLibrary_gfx906_alias.co").symlink_to("TensileLibrary_gfx1036.co")
    (blas / "TensileLibrary_gfx1101.co").symlink_to("TensileLibrary_gfx1100.co")
    lib = root / "usr/lib/libmath.so.1"
    lib.write_bytes(LIBRARY)
    os.link(lib, root / "usr/lib/libmath-copy.so.1")
    (root / "usr/lib/libmath.so").symlink_to("libmath.so.1")
    (root / "usr/lib/libother.so").write_bytes(make_library(Spec(bundles(["gfx1030"]))).data)
    (root / "usr/lib/libbroken.so").write_bytes(LIBRARY[:5000])
    (root / "usr/lib/notes.txt").write_text("gfx1100")
    return root


def snapshot(root: Path) -> dict[str, bytes | str]:
    return {
        str(p.relative_to(root)): str(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def test_tree_loses_foreign_files_and_code(tree: Path) -> None:
    result = prune_tree(tree, GFX906)
    left = snapshot(tree)
    assert {Path(item.path).name for item in result.deleted} == {
        "TensileLibrary_gfx1100.co",
        "TensileLibrary_gfx1101.co",
        "TensileLibrary_lazy_gfx1100.dat",
    }
    assert "usr/lib/rocblas/library/TensileLibrary_gfx1036.co" in left, "a link that stays leads to it"
    assert [item.path for item in result.pruned] == ["usr/lib/libmath-copy.so.1"]
    assert {Path(item.path).name for item in result.refused} == {"libother.so", "libbroken.so"}
    assert targets_in(tree / "usr/lib/libmath.so") == {"gfx906"}


def test_tree_prune_keeps_hard_links_together(tree: Path) -> None:
    prune_tree(tree, GFX906)
    first, second = (tree / "usr/lib" / name for name in ("libmath.so.1", "libmath-copy.so.1"))
    assert first.stat().st_ino == second.stat().st_ino
    assert first.stat().st_nlink == 2


def test_dry_run_predicts_the_saving_to_the_byte_and_changes_nothing(tree: Path) -> None:
    before = snapshot(tree)
    foretold = prune_tree(tree, GFX906, dry_run=True)
    assert snapshot(tree) == before

    def total() -> int:
        return sum(
            {p.stat().st_ino: p.lstat().st_size for p in tree.rglob("*.*") if not p.is_symlink()}.values()
        )

    bytes_before = total()
    assert prune_tree(tree, GFX906).saved_bytes == foretold.saved_bytes == bytes_before - total()


def test_tree_pruned_twice_stays_the_same(tree: Path) -> None:
    prune_tree(tree, GFX906)
    once = snapshot(tree)
    assert not prune_tree(tree, GFX906).changed
    assert snapshot(tree) == once


@pytest.mark.parametrize("asked", ["gfx9999", "sm_90", "gfx906,gfx1201"])
def test_a_target_that_nothing_serves_is_reported_before_a_file_goes(tree: Path, asked: str) -> None:
    before = snapshot(tree)
    with pytest.raises(TargetMissing, match=r"but code for .*gfx906"):
        prune_tree(tree, parse_targets(asked))
    assert snapshot(tree) == before


def test_a_tree_without_gpu_code_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("gfx1100")
    assert not prune_tree(tmp_path, GFX906).changed


def test_a_file_written_onto_itself_counts_as_pruned_in_place(library: Path, tmp_path: Path) -> None:
    os.link(library, tmp_path / "other.so")
    with pytest.raises(PruneRefused, match="hard links elsewhere"):
        prune_file(library, GFX906, out=library)
