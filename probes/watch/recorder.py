"""Files that samples are appended to, a line each: what was written is kept when this process is killed."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

from probes.errors import ReportError
from probes.records.samples import Sample, Subject
from probes.watch import samplelines

_OPEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class Recorder:
    """One file of lines. Each line is with the kernel when `add` returns."""

    def __init__(self, path: Path, head: str, line: Callable[[Sample], str]) -> None:
        self._path, self._line = path, line
        try:
            self._descriptor = os.open(path, _OPEN, 0o666)
        except OSError as error:
            raise self._failed(error) from error
        self._append(head)

    def add(self, sample: Sample) -> None:
        """Append a sample. Raises ReportError."""
        self._append(self._line(sample))

    def _append(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            if os.write(self._descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> ReportError:
        return ReportError(f"can't write {self._path}: {error.strerror}", "choose a file on a disk with room")

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def open_recorders(subject: Subject, *, jsonl: Path | None, csv: Path | None) -> list[Recorder]:
    """A recorder for each file that was asked for. Raises ReportError."""
    found = []
    if jsonl:
        found.append(Recorder(jsonl, samplelines.first_line(subject), samplelines.LineWriter().line))
    if csv:
        found.append(Recorder(csv, samplelines.csv_header(subject), samplelines.csv_row))
    return found
