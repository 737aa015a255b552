"""Prunes a file or a directory tree: deletes foreign targets' files, cuts foreign code out of libraries.

A tree's prune stays on one file system and follows no symbolic link. Each file is finished before the next.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from buildtool.core.errors import DataError, EnvironmentMissing
from buildtool.core.files import link_over, replacing
from buildtool.core.progress import Progress
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.loaded import key_of
from buildtool.gpucode.plan import HOLE_BYTES, Copy, PrunePlan, Zeros, chunks_of
from buildtool.gpucode.scan import foreign_targets, may_hold_code, targets_in
from buildtool.gpucode.source import GpuCodeError, PruneRefused, Source, VerifyFailed
from buildtool.gpucode.strip import plan_strip, verify_stripped
from buildtool.gpucode.target import (
    CUDA_PROGRAMS,
    TargetId,
    gfx_targets_of_path,
    known_targets,
    served_targets,
    serves_any,
)
from buildtool.gpucode.used import Used, machine_code
from buildtool.gpucode.verify import verify_prune
from buildtool.prune.manifest import FILE_NAME, Change, Deleted, Pruned, Refused, TreeResult
from probes.core.files import sweep_partials, write_all
from probes.core.units import decimal_bytes

T = TypeVar("T")
_ARCHIVE_MAGIC = b"!<arch>\n"
_LIBRARY = re.compile(r"lib([^/]+?)\.so(?:\.[0-9.]+)?")
_LISTS = ("RECORD", FILE_NAME)  # of all files of a distribution, and of what was pruned
_MOST_BUILDS = 50  # each is looked for in every file
Announce = Callable[[Sequence["Change"]], None]

# One file.


@dataclass(frozen=True)
class PlannedFile:
    """What a file becomes: stripped first, where it is, and then cut."""

    source: Source
    targets: tuple[TargetId, ...]
    used: Used | None
    stripped: PrunePlan | None
    cut: PrunePlan

    @property
    def plan(self) -> PrunePlan:
        """Both steps as one."""
        if not self.stripped:
            return self.cut
        return replace(
            self.stripped.then(self.cut),
            kept_bytes=self.cut.kept_bytes,
            removed_bytes=self.cut.removed_bytes,
            zeroed_bytes=self.cut.zeroed_bytes,
        )

    def verify(self, written: Source) -> None:
        """Compare what was written with the original, step by step. Raises VerifyFailed."""
        bare = self.source
        if self.stripped:
            bare = self.stripped.view(self.source) if self.cut.changed else written
            verify_stripped(self.source, bare)
        if self.cut.changed:
            verify_prune(bare, written, self.targets, self.used)


def plan_file(
    source: Source,
    targets: Sequence[TargetId],
    *,
    compress: int | None = None,
    strict: bool = True,
    used: Used | None = None,
    strip: bool = False,
) -> PlannedFile:
    """What is cut out of a file; with `strip`, also what no segment loads. Raises as `plan_prune` does."""
    stripped = plan_strip(source, anyway=True) if strip else None
    bare = stripped.view(source) if stripped else source
    cut = plan_prune(bare, targets, compress=compress, strict=strict, used=used)
    if stripped and not cut.changed:
        stripped = plan_strip(source)  # only what is worth it
        cut = PrunePlan.unchanged(stripped.bytes_after if stripped else source.size, cut.kept_bytes)
    return PlannedFile(source, tuple(targets), used, stripped, cut)


def prune_file(
    path: Path,
    targets: Sequence[TargetId],
    *,
    out: Path | None = None,
    compress: int | None = None,
    strict: bool = True,
    used: Used | None = None,
    strip: bool = False,
    links: Sequence[Path] = (),
    dry_run: bool = False,
    announce: Callable[[PrunePlan], None] = lambda _plan: None,
) -> PrunePlan:
    """Prune one file, in place or to `out`, and verify it before anything is replaced.

    With `strip`, an ELF file also loses what no segment loads: symbol tables and debug information.
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
        planned = plan_file(source, targets, compress=compress, strict=strict, used=used, strip=strip)
        plan = planned.plan
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
            handle = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                write_plan(plan, source, descriptor, handle)
                written = window(handle, 0, os.fstat(handle).st_size)
                planned.verify(written)
                _copy_status(descriptor, handle)
            finally:
                os.close(handle)
            if plan.changed:
                announce(plan)
        for link in links if out is None else ():
            link_over(path, link)
    return plan


