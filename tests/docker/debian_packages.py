"""Debian's packages, unpacked into a folder and not installed: programs that only tests need."""

import fcntl
import os
import subprocess
from pathlib import Path


def unpacked(folder: Path, *packages: str) -> Path:
    """The root of a tree with the files of these packages; none of their scripts runs."""
    folder.mkdir(parents=True, exist_ok=True)
    for words in (["update"], ["download", *packages]):
        done = apt_get(*words, folder=folder)
        assert done.returncode == 0, done.stderr
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "root")], check=True)
    return folder / "root"


def apt_get(*words: str, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run it when no test of any checkout does: it doesn't wait for another one, it fails."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    lock = os.open("/var/lib/apt/lists", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return subprocess.run(
            ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(lock)
