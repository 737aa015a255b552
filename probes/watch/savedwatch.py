"""Reads a watch's report, or makes one of a file of samples: what is left of a watch that was killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from probes.records.reportfiles import reading
from probes.records.samples import Subject
from probes.records.watched import KIND, MOST_BYTES, VERSION, WatchReport, from_json
from probes.shared import files
from probes.shared.invocation import probe_command, tool_version
from probes.shared.unknown import Unknown
from probes.watch import samplelines
from probes.watch.tallies.tally import Tally

MOST_LINE_CHARS = 8 << 20  # a first line holds the command's words, of which Linux takes 2 MiB
_HEAD = 400  # bytes: enough for the key `kind`, which is written first
_NOT_IN_SAMPLES = Unknown("a file of samples doesn't hold it; --report does")


def is_watch_file(path: Path) -> bool:
    """Whether a file begins like a watch's report or samples; False where it can't be read."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD).decode("utf-8", "replace")
    except OSError:
        return False
    return f'"kind": "{KIND}"' in head or samplelines.FORM in head


def named_watch(path: Path, *, name: Path | None = None) -> tuple[WatchReport, str]:
    """The report in a file and the text that it was read from. Raises ReportError, which calls it `name`."""
    with reading(name or path, f"make one: {probe_command()} watch --report FILE"):
        with path.open(encoding="utf-8") as file:
            lines = _lines(file)
            subject = samplelines.subject_of(next(lines, ""))
            if subject:
                return _tallied(subject, lines), ""
        text = files.read_text(path, most_bytes=MOST_BYTES)
        return from_json(text), text


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, which may have no end. Raises ValueError for one that is too long."""
    while line := file.readline(MOST_LINE_CHARS):
        if len(line) == MOST_LINE_CHARS and not line.endswith("\n"):
            raise ValueError(f"a line of {MOST_LINE_CHARS >> 20} Mi characters or more")
        yield line


def _tallied(subject: Subject, lines: Iterator[str]) -> WatchReport:
    tally = Tally(subject.interval_s, len(subject.cards))
    for sample in samplelines.samples_of(lines):
        tally.add(sample)
    return report_of(subject, tally)


def report_of(subject: Subject, tally: Tally) -> WatchReport:
    """A report of what the samples alone say."""
    return WatchReport(
        kind=KIND,
        schema_version=VERSION,
        tool_version=tool_version(),
        subject=subject,
        duration_s=tally.duration_s,
        step_s=tally.step_s,
        pace=tally.pace(_NOT_IN_SAMPLES),
        machine=tally.machine(),
        cards=tally.cards(),
        allocator=_NOT_IN_SAMPLES,
        ended=_NOT_IN_SAMPLES,
    )
