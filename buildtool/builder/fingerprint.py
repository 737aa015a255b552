"""Identifies this tool by its own source files: results of another version are not reused."""

import functools
import hashlib
from pathlib import Path

PACKAGES = tuple(Path(__file__).parents[2] / name for name in ("buildtool", "probes"))


@functools.cache
def tool_fingerprint() -> str:
    """SHA-256 over every file of both programs: between releases the version number stays the same."""
    return fingerprint(PACKAGES)


def fingerprint(folders: tuple[Path, ...]) -> str:
    """SHA-256 over names and contents of the sources below `folders`."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = f"{folder.name}/{path.relative_to(folder)}"
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest()
