"""The journal of a run: every record as soon as it is measured, so that a run can be resumed.

A file of JSON lines named after the report, locked while its run is alive. The first line is the report as it
was at the start; each further one names a probe and holds a record of it. A torn last line is ignored.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from probes.core.codec import decode, encode, load
from probes.core.errors import DeviceBusy, ReportError
from probes.core.files import lock_now, open_regular, read_regular, sweep_partials
from probes.core.invocation import probe_command
from probes.records.files import writing
from probes.records.rows import Record
from probes.records.schema import MOST_BYTES, WRITABLE, ProbeReport

SUFFIX = ".journal"
# Its name follows from the report's, so a symbolic link there must not be followed.
_OPEN = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW


@dataclass(frozen=True)
class Entry:
    """One line after the first."""

    probe: str
    record: Record
    round: int = 0


@dataclass(frozen=True)
class Past:
    """The content of a journal: the run as it was begun, and what it has measured."""

    begun: ProbeReport
    entries: tuple[Entry, ...]

    def records(self, probe: str, turn: int = 0) -> tuple[Record, ...]:
        """The records of a probe in one round, in order."""
        return tuple(e.record for e in self.entries if (e.probe, e.round) == (probe, turn))


def path_of(report: Path) -> Path:
    """The path of a report's journal. A journal's own path is given back."""
    return report if report.suffix == SUFFIX else report.with_name(report.name + SUFFIX)


def report_of(journal: Path) -> Path:
    """The report of a journal. A report's own path is given back. Raises ReportError for no file's name."""
    name = journal.name.removesuffix(SUFFIX)
    if not name:
        raise ReportError(
            f"{journal} is not the report of a run", f"name one: {probe_command()} run --resume FILE"
        )
    return journal.with_name(name)


class Journal:
    """An open journal. Each line is with the kernel when `add` returns: killing this process loses none."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path = descriptor, path

    def add(self, probe: str, record: Record, turn: int = 0) -> None:
        """Append a record of a probe in one round. Raises ReportError."""
        self._append(json.dumps(encode(Entry(probe, record, turn)), allow_nan=False))

    def begin(self, report: ProbeReport) -> None:
        """Write the first line. Raises ReportError."""
        self._append(json.dumps(encode(report), allow_nan=False))

    def _append(self, line: str) -> None:
        data = line.encode() + b"\n"
        with writing(self._path, "make room, then go on: --resume"):
            if os.write(self._descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)

    def remove(self) -> None:
        """The report holds everything: remove the journal."""
        with suppress(OSError):
            self._path.unlink()


@contextmanager
def open_journal(report: Path) -> Iterator[Journal]:
    """The journal of a report, made if it isn't there, held only for this run.

    A torn last line is cut off, so that the next one starts on a new line. Raises DeviceBusy when the run is
    alive, ReportError when the folder can't be written.
    """
    path = path_of(report)
    busy = DeviceBusy(f"the run of {report.name} is still alive", "wait for it to end")
    with held(path, _OPEN, 0o666, busy=busy) as descriptor:
        content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.ftruncate(descriptor, content.rfind(b"\n") + 1)
        yield Journal(descriptor, path)


def read(report: Path) -> Past | None:
    """The content of a report's journal; None for one that hadn't received its first line.

    Raises ReportError when there is no journal, or a line other than the last is broken.
    """
    path = path_of(report)
    try:
        lines = read_regular(path, most_bytes=MOST_BYTES).split(b"\n")
    except FileNotFoundError:
        raise ReportError(
            f"{report.name} has no journal: it was finished, begun by an older version, or isn't there",
            f"begin a new run: {probe_command()} run",
        ) from None
    except OSError as error:
        raise ReportError(
            f"can't read {path}: {error.strerror}", "check the path and its permissions"
        ) from error
    whole = lines[:-1]  # what follows the last line break is torn, or empty
    if not whole:
        return None
    try:
        begun = decode(ProbeReport, load(whole[0]), "line 1")
        entries = [decode(Entry, load(line), f"line {i}") for i, line in enumerate(whole[1:], 2)]
    except ValueError as error:
        raise ReportError(
            f"{path} is broken: {error}", f"remove it and begin a new run: {probe_command()} run"
        ) from error
    return Past(begun, tuple(entries))


def sweep(folder: Path) -> tuple[Path, ...]:
    """Remove half-written files of dead runs; the reports of those that can go on, oldest first.

    A file is left alone while the run that it belongs to is alive, and so is what only has a journal's name.
    """
    sweep_partials(folder)
    unfinished = []
    for path in sorted(folder.glob(f"*.json{SUFFIX}")):
        begun = _begun(path)
        if begun:
            unfinished.append(report_of(path))
        elif begun is False:
            path.unlink(missing_ok=True)
    return tuple(unfinished)


def _begun(journal: Path) -> bool | None:
    """Whether a dead run got its first line. None: it is alive, or this is a link, a directory or a pipe."""
    try:
        descriptor = open_regular(journal)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return b"\n" in os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    except OSError:  # it is locked, or there are no locks here and nobody can know
        return None
    finally:
        os.close(descriptor)


@contextmanager
def gpu_lock(folder: Path, pci_id: str) -> Iterator[None]:
    """Hold the GPU's lock in a folder that all runs share (the reports', also when they are in containers).

    The kernel releases it no matter how the holder ends. Raises DeviceBusy when another run holds it,
    ReportError when the folder can't be written.
    """
    path = folder / f".gpu-{pci_id.replace(':', '-')}.lock"
    busy = DeviceBusy(f"another run is measuring GPU {pci_id}", f"wait for it to end (it holds {path})")
    # reading is enough for flock, so that another user's file will do
    with held(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644, busy=busy):
        yield


@contextmanager
def held(path: Path, flags: int, mode: int, *, busy: DeviceBusy) -> Iterator[int]:
    """An open and locked file, in a folder that is made if need be. Raises `busy` or ReportError."""
    with writing(path, WRITABLE):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, mode)
    try:
        if not lock_now(descriptor):
            raise busy
        yield descriptor
    finally:
        os.close(descriptor)
