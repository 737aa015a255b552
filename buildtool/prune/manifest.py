"""What prunes removed from a tree: as a value, and as the JSON list that is kept with the tree.

While a prune runs, the list is a journal: a line for each change, on disk before the change is made. Whatever
stops the prune, the journal lists what was removed, and this run or the next one adds it to the list.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from buildtool.core.errors import ConfigError, DataError, EnvironmentMissing, ToolError
from buildtool.core.files import write_text
from buildtool.core.json_text import why_unread
from buildtool.gpucode.plan import PrunePlan
from buildtool.gpucode.target import TargetId
from probes.core.codec import decode, load
from probes.core.files import is_at, lock_now, open_regular, read_regular, sync_directory, write_all

# What a prune did.


@dataclass(frozen=True)
class Deleted:
    """A name that was only for foreign targets; `freed_bytes` is 0 for all but a file's last hard link."""

    path: str
    freed_bytes: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Pruned:
    """A file that lost code. Lengths of the file; the maps are unpacked bytes of code by target.

    `zeroed_bytes` of its length are zeros in place of code: they take no room on a disk, nor compressed.
    """

    path: str
    bytes_before: int
    bytes_after: int
    kept_bytes: dict[str, int]
    removed_bytes: dict[str, int]
    zeroed_bytes: int = 0

    @classmethod
    def by(cls, plan: PrunePlan, path: str) -> "Pruned":
        """What a plan makes of the file at `path`."""
        return cls(
            path,
            plan.bytes_before,
            plan.bytes_after,
            plan.kept_bytes,
            plan.removed_bytes,
            plan.zeroed_bytes,
        )


Change = Deleted | Pruned


@dataclass(frozen=True)
class Refused:
    """A file that was left as it is, and why: it can't be cut, or nothing of its code is to be cut."""

    path: str
    reason: str


@dataclass
class TreeResult:
    """What a prune of a tree did, or what a dry run would do; accumulates. Paths are relative to the tree."""

    targets: tuple[str, ...]
    deleted: list[Deleted] = field(default_factory=list)
    pruned: list[Pruned] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    untouched: list[Refused] = field(default_factory=list)  # with code for other cards that isn't cut

    def add(self, changes: Sequence[Change]) -> None:
        """Count changes."""
        self.deleted += [change for change in changes if isinstance(change, Deleted)]
        self.pruned += [change for change in changes if isinstance(change, Pruned)]

    def add_untouched(self, path: str, foreign: Sequence[str]) -> str:
        """Count a file that keeps its code for other cards; returns the line that reports it."""
        self.untouched.append(Refused(path, f"it holds code for {', '.join(foreign)} as before"))
        return f"untouched: {path}: {self.untouched[-1].reason}"

    @property
    def saved_bytes(self) -> int:
        """How many bytes smaller the files are together."""
        cut = sum(item.bytes_before - item.bytes_after for item in self.pruned)
        return cut + sum(item.freed_bytes for item in self.deleted)

    @property
    def zeroed_bytes(self) -> int:
        """How many bytes became zeros where they are."""
        return sum(item.zeroed_bytes for item in self.pruned)

    @property
    def changed(self) -> bool:
        """Whether anything was done, or would be done."""
        return bool(self.deleted or self.pruned)


# The list.

SCHEMA_VERSION = 1
MAX_BYTES = 64 << 20  # of a manifest or a journal; that of a whole ROCm tree has 1 MB
FILE_NAME = "weir-prune.json"
IMAGE_PATH = f"opt/weir/{FILE_NAME}"  # in a pruned image
_JOURNAL = ".journal"  # after the manifest's name
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_ELSEWHERE = "move it away, or name another file for the list: --manifest FILE"


def manifest_entry(archive: str, result: TreeResult) -> dict[str, Any]:
    """A prune as an entry of the manifest."""
    return {"archive": archive, **asdict(result), "saved_bytes": result.saved_bytes}


def image_manifest(targets: Sequence[TargetId], runs: Sequence[Any]) -> str:
    """The manifest of an image: the targets that it holds code for, and what each prune took out."""
    return _as_text({"targets": [str(target) for target in targets], "runs": list(runs)})


def runs_in(text: bytes) -> list[object]:
    """The runs that a manifest lists, fit to be written again.

    Raises ValueError for what isn't a manifest.
    """
    document = load(text)
    runs = document.get("runs") if isinstance(document, Mapping) else None
    if not isinstance(document, Mapping) or not isinstance(runs, list):
        raise ValueError("it lists no runs")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema version {document.get('schema_version')}")
    json.dumps(runs, allow_nan=False)
    return [*runs]


