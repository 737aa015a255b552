"""What is at a path that a user typed: a file, a directory, a device and the like, or nothing."""

import errno
import stat
from enum import Enum
from pathlib import Path

from buildtool.errors import DataError

_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


def path_or_name(text: str) -> str:
    """The type of an argument that a path or an image's name may follow: shells complete it as a path."""
    return text


class Place(Enum):
    """What a path leads to, symbolic links followed."""

    NOTHING = "nothing"
    FILE = "a regular file"
    DIRECTORY = "a directory"
    CHARACTER_DEVICE = "a character device"
    BLOCK_DEVICE = "a block device"
    PIPE = "a named pipe"
    SOCKET = "a socket"


_PLACES = {
    stat.S_IFREG: Place.FILE,
    stat.S_IFDIR: Place.DIRECTORY,
    stat.S_IFCHR: Place.CHARACTER_DEVICE,
    stat.S_IFBLK: Place.BLOCK_DEVICE,
    stat.S_IFIFO: Place.PIPE,
    stat.S_IFSOCK: Place.SOCKET,
}


def place_at(path: Path) -> Place:
    """What is there. A name that no file can have leads to nothing.

    Raises DataError where that can't be determined, as below a directory that this user can't search.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno in _NOTHING:
            return Place.NOTHING
        raise DataError(
            f"can't read {path}: {error.strerror}", "check the path and its permissions"
        ) from error
    return _PLACES[stat.S_IFMT(mode)]
