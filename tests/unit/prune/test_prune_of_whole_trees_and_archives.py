"""Trees, tars and wheels as a whole: partial targets, what is said and added, what a failed check does."""

import os
import tarfile
import zipfile
from pathlib import Path

import pytest
from gpucode.maker import Spec, bundles, code, make_library, raw_bundle
from test_archive import LIBRARY, Part, content, make, members, targets_of

from buildtool.core.errors import DataError
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.elf import read_elf
from buildtool.gpucode.scan import find_container
from buildtool.gpucode.source import PruneRefused, Source, VerifyFailed
from buildtool.gpucode.target import TargetId, parse_targets, target_of_override
from buildtool.prune import archives
from buildtool.prune.archives import archive_targets, prune_tar, prune_wheel
from buildtool.prune.manifest import TreeResult
from buildtool.prune.trees import copy_range, is_foreign_path, open_source, prune_file, prune_tree
from probes.core.units import decimal_bytes

GFX906 = parse_targets("gfx906")
TWO_CARDS = parse_targets("gfx906,gfx1200")  # nothing here has code for the second one
FOREIGN = make_library(Spec(bundles(["gfx803"]))).data


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return make(
        tmp_path / "in.tar", [Part("lib/liba.so", LIBRARY), Part("lib/libb.so", FOREIGN), Part("x", b"y")]
    )


def test_library_in_a_tar_keeps_what_it_has_of_the_cards(tar: Path) -> None:
    out = tar.with_name("out.tar")
    result = prune_tar(tar, out, TWO_CARDS)
    assert targets_of(content(out, "lib/liba.so")) == {"gfx906"}
    assert [item.path for item in result.refused] == ["lib/libb.so"]
    assert content(out, "lib/libb.so") == FOREIGN
    had = archive_targets(tar, folder=tar.parent)
    assert {code.processor for code in had} == {"gfx906", "gfx803", "gfx1100"}


def test_tar_ends_with_its_two_zero_blocks_and_fills_a_record(tar: Path) -> None:
    out = tar.with_name("out.tar")
    prune_tar(tar, out, GFX906)
    data = out.read_bytes()
    assert len(data) % tarfile.RECORDSIZE == 0
    with tarfile.open(out) as opened:
        last = opened.getmembers()[-1]
    end = last.offset_data + 512
    assert data[end:] == bytes(len(data) - end)
    assert 1024 <= len(data) - end < 1024 + tarfile.RECORDSIZE


def test_files_that_are_added_come_last_in_order_and_whole(tar: Path) -> None:
    out = tar.with_name("out.tar")
    more = {"opt/b": b"2" * 513, "opt/a": b"1" * 512, "opt/c": b""}
    prune_tar(tar, out, GFX906, latest=77, added=lambda _result: more)
    assert list(members(out))[-3:] == ["opt/a", "opt/b", "opt/c"]
    assert {name: content(out, name) for name in more} == more
    assert {members(out)[name].mtime for name in more} == {77}
    plain = tar.with_name("plain.tar")
    prune_tar(tar, plain, GFX906, added=lambda _result: {"a": b"1"})
    assert members(plain)["a"].mtime == 0


def test_time_at_the_cap_keeps_the_very_header(tmp_path: Path) -> None:
    made = make(tmp_path / "in.tar", [Part("at", b"x", mtime=1000.0), Part("late", b"x", mtime=1000.5)])
    out = tmp_path / "out.tar"
    prune_tar(made, out, GFX906, latest=1000)
    assert [info.mtime for info in members(out).values()] == [1000, 1000]
    assert out.read_bytes()[:512] == made.read_bytes()[:512]


def test_size_in_an_extended_header_follows_the_cut(tmp_path: Path) -> None:
    made = make(
        tmp_path / "in.tar", [Part("liba.so", LIBRARY, pax=(("size", str(len(LIBRARY))),)), Part("z", b"z")]
    )
    out = tmp_path / "out.tar"
    prune_tar(made, out, GFX906)
    assert list(members(out)) == ["liba.so", "z"]
    assert members(out)["liba.so"].size < len(LIBRARY)
    assert targets_of(content(out, "liba.so")) == {"gfx906"}


