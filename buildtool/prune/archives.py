"""Prunes an archive into another one, as a stream of its parts: a root file system's tar, or a wheel.

Nothing is unpacked, so no privilege is needed and no owner, mode, time, link or attribute can get lost: kept
parts of a tar are copied byte for byte. The same archive and targets give the same bytes.
"""

import copy
import io
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from buildtool.core.errors import DataError
from buildtool.core.files import scratch
from buildtool.core.progress import Progress
from buildtool.gpucode.cut import plan_prune
from buildtool.gpucode.elf import HEADER_BYTES
from buildtool.gpucode.plan import PrunePlan
from buildtool.gpucode.scan import foreign_targets, may_hold_bundles, may_hold_code, targets_in
from buildtool.gpucode.source import GpuCodeError, PruneRefused, Source, VerifyFailed
from buildtool.gpucode.target import TargetId, gfx_targets_of_path, known_targets
from buildtool.gpucode.verify import verify_prune
from buildtool.image.archive import header_reader, member_path
from buildtool.image.tar import DANGLING, FILE, NO_PADDING, normal_path
from buildtool.prune.manifest import Deleted, Pruned, Refused, TreeResult
from buildtool.prune.trees import (
    Links,
    copy_range,
    is_foreign_path,
    open_source,
    prune_file,
    sizes_text,
    window,
    write_plan,
)

BLOCK = tarfile.BLOCKSIZE
AGAIN = "it is damaged or was cut short: make or fetch it again"
# what zipfile and zlib raise for a damaged, encrypted or otherwise unreadable member
ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


def archive_targets(original: Path, *, folder: Path) -> set[TargetId]:
    """The targets that a root file system's tar or a wheel has code for: by its files' names and their code.

    Files of a wheel that may hold code are unpacked below `folder`, one at a time. Raises DataError for an
    archive that can't be read, OSError when the disk is full.
    """
    return _targets_of_wheel(original, folder) if original.suffix == ".whl" else _targets_of_tar(original)


@dataclass(frozen=True)
class _Run:
    """A prune of an archive: what to keep, where progress goes, what was done."""

    targets: Sequence[TargetId]
    progress: Progress
    result: TreeResult

    def cut(self, path: str, source: Source, plan: Callable[[], PrunePlan]) -> PrunePlan | None:
        """The plan for a file whose code can be cut; what may not be cut is refused in the result."""
        if not may_hold_code(source):
            return None
        try:
            change = plan()
        except (GpuCodeError, PruneRefused, VerifyFailed) as error:
            self.result.refused.append(Refused(path, str(error).splitlines()[0]))
            return None
        if not change.changed:
            if foreign := foreign_targets(source, self.targets):
                self.progress(self.result.add_untouched(path, foreign))
            return None
        self.progress(f"prune {path}: {sizes_text(change)}")
        self.result.pruned.append(Pruned.by(change, path))
        return change


# Tars.


def prune_tar(
    original: Path,
    out: Path,
    targets: Sequence[TargetId],
    *,
    latest: int | None = None,
    dropped: Sequence[str] = (),
    added: Callable[[TreeResult], Mapping[str, bytes]] = lambda _result: {},
    progress: Progress = lambda _line: None,
) -> TreeResult:
    """Write the tar `original` to `out` without what none of the targets can run.

    A library that can't be cut safely stays as it is and is listed as refused; what is cut is verified as
    in a tree. `latest` caps times (seconds since 1970); paths in `dropped` are left out; files that `added`
    makes from the result come last. Raises DataError for a file that isn't a plain tar or is damaged, before
    anything is written; VerifyFailed, and OSError when `out` can't be written.
    """
    result = TreeResult(tuple(map(str, targets)))
    run = _Run(targets, progress, result)
    with open_source(original) as (_, descriptor), writing_tar(out) as handle:
        members = members_of(original)
        removed = {*dropped} | _foreign(members, targets, result)
        for member in members:
            if member.path not in removed:
                plan = _planned(member, descriptor, run)
                _write_member(
                    member, plan, descriptor, handle=handle.fileno(), latest=latest, targets=targets
                )
        for path, content in sorted(added(result).items()):
            _add(handle, path, content, latest or 0)
    return result


