"""Prune a directory tree: delete foreign targets' files, cut foreign code out of libraries.

Stays on one file system and follows no symbolic link. Each file is finished before the next is begun.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from buildtool.errors import DataError, EnvironmentMissing
from buildtool.gpucode.elf import HEADER_BYTES
from buildtool.gpucode.errors import GpuCodeError, PruneRefused, VerifyFailed
from buildtool.gpucode.names import gfx_targets_of_path
from buildtool.gpucode.rewrite import open_source, prune_file
from buildtool.gpucode.scan import may_hold_bundles, scan_file
from buildtool.gpucode.target import TargetId, known_targets, served, serves_any
from probes.units import decimal_bytes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Deleted:
    """A name that was only for foreign targets; `freed_bytes` is 0 for all but a file's last hard link."""

    path: str
    freed_bytes: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Pruned:
    """A file that lost code. Lengths of the file; the maps are unpacked bytes of code by target."""

    path: str
    bytes_before: int
    bytes_after: int
    kept_bytes: dict[str, int]
    removed_bytes: dict[str, int]


@dataclass(frozen=True)
class Refused:
    """A file that was left as it is, and why."""

    path: str
    reason: str


@dataclass
class TreeResult:
    """What a prune of a tree did, or in a dry run would do; accumulates. Paths are relative to the tree."""

    targets: tuple[str, ...]
    deleted: list[Deleted] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    @property
    def saved_bytes(self) -> int:
        """How much less the files take together."""
        cut = sum(item.bytes_before - item.bytes_after for item in self.pruned)
        return cut + sum(item.freed_bytes for item in self.deleted)

    @property
    def changed(self) -> bool:
        """Was, or would be, anything done?"""
        return bool(self.deleted or self.pruned)


@dataclass
class _Listing:
    """A walk's finds: names by (device, inode), and symbolic links; accumulates."""

    names: dict[tuple[int, int], list[Path]] = field(default_factory=dict)
    links: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class _Job:
    """The order: what to keep below which directory, and whether to touch anything."""

    root: Path
    targets: tuple[TargetId, ...]
    compress: int | None
    dry_run: bool

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def is_foreign(self, path: Path) -> bool:
        return is_foreign_path(self.relative(path), self.targets)


def is_foreign_path(path: str, targets: Sequence[TargetId]) -> bool:
    """Does a file's name say that it is for other cards alone?"""
    named = gfx_targets_of_path(path)
    wanted = [target for target in targets if not target.is_cuda]
    return bool(named and wanted) and not any(serves_any(TargetId(name), wanted) for name in named)


def prune_tree(
    root: Path,
    targets: Sequence[TargetId],
    *,
    compress: int | None = None,
    dry_run: bool = False,
    say: Say = lambda _line: None,
) -> TreeResult:
    """Prune everything below `root` to what `targets` can run; `say` hears a line for each change.

    A file that can't be cut safely is left alone and listed under `refused`; a library that has some
    of the targets keeps those. Raises DataError when `root` is no directory; TargetMissing when there
    is GPU code and none of it is for one of the targets: nothing is touched then; EnvironmentMissing
    when it can't be written: what was done before that is whole, and running again does the rest.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a directory")
    job = _Job(root, tuple(targets), compress, dry_run)
    listing = _walk(root)
    _require_served(job, listing)
    protected = {_destination(root, link) for link in listing.links if not job.is_foreign(link)}
    result = TreeResult(tuple(map(str, targets)))
    for names in listing.names.values():
        foreign = [path for path in names if job.is_foreign(path) and path.resolve() not in protected]
        for path in foreign:
            _delete(job, path, result, say, frees=len(foreign) == len(names) and path == foreign[-1])
        remaining = [path for path in names if path not in foreign]
        if remaining and _worth_a_look(remaining[0]):
            _prune(job, remaining, result, say)
    for link in listing.links:
        if job.is_foreign(link):
            _delete(job, link, result, say, frees=False)
    return result


def _walk(root: Path) -> _Listing:
    listing = _Listing()
    device = root.stat().st_dev
    for directory, subdirectories, names in os.walk(root, onerror=_unreadable):
        here = Path(directory)
        subdirectories[:] = sorted(name for name in subdirectories if (here / name).lstat().st_dev == device)
        for path in (here / name for name in sorted((*names, *_linked(here, subdirectories)))):
            if path.is_symlink():
                listing.links.append(path)
            elif path.is_file():
                status = path.lstat()
                listing.names.setdefault((status.st_dev, status.st_ino), []).append(path)
    return listing


def _require_served(job: _Job, listing: _Listing) -> None:
    """Before a file goes: a mistyped target would take all there is."""
    had = {code for names in listing.names.values() for code in _codes_of(job, names[0])}
    if had:
        served(had, job.targets, strict=True)


def _codes_of(job: _Job, path: Path) -> set[TargetId]:
    named = gfx_targets_of_path(job.relative(path))
    if named or not _worth_a_look(path):
        return known_targets(named)
    try:
        with open_source(path) as (source, _):
            return known_targets(scan_file(source.size, source.read_at).stored_bytes_by_target())
    except (GpuCodeError, PruneRefused):  # told when its turn comes
        return set()


def _linked(here: Path, subdirectories: Sequence[str]) -> Iterator[str]:
    """Symbolic links to directories, which a walk gives as directories."""
    return (name for name in subdirectories if (here / name).is_symlink())


def _destination(root: Path, link: Path) -> Path:
    """Where a link leads when `root` is the root directory, as it will be in a container."""
    to = link.readlink()
    there = root / to.relative_to("/") if to.is_absolute() else link.parent / to
    return Path(os.path.realpath(there))  # `resolve` raises for links in a circle


def _unreadable(error: OSError) -> None:
    raise EnvironmentMissing(f"{error.filename} can't be read: {error.strerror}") from error


def _delete(job: _Job, path: Path, result: TreeResult, say: Say, *, frees: bool) -> None:
    relative = job.relative(path)
    say(f"{'would delete' if job.dry_run else 'delete'} {relative}")
    try:
        freed = path.lstat().st_size if frees else 0
        if not job.dry_run:
            path.unlink()
    except OSError as error:
        raise EnvironmentMissing(f"{path} can't be deleted: {error.strerror}") from error
    result.deleted.append(Deleted(relative, freed, gfx_targets_of_path(relative)))


def _worth_a_look(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            head = handle.read(HEADER_BYTES)
    except OSError:
        return False
    return may_hold_bundles(head)


def _prune(job: _Job, names: Sequence[Path], result: TreeResult, say: Say) -> None:
    relative = job.relative(names[0])
    try:
        plan = prune_file(
            names[0],
            job.targets,
            compress=job.compress,
            strict=False,
            links=names[1:],
            dry_run=job.dry_run,
        )
    except (GpuCodeError, PruneRefused, VerifyFailed) as error:
        say(f"left whole: {relative}: {error.message}")
        result.refused.append(Refused(relative, error.message))
        return
    if plan.changed:
        verb = "would prune" if job.dry_run else "prune"
        say(f"{verb} {relative}: {decimal_bytes(plan.bytes_before)} to {decimal_bytes(plan.bytes_after)}")
        result.pruned.append(
            Pruned(relative, plan.bytes_before, plan.bytes_after, plan.kept_bytes, plan.removed_bytes)
        )