def _finished(result: TreeResult) -> dict[str, Any] | None:
    """A run as an entry of the manifest; None for one that changed nothing."""
    if not result.changed:
        return None
    return asdict(result) | {"saved_bytes": result.saved_bytes, "finished": True}


def _add_run(manifest: Path, run: dict[str, Any]) -> None:
    write_text(manifest, _as_text({"runs": [*_runs(manifest), run]}))


def _as_text(document: dict[str, Any]) -> str:
    return json.dumps({"schema_version": SCHEMA_VERSION, **document}, indent=1, sort_keys=True) + "\n"


def _runs(path: Path) -> list[object]:
    try:
        return runs_in(read_regular(path, most_bytes=MAX_BYTES))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unread(path, error) from error
    except ValueError as error:
        raise DataError(f"{path} is not a manifest of a prune ({why_unread(error)})", _ELSEWHERE) from error


def _unread(path: Path, error: OSError) -> DataError:
    reasons = {errno.EFBIG: "is larger than any prune's list", errno.EINVAL: "isn't a regular file"}
    reason = reasons.get(error.errno or 0, f"can't be read: {error.strerror}")
    return DataError(f"{path} {reason}", _ELSEWHERE)


# The journal.


class Journal:
    """A prune's changes so far, in a locked file next to the manifest. Use `journal` to get one."""

    def __init__(self, manifest: Path, root: Path, targets: Sequence[TargetId]) -> None:
        """Raises EnvironmentMissing when the journal can't be written: nothing may be changed then."""
        self.path = _journal_of(manifest)
        self._manifest = manifest
        self._root = root
        self._announced = TreeResult(tuple(map(str, targets)))
        self._inodes: dict[str, int] = {}
        self._result: TreeResult | None = None
        self._descriptor = _create_journal(self.path)
        head = {
            "schema_version": SCHEMA_VERSION,
            "root": str(root.resolve()),
            "targets": list(map(str, targets)),
        }
        try:
            self._append([json.dumps(head)])
            sync_directory(self.path.parent)
        except BaseException:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise

    def announce(self, changes: Sequence[Change]) -> None:
        """Record what is about to be done. Raises EnvironmentMissing; then it must not be done."""
        inodes = {
            item.path: status.st_ino
            for item in changes
            if isinstance(item, Pruned) and (status := _status(self._root / item.path))
        }
        self._append([json.dumps(_row(change, inodes)) for change in changes])
        self._announced.add(changes)
        self._inodes |= inodes

    def finish(self, result: TreeResult) -> None:
        """Record that the prune is complete, with its result."""
        self._result = result

    def close(self) -> None:
        """Add the run to the manifest and remove the journal.

        Raises EnvironmentMissing, DataError when the manifest can't be written. The journal stays then.
        """
        try:
            if self._result:
                run = _finished(self._result)
            else:
                run = _unfinished(self._announced, self._inodes, self._root)
            if run:
                _add_run(self._manifest, run)
            _remove(self.path)
        except ToolError as error:
            error.message += (
                f"; what was removed is listed in {self.path}, and the next prune adds it to the list"
            )
            raise
        finally:
            os.close(self._descriptor)

    def _append(self, lines: Iterable[str]) -> None:
        try:
            write_all(self._descriptor, "".join(f"{line}\n" for line in lines).encode())
            os.fsync(self._descriptor)
        except OSError as error:
            raise EnvironmentMissing(
                f"{self.path} can't be written: {error.strerror}; what it doesn't list wasn't touched",
                "free some space and run the same command again",
            ) from error


@contextmanager
def journal(manifest: Path, root: Path, targets: Sequence[TargetId]) -> Iterator[Journal]:
    """A journal for the prune of `root`; a killed prune's journal is added to the manifest first.

    If the block raises, or doesn't `finish`, what was done until then is listed as unfinished. Raises
    DataError for a file that isn't a manifest or a journal, ConfigError while another prune is running,
    EnvironmentMissing: all before anything is touched.
    """
    if manifest.parent == root and manifest.is_symlink():  # the tree's maker chose where it leads
        raise DataError(f"{manifest} is a symbolic link", _ELSEWHERE)
    manifest = Path(os.path.realpath(manifest))
    _runs(manifest)
    _recover(_journal_of(manifest), manifest)
    written = Journal(manifest, root, targets)
    try:
        yield written
    except ToolError as error:
        try:
            written.close()
        except ToolError as second:
            error.message += f"\n{second.message}"
        raise
    except BaseException:
        with suppress(ToolError):
            written.close()
        raise
    written.close()


