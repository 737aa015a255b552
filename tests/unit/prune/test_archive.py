"""Archives are pruned part by part; what stays of a tar is the very bytes that were there."""

import io
import tarfile
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from gpucode.maker import Spec, bundles, make_library

from buildtool.core.errors import DataError
from buildtool.gpucode.scan import scan_file
from buildtool.gpucode.source import Source, TargetMissing
from buildtool.gpucode.target import TargetId, parse_targets, served_targets
from buildtool.prune.archives import archive_targets, prune_tar, prune_wheel
from buildtool.prune.manifest import TreeResult

LIBRARY = make_library(Spec(bundles(["gfx906", "gfx803", "gfx1100"]))).data
STUBBORN = make_library(Spec(bundles(["gfx906", "gfx803"]), interpreter=True)).data
GFX906 = parse_targets("gfx906")
XATTR = {"SCHILY.xattr.security.capability": "\x01\x02é"}


@dataclass
class Part:
    """A member: content, or where a link leads."""

    path: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    to: str = ""
    mtime: float = 1000.25
    pax: tuple[tuple[str, str], ...] = ()


def make(path: Path, parts: Iterable[Part], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for part in parts:
            info = tarfile.TarInfo(part.path)
            info.size, info.type, info.linkname = len(part.data), part.kind, part.to
            info.mtime, info.mode, info.uid, info.gid = part.mtime, 0o4751, 17, 42
            info.uname, info.pax_headers = "someone", dict(part.pax)
            tar.addfile(info, io.BytesIO(part.data))
    return path


def members(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return {info.name: info for info in tar}


def content(path: Path, name: str) -> bytes:
    with tarfile.open(path) as tar:
        file = tar.extractfile(name)
        assert file
        return file.read()


def targets_of(data: bytes) -> set[str]:
    return set(scan_file(Source.of_bytes(data)))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    parts = [
        Part("./", kind=tarfile.DIRTYPE),
        Part("./lib/libmath.so.1", LIBRARY, pax=tuple(XATTR.items())),
        Part("./lib/libmath.so", kind=tarfile.SYMTYPE, to="libmath.so.1"),
        Part("./lib/same.so", kind=tarfile.LNKTYPE, to="./lib/libmath.so.1"),
        Part("./bin/program", STUBBORN),
        Part("./lib/library/Kernels_gfx803.co", b"foreign"),
        Part("./lib/library/Kernels_gfx906.co", b"ours"),
        Part("./lib/library/" + "x" * 120 + ".txt", b"long name"),
        Part("./etc/passwd", b"root"),
    ]
    return make(tmp_path / "whole.tar", parts)


def pruned(whole: Path, targets: str = "gfx906") -> tuple[Path, TreeResult]:
    out = whole.with_name(f"{targets}.tar")
    return out, prune_tar(whole, out, parse_targets(targets))


def test_libraries_are_cut_foreign_files_go_and_the_rest_stays(whole: Path) -> None:
    out, result = pruned(whole)
    assert targets_of(content(out, "./lib/libmath.so.1")) == {"gfx906"}
    assert set(members(whole)) - set(members(out)) == {"./lib/library/Kernels_gfx803.co"}
    assert [item.path for item in result.deleted] == ["lib/library/Kernels_gfx803.co"]
    assert [item.path for item in result.pruned] == ["lib/libmath.so.1"]
    lost = whole.stat().st_size - out.stat().st_size
    assert abs(lost - result.saved_bytes) < 3 * tarfile.RECORDSIZE


def test_owner_mode_time_attributes_and_links_are_those_of_the_original(whole: Path) -> None:
    out, _ = pruned(whole)
    before, after = members(whole), members(out)
    for name, info in after.items():
        old = before[name]
        for key in ("mode", "uid", "gid", "uname", "mtime", "type", "linkname", "pax_headers"):
            assert getattr(info, key) == getattr(old, key), (name, key)
    assert content(out, "./lib/same.so") == content(out, "./lib/libmath.so.1")


def test_a_library_that_cannot_be_cut_stays_whole_and_is_listed(whole: Path) -> None:
    out, result = pruned(whole)
    assert content(out, "./bin/program") == STUBBORN
    assert [item.path for item in result.refused] == ["bin/program"]


def test_pruning_is_reproducible_and_idempotent(whole: Path) -> None:
    first, _ = pruned(whole)
    bytes_of_first = first.read_bytes()
    second, _ = pruned(whole)
    assert second.read_bytes() == bytes_of_first
    again = whole.with_name("again.tar")
    result = prune_tar(first, again, GFX906)
    assert again.read_bytes() == bytes_of_first
    assert not result.changed


def test_two_steps_equal_one(whole: Path) -> None:
    both, _ = pruned(whole, "gfx906,gfx803")
    out = whole.with_name("then.tar")
    prune_tar(both, out, GFX906)
    assert out.read_bytes() == pruned(whole)[0].read_bytes()


def test_the_targets_of_an_archive_are_those_of_names_code_and_files_that_cannot_be_cut(
    whole: Path, tmp_path: Path
) -> None:
    had = archive_targets(whole, folder=tmp_path)
    assert {code.processor for code in had} == {"gfx906", "gfx803", "gfx1100"}
    asked = parse_targets("gfx906,gfx1030,gfx1200")
    assert served_targets(had, asked, strict=False) == parse_targets("gfx906")
    with pytest.raises(TargetMissing, match="no code for gfx1030, gfx1200, but"):
        served_targets(had, asked, strict=True)
    family = [TargetId("gfx11-generic")]
    assert served_targets(family, parse_targets("gfx1103"), strict=True) == parse_targets("gfx1103")


def test_a_foreign_file_that_a_link_or_another_name_needs_stays(tmp_path: Path) -> None:
    parts = [
        Part("lib", kind=tarfile.SYMTYPE, to="usr/lib"),
        Part("usr/lib/a_gfx803.co", b"linked to"),
        Part("usr/lib/default.co", kind=tarfile.SYMTYPE, to="/lib/a_gfx803.co"),
        Part("usr/lib/b_gfx803.co", b"two names"),
        Part("usr/lib/fallback.co", kind=tarfile.LNKTYPE, to="usr/lib/b_gfx803.co"),
        Part("usr/lib/c_gfx803.co", b"both foreign"),
        Part("usr/lib/d_gfx803.co", kind=tarfile.LNKTYPE, to="usr/lib/c_gfx803.co"),
        Part("usr/lib/e_gfx803.co", kind=tarfile.SYMTYPE, to="a_gfx803.co"),
        Part("loop", kind=tarfile.SYMTYPE, to="loop"),
    ]
    out, result = pruned(make(tmp_path / "links.tar", parts))
    gone = {"usr/lib/c_gfx803.co", "usr/lib/d_gfx803.co", "usr/lib/e_gfx803.co"}
    assert {item.path for item in result.deleted} == gone
    assert result.saved_bytes == len(b"both foreign")
    assert set(members(out)) == {part.path for part in parts} - gone


def test_late_times_are_capped_files_dropped_and_added(whole: Path) -> None:
    out = whole.with_name("image.tar")
    prune_tar(
        whole,
        out,
        GFX906,
        latest=900,
        dropped=("etc/passwd",),
        added=lambda result: {"opt/list": str(len(result.pruned)).encode()},
    )
    found = members(out)
    assert {info.mtime for info in found.values()} == {900}
    assert "./etc/passwd" not in found
    assert content(out, "opt/list") == b"1"
    assert found["./lib/libmath.so.1"].pax_headers == XATTR


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_other_kinds_of_tar_are_read(tmp_path: Path, form: int) -> None:
    whole = make(tmp_path / "whole.tar", [Part("lib.so", LIBRARY, mtime=7), Part("x", b"y", mtime=7)], form)
    out, _ = pruned(whole)
    assert targets_of(content(out, "lib.so")) == {"gfx906"}
    assert content(out, "x") == b"y"


@pytest.mark.parametrize("data", [b"no tar", b"\x1f\x8b compressed"])
def test_what_is_no_plain_tar_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(data * 200)
    with pytest.raises(DataError, match="not a plain tar"):
        pruned(path)


def test_no_flipped_header_byte_makes_members_vanish(whole: Path) -> None:
    good = whole.read_bytes()
    infos = list(members(whole).values())
    starts = [(info.offset, info.offset_data) for info in infos]
    for number, (start, content_start) in enumerate(starts):
        for at in (start, start + 30, start + 124, start + 148, start + 156, content_start - 512):
            bad = bytearray(good)
            bad[at] ^= 0x01
            whole.write_bytes(bad)
            with pytest.raises(DataError, match="damaged") as caught:
                pruned(whole)
            assert "again" in caught.value.hint, number


def test_no_cut_makes_members_vanish(whole: Path) -> None:
    good = whole.read_bytes()
    starts = [info.offset for info in members(whole).values()]
    last = list(members(whole).values())[-1]
    end = last.offset_data + 512
    for length in (*starts[1:], *(start + 512 for start in starts), *(start + 700 for start in starts), end):
        whole.write_bytes(good[:length])
        with pytest.raises(DataError):
            pruned(whole)


def test_a_lone_zero_block_does_not_end_an_archive(whole: Path) -> None:
    good = whole.read_bytes()
    start = list(members(whole).values())[3].offset
    whole.write_bytes(good[:start] + bytes(512) + good[start:])
    with pytest.raises(DataError):
        pruned(whole)


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "torch-2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        library = zipfile.ZipInfo("torch/lib/libmath.so", (2024, 1, 2, 3, 4, 6))
        library.external_attr = 0o100755 << 16
        file.writestr(library, LIBRARY)
        file.writestr("torch/lib/library/a_gfx803.dat", b"foreign")
        file.writestr("torch/lib/library/a_gfx906.dat", b"ours")
        file.writestr("torch-2.dist-info/RECORD", b"torch/lib/libmath.so,,\n")
    return path


def test_a_wheel_is_pruned_like_a_tar(wheel: Path) -> None:
    out = wheel.with_name("small.whl")
    result = prune_wheel(wheel, out, GFX906)
    with zipfile.ZipFile(out) as file:
        assert targets_of(file.read("torch/lib/libmath.so")) == {"gfx906"}
        assert "torch/lib/library/a_gfx803.dat" not in file.namelist()
        assert file.getinfo("torch/lib/libmath.so").external_attr >> 16 == 0o100755
        assert file.getinfo("torch/lib/libmath.so").date_time == (2024, 1, 2, 3, 4, 6)
    assert [item.path for item in result.pruned] == ["torch/lib/libmath.so"]
    assert sorted(path.name for path in wheel.parent.iterdir()) == sorted((wheel.name, out.name))


def test_the_same_wheel_gives_the_same_bytes(wheel: Path) -> None:
    first, second = wheel.with_name("a.whl"), wheel.with_name("b.whl")
    prune_wheel(wheel, first, GFX906)
    prune_wheel(wheel, second, GFX906)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.9, 0.999])
def test_a_damaged_wheel_is_an_error_and_no_traceback(wheel: Path, share: float) -> None:
    good = wheel.read_bytes()
    at = int(len(good) * share)
    for damaged in (good[:at], good[:at] + bytes([good[at] ^ 0x55]) + good[at + 1 :]):
        wheel.write_bytes(damaged)
        with suppress(DataError):
            archive_targets(wheel, folder=wheel.parent)
        with suppress(DataError):  # the flipped byte may be one that nobody reads
            prune_wheel(wheel, wheel.with_name("out.whl"), GFX906)


def test_what_is_no_wheel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(DataError, match="not a wheel"):
        prune_wheel(path, tmp_path / "y.whl", GFX906)
    with pytest.raises(DataError, match="not a wheel"):
        archive_targets(path, folder=tmp_path)
