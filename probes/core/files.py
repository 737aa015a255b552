"""Writes files whole or not at all, in both programs, and reads them within limits.

A file is written under an unpredictable name next to its destination, synced, then renamed. Its writer holds
a lock on it, so a later run can distinguish a killed run's file from one that is being written.
Standard library only; every failure is an OSError, which the callers turn into errors of their own.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PARTIAL = re.compile(r"\.weir-[0-9a-f]{16}\.partial")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes spaces
_MAX_LINKS = 40  # as Linux: path_resolution(7)
_PIECE_BYTES = 1 << 20
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

# ---- locks -------------------------------------------------------------------------------------------


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


def lock_of_process(path: Path) -> bool:
    """Lock a file, made with its folder if need be, until this process ends; False where another one has it.

    Processes that are forked don't have the lock, however long they live. True also where the file can't be
    made, and on a file system without locks. Raises OSError where there is one that can't be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError:
        if os.path.lexists(path):
            raise
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing it would give the lock up
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


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


# ---- writing and reading -----------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """An empty file to write into; it replaces `path` if the block succeeds, else it is removed.

    The block must write into that very file: a rename over it would lose its lock. Symbolic links are
    followed. A destination that isn't a regular file (a device, a FIFO, /dev/stdout) is written into at the
    end of the block instead of being replaced. The file gets the mode and owner of the file it replaces, else
    those of any new file of this process. `durable` False is for what can be made again: nothing waits for
    the disk, so a file may have lost its bytes after a power failure. Raises OSError.
    """
    destination = _regular(path)
    if destination is None:
        with _spool(path) as spool:
            yield spool
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial, descriptor = _create(destination)
    try:
        yield partial
        if durable:
            os.fsync(descriptor)
        partial.replace(destination)
        if durable:
            sync_directory(destination.parent)
    finally:
        with suppress(OSError):
            partial.unlink()
        os.close(descriptor)


def read_head(path: Path, n_bytes: int) -> bytes:
    """The first bytes of a file, device or pipe, at most so many.

    Raises OSError, EPIPE for a named pipe that nobody writes into: opening it would wait without end.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        descriptor = file.fileno()
        first = _first_of_pipe(path, descriptor) if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else b""
        os.set_blocking(descriptor, True)
        return first + file.read(n_bytes - len(first))


def read_text(path: Path, *, most_bytes: int) -> str:
    """The UTF-8 text of a file, device or pipe that holds at most `most_bytes`.

    Raises OSError (EFBIG for more than that, and as `read_head` does) and UnicodeDecodeError.
    """
    data = read_head(path, most_bytes + 1)
    if len(data) > most_bytes:
        raise _too_large(path, most_bytes)
    return data.decode("utf-8")


def _first_of_pipe(path: Path, descriptor: int) -> bytes:
    """What a pipe holds already, a byte at most. Raises OSError for a named one without a writer."""
    try:
        first = os.read(descriptor, 1)
    except BlockingIOError:  # there is a writer, who is waited for
        return b""
    if not first and not str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("pipe:"):
        raise OSError(errno.EPIPE, "it is a pipe, and nobody writes into it", str(path))
    return first


def open_regular(path: Path, access: int = os.O_RDONLY) -> int:
    """A descriptor of a file that anybody may have put there; the caller closes it.

    Raises OSError, EINVAL for what isn't a regular file: links aren't followed, pipes aren't waited for.
    """
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_regular(path: Path, *, most_bytes: int, descriptor: int | None = None) -> bytes:
    """The bytes of such a file, or of one that is open. Raises OSError, EFBIG for more than `most_bytes`."""
    with os.fdopen(open_regular(path) if descriptor is None else os.dup(descriptor), "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise _too_large(path, most_bytes)
    return data


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data at the descriptor's position. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a whole UTF-8 file or nothing; `durable` as for `replacing`. Raises OSError."""
    with replacing(path, durable=durable) as partial:
        partial.write_bytes(text.encode(errors="backslashreplace"))


def write_new(paths: Iterable[Path], text: str) -> Path:
    """Write a whole UTF-8 file under the first of these names that is free, and keep it from other processes.

    Returns the name. Raises OSError, FileExistsError where all are taken.
    """
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(path, _NEW_FILE, 0o666))
        except FileExistsError:
            continue
        try:
            write_text(path, text)
        except BaseException:
            path.unlink()
            raise
        return path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


@contextmanager
def reserved(path: Path) -> Iterator[Path]:
    """Where to write, within the block, a file whose content isn't known yet: what can fail now fails now.

    For a regular file that is `path`, beside which a new file can be made. Anything else is opened and stays
    open, so that a pipe's reader sees no end too soon. Raises OSError, ENXIO for a pipe without a reader.
    """
    destination = _regular(path)
    if destination is not None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial, descriptor = _create(destination)
        partial.unlink()
        os.close(descriptor)
        yield path
        return
    _refuse_directory(path)
    descriptor = _open_special(path, os.O_NONBLOCK)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@contextmanager
def rereadable(path: Path, *, most_bytes: int) -> Iterator[Path]:
    """`path`, or a copy of what it gives where that can be read only once (a pipe, /dev/stdin, a FIFO).

    At most `most_bytes` are copied. Raises OSError, EFBIG for more.
    """
    if stat.S_ISREG(path.stat().st_mode):
        yield path
        return
    _refuse_directory(path)
    with tempfile.TemporaryDirectory(prefix="weir-") as name:
        copy = Path(name) / "copy"
        with path.open("rb") as source, copy.open("wb") as target:
            left = most_bytes
            while data := source.read(min(_PIECE_BYTES, left + 1)):
                left -= len(data)
                if left < 0:
                    raise _too_large(path, most_bytes)
                target.write(data)
        yield copy


