"""A wheel in a layer is what `pip install` makes of it, with the image's interpreter."""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from buildtool.build.wheel_layer import UNNEEDED, install_wheels
from buildtool.image.layer_writer import LayerWriter, TarMembers
from buildtool.image.streams import Form, decompressed

EPOCH = 1_767_225_600
FILES = {
    "pkg/__init__.py": b"x = 1\n",
    "pkg/include/a.h": b"int a;",
    "pkg/tests/test_a.py": b"assert 0",
    "pkg/lib/native.so": b"\x7fELF" + bytes(2_000_000),
    "easy.pth": b"import pkg\n",
    "pkg-1.0.data/scripts/tool": b"#!python\nprint(1)\n",
    "pkg-1.0.data/scripts/shell": b"#!/bin/sh\necho 1\n",
    "pkg-1.0.data/data/etc/pkg.conf": b"a=1\n",
    "pkg-1.0.data/purelib/extra.py": b"y = 2\n",
    "pkg-1.0.dist-info/entry_points.txt": b"[console_scripts]\npkg = pkg:main\n",
}


def wheel_of(folder: Path) -> Path:
    info = "pkg-1.0.dist-info"
    content = FILES | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{each},,\n" for each in [*content, f"{info}/RECORD"]).encode()
    path = folder / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, data in (content | {f"{info}/RECORD": record}).items():
            entry = zipfile.ZipInfo(each, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return path


def test_a_wheel_is_installed_as_pip_installs_it(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path)
    target = tmp_path / "prefix"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--no-deps", "--no-index"]
    subprocess.run([*command, "--prefix", str(target), str(wheel)], check=True, capture_output=True)
    [site] = target.glob("lib/python*/site-packages")
    by_pip = {}
    for path in target.rglob("*"):
        if path.is_file():
            name = f"lib/{path.relative_to(site)}" if path.is_relative_to(site) else None
            by_pip[name or str(path.relative_to(target))] = path.read_bytes()
    out = io.BytesIO()
    layer = TarMembers(LayerWriter(out), EPOCH)
    install_wheels({wheel.name: wheel}, layer)
    layer.end()
    plain = b"".join(decompressed(iter([out.getvalue()]), Form.ZSTD, place="x"))
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        ours = {i.name.removeprefix("opt/weir/"): tar.extractfile(i).read() for i in tar if i.isreg()}  # type: ignore[union-attr]
    ours = {
        name.replace("share/", "", 1) if name.startswith("share/") else name: data
        for name, data in ours.items()
    }
    about_pip = {
        f"lib/pkg-1.0.dist-info/{name}" for name in ("INSTALLER", "RECORD", "REQUESTED", "direct_url.json")
    }
    scripts = {"bin/pkg", "bin/tool"}
    unneeded = {name for name in by_pip if UNNEEDED.search(name) or "__pycache__" in name}
    assert ours.keys() - about_pip == by_pip.keys() - about_pip - unneeded
    for name in ours.keys() - about_pip - scripts:
        assert ours[name] == by_pip[name], name
    for name in scripts:
        assert ours[name].startswith(b"#!/usr/bin/env python3\n")
    assert ours["bin/tool"].partition(b"\n")[2] == by_pip["bin/tool"].partition(b"\n")[2]
    assert ours["lib/pkg-1.0.dist-info/INSTALLER"] == b"weir\n"