def sizes_text(plan: PrunePlan) -> str:
    """What a prune makes of a file's length: "4.00 MB to 1.00 MB, of which 0.50 MB are zeros"."""
    sizes = f"{decimal_bytes(plan.bytes_before)} to {decimal_bytes(plan.bytes_after)}"
    zeros = f", of which {decimal_bytes(plan.zeroed_bytes)} are zeros" if plan.zeroed_bytes else ""
    return sizes + zeros


def write_plan(plan: PrunePlan, source: Source, descriptor: int, handle: int, *, origin: int = 0) -> None:
    """Write the pruned file at the position of `handle`; the original begins at `origin` of `descriptor`."""
    begin = os.lseek(handle, 0, os.SEEK_CUR)
    for piece in plan.pieces:
        if isinstance(piece, Copy):
            copy_range(descriptor, handle, origin + piece.offset, n_bytes=piece.n_bytes)
        elif isinstance(piece, Zeros) and piece.n_bytes >= HOLE_BYTES:
            _skip(handle, piece.n_bytes)
        else:
            for chunk in chunks_of(piece, source):
                write_all(handle, chunk)
    for patch in plan.patches:
        os.pwrite(handle, patch.data, begin + patch.offset)


def copy_range(descriptor: int, handle: int, offset: int, *, n_bytes: int) -> None:
    """Copy bytes within the kernel: it needs no memory of ours, and on some file systems copies nothing.

    Holes stay holes.
    """
    end = offset + n_bytes
    while offset < end:
        try:
            begin = min(os.lseek(descriptor, offset, os.SEEK_DATA), end)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nothing but a hole from there on, or the file's end
                raise
            if os.fstat(descriptor).st_size < end:
                raise PruneRefused("the file got shorter while it was copied") from error
            begin = end
        if begin > offset:
            _skip(handle, begin - offset)
        offset = begin
        stop = min(os.lseek(descriptor, offset, os.SEEK_HOLE), end) if offset < end else end
        while offset < stop:
            copied = os.sendfile(handle, descriptor, offset, stop - offset)
            if not copied:
                raise PruneRefused("the file got shorter while it was copied")
            offset += copied


def _skip(handle: int, n_bytes: int) -> None:
    """Leave a hole; its last byte is written, for where the file would end with it."""
    os.lseek(handle, n_bytes - 1, os.SEEK_CUR)
    write_all(handle, b"\0")


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


def _copy_status(original: int, copy: int) -> None:
    """Copy owner, attributes, mode and times; owner first, as that clears set-user-id bits."""
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


# A tree.


def prune_tree(
    root: Path,
    targets: Sequence[TargetId],
    *,
    compress: int | None = None,
    used: Used | None = None,
    strip: bool = False,
    dry_run: bool = False,
    progress: Progress = lambda _line: None,
    announce: Announce = lambda _changes: None,
) -> TreeResult:
    """Prune everything below `root` to what `targets` can run; `progress` receives a line for each change.

    With `used`, CUDA code that runs didn't load goes as well; with `strip`, what no running program loads:
    symbol tables, debug information, static libraries, and second builds of libraries that nothing in the
    tree names, but those that a link leads to.
    `announce` is called before changes are made; what it raises stops the prune, and they aren't made.
    A file that can't be cut safely is left alone and listed under `refused`; a library that has some
    of the targets keeps those. Raises DataError when `root` isn't a directory; TargetMissing when there
    is GPU code and none of it is for one of the targets: nothing is touched then; EnvironmentMissing,
    DataError when it can't be written: what was done before that is whole, and running again does the rest.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a directory", "give the directory that holds the libraries")
    job = _Job(root, tuple(targets), compress, used, strip, dry_run, progress, announce)
    listing = _walk(root, sweep=not dry_run)
    _require_served(job, listing)
    result = TreeResult(tuple(map(str, targets)))
    foreign = _foreign(job, listing)
    foreign |= _needless(job, listing, foreign) if strip else {}
    _delete_all(job, foreign, result)
    for names in listing.names.values():
        remaining = [path for path in names if path not in foreign]
        going = [path for path in names if dry_run and path in foreign]  # not deleted: they count as links
        if any(_inspect(path, may_hold_code, otherwise=False) for path in remaining[:1]):
            _prune(job, [*remaining, *going], result)
    return result


def keys_below(root: Path) -> set[str]:
    """The keys of all CUDA machine code below a directory that can be read: `gpucode.loaded`."""
    listing = _walk(root, sweep=False)
    nothing: frozenset[str] = frozenset()
    return {key for names in listing.names.values() for key in _inspect(names[0], keys_in, nothing)}


def keys_in(source: Source) -> frozenset[str]:
    """The keys of a file's CUDA machine code that can be read."""
    try:
        return frozenset(map(key_of, machine_code(source) if may_hold_code(source) else ()))
    except GpuCodeError:
        return frozenset()