def test_failed_check_of_a_cut_member_stops_the_prune(tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise VerifyFailed("planted")

    monkeypatch.setattr(archives, "verify_prune", fail)
    with pytest.raises(VerifyFailed, match="planted"):
        prune_tar(tar, tar.with_name("out.tar"), GFX906)


def test_each_cut_of_an_archive_is_said_once(tar: Path) -> None:
    lines: list[str] = []
    result = prune_tar(tar, tar.with_name("out.tar"), GFX906, progress=lines.append)
    (cut,) = result.pruned
    sizes = f"{decimal_bytes(len(LIBRARY))} to {decimal_bytes(cut.bytes_after)}"
    assert lines == [f"prune lib/liba.so: {sizes}"], "in the words that a tree's prune has"
    assert cut.bytes_before == len(LIBRARY)
    assert cut.removed_bytes.keys() == {"gfx803", "gfx1100"}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "in.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("pkg/", b"")
        made.writestr("pkg/liba.so", LIBRARY)
        made.writestr("pkg/libb.so", FOREIGN)
        made.writestr("pkg/K_gfx803.co", b"foreign")
        made.writestr("pkg/K_gfx1030.co", b"other")
        made.writestr("pkg/large.bin", os.urandom(3 << 20))
    return path


@pytest.mark.thorough
def test_wheel_keeps_directories_large_files_and_what_it_has_of_the_cards(wheel: Path) -> None:
    out = wheel.with_name("out.whl")
    lines: list[str] = []
    result = prune_wheel(wheel, out, TWO_CARDS, progress=lines.append)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out) as new:
        assert new.namelist() == ["pkg/", "pkg/liba.so", "pkg/libb.so", "pkg/large.bin"]
        assert new.read("pkg/large.bin") == old.read("pkg/large.bin")
        assert new.read("pkg/libb.so") == FOREIGN
        assert targets_of(new.read("pkg/liba.so")) == {"gfx906"}
        assert new.read("pkg/") == b""
    gone = {item.path: (item.freed_bytes, item.targets) for item in result.deleted}
    assert gone == {"pkg/K_gfx803.co": (7, ("gfx803",)), "pkg/K_gfx1030.co": (5, ("gfx1030",))}
    assert [item.path for item in result.refused] == ["pkg/libb.so"]
    had = archive_targets(wheel, folder=wheel.parent)
    assert {found.processor for found in had} == {"gfx906", "gfx803", "gfx1030", "gfx1100"}
    assert len(lines) == 1
    assert sorted(path.name for path in wheel.parent.iterdir()) == ["in.whl", "out.whl"]


@pytest.mark.parametrize(
    ("path", "cards", "foreign"),
    [
        ("lib/K_gfx803.co", "gfx906", True),
        ("lib/K_gfx906.co", "gfx906", False),
        ("lib/K_gfx906.co", "gfx803,gfx906", False),
        ("lib/K_gfx803.co", "sm_90", False),
        ("lib/K_gfx803.co", "gfx906,sm_90", True),
        ("lib/gfx11xx/flash.aks2", "gfx1101", False),
        ("lib/gfx11xx/flash.aks2", "gfx906", True),
        ("lib/notes_gfx803.txt", "gfx906", False),
    ],
)
def test_file_is_foreign_by_its_name_when_no_card_can_run_it(path: str, cards: str, foreign: bool) -> None:
    assert is_foreign_path(path, parse_targets(cards)) is foreign


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "liba.so").write_bytes(LIBRARY)
    (root / "lib" / "libb.so").write_bytes(FOREIGN)
    (root / "lib" / "K_gfx803.co").write_bytes(b"foreign")
    (root / "lib" / "K_gfx906.co").write_bytes(b"ours")
    (root / "lib" / "K_gfx1200.co").write_bytes(b"ours")
    return root


@pytest.mark.parametrize("dry_run", [False, True])
def test_prune_of_a_tree_says_each_change_in_its_mood(tree: Path, dry_run: bool) -> None:
    lines: list[str] = []
    result = prune_tree(tree, TWO_CARDS, dry_run=dry_run, progress=lines.append)
    would = "would " if dry_run else ""
    assert [line for line in lines if line.startswith(f"{would}delete lib/K_gfx803.co")]
    assert [line for line in lines if line.startswith(f"{would}prune lib/liba.so: ")]
    assert [line for line in lines if line.startswith("left whole: lib/libb.so: ")]
    assert len(lines) == 3
    assert result.changed
    assert (tree / "lib" / "K_gfx803.co").exists() is dry_run
    assert (targets_of((tree / "lib" / "liba.so").read_bytes()) == {"gfx906"}) is not dry_run
    assert [item.path for item in result.refused] == ["lib/libb.so"]


def test_tree_with_only_deletions_or_only_cuts_counts_as_changed(tree: Path) -> None:
    (tree / "lib" / "liba.so").unlink()
    assert prune_tree(tree, TWO_CARDS).changed
    assert not prune_tree(tree, TWO_CARDS).changed
    (tree / "lib" / "liba.so").write_bytes(LIBRARY)
    assert prune_tree(tree, TWO_CARDS).changed
    assert not TreeResult(("gfx906",)).changed


def test_file_in_place_of_a_tree_is_refused(tree: Path) -> None:
    with pytest.raises(DataError, match="is not a directory"):
        prune_tree(tree / "lib" / "liba.so", GFX906)