def _journal_of(manifest: Path) -> Path:
    return manifest.with_name(f"{manifest.name}{_JOURNAL}")


def _unfinished(announced: TreeResult, inodes: Mapping[str, int], root: Path) -> dict[str, Any] | None:
    """Which of the announced changes were made, judged by what is there now; `inodes` are those of before."""
    done = TreeResult(announced.targets)
    done.add([item for item in announced.deleted if not os.path.lexists(root / item.path)])
    done.add([item for item in announced.pruned if _is_replaced(item, root / item.path, inodes)])
    run = _finished(done)
    return run | {"finished": False} if run else None


def _is_replaced(item: Pruned, path: Path, inodes: Mapping[str, int]) -> bool:
    """Whether a cut file took its original's place; one with zeros in place of code may have its length."""
    status = _status(path)
    if status is None or item.bytes_after != item.bytes_before:
        return status is None or status.st_size != item.bytes_before
    return status.st_ino != inodes.get(item.path, status.st_ino)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _create_journal(path: Path) -> int:
    try:
        descriptor = os.open(path, _CREATE, 0o666)
    except FileExistsError as error:
        raise _busy(path) from error
    except OSError as error:
        raise EnvironmentMissing(f"{path} can't be written: {error.strerror}", _ELSEWHERE) from error
    try:
        if not _lock(path, descriptor):
            raise _busy(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(path: Path, descriptor: int) -> bool:
    """Lock a journal; False when it isn't there any more. Raises ConfigError when another prune holds it."""
    if not lock_now(descriptor):
        raise _busy(path)
    return is_at(path, descriptor)


def _busy(path: Path) -> ConfigError:
    return ConfigError(f"another prune is running: it holds {path}", "wait for it to finish")


def _recover(path: Path, manifest: Path) -> None:
    """Add what a killed prune did to the manifest, and remove its journal.

    Raises DataError, EnvironmentMissing, ConfigError.
    """
    try:
        descriptor = open_regular(path, os.O_RDWR)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unread(path, error) from error
    try:
        if not _lock(path, descriptor):
            return  # its prune has just come to its end and listed it all
        run = _unfinished(*_read_back(path, descriptor))
        if run:
            _add_run(manifest, run)
        _remove(path)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentMissing(f"{path} can't be removed: {error.strerror}", _ELSEWHERE) from error


def _read_back(path: Path, descriptor: int) -> tuple[TreeResult, dict[str, int], Path]:
    """A journal's changes, inodes and the tree that they are in. Raises DataError for no journal."""
    try:
        text = read_regular(path, most_bytes=MAX_BYTES, descriptor=descriptor)
        lines = text.split(b"\n")[:-1]  # after the last line break: a line that was never whole
        if not lines:
            return TreeResult(()), {}, path.parent
        head, *rows = cast("list[dict[str, Any]]", list(map(load, lines)))
        announced = TreeResult(tuple(map(str, head["targets"])))
        inodes: dict[str, int] = {}
        announced.add([_change(row, inodes) for row in rows])
        return announced, inodes, Path(_path(head["root"]))
    except OSError as error:
        raise _unread(path, error) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a journal of a prune ({why_unread(error)})", _ELSEWHERE) from error


def _row(change: Change, inodes: Mapping[str, int]) -> dict[str, Any]:
    if isinstance(change, Deleted):
        return {"deleted": asdict(change)}
    return {"pruned": asdict(change), "inode": inodes.get(change.path)}


def _change(row: dict[str, Any], inodes: dict[str, int]) -> Change:
    """A line's change; the inode that it names goes to `inodes`."""
    inode = row.pop("inode", None)
    [(kind, fields)] = row.items()
    change: Change = decode(Deleted, fields) if kind == "deleted" else decode(Pruned, fields)
    if isinstance(inode, int):
        inodes[change.path] = inode
    _path(change.path)
    return change


def _path(value: object) -> str:
    """A path that a file system can have. Raises ValueError."""
    if not isinstance(value, str) or b"\0" in os.fsencode(value):
        raise ValueError("a path that no file has")
    return value