@dataclass(frozen=True)
class _Job:
    """A prune's settings: what to keep in which directory, whether to change anything, whom to notify."""

    root: Path
    targets: tuple[TargetId, ...]
    compress: int | None
    used: Used | None
    strip: bool
    dry_run: bool
    progress: Progress
    announce: Announce

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def is_foreign(self, path: Path) -> bool:
        return is_foreign_path(self.relative(path), self.targets)


@dataclass
class _Listing:
    """What a walk found: names by (device, inode), and symbolic links; accumulates."""

    names: dict[tuple[int, int], list[Path]] = field(default_factory=dict)
    links: list[Path] = field(default_factory=list)


def _walk(root: Path, *, sweep: bool) -> _Listing:
    """Regular files and links on the root's own file system. Raises EnvironmentMissing."""
    listing = _Listing()
    device = root.stat().st_dev
    waiting = [root]
    while waiting:
        here = waiting.pop()
        if sweep:
            sweep_partials(here)
        below = []
        for path, status in _entries_of(here):
            if stat.S_ISLNK(status.st_mode):
                listing.links.append(path)
            elif stat.S_ISREG(status.st_mode):
                listing.names.setdefault((status.st_dev, status.st_ino), []).append(path)
            elif stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                below.append(path)
        waiting += reversed(below)
    return listing


def _entries_of(directory: Path) -> list[tuple[Path, os.stat_result]]:
    """What a directory holds, by name, without what another process removes meanwhile."""
    entries = []
    with _as_environment_missing(directory, "read"), os.scandir(directory) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            with suppress(FileNotFoundError):
                entries.append((directory / entry.name, entry.stat(follow_symlinks=False)))
    return entries