# ---- scratch directories, links, and what killed runs leave ------------------------------------------


@contextmanager
def scratch(directory: Path | None = None) -> Iterator[Path]:
    """A directory for this block only, removed with everything in it unless something is mounted below it.

    It is made below `directory`, or where the system has its temporary files. Raises OSError.
    """
    directory = directory or Path(tempfile.gettempdir())
    directory.mkdir(parents=True, exist_ok=True)
    path, descriptor = _create_directory(directory)
    try:
        yield path
    finally:
        _remove(path)
        os.close(descriptor)


def link_over(existing: Path, path: Path) -> None:
    """Make `path` another name of the file `existing`, in one step, replacing what had that name.

    Raises OSError. Symbolic links aren't followed.
    """
    descriptor = os.open(existing, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    partial = path.parent / _new_name()
    try:
        with suppress(OSError):  # without locks on this file system, a sweep leaves everything alone
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(existing, partial, follow_symlinks=False)
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()
        os.close(descriptor)


def sweep_partials(directory: Path | None = None) -> None:
    """Remove the partial files and scratch directories of runs that no longer live; never raises.

    `directory` None is the system's place for temporary files, as for `scratch`. What a living process holds
    is left alone, and so is everything that has no name of ours.
    """
    with suppress(OSError):
        for path in (directory or Path(tempfile.gettempdir())).iterdir():
            if _PARTIAL.fullmatch(path.name):
                _sweep(path)


def partials(directory: Path | None = None) -> Iterator[tuple[Path, bool]]:
    """The partial files and scratch directories in a directory, each with whether a living process holds it.

    `directory` None is the system's place for temporary files. What can't be listed or opened is left out.
    """
    with suppress(OSError):
        for path in sorted((directory or Path(tempfile.gettempdir())).iterdir()):
            if _PARTIAL.fullmatch(path.name):
                with suppress(OSError):
                    yield path, _is_held(path)


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return not lock_now(descriptor)
    finally:
        os.close(descriptor)


def own_descriptor(path: Path) -> int | None:
    """The descriptor of this process that a path such as /dev/stdout leads to, if any."""
    for _ in range(_MAX_LINKS):
        parent = Path(os.path.realpath(path.parent))
        if parent == Path(f"/proc/{os.getpid()}/fd") and path.name.isdecimal():
            return int(path.name)
        if parent.parts[:2] == ("/", "proc") or not path.is_symlink():
            return None
        path = parent / path.readlink()
    return None


def sync_directory(directory: Path) -> None:
    """Make renames in a directory last. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- how a path is written to ------------------------------------------------------------------------


def _regular(path: Path) -> Path | None:
    """The regular file (or the free name) that `path` leads to, links followed; None for anything else."""
    for _ in range(_MAX_LINKS + 1):
        parent = Path(os.path.realpath(path.parent))
        path = parent / path.name
        if parent.parts[:2] == ("/", "proc"):  # /dev/stdout is a link to there, no matter what it is open on
            return None
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return path
        if stat.S_ISREG(mode):
            return path
        if not stat.S_ISLNK(mode):
            return None
        path = parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


@contextmanager
def _spool(path: Path) -> Iterator[Path]:
    _refuse_directory(path)
    with tempfile.TemporaryDirectory(prefix="weir-") as name:
        spool = Path(name) / "spool"
        spool.touch()
        yield spool
        with spool.open("rb") as source, os.fdopen(_open_special(path), "wb") as target:
            shutil.copyfileobj(source, target)


def _too_large(path: Path, most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"more than {most_bytes:,} bytes", str(path))


def _refuse_directory(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _open_special(path: Path, more_flags: int = 0) -> int:
    """Open a device, or one of our own descriptors so that what is written goes on where others stopped."""
    own = own_descriptor(path)
    if own is not None:
        return os.dup(own)
    descriptor = os.open(path, os.O_WRONLY | more_flags)
    os.set_blocking(descriptor, True)
    return descriptor


def _create(destination: Path) -> tuple[Path, int]:
    """A locked new file next to `destination`, with its owner and mode, or with what the umask gives."""
    old = destination.stat() if destination.exists() else None
    while True:
        path = destination.parent / _new_name()
        descriptor = os.open(path, _NEW_FILE, 0o600 if old else 0o666)
        if _hold(path, descriptor):
            break
        os.close(descriptor)
    if old:
        if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
            with suppress(PermissionError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
    return path, descriptor


def _create_directory(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / _new_name()
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # swept before it was locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if _hold(path, descriptor):
                return path, descriptor
            os.close(descriptor)


# ---- partial files -----------------------------------------------------------------------------------


def _new_name() -> str:
    return f".weir-{secrets.token_hex(8)}.partial"


def _hold(path: Path, descriptor: int) -> bool:
    """Lock what we just made; False when a sweep of another process was quicker and removes it."""
    return lock_now(descriptor) and is_at(path, descriptor)


def _sweep(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                _remove(path)
            else:
                path.unlink()
        finally:
            os.close(descriptor)


def _remove(directory: Path) -> None:
    """Remove a directory unless something is mounted below it: a killed bootstrap leaves /dev so."""
    if not has_mounts(directory):
        shutil.rmtree(directory, ignore_errors=True)


def has_mounts(directory: Path) -> bool:
    """Whether something is mounted below a directory. Raises OSError."""
    below = f"{os.path.realpath(directory)}/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:  # noqa: PTH123
        points = (_OCTAL.sub(lambda match: chr(int(match[1], 8)), line.split()[4]) for line in mounts)
        return any(point.startswith(below) for point in points)
