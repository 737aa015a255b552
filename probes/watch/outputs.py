"""The files that a watch was asked to write: each of them another one."""

import os
import stat
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

from probes.errors import UsageError


def require_distinct(places: Mapping[str, Path | None]) -> None:
    """Options and the files that they name. Raises UsageError for one file under two of them.

    A device such as /dev/null may have several; names that don't exist yet are compared within their folders.
    """
    known = [(option, path, _identity(path)) for option, path in places.items() if path is not None]
    for (a, path, one), (b, _, other) in combinations(known, 2):
        if one is not None and one == other:
            raise UsageError(f"{a} and {b} are one file, {path}", f"name another file: {b} FILE")


def _identity(path: Path) -> tuple[object, ...] | None:
    """What two names of one file have in common; None for a character device."""
    place = Path(os.path.realpath(path))
    try:
        found = place.stat()
    except OSError:
        return *_identity_of_folder(place.parent), place.name
    return None if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)


def _identity_of_folder(folder: Path) -> tuple[object, ...]:
    try:
        found = folder.stat()
    except OSError:
        return (str(folder),)
    return found.st_dev, found.st_ino