@contextmanager
def _as_environment_missing(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentMissing(
            f"{error.filename or path} can't be {done}: {error.strerror}",
            "check its permissions and the free space, and prune again: what is done is whole",
        ) from error


def _require_served(job: _Job, listing: _Listing) -> None:
    """Raises TargetMissing before any file is deleted: a mistyped target would remove everything."""
    had = {code for names in listing.names.values() for name in names for code in _codes_of(job, name)}
    if had:
        served_targets(had, job.targets, strict=True)


def _codes_of(job: _Job, path: Path) -> set[TargetId]:
    if named := gfx_targets_of_path(job.relative(path)):
        return known_targets(named)
    return _inspect(path, targets_in, set())


def _inspect(path: Path, look: Callable[[Source], T], otherwise: T) -> T:
    """What `look` finds in a file; `otherwise` where it can't be read: its prune reports that."""
    try:
        with open_source(path) as (source, _):
            return look(source)
    except (OSError, PruneRefused):
        return otherwise


def is_foreign_path(path: str, targets: Sequence[TargetId]) -> bool:
    """Whether a file's name shows that it is only for other cards."""
    if since := CUDA_PROGRAMS.get(path.rpartition("/")[2]):
        cards = [target for target in targets if target.is_cuda]
        return bool(cards) and not serves_any(since, cards)
    named = gfx_targets_of_path(path)
    wanted = [target for target in targets if not target.is_cuda]
    return bool(named and wanted) and not any(serves_any(TargetId(name), wanted) for name in named)


def _foreign(job: _Job, listing: _Listing) -> dict[Path, int]:
    """Names that are only for other cards and that nothing else needs -> the bytes that go with each."""
    link_targets = {job.relative(link): _link_target(job.root, link) for link in listing.links}
    links = Links(link_targets)
    needed = {links.destination(path) for path in link_targets if not is_foreign_path(path, job.targets)}
    bytes_by_path: dict[Path, int] = {}
    for names in listing.names.values():
        foreign = [path for path in names if job.is_foreign(path) and job.relative(path) not in needed]
        bytes_by_path |= dict.fromkeys(foreign, 0)
        if foreign and len(foreign) == len(names):
            bytes_by_path[foreign[-1]] = _size(foreign[-1])
    return bytes_by_path | {link: 0 for link in listing.links if job.is_foreign(link)}


def _needless(job: _Job, listing: _Listing, foreign: Collection[Path]) -> dict[Path, int]:
    """As `_foreign`, for archives that only linkers read, and unnamed second builds of libraries."""
    links = Links({job.relative(link): _link_target(job.root, link) for link in listing.links})
    needed = {links.destination(job.relative(link)) for link in listing.links}
    free = [
        names for names in listing.names.values() if not any(job.relative(path) in needed for path in names)
    ]
    archives = [
        names
        for names in free
        if all(path.suffix == ".a" for path in names) and _inspect(names[0], _is_archive, otherwise=False)
    ]
    going = {*foreign, *(path for names in archives for path in names)}
    unnamed = _unnamed_builds(job, listing, [names[0] for names in free if len(names) == 1], going)
    bytes_by_path: dict[Path, int] = {}
    for names in (*archives, *([path] for path in unnamed)):
        bytes_by_path |= dict.fromkeys(names, 0)
        bytes_by_path[names[-1]] = _size(names[-1])
    return bytes_by_path


def _unnamed_builds(
    job: _Job, listing: _Listing, free: Collection[Path], going: Collection[Path]
) -> list[Path]:
    """Second builds of libraries, as libnvrtc.alt.so.13 beside libnvrtc.so.13, that no file names.

    Who loads one names it: the first build is what others link to. One that has code for the cards stays, and
    so do all where there are more than a handful.
    """
    everything = {path for names in listing.names.values() for path in names}
    names_of = {
        path: os.fsencode(match[1])
        for path in sorted(free)
        if (match := _LIBRARY.fullmatch(path.name))
        and any(path.with_name(other) in everything for other in _first_builds(path.name))
        and not any(serves_any(code, job.targets) for code in _codes_of(job, path))
    }
    if not 0 < len(names_of) <= _MOST_BUILDS:
        return []
    all_names = frozenset(names_of.values())
    kept: set[bytes] = set()
    named: dict[Path, frozenset[bytes]] = {}  # by the second builds
    for path, *_ in listing.names.values():
        if path not in going and path.name not in _LISTS:
            present = _inspect(path, partial(_names_in, names=all_names), all_names)
            if path in names_of:
                named[path] = present
            else:
                kept |= present
    waiting = set(kept)
    while waiting:
        more = {name for path, names in named.items() if names_of[path] in waiting for name in names}
        waiting = more - kept
        kept |= more
    return [path for path, name in names_of.items() if name not in kept]


def _first_builds(name: str) -> Iterator[str]:
    """The names without one of their words between dots: `libnvrtc.so.13` of `libnvrtc.alt.so.13`."""
    words = name.split(".")
    for at in range(1, words.index("so")):
        if words[at].isalpha():
            yield ".".join(words[:at] + words[at + 1 :])


def _names_in(source: Source, names: Collection[bytes]) -> frozenset[bytes]:
    """Those of the names that stand somewhere in a file, without its symbols."""
    if cut := plan_strip(source):
        source = cut.view(source)
    present: set[bytes] = set()
    longest = max(map(len, names))
    before = b""
    for chunk in source.chunks(0, source.size, "the file"):
        text = before + chunk
        present.update(name for name in names if name in text)
        before = text[-longest:]
    return frozenset(present)


def _is_archive(source: Source) -> bool:
    return source.read_at(0, len(_ARCHIVE_MAGIC)) == _ARCHIVE_MAGIC


def _size(path: Path) -> int:
    with _as_environment_missing(path, "read"):
        return path.lstat().st_size


def _delete_all(job: _Job, foreign: Mapping[Path, int], result: TreeResult) -> None:
    changes = [
        Deleted(job.relative(path), freed, gfx_targets_of_path(job.relative(path)))
        for path, freed in foreign.items()
    ]
    if changes and not job.dry_run:
        job.announce(changes)
    for path, change in zip(foreign, changes, strict=True):
        job.progress(f"{'would delete' if job.dry_run else 'delete'} {change.path}")
        if not job.dry_run:
            with _as_environment_missing(path, "deleted"):
                path.unlink()
        result.add([change])


def _prune(job: _Job, names: Sequence[Path], result: TreeResult) -> None:
    relative = job.relative(names[0])
    try:
        plan = prune_file(
            names[0],
            job.targets,
            compress=job.compress,
            strict=False,
            used=job.used,
            strip=job.strip,
            links=names[1:],
            dry_run=job.dry_run,
            announce=lambda plan: job.announce([Pruned.by(plan, relative)]),
        )
    except (GpuCodeError, PruneRefused, VerifyFailed) as error:
        job.progress(f"left whole: {relative}: {error.message}")
        result.refused.append(Refused(relative, error.message))
        return
    if plan.changed:
        verb = "would prune" if job.dry_run else "prune"
        job.progress(f"{verb} {relative}: {sizes_text(plan)}")
        result.add([Pruned.by(plan, relative)])
        return
    nothing: tuple[str, ...] = ()
    foreign = _inspect(names[0], partial(foreign_targets, targets=job.targets), nothing)
    if foreign:
        job.progress(result.add_untouched(relative, foreign))


# Symbolic links.

_MAX_LINKS = 40  # as many as Linux follows
_MAX_PARTS = 4096  # of a path that links keep making longer
_Node = dict[str, "_Node | str"]  # names below a directory -> directory, or a link's target


class Links:
    """Symbolic links below a root, followed as the kernel does, but never out of the root."""

    def __init__(self, link_targets: Mapping[str, str]) -> None:
        """`link_targets` maps the path of each link to its target."""
        self._root: _Node = {}
        for path, target in link_targets.items():
            node = self._root
            *directories, name = path.split("/")
            for directory in directories:
                below = node.setdefault(directory, {})
                if not isinstance(below, dict):
                    break  # that directory is a link itself: the path leads elsewhere
                node = below
            else:
                node[name] = target

    def place(self, path: str) -> str | None:
        """Where a name itself is: links on the way are followed, but not the last part; None for a loop."""
        directory, _, name = path.rpartition("/")
        led = self.destination(directory)
        return led if led is None else f"{led}/{name}".lstrip("/")

    def destination(self, path: str) -> str | None:
        """Where a path leads in the end, whether or not something is there; None for a loop."""
        passed: list[tuple[str, _Node]] = []
        pending = path.split("/")[::-1]
        followed = 0
        while pending:
            part = pending.pop()
            if part == "..":
                del passed[-1:]
            elif part not in ("", "."):
                below = (passed[-1][1] if passed else self._root).get(part)
                if isinstance(below, str):
                    followed += 1
                    pending += below.split("/")[::-1]
                    if followed > _MAX_LINKS or len(pending) > _MAX_PARTS:
                        return None
                    if below.startswith("/"):
                        passed.clear()
                else:
                    passed.append((part, below or {}))
        return "/".join(name for name, _ in passed)


def _link_target(root: Path, link: Path) -> str:
    """A link's target.

    A container will have the tree as its root; until then a link may name the tree's own path.
    """
    with _as_environment_missing(link, "read"):
        target = str(link.readlink())
    inside = f"{root.resolve()}/"
    return f"/{target.removeprefix(inside)}" if target.startswith(inside) else target
