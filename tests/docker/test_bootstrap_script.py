"""The script that runs in a fresh tree on the host, in a real shell: names are data, links lead nowhere."""

import os
import subprocess
from pathlib import Path

import pytest

from buildtool.build.rootfs import environment, mmdebstrap_command
from buildtool.core.model import Bootstrap

EVIL = ("x; touch evil", "$(touch evil)", "`touch evil`", "'\"", "-x", "a b", "END", "[z]")


@pytest.fixture(params=["plain", "a b'c\"d$(touch x)[z]*{\\"], ids=["plain", "hostile"])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    root = tmp_path / request.param / "root"
    (root / "etc").mkdir(parents=True)
    return root


def customized(base: Bootstrap, tree: Path, tmp_path: Path) -> list[str]:
    """Run the hook with a `chroot` that only writes its arguments down; gives them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "chroot").write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > {tmp_path}/ran\n")
    (programs / "chroot").chmod(0o755)
    option = "--customize-hook="
    command = mmdebstrap_command(base, Path("out.tar"), None)
    hook = next(word.removeprefix(option) for word in command if word.startswith(option))
    env = environment(base, {"PATH": f"{programs}:{os.environ['PATH']}"}, 7)
    subprocess.run(["sh", "-c", hook, "exec", str(tree)], env=env, cwd=tmp_path, check=True)
    ran = tmp_path / "ran"
    return ran.read_text().split("\0")[:-1] if ran.exists() else []


def test_hostile_names_are_arguments_of_dpkg_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    asked = customized(Bootstrap("s", (), EVIL, EVIL), tree, tmp_path)
    assert asked == [str(tree), "dpkg", "--purge", "--force-depends", "--", *sorted(EVIL)]
    assert not list(tmp_path.rglob("evil"))


def test_a_link_in_the_tree_makes_the_hook_change_no_file_of_the_host(tree: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (victim / "log").mkdir(parents=True)
    (victim / "cache/debconf").mkdir(parents=True)
    files = [victim / name for name in ("hosts", "log/a", "cache/debconf/x")]
    for file in files:
        file.write_text("precious")
    (tree / "etc/hosts").symlink_to(victim / "hosts")
    (tree / "var").symlink_to(victim)
    (tree / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    (tree / "etc/apt").mkdir()
    (tree / "usr/lib").mkdir(parents=True)
    customized(Bootstrap("s", ()), tree, tmp_path)
    assert [file.read_text() for file in files] == ["precious"] * 3
