"""Files that samples are appended to, a line each: what was written is kept when this process is killed.

A file that takes no more, because the disk is full or a pipe's reader is slow, doesn't end the watch: the
samples that it lacks are counted, and it gets the next ones as soon as it takes them.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path

from probes.errors import ReportError
from probes.records.reportfiles import reason
from probes.records.samples import Sample, Subject
from probes.shared import files
from probes.shared.locks import lock_now
from probes.shared.output import complain
from probes.watch import samplelines

Line = Callable[[Sample], str]

# Without O_NONBLOCK a pipe without a reader, or with a slow one, would hold up the watch and its command
_OPEN = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Recorder:
    """One file of lines. A line is with the kernel when `add` returns, or the sample is counted as lost."""

    def __init__(self, path: Path, head: str, new_lines: Callable[[], Line]) -> None:
        """`new_lines` makes what turns samples into lines, which may leave out what the line before said.

        Raises ReportError where the file can't be opened, or another watch writes it.
        """
        self._path, self._head, self._new_lines = path, head, new_lines
        self._line = new_lines()
        self._rest = b""  # of a line that was written in part
        self._n_samples = self._n_lost = 0
        self._why = ""
        try:
            self._descriptor, self._replaces = _opened(path)
        except OSError as error:
            raise self._failed(error) from error
        if self._replaces and not lock_now(self._descriptor):
            os.close(self._descriptor)
            raise ReportError(f"another watch writes {path}", "name another file, or wait for it to end")

    def begin(self) -> None:
        """Write the head, over what the file had. Raises ReportError."""
        try:
            if self._replaces:
                os.ftruncate(self._descriptor, 0)
            self._write(self._head)
            self._finish_line()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> ReportError:
        return ReportError(
            f"can't write {self._path}: {reason(error)}",
            "choose a file that can be written, on a disk with room",
        )

    def add(self, sample: Sample) -> None:
        """Append a sample."""
        self._n_samples += 1
        try:
            self._finish_line()
            self._write(self._line(sample))
        except OSError as error:
            self._n_lost += 1
            self._line = self._new_lines()  # the next line must not rely on this one
            self._note(error)

    def _write(self, line: str) -> None:
        self._rest = line.encode() + b"\n"
        try:
            self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except OSError:
            self._rest = b""  # nothing of it was written
            raise

    def _finish_line(self) -> None:
        while self._rest:
            self._rest = self._rest[os.write(self._descriptor, self._rest) :]

    def _note(self, error: OSError) -> None:
        if not self._why:
            complain(f"note: {self._path} doesn't take every sample: {reason(error)}; the watch goes on")
        self._why = reason(error)

    def close(self) -> str:
        """Close the file. What it lacks, in words; empty where it has everything."""
        try:
            try:
                self._finish_line()
            finally:
                os.close(self._descriptor)
        except OSError as error:
            self._n_lost += 1
            self._note(error)
        if not self._n_lost:
            return ""
        return f"{self._path} lacks {self._n_lost:,} of {self._n_samples:,} samples: {self._why}"


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor to append to, and whether what the file has is to be replaced. Raises OSError."""
    descriptor = os.open(path, _OPEN, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor, False
    own = files.own_descriptor(path)
    if own is None:
        return descriptor, True
    os.close(descriptor)
    return os.dup(own), False  # /dev/stdout on a log: go on where it stands, as the command does


def open_recorders(subject: Subject, *, jsonl: Path | None, csv: Path | None) -> list[Recorder]:
    """A recorder for each file that was asked for. Raises ReportError."""
    found = []
    if jsonl:
        found.append(Recorder(jsonl, samplelines.first_line(subject), lambda: samplelines.LineWriter().line))
    if csv:
        found.append(Recorder(csv, samplelines.csv_header(subject), lambda: samplelines.csv_row))
    for recorder in found:  # once all of them are open
        recorder.begin()
    return found
