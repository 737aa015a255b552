"""A root file system's tar depends on its packages alone, and making it touches no file of the host."""

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from buildtool.build import rootfs
from buildtool.core.errors import DataError

BEGUN, EPOCH = 2_000, 1_000
PACKAGED = ("usr/lib/libx.so", "usr/lib/py/t", "etc/passwd")


def member(name: str, content: bytes | None = b"content", **more: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(f"./{name}")
    info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
    info.size, info.mode, info.mtime = len(content or b""), 0o755 if content is None else 0o644, 500
    for key, value in more.items():
        setattr(info, key, value)
    return info, content or b""


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, b"", type=kind, linkname=target)


@pytest.fixture
def settled(tmp_path: Path) -> Callable[..., Path]:
    """Settles a tar of these members, besides those of packages that are always there."""

    def make(*members: tuple[tarfile.TarInfo, bytes], cut: tuple[str, ...] = (), name: str = "a") -> Path:
        raw, out = tmp_path / f"{name}.raw", tmp_path / f"{name}.tar"
        names = {"encoding": "utf-8", "errors": "surrogateescape"}
        with tarfile.TarFile(raw, "w", format=tarfile.PAX_FORMAT, **names) as tar:
            for info, content in (member("", None), *map(member, PACKAGED), *members):
                tar.addfile(info, io.BytesIO(content))
        rootfs.write_clean_tar(raw, out, cut=cut, begun=BEGUN, epoch=EPOCH)
        return out

    return make


def read(path: Path) -> Mapping[str, tarfile.TarInfo]:
    with tarfile.open(path, "r:") as tar:
        return {info.name.removeprefix("./"): info for info in tar}


