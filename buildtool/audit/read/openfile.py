"""Files of image archives: opened if they are regular ones, listed, and read in place."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from buildtool.audit.tar.limits import LIMITS, Limits
from buildtool.audit.tar.tarwalk import TarReader
from buildtool.errors import DataError
from buildtool.files import reading

CHUNK = 1 << 18
FORMS = "an image archive is what `docker save IMAGE -o FILE` writes, or an OCI layout"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A regular file's descriptor. Raises DataError for anything else and for what can't be read."""
    with reading(path):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer doesn't block
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise DataError(f"{path} is not a file", FORMS)
        with reading(path, "check the disk"):
            yield handle
    finally:
        os.close(handle)


def files_below(root: Path) -> Iterator[str]:
    """Every regular file's path below a directory, links not followed. Raises OSError, naming the path."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{path}/")
                elif entry.is_file(follow_symlinks=False):
                    yield path


def headers_of(handle: int, *, place: str, limits: Limits = LIMITS) -> TarReader:
    """A reader of an open file's tar that passes over content without reading it."""
    size = os.fstat(handle).st_size

    def leap(distance: int) -> int:
        here = os.lseek(handle, 0, os.SEEK_CUR)
        return os.lseek(handle, min(here + distance, size), os.SEEK_SET) - here

    chunks = iter(partial(os.read, handle, 64 << 10), b"")
    return TarReader(chunks, place=place, limits=limits, leap=leap)


def span(handle: int, start: int, length: int) -> Iterator[bytes]:
    """A part of an open file in chunks, without moving its position."""
    at, end = start, start + length
    while chunk := os.pread(handle, min(CHUNK, end - at), at):
        at += len(chunk)
        yield chunk
