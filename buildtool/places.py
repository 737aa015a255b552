"""What is at a path that a user typed: a file, a directory, a device and the like, or nothing."""

import errno
import os
import re
import stat
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from buildtool.errors import ConfigError
from buildtool.files import reading

ARCHIVE_NAME = re.compile(r"\.(whl|tar(\.\w+)?|tgz|tbz2?|txz|tzst|oci|zip|deb|rpm)$")
_CODE_NAME = re.compile(r"\.(so(\.\d+)*|o|a|co|hsaco|fatbin|bin|dat)$")
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
    with reading(path):
        try:
            return _PLACES[stat.S_IFMT(path.stat().st_mode)]
        except OSError as error:
            if error.errno in _NOTHING:
                return Place.NOTHING
            raise


def near(path: Path) -> Path:
    """The path as it is typed from the current directory, where it is below that."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


def refuse_overwriting(written: Sequence[Path], *, inputs: Sequence[str | Path]) -> None:
    """Refuse reports that would replace what this command reads, or one another. Raises ConfigError."""
    read = {os.path.realpath(path) for path in inputs}
    places = [os.path.realpath(path) for path in written]
    for path, place in zip(written, places, strict=True):
        if place_at(path) in (Place.FILE, Place.NOTHING) and (place in read or places.count(place) > 1):
            what = "is what this command reads" if place in read else "is named for two reports"
            raise ConfigError(f"{path} {what}", "write the report to another file")


def means_file(name: str) -> bool:
    """Whether a name with nothing at it was meant as a file, not as an image: by its beginning or ending.

    Images may be called so too (`x.tar` is a valid name): with its tag, `x.tar:latest` means the image.
    """
    return bool(name.startswith((".", "/", "~")) or _CODE_NAME.search(name) or ARCHIVE_NAME.search(name))