@contextmanager
def writing_tar(out: Path) -> Iterator[io.FileIO]:
    """A tar for the block to write members into, with their padding; its end comes after the block."""
    with out.open("w+b", buffering=0) as handle:
        yield handle
        handle.write(bytes(2 * BLOCK))
        handle.write(bytes(-handle.tell() % tarfile.RECORDSIZE))


@dataclass(frozen=True)
class Member:
    """An entry of a tar: it extends from `start` to `end`, with its content at `content`."""

    info: tarfile.TarInfo
    path: str

    @property
    def start(self) -> int:
        """Return the offset where the member's headers begin."""
        return self.info.offset

    @property
    def content(self) -> int:
        """Return the offset where the member's content begins."""
        return self.info.offset_data

    @property
    def n_bytes(self) -> int:
        """Bytes of content; 0 for what isn't a regular file."""
        return self.info.size if self.info.isreg() else 0

    @property
    def end(self) -> int:
        """Return the offset behind the member's padding."""
        return self.content + self.n_bytes + -self.n_bytes % BLOCK


def members_of(original: Path) -> list[Member]:
    """All members. Raises DataError unless the archive is whole.

    Python's reader ends at the first header that it can't read, as if the archive ended there. The
    audit's reader doesn't, and the two must have seen the same.
    """
    walked_members = _walked(original)
    try:
        with tarfile.open(original, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            members = [Member(info, normal_path(info.name)) for info in tar]
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"{original} is not a plain tar: {error}", AGAIN) from error
    for member, walked in zip_longest(members, walked_members):
        if member is None or walked != (member.path, member.content, member.n_bytes):
            place = walked[1] if walked else member.content
            raise DataError(f"{original}: its readers disagree about the member before byte {place:,}", AGAIN)
    if any(member.info.issparse() for member in members):
        raise DataError(f"{original} has sparse members, which aren't read here")
    return members


def _walked(original: Path) -> list[tuple[str, int, int]]:
    """Path, place and bytes of every member's content, as the audit's reader sees them. Raises DataError."""
    with open_source(original) as (_, descriptor):
        reader = header_reader(descriptor, place="the archive")
        try:
            rows = [
                (member_path(name), reader.offset, size if kind == FILE else 0)
                for name, kind, size, _ in reader
            ]
        except DataError as fault:
            raise DataError(
                f"{original} is not a plain tar, or it is damaged: {fault.message}", AGAIN
            ) from fault
    if not reader.ended or {NO_PADDING, DANGLING} & reader.notes.keys():
        raise DataError(f"{original} ends without the end marker of an archive", AGAIN)
    return rows


def _targets_of_tar(original: Path) -> set[TargetId]:
    targets: set[TargetId] = set()
    with open_source(original) as (_, descriptor):
        for member in members_of(original):
            if not member.info.isdir():
                source = window(descriptor, member.content, member.n_bytes)
                targets |= known_targets(gfx_targets_of_path(member.path)) | targets_in(source)
    return targets


def _foreign(members: Sequence[Member], targets: Sequence[TargetId], result: TreeResult) -> set[str]:
    """Paths that are only for other cards.

    A file is deleted when all its names (hard links) are and no link needs it.
    """
    link_targets = {member.path: member.info.linkname for member in members if member.info.issym()}
    links = Links(link_targets)
    needed = {links.destination(path) for path in link_targets if not is_foreign_path(path, targets)}
    names: dict[str, list[Member]] = {}
    for member in members:
        if member.info.isreg() or member.info.issym():
            names[member.path] = [member]
        elif member.info.islnk():
            names.setdefault(normal_path(member.info.linkname), []).append(member)
    removed: set[str] = set()
    for group in names.values():
        paths = [member.path for member in group]
        if all(is_foreign_path(path, targets) and links.place(path) not in needed for path in paths):
            removed |= set(paths)
            freed = [group[0].n_bytes, *(0 for _ in paths[1:])]
            result.deleted += [
                Deleted(path, n_bytes, gfx_targets_of_path(path))
                for path, n_bytes in zip(paths, freed, strict=True)
            ]
    return removed


def _planned(member: Member, descriptor: int, run: _Run) -> PrunePlan | None:
    """How to prune a member; None when there is nothing to cut, or when it may not be cut."""
    source = window(descriptor, member.content, member.n_bytes)
    return run.cut(member.path, source, lambda: plan_prune(source, run.targets, strict=False))


