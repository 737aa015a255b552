"""The script that finishes a root file system, in a real shell: names are data, and only patterns match."""

import os
import subprocess
from pathlib import Path

import pytest

from buildtool.builder.rootfs import CUSTOMIZE, environment
from buildtool.model import Bootstrap

EVIL = ("x; touch evil", "$(touch evil)", "`touch evil`", "'\"", "-x", "a b", "END", "[z]")
TREE = (
    *("usr/include/x.h", "usr/lib/libx.a", "usr/lib/libx.so", "usr/lib/py/tests/t", "usr/lib/py/t"),
    *("var/log/a", "var/cache/debconf/x", "var/cache/ldconfig/x", "etc/hostname", "etc/apt/sources.list"),
)


@pytest.fixture(params=["plain", "a b'c\"d$(touch x)[z]*{\\"], ids=["plain", "hostile"])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    root = tmp_path / request.param / "root"
    for name in TREE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("content")
    return root


def customized(base: Bootstrap, tree: Path, tmp_path: Path) -> list[str]:
    """Run the script with a `chroot` that only writes its arguments down; gives them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "chroot").write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {tmp_path}/ran\n")
    (programs / "chroot").chmod(0o755)
    env = environment(base, {"PATH": f"{programs}:{os.environ['PATH']}"}, 7)
    subprocess.run(["sh", "-c", CUSTOMIZE, "exec", str(tree)], env=env, cwd=tmp_path, check=True)
    ran = tmp_path / "ran"
    return ran.read_text().split("\0")[:-1] if ran.exists() else []


def test_hostile_names_are_arguments_of_dpkg_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    base = Bootstrap("s", (), EVIL, (*EVIL, "usr/lib/*/tests"))
    assert customized(base, tree, tmp_path) == [".", "dpkg", "--purge", "--force-depends", "--", *EVIL]
    assert not list(tmp_path.rglob("evil"))
    assert not (tree / "usr/lib/py/tests").exists()
    assert (tree / "usr/lib/py/t").exists()


def test_only_what_a_pattern_names_is_cut(tree: Path, tmp_path: Path) -> None:
    base = Bootstrap("s", (), (), ("usr/lib/*/tests", "'\"", "x; rm -rf usr"))
    assert customized(base, tree, tmp_path) == []
    left = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    assert {"usr/lib/libx.so", "usr/lib/py/t"} <= left
    assert not {"usr/include/x.h", "usr/lib/libx.a", "usr/lib/py/tests/t", "var/log/a"} & left
    assert (tree / "etc/hostname").read_text() == ""
