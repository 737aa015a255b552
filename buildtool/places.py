"""What is at a path that a user typed: a file, a directory, something else, or nothing."""

import errno
import stat
from enum import Enum
from pathlib import Path

from buildtool.errors import DataError

_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


class Place(Enum):
    """What a path leads to, symbolic links followed."""

    NOTHING = "nothing"
    FILE = "a regular file"
    DIRECTORY = "a directory"
    OTHER = "a device, socket or pipe"


def place_at(path: Path) -> Place:
    """What is there. A name that no file can have leads to nothing.

    Raises DataError where that can't be told, as below a directory that this user can't search.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno in _NOTHING:
            return Place.NOTHING
        raise DataError(
            f"can't read {path}: {error.strerror}", "check the path and its permissions"
        ) from error
    if stat.S_ISDIR(mode):
        return Place.DIRECTORY
    return Place.FILE if stat.S_ISREG(mode) else Place.OTHER
