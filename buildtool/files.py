"""Buildtool's way to read and write files (by `probes.shared.files`), with its failures as our errors."""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from buildtool.errors import DataError, EnvironmentMissing, ToolError
from probes.shared import files, locks

T = TypeVar("T")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file next to `path` to write into; it replaces `path` if the block succeeds.

    Otherwise it is removed. The block must write into exactly that file and not rename another one over it.
    Symbolic links are followed; what isn't a regular file (a device, a FIFO, /dev/stdout) is written into at
    the end of the block. Raises EnvironmentMissing when the disk is full, DataError when the place can't be
    written.
    """
    with _translated(path), files.replacing(path) as partial:
        yield partial


@contextmanager
def reading(path: Path | str, way_out: str = "check the path and its permissions") -> Iterator[None]:
    """Raises DataError, which names the path and the way out, where the block can't read it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}", way_out) from error


@contextmanager
def scratch(directory: Path | None = None) -> Iterator[Path]:
    """A directory for this block only, below `directory` or the system's temporary one; removed afterwards.

    Raises as `replacing` does where it can't be made, EnvironmentMissing for a disk that the block fills.
    """
    place = directory or Path("a temporary directory")
    with contextlib.ExitStack() as held:
        with _translated(place):
            path = held.enter_context(files.scratch(directory))
        with _full_disk(place):
            yield path


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a directory or lock file against other threads and processes; `on_wait` is called before a wait.

    Raises DataError when it can't be made.
    """
    with contextlib.ExitStack() as held:
        with _translated(path):
            held.enter_context(locks.locked(path, on_wait))
        yield


def link_over(existing: Path, path: Path) -> None:
    """Make `path` another name of the file `existing`, in one step. Raises as `replacing` does."""
    with _translated(path):
        files.link_over(existing, path)


def open_lock(path: Path) -> int:
    """A descriptor with a shared lock on `path`; the caller closes it. Raises as `replacing` does."""
    with _translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = locks.open_lock(path, shared=True)
    assert descriptor is not None  # a shared lock is waited for
    return descriptor


@contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Whether nobody holds a lock on the file `path`: then it is held for this block only."""
    with _translated(path):
        descriptor = locks.open_lock(path, shared=False)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a whole UTF-8 file or nothing. Raises as `replacing` does."""
    with _translated(path):
        files.write_text(path, text)


def kept(path: Path, parse: Callable[[str], T]) -> T | None:
    """What an earlier run stored in a cache; None where it is missing or damaged and must be made again.

    `parse` raises ValueError, LookupError, TypeError, AttributeError or a ToolError for a damaged text.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ToolError):
        return None


def discard(path: Path) -> None:
    """Remove a cache's entry at `path`, even if it is a directory. Raises as `replacing` does."""
    with _translated(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def require_writable(directory: Path, way_out: str) -> None:
    """Refuse, before long work, a directory that can't be made or written. Raises DataError."""
    with _translated(directory):
        place = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise DataError(f"can't write into {place}", way_out)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def require_sha256(path: Path, sha256: str, what: str, *, way_out: str) -> None:
    """Read a cache's file once and compare. Raises DataError when it is damaged, having removed it."""
    if not path.is_file() or sha256_of(path) != sha256:
        discard(path)
        raise DataError(f"{what} {path.name} is corrupt (not {sha256[:12]}...); removed it", way_out)


def free_bytes(path: Path) -> int:
    """Bytes that the file system under `path` (or its nearest visible parent) still has for this process."""
    for place in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    raise DataError(f"can't find out how much space is left at {path}", "check the path and its permissions")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        with _full_disk(path):
            yield
    except OSError as error:
        raise DataError(
            f"can't write {path}: {error.strerror or error}", "check the path and its permissions"
        ) from error


@contextmanager
def _full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentMissing(
                f"no space left while writing {path}", "free some space and run the same command again"
            ) from error
        raise
