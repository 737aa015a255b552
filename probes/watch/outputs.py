"""The files that a watch was asked to write: each of them another one, and checked before it begins."""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path

from probes.errors import ReportError, UsageError
from probes.shared import files

_REASONS = {
    errno.ENXIO: "nobody reads this pipe",
    errno.EAGAIN: "its reader doesn't keep up",
    errno.EPIPE: "its reader has gone",
}


def reason(error: OSError) -> str:
    """Why a file can't be written, as a user sees it."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


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


@contextmanager
def report_place(path: Path | None) -> Iterator[Path | None]:
    """Where to write the report at the end of the block. Raises ReportError now where that can't be."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(files.reserved(path)) if path else None
        except OSError as error:
            raise ReportError(
                f"can't write {path}: {reason(error)}", "choose a place that can be written: --report FILE"
            ) from error
        yield place