def test_foreign_file_with_a_name_for_our_card_keeps_its_content_and_loses_that_name(tree: Path) -> None:
    os.link(tree / "lib" / "K_gfx906.co", tree / "lib" / "A_gfx803.co")
    result = prune_tree(tree, TWO_CARDS)
    assert {item.path: item.freed_bytes for item in result.deleted} == {
        "lib/A_gfx803.co": 0,
        "lib/K_gfx803.co": 7,
    }
    assert (tree / "lib" / "K_gfx906.co").read_bytes() == b"ours"


def test_two_names_of_a_foreign_file_free_its_bytes_once(tree: Path) -> None:
    os.link(tree / "lib" / "K_gfx803.co", tree / "lib" / "A_gfx803.co")
    result = prune_tree(tree, TWO_CARDS)
    assert sum(item.freed_bytes for item in result.deleted) == 7
    assert len(result.deleted) == 2


def test_file_that_gets_shorter_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(bytes(range(256)) * 40)
    with open_source(tmp_path / "in") as (_, descriptor), (tmp_path / "out").open("wb") as out:
        copy_range(descriptor, out.fileno(), 100, n_bytes=5000)
        with pytest.raises(PruneRefused, match="got shorter"):
            copy_range(descriptor, out.fileno(), 10_000, n_bytes=500)
    copied = (tmp_path / "out").read_bytes()
    assert copied[:5000] == (bytes(range(256)) * 40)[100:5100]


def test_long_range_that_the_kernel_copies_in_parts_comes_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(10_000)
    (tmp_path / "in").write_bytes(data)
    real = os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda out, source, at, n: real(out, source, at, min(n, 999)))
    with open_source(tmp_path / "in") as (_, descriptor), (tmp_path / "out").open("wb") as out:
        copy_range(descriptor, out.fileno(), 7, n_bytes=9000)
    assert (tmp_path / "out").read_bytes() == data[7:9007]


def test_file_that_can_t_be_opened_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(PruneRefused, match="No such file"), open_source(tmp_path / "missing"):
        pass


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "liba.so"
    path.write_bytes(LIBRARY)
    before = set(Path("/proc/self/fd").iterdir())
    prune_file(path, GFX906)
    prune_file(path, GFX906, out=tmp_path / "out.so")
    assert set(Path("/proc/self/fd").iterdir()) <= before


def test_file_that_needs_no_cut_is_still_written_where_it_was_asked_for(tmp_path: Path) -> None:
    path, out = tmp_path / "liba.so", tmp_path / "out.so"
    path.write_bytes(make_library(Spec(bundles(["gfx906"]))).data)
    assert not prune_file(path, GFX906, out=out).changed
    assert out.read_bytes() == path.read_bytes()


def test_hard_links_elsewhere_matter_only_to_a_file_that_is_cut_in_place(tmp_path: Path) -> None:
    path, link = tmp_path / "liba.so", tmp_path / "link.so"
    path.write_bytes(LIBRARY)
    os.link(path, link)
    with pytest.raises(PruneRefused, match="hard links elsewhere"):
        prune_file(path, GFX906)
    with pytest.raises(PruneRefused, match="hard links elsewhere"):
        prune_file(path, GFX906, dry_run=True)
    assert prune_file(path, GFX906, out=tmp_path / "out.so").changed
    assert link.read_bytes() == LIBRARY


def test_unknown_version_of_compressed_bundles_is_an_error_of_the_caller() -> None:
    for version in (0, 4):
        with pytest.raises(ValueError, match=f"CCOB version {version}"):
            plan_prune(Source.of_bytes(LIBRARY), GFX906, compress=version)


def test_bundle_for_another_vendor_stays_as_it_is() -> None:
    raw = raw_bundle({"gfx906": code("gfx906"), "gfx803": code("gfx803")})
    plan = plan_prune(Source.of_bytes(raw), parse_targets("sm_90"), strict=False)
    assert not plan.changed
    mixed = plan_prune(Source.of_bytes(raw), parse_targets("gfx906,sm_90"), strict=False)
    assert mixed.removed_bytes == {"gfx803": 9000}
    assert plan_prune(Source.of_bytes(raw), parse_targets("gfx906,sm_90")).changed


def test_code_of_both_vendors_in_one_file_is_refused_when_both_are_asked_for() -> None:
    both = make_library(Spec(bundles(["gfx906"]), behind=".nv_fatbin")).data
    both = both.replace(b".note.gnu.build-id\0", b".nvFatBinSegment\0\0\0")
    elf = read_elf(Source.of_bytes(both))
    with pytest.raises(PruneRefused, match="HIP and CUDA code in one file"):
        find_container(elf, parse_targets("gfx906,sm_90"))
    found = find_container(elf, GFX906)
    assert found is not None
    assert [section.name for section in found[1]] == [".hip_fatbin"]


@pytest.mark.parametrize(
    ("version", "card"), [("9.0.10", "gfx90a"), ("10.3.15", "gfx103f"), ("11.0.0", "gfx1100")]
)
def test_override_names_its_card(version: str, card: str) -> None:
    assert target_of_override(version) == TargetId(card)
