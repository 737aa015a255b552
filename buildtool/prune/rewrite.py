"""Carry out a prune plan on a file: written next to it, checked, then put in its place with one rename."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from buildtool.files import link_over, replacing
from buildtool.gpucode.cut.edit import Copy, chunks_of
from buildtool.gpucode.cut.library import PrunePlan, plan_prune
from buildtool.gpucode.cut.verify import verify_prune
from buildtool.gpucode.errors import PruneRefused
from buildtool.gpucode.source import Source
from buildtool.gpucode.target import TargetId
from probes.shared.files import write_all


@contextmanager
def open_source(path: Path) -> Iterator[tuple[Source, int]]:
    """A file as a source, and its descriptor. Raises PruneRefused when it can't be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise PruneRefused(f"{path} can't be read: {error.strerror}") from error
    try:
        yield window(descriptor, 0, os.fstat(descriptor).st_size), descriptor
    finally:
        os.close(descriptor)


def window(descriptor: int, start: int, size: int) -> Source:
    """A part of an open file as a source."""
    return Source(size, lambda offset, length: os.pread(descriptor, length, start + offset))


def prune_file(
    path: Path,
    targets: Sequence[TargetId],
    *,
    out: Path | None = None,
    compress: int | None = None,
    strict: bool = True,
    links: Sequence[Path] = (),
    dry_run: bool = False,
    announce: Callable[[PrunePlan], None] = lambda _plan: None,
) -> PrunePlan:
    """Prune one file, in place or to `out`, and verify it before anything is replaced.

    `links` are the file's other hard links, which follow it. With `dry_run` all is checked and
    planned, nothing written. `announce` is called with the change when it is ready; if it raises, the change
    isn't made. Mode, owner, extended attributes and times are kept. Raises what `plan_prune` raises,
    VerifyFailed, EnvironmentMissing when the disk is full, DataError when it can't be written, and
    PruneRefused for hard links that aren't in `links`; the original is then untouched and nothing is left
    behind.
    """
    path = path.resolve()
    out = None if out is not None and out.resolve() == path else out
    with open_source(path) as (source, descriptor):
        plan = plan_prune(source, targets, compress=compress, strict=strict)
        if not plan.changed and out is None:
            return plan
        status = os.fstat(descriptor)
        if out is None and status.st_nlink > 1 + len(links):
            raise PruneRefused(
                "it has hard links elsewhere, which would keep all its bytes",
                "prune the tree that holds them all, or write to --out",
            )
        if dry_run:
            return plan
        with replacing(out or path) as partial:
            _write_checked(plan, partial, source=source, descriptor=descriptor, targets=targets)
            if plan.changed:
                announce(plan)
        for link in links if out is None else ():
            link_over(path, link)
    return plan


def _write_checked(
    plan: PrunePlan, partial: Path, *, source: Source, descriptor: int, targets: Sequence[TargetId]
) -> None:
    handle = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write_plan(plan, source, descriptor, handle)
        written = window(handle, 0, os.fstat(handle).st_size)
        if plan.changed:
            verify_prune(source, written, targets)
        _copy_status(descriptor, handle)
    finally:
        os.close(handle)


def write_plan(plan: PrunePlan, source: Source, descriptor: int, handle: int, *, origin: int = 0) -> None:
    """Write the pruned file at the position of `handle`; the original begins at `origin` of `descriptor`."""
    begin = os.lseek(handle, 0, os.SEEK_CUR)
    for piece in plan.pieces:
        if isinstance(piece, Copy):
            copy_range(descriptor, handle, origin + piece.offset, n_bytes=piece.n_bytes)
        else:
            for chunk in chunks_of(piece, source):
                write_all(handle, chunk)
    for patch in plan.patches:
        os.pwrite(handle, patch.data, begin + patch.offset)


def copy_range(descriptor: int, handle: int, offset: int, *, n_bytes: int) -> None:
    """Copy bytes within the kernel: it needs no memory of ours, and on some file systems copies nothing."""
    left = n_bytes
    while left:
        copied = os.sendfile(handle, descriptor, offset, left)
        if not copied:
            raise PruneRefused("the file got shorter while it was copied")
        offset, left = offset + copied, left - copied


def _copy_status(original: int, copy: int) -> None:
    """Owner first: changing it clears the set-user-id bits that the mode brings back."""
    status = os.fstat(original)
    if (os.geteuid(), os.getegid()) != (status.st_uid, status.st_gid):
        os.fchown(copy, status.st_uid, status.st_gid)
    _copy_attributes(original, copy)
    os.fchmod(copy, stat.S_IMODE(status.st_mode))
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_attributes(original: int, copy: int) -> None:
    """Extended attributes, except those that the file system or our rights don't allow."""
    with _where_allowed():
        for name in os.listxattr(original):
            with _where_allowed():
                os.setxattr(copy, name, os.getxattr(original, name))


@contextmanager
def _where_allowed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.ENODATA, errno.EINVAL, errno.EACCES):
            raise
