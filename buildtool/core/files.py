"""Reads and writes files by `probes.core.files`, with failures as our errors; paths on the command line."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TypeVar

from buildtool.core.errors import ConfigError, DataError, EnvironmentMissing, ToolError
from probes.core import files

T = TypeVar("T")

ARCHIVE_NAME = re.compile(r"\.(whl|tar(\.\w+)?|tgz|tbz2?|txz|tzst|oci|zip|deb|rpm)$")
_CODE_NAME = re.compile(r"\.(so(\.\d+)*|o|a|co|hsaco|fatbin|bin|dat)$")
_LARGE_BYTES = 1 << 24  # a hundredth of a second
_TICK_NS = 20_000_000  # more than the kernel's clock of files takes from one time to the next
_NOTHING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})


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
            held.enter_context(files.locked(path, on_wait))
        yield


def link_over(existing: Path, path: Path) -> None:
    """Make `path` another name of the file `existing`, in one step. Raises as `replacing` does."""
    with _translated(path):
        files.link_over(existing, path)


def open_lock(path: Path) -> int:
    """A descriptor with a shared lock on `path`; the caller closes it. Raises as `replacing` does."""
    with _translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = files.open_lock(path, shared=True)
    assert descriptor is not None  # a shared lock is waited for
    return descriptor


@contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Whether nobody holds a lock on the file `path`: then it is held for this block only."""
    with _translated(path):
        descriptor = files.open_lock(path, shared=False)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a whole UTF-8 file or nothing. Raises as `replacing` does."""
    with _translated(path):
        files.write_text(path, text)


def read_cached(path: Path, parse: Callable[[str], T]) -> T | None:
    """A cached file as `parse` reads it; None where it is missing or damaged, and must be made again.

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
    """Hex SHA-256 of a file's content.

    A large file is read once by a process, as long as nothing has changed it since: its inode, its size, and
    the time of its last change, which no program sets at will.
    """
    with path.open("rb") as handle:
        status = os.fstat(handle.fileno())
        if status.st_size < _LARGE_BYTES:
            return hashlib.file_digest(handle, "sha256").hexdigest()
        if time.time_ns() - status.st_ctime_ns < _TICK_NS:  # a change now would have this time, too
            time.sleep(_TICK_NS / 1e9)
        key = _identity(handle.fileno())
        if key not in _digests:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
            if _identity(handle.fileno()) != key:
                return digest
            _digests[key] = digest
        return _digests[key]


_digests: dict[tuple[int, ...], str] = {}  # SHA-256 of large files that this process has read


def _identity(descriptor: int) -> tuple[int, ...]:
    """What differs when another file is there, or this one has changed."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def require_sha256(path: Path, sha256: str, what: str, *, way_out: str) -> None:
    """Compare a cache's file. Raises DataError when it is damaged, having removed it."""
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


# ---- paths on the command line -----------------------------------------------------------------------


def path_or_name(text: str) -> str:
    """The argparse type of an argument that takes a path or an image's name: shells complete it as a path."""
    return text


class PathKind(Enum):
    """The kind of file at a path, symbolic links followed."""

    NOTHING = "nothing"
    FILE = "a regular file"
    DIRECTORY = "a directory"
    CHARACTER_DEVICE = "a character device"
    BLOCK_DEVICE = "a block device"
    PIPE = "a named pipe"
    SOCKET = "a socket"


_KINDS = {
    stat.S_IFREG: PathKind.FILE,
    stat.S_IFDIR: PathKind.DIRECTORY,
    stat.S_IFCHR: PathKind.CHARACTER_DEVICE,
    stat.S_IFBLK: PathKind.BLOCK_DEVICE,
    stat.S_IFIFO: PathKind.PIPE,
    stat.S_IFSOCK: PathKind.SOCKET,
}


def kind_of_path(path: Path) -> PathKind:
    """The kind of file at a path. A name that no file can have leads to nothing.

    Raises DataError where that can't be determined, as below a directory that this user can't search.
    """
    with reading(path):
        try:
            return _KINDS[stat.S_IFMT(path.stat().st_mode)]
        except OSError as error:
            if error.errno in _NOTHING:
                return PathKind.NOTHING
            raise


def relative_to_cwd(path: Path) -> Path:
    """The path relative to the current directory, where it is below that; else the path itself."""
    try:
        return path.relative_to(Path.cwd())
    except (ValueError, OSError):
        return path


def refuse_overwriting(written: Sequence[Path], *, inputs: Sequence[str | Path]) -> None:
    """Refuse reports that would replace what this command reads, or one another. Raises ConfigError."""
    read = {os.path.realpath(path) for path in inputs}
    targets = [os.path.realpath(path) for path in written]
    for path, target in zip(written, targets, strict=True):
        is_file = kind_of_path(path) in (PathKind.FILE, PathKind.NOTHING)
        is_read = target in read or any(_is_of_layout(target, place) for place in read)
        if is_file and (is_read or targets.count(target) > 1):
            what = "is what this command reads" if is_read else "is named for two reports"
            raise ConfigError(f"{path} {what}", "write the report to another file")


def _is_of_layout(target: str, place: str) -> bool:
    """Whether a file is one of those that make up the OCI layout at a place."""
    own = target.removeprefix(f"{place}/")
    is_named = own in ("index.json", "oci-layout", "manifest.json") or own.startswith("blobs/")
    return own != target and is_named and os.path.lexists(f"{place}/oci-layout")


def looks_like_file(name: str) -> bool:
    """Whether a name with no file at it was meant as a file, not as an image: by its beginning or ending.

    `x.tar` is a valid name of an image, too; with a tag, `x.tar:latest`, it is taken for one.
    """
    return bool(name.startswith((".", "/", "~")) or _CODE_NAME.search(name) or ARCHIVE_NAME.search(name))
