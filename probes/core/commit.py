"""The commit that this program's files are of: what a build noted in the package, else what git's files say.

git isn't run: it may be missing, and refuses a checkout that belongs to another user. Standard library alone,
because setup.py imports this too.
"""

import re
from pathlib import Path

NOTE = "buildtool/commit.txt"  # in a wheel and in an sdist; empty where the build knew no commit
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")  # SHA-1, or SHA-256
_MOST_BYTES = 16 << 20  # of packed-refs: a line of some 60 bytes for each name


def commit_of(root: Path) -> str | None:
    """The commit of the program whose packages are in the folder `root`; None where it isn't known.

    A note comes before git's files: a package may be installed into a folder that is a checkout of another
    project.
    """
    try:
        note = root / NOTE
        if note.is_file():
            return _as_hash(_text(note))
        folder = _git_folder(root / ".git")
        return _head(folder) if folder else None
    except (OSError, ValueError):
        return None


def _git_folder(place: Path) -> Path | None:
    """The folder with HEAD: `.git` itself or, in a work tree and a submodule, the one that it names."""
    if place.is_dir():
        return place
    if not place.is_file():
        return None
    named = _text(place).removeprefix("gitdir:").strip()
    return place.parent / named


def _head(folder: Path) -> str | None:
    """The commit of HEAD: a hash, or a branch in a file of its own or in the list of packed ones."""
    head = _text(folder / "HEAD").strip()
    if not head.startswith("ref:"):
        return _as_hash(head)
    name = head.removeprefix("ref:").strip()
    if not name.startswith("refs/") or ".." in name:
        return None
    pointer = folder / "commondir"  # of a work tree: branches are in the main one
    common = folder / _text(pointer).strip() if pointer.is_file() else folder
    for place in (folder / name, common / name):
        if place.is_file():
            return _as_hash(_text(place))
    for line in _text(common / "packed-refs").splitlines():
        commit, _, known = line.partition(" ")
        if known.strip() == name:
            return _as_hash(commit)
    return None


def _as_hash(text: str) -> str | None:
    text = text.strip()
    return text if _HASH.fullmatch(text) else None


def _text(path: Path) -> str:
    """A file of git's. Raises OSError, and ValueError for one that isn't text."""
    with path.open("rb") as file:
        return file.read(_MOST_BYTES).decode()
