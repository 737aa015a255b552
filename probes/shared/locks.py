"""Locks on files and directories, against other threads and processes alike. Every failure is an OSError."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a directory, or a lock file made if need be, against other threads and processes alike.

    `on_wait` is called when another one holds it. A lock file stays: removing it would let two holders in.
    Raises OSError.
    """
    if path.is_dir():
        descriptor = os.open(path, os.O_RDONLY)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def open_lock(path: Path, *, shared: bool) -> int | None:
    """A descriptor that holds the lock on the file `path`, made if it isn't there; the caller closes it.

    A shared lock is waited for. An exclusive one isn't: None when somebody holds the lock. Where the
    file system has no locks, a shared one counts as held, and an exclusive one is never granted. Raises
    OSError.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if not shared:
                os.close(descriptor)
                return None
        if is_at(path, descriptor):
            return descriptor
        os.close(descriptor)  # removed by its last holder before it was ours


def lock_now(descriptor: int) -> bool:
    """Lock an open file, unless another one holds it: then False. True also where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system: nobody can take them, and a sweep leaves everything alone
        pass
    return True


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
