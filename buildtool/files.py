"""Files that are whole or not there: temporary name, fsync, rename."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buildtool.errors import DataError, EnvironmentMissing


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and is removed otherwise.

    Raises EnvironmentMissing when the disk is full, DataError when the place can't be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        partial.replace(path)
    except OSError as error:
        raise _file_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file or nothing. Raises as `replacing` does."""
    with replacing(path) as partial:
        partial.write_text(text)


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Bytes that the file system under `path` (or its nearest existing parent) still has for us."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def sweep_partials(directory: Path) -> None:
    """Remove what a killed run left half-written."""
    for partial in directory.glob(".*.partial"):
        owner = partial.name.rsplit(".", 2)[-2]
        if not Path(f"/proc/{owner}").exists():
            partial.unlink(missing_ok=True)


def _file_error(path: Path, error: OSError) -> EnvironmentMissing | DataError:
    if error.errno in (28, 122):  # ENOSPC, EDQUOT
        return EnvironmentMissing(
            f"no space left while writing {path}", "free some space and run the same command again"
        )
    return DataError(f"can't write {path}: {error.strerror or error}", "check the path and its permissions")