def _write_member(
    member: Member,
    plan: PrunePlan | None,
    descriptor: int,
    *,
    handle: int,
    latest: int | None,
    targets: Sequence[TargetId],
) -> None:
    late = latest is not None and member.info.mtime > latest
    if plan is None and not late:
        copy_range(descriptor, handle, member.start, n_bytes=member.end - member.start)
        return
    size = plan.bytes_after if plan else member.info.size
    os.write(handle, _header(member.info, size, latest if late else None))
    if plan is None:
        copy_range(descriptor, handle, member.content, n_bytes=member.end - member.content)
        return
    begin = os.lseek(handle, 0, os.SEEK_CUR)
    source = window(descriptor, member.content, member.n_bytes)
    write_plan(plan, source, descriptor, handle, origin=member.content)
    verify_prune(source, window(handle, begin, size), targets)
    os.write(handle, bytes(-size % BLOCK))


def _header(info: tarfile.TarInfo, size: int, mtime: int | None) -> bytes:
    kept = {key: value for key, value in info.pax_headers.items() if key != "size"}
    if mtime is not None:
        kept.pop("mtime", None)
    changed = copy.copy(info)
    changed.size, changed.pax_headers = size, kept
    changed.mtime = info.mtime if mtime is None else mtime
    return changed.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _add(handle: io.FileIO, path: str, content: bytes, mtime: int) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mtime = len(content), mtime
    handle.write(info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % BLOCK))


# Wheels.


def prune_wheel(
    original: Path, out: Path, targets: Sequence[TargetId], *, progress: Progress = lambda _line: None
) -> TreeResult:
    """Write the wheel `original` to `out` without what none of the targets can run.

    Its changed files are in a temporary folder next to `out`, one at a time. RECORD stays
    as it is: installers write their own. Raises as `prune_tar` does.
    """
    run = _Run(targets, progress, TreeResult(tuple(map(str, targets))))
    with _readable(original) as old, zipfile.ZipFile(out, "w") as new, scratch(out.parent) as folder:
        for info in old.infolist():
            _wheel_member(old, new, info, folder=folder, run=run)
    return run.result


@contextmanager
def _readable(original: Path) -> Iterator[zipfile.ZipFile]:
    """A wheel, opened. Raises DataError where its directory or a member can't be read."""
    try:
        with zipfile.ZipFile(original) as wheel:
            yield wheel
    except ZIP_FAULTS as error:
        raise DataError(f"{original} is not a wheel, or it is damaged: {error}", AGAIN) from error


def _targets_of_wheel(original: Path, folder: Path) -> set[TargetId]:
    targets: set[TargetId] = set()
    with _readable(original) as wheel, scratch(folder) as inner:
        member_file = inner / "member"
        for info in wheel.infolist():
            targets |= known_targets(gfx_targets_of_path(info.filename))
            with wheel.open(info) as packed:
                head = packed.read(HEADER_BYTES)
                if not may_hold_bundles(head):
                    continue
                with member_file.open("wb") as file:
                    file.write(head)
                    shutil.copyfileobj(packed, file, 1 << 20)
            with open_source(member_file) as (source, _):
                targets |= targets_in(source)
    return targets


def _wheel_member(
    old: zipfile.ZipFile,
    new: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    *,
    folder: Path,
    run: _Run,
) -> None:
    if is_foreign_path(info.filename, run.targets):
        named = gfx_targets_of_path(info.filename)
        run.result.deleted.append(Deleted(info.filename, info.file_size, named))
        return
    fresh = zipfile.ZipInfo(info.filename, info.date_time)  # stored, not deflated: it is read once, soon
    fresh.external_attr = info.external_attr
    if info.is_dir():
        new.writestr(fresh, b"")
        return
    place = folder / "member"
    with old.open(info) as packed, place.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    with open_source(place) as (source, _):
        run.cut(info.filename, source, lambda: prune_file(place, run.targets, strict=False))
    with place.open("rb") as file, new.open(fresh, "w", force_zip64=True) as stored:
        shutil.copyfileobj(file, stored, 1 << 20)