@pytest.mark.parametrize("name", rootfs.EMPTIED)
def test_a_link_where_an_empty_file_belongs_leads_to_no_file_of_the_host(
    name: str, settled: Callable[..., Path], tmp_path: Path
) -> None:
    """`etc/hosts -> /victim` emptied that file, and systemd-resolved's link made bootstraps fail."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for target in (str(victim), "../run/systemd/resolve/stub-resolv.conf"):
        found = read(settled(link(name, target)))[name]
        assert (found.type, found.size, found.mode, found.uid, found.mtime) == (
            tarfile.REGTYPE,
            0,
            0o644,
            0,
            EPOCH,
        )
    assert victim.read_text() == "precious"


def test_what_the_host_decides_about_a_member_is_not_in_the_tar(settled: Callable[..., Path]) -> None:
    """apt's folders belong to 0 or 42 by the modes above; names of the host's files come with their modes."""
    label = {"SCHILY.xattr.security.selinux": "unconfined", "SCHILY.xattr.user.x": "1"}
    one = settled(
        member("var/cache/apt/archives/partial", None, uid=42, mode=0o700),
        member("var/lib/apt/lists/partial", None, uid=42, mode=0o700),
        member("etc/hostname", b"host-a\n", mode=0o755),
        member("etc/new", mtime=BEGUN + 5, uname="root", gname="root", pax_headers=label),
        name="one",
    )
    two = settled(
        member("etc/hostname", b"host-b\n", mode=0o600),
        member("etc/new", mtime=BEGUN + 90),
        member("var/lib/apt/lists/partial", None, mode=0o700),
        name="two",
    )
    assert one.read_bytes() == two.read_bytes()


def test_packages_own_owners_modes_times_and_capabilities_stay(settled: Callable[..., Path]) -> None:
    capability = {rootfs.CAPABILITY: "\x01\x00\x00\x02"}
    found = read(settled(member("usr/bin/ping", mode=0o4755, uid=7, gid=8, pax_headers=capability)))[
        "usr/bin/ping"
    ]
    assert (found.mode, found.uid, found.gid, found.mtime) == (0o4755, 7, 8, 500)
    assert found.pax_headers[rootfs.CAPABILITY] == "\x01\x00\x00\x02"


@pytest.mark.parametrize("begun", [BEGUN, EPOCH - 400])
def test_times_of_a_bootstrap_are_those_of_the_catalog_even_one_in_the_future(
    tmp_path: Path, begun: int
) -> None:
    with tarfile.open(tmp_path / "raw", "w:") as tar:
        tar.addfile(member("new", b"", mtime=begun + 1)[0])
    rootfs.write_clean_tar(tmp_path / "raw", tmp_path / "out", cut=(), begun=begun, epoch=EPOCH)
    assert read(tmp_path / "out")["new"].mtime == EPOCH


def test_only_what_a_pattern_names_is_cut(settled: Callable[..., Path]) -> None:
    unwanted = (
        "usr/include/x.h",
        "usr/lib/libx.a",
        "var/log/a",
        "var/cache/debconf/x",
        "usr/lib/py/tests/t/u",
    )
    tar = settled(*map(member, unwanted), cut=("usr/lib/*/tests", "usr/share/[!a]*", "'\"", "x; rm -rf usr"))
    assert set(read(tar)) == {".", *PACKAGED, *rootfs.EMPTIED}


def test_a_hard_link_to_what_was_cut_keeps_the_content(settled: Callable[..., Path]) -> None:
    tar = settled(
        member("usr/bin/perl", b"#!perl"),
        link("usr/bin/perl5", "./usr/bin/perl", tarfile.LNKTYPE),
        link("usr/lib/p", "./usr/bin/perl", tarfile.LNKTYPE),
        link("usr/lib/q", "./usr/bin/perl", tarfile.LNKTYPE),
        cut=("usr/bin/perl*",),
    )
    found = read(tar)
    with tarfile.open(tar) as opened:
        for name in ("usr/lib/p", "usr/lib/q"):
            file = opened.extractfile(f"./{name}")
            assert file
            assert file.read() == b"#!perl"
    assert found["usr/lib/q"].linkname == "./usr/lib/p"
    assert "usr/bin/perl5" not in found


def test_a_hard_link_finds_what_was_cut_however_its_path_is_written(settled: Callable[..., Path]) -> None:
    """`usr/bin/perl` isn't `./usr/bin/perl`: the link led nowhere, and the engine refused the tar."""
    tar = settled(
        member("usr/bin/perl", b"#!perl", mode=0o755, uid=7),
        link("usr/bin/perl5", "usr//bin/./perl", tarfile.LNKTYPE),
        link("usr/lib/p", "/usr/bin/perl5", tarfile.LNKTYPE),
        member("dev/null", b"", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        link("opt/null", "dev/null", tarfile.LNKTYPE),
        cut=("usr/bin/perl*", "dev/null"),
    )
    found = read(tar)
    assert (found["usr/lib/p"].type, found["usr/lib/p"].uid) == (tarfile.REGTYPE, 7)
    device = found["opt/null"]
    assert (device.type, device.devmajor, device.devminor) == (tarfile.CHRTYPE, 1, 3)
    with tarfile.open(tar) as opened:
        file = opened.extractfile("./usr/lib/p")
        assert file
        assert file.read() == b"#!perl"


def test_names_and_attributes_are_bytes_whatever_the_hosts_locale(
    settled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = (
        member("usr/share/a\nb"),
        member("usr/share/caf\u00e9"),
        member("usr/share/\udce9\u00e9"),
        link("usr/share/link", "\udcff\u00e9"),
        # CAP_SETUID, whose byte 0x80 isn't UTF-8
        member("usr/bin/newuidmap", pax_headers={rootfs.CAPABILITY: "\x01\x00\x00\x02\udc80\x00"}),
    )
    one = settled(*odd, name="one")
    raw = one.with_name("one.raw")
    monkeypatch.setattr(tarfile, "ENCODING", "iso8859-1")
    two = one.with_name("two.tar")
    monkeypatch.setattr(tarfile.TarFile, "encoding", "iso8859-1")
    rootfs.write_clean_tar(raw, two, cut=(), begun=BEGUN, epoch=EPOCH)
    assert one.read_bytes() == two.read_bytes()
    monkeypatch.undo()
    with tarfile.open(two, encoding="utf-8", errors="surrogateescape") as opened:
        names = {info.name.removeprefix("./") for info in opened}
        capability = opened.getmember("./usr/bin/newuidmap").pax_headers[rootfs.CAPABILITY]
    assert {info.name.removeprefix("./") for info, _ in odd} <= names
    assert capability.encode(errors="surrogateescape") == b"\x01\x00\x00\x02\x80\x00"


def test_patterns_that_match_nothing_are_named(settled: Callable[..., Path], tmp_path: Path) -> None:
    settled(member("usr/share/x/y"))
    patterns = ("usr/share/x", "usr/share/X", "etc/hosts", "usr/*/passwd")
    found = rootfs.write_clean_tar(tmp_path / "a.raw", tmp_path / "b", cut=patterns, begun=BEGUN, epoch=EPOCH)
    assert found == ["usr/share/X", "etc/hosts", "usr/*/passwd"]


def test_a_tar_cut_short_becomes_no_root_file_system(settled: Callable[..., Path], tmp_path: Path) -> None:
    whole = settled(member("usr/x", bytes(5000)))
    for bytes_left in (0, 512, whole.stat().st_size - 11_000):
        (tmp_path / "short").write_bytes(whole.read_bytes()[:bytes_left])
        with pytest.raises(DataError):
            rootfs.write_clean_tar(tmp_path / "short", tmp_path / "out", cut=(), begun=BEGUN, epoch=EPOCH)
