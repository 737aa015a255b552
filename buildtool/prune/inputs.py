"""Inputs of a build without the GPU code that its cards can't run, kept by content, targets and pruner.

A root file system or a wheel is pruned on the host, before the engine sees any of it: docs/decisions/0006.
"""

import hashlib
import json
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buildtool.core.files import (
    discard,
    lock_if_free,
    open_lock,
    read_cached,
    replacing,
    sha256_of,
    write_text,
)
from buildtool.core.progress import Progress
from buildtool.gpucode.target import TargetId
from buildtool.prune.archives import archive_targets, prune_tar, prune_wheel
from buildtool.prune.manifest import TreeResult, image_manifest, manifest_entry
from probes.core.units import counted, decimal_bytes

Verify = Callable[[Path, str], None]  # raises DataError when a file doesn't have this SHA-256

PRUNER = 3  # part of every key: raise it when the same input and targets would give other bytes
INSPECTOR = 2  # likewise, when other targets would be found in the same input
KEPT_BYTES = 12_000_000_000  # of archives that no run uses; those of `rocm` or `cuda` have 2 to 3 GB


class Lease:
    """Keeps an entry of the cache from being evicted, by this run or another, for as long as it is alive."""

    def __init__(self, lock: Path) -> None:
        """Wait while the entry is being evicted. Raises DataError when the cache can't be written."""
        self._close = weakref.finalize(self, os.close, open_lock(lock))


@dataclass(frozen=True)
class PrunedInput:
    """What replaces an archive (itself where nothing was removed), and what a prune did to it."""

    path: Path
    run: dict[str, Any]  # an entry of the manifest
    lease: Lease | None = field(default=None, compare=False, repr=False)  # keeps `path` where it is


@dataclass(frozen=True)
class PrunedInputs:
    """All of a variant's inputs that were inspected, by the SHA-256 of the archive."""

    targets: tuple[TargetId, ...]
    by_sha256: dict[str, PrunedInput]

    def path(self, sha256: str, original: Path) -> Path:
        """The file to use in place of `original`."""
        pruned = self.by_sha256.get(sha256)
        return pruned.path if pruned else original

    def manifest(self) -> str:
        """What was removed, for the image: `/opt/weir/weir-prune.json`."""
        return image_manifest(self.targets, [pruned.run for pruned in self.by_sha256.values()])


class Inspections:
    """Which targets an archive has code for, kept by its content: reading one takes seconds."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        self._directory = directory
        self._progress = progress

    def known(self, sha256: str) -> frozenset[TargetId] | None:
        """What an earlier inspection found; None before there was one."""
        return read_cached(self._record(sha256), _targets_from)

    def targets(self, original: Path, sha256: str, *, verify: Verify) -> frozenset[TargetId]:
        """The targets of a root file system's tar or a wheel, inspected where that hasn't happened yet.

        Raises what `verify` raises, DataError for an archive that can't be read, OSError for a full disk.
        """
        targets = self.known(sha256)
        if targets is None:
            self._progress(f"looking for GPU code in {original.name}")
            verify(original, sha256)
            targets = frozenset(archive_targets(original, folder=self._directory))
            write_text(self._record(sha256), json.dumps(sorted(map(str, targets))))
        return targets

    def _record(self, sha256: str) -> Path:
        key = hashlib.sha256(json.dumps([sha256, INSPECTOR]).encode()).hexdigest()
        return self._directory / f"{key[:24]}.json"


def _targets_from(text: str) -> frozenset[TargetId]:
    """What `Inspections` stored. Raises what `kept` takes for damage."""
    return frozenset(map(TargetId.parse, json.loads(text)))


class PruneCache:
    """Pruned archives, each with the list of what was removed."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        self._directory = directory
        self._progress = progress

    def bring(
        self,
        original: Path,
        sha256: str,
        targets: Sequence[TargetId],
        *,
        verify: Verify = lambda _path, _sha256: None,
    ) -> PrunedInput:
        """A root file system's tar or a wheel, pruned; made if it is missing or has changed.

        It stays where it is for as long as the result is alive, no matter what this and other runs make
        meanwhile. `verify` is called before the original is used. Raises what it raises, DataError for an
        archive that can't be read, EnvironmentMissing when the disk is full.
        """
        key = hashlib.sha256(json.dumps([sha256, [str(t) for t in targets], PRUNER]).encode()).hexdigest()
        out = self._directory / f"{key[:24]}{original.suffix}"
        record = out.with_suffix(".json")
        lease = Lease(out.with_suffix(".lock"))
        data = self._read(record, out)
        if data is None:
            verify(original, sha256)
            data = self._make(original, out, record, targets=targets)
        elif not data["changed"]:
            verify(original, sha256)
        os.utime(record)
        return PrunedInput(out if data["changed"] else original, data["run"], lease)

    def _read(self, record: Path, out: Path) -> dict[str, Any] | None:
        """What is known of an archive pruned earlier; None where it is missing or has changed."""
        data = read_cached(record, _recorded)
        if data and data["changed"] and not (out.is_file() and sha256_of(out) == data["sha256"]):
            return None
        return data

    def _make(
        self, original: Path, out: Path, record: Path, *, targets: Sequence[TargetId]
    ) -> dict[str, Any]:
        self._progress(f"pruning {original.name} to {', '.join(map(str, targets))}")
        prune = prune_wheel if original.suffix == ".whl" else prune_tar
        if not out.is_file():
            discard(out)
        with replacing(out) as partial:
            result = prune(original, partial, targets)
            data = {
                "changed": result.changed,
                "sha256": sha256_of(partial) if result.changed else "",
                "run": manifest_entry(original.name, result),
            }
            write_text(record, json.dumps(data))  # before the archive: what isn't recorded is never removed
        if not result.changed:
            out.unlink()
        self._progress(_summary(original, result))
        # the newest stay, and those in use; what a context links keeps its bytes until the next build
        kept = 0
        for each in sorted(self._directory.glob("*.json"), key=_used_at, reverse=True):
            kept += _archive_bytes(each)
            if kept > KEPT_BYTES:
                _evict(each)
        return data


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another run was quicker
        return 0


def _archive_bytes(record: Path) -> int:
    """The bytes of a record's archive; 0 where nothing was removed from the original."""
    return sum(
        path.stat().st_size for path in record.parent.glob(f"{record.stem}.*") if path.suffix != ".json"
    )


def _evict(record: Path) -> None:
    """Remove an entry, unless somebody holds a lease on it. Its lock is removed last, while we hold it."""
    lock = record.with_suffix(".lock")
    with lock_if_free(lock) as ours:
        if ours:
            for path in sorted(record.parent.glob(f"{record.stem}.*"), key=lambda path: path == lock):
                path.unlink(missing_ok=True)


def _recorded(text: str) -> dict[str, Any]:
    """What `_make` stored. Raises what `kept` takes for damage."""
    data: dict[str, Any] = json.loads(text)
    if not isinstance(data["changed"], bool) or not isinstance(data["run"]["targets"], list):
        raise TypeError("not what a prune writes down")
    return data | {"sha256": str(data["sha256"])}


def _summary(original: Path, result: TreeResult) -> str:
    refused = [f"; left whole: {item.path} ({item.reason})" for item in result.refused]
    return (
        f"{original.name}: {decimal_bytes(result.saved_bytes)} less, {counted(len(result.deleted), 'file')} "
        f"deleted, {counted(len(result.pruned), 'library')} cut, {len(result.untouched)} untouched"
        f"{''.join(refused)}"
    )
