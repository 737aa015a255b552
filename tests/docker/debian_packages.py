"""Debian's packages, unpacked into a folder and not installed: programs that only tests need."""

import subprocess
from pathlib import Path


def unpacked(folder: Path, *packages: str) -> Path:
    """The root of a tree with the files of these packages; none of their scripts runs."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "-qq", "update"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["apt-get", "-qq", "download", *packages], cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "root")], check=True)
    return folder / "root"
