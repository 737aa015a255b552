"""Files that samples are appended to, a line each: what was written is kept when this process is killed, and
when another watch goes on with the file, as that of a run that is resumed does.

A file that takes no more, because the disk is full or a pipe's reader is slow, doesn't end the watch: the
samples that it lacks are counted, and it gets the next ones as soon as it takes them.
"""

import csv
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from probes.core import files
from probes.core.codec import Misfit, check_figures, decode, encode, load
from probes.core.errors import ReportError
from probes.core.files import lock_now
from probes.core.invocation import probe_command, tool_version
from probes.core.output import error
from probes.core.unknown import Unknown
from probes.records.files import reading, reason
from probes.records.watch import (
    CARD_GAUGES,
    MACHINE_GAUGES,
    MOST_BYTES,
    WATCH_KIND,
    WATCH_VERSION,
    CardSample,
    Look,
    ProcessUse,
    Sample,
    Subject,
    WatchReport,
    subject_from,
    watch_from_json,
)
from probes.watch.totals import WatchTotals

FORM = "weir watch samples 1"  # of the first line
DIGITS = 6  # of figures in lines
_MACHINE_COLUMNS = tuple(gauge.name for gauge in MACHINE_GAUGES)
_CARD_COLUMNS = tuple(gauge.name for gauge in CARD_GAUGES)


def first_line(subject: Subject) -> str:
    """The line that a file of samples begins with."""
    return json.dumps({"form": FORM, "subject": encode(subject)}, allow_nan=False)


class LineWriter:
    """Makes the JSON lines of samples."""

    def __init__(self) -> None:
        self._reasons: Sequence[Mapping[str, str]] = ()

    def line(self, sample: Sample) -> str:
        """One sample."""
        reasons = [sample.machine.missing, *(_card_reasons(card) for card in sample.cards)]
        found: dict[str, Any] = {
            "at_s": round(sample.at_s, DIGITS),
            "late_s": None if sample.late_s is None else round(sample.late_s, DIGITS),
            "machine": _figures(sample.machine),
            "cards": [_card(card) for card in sample.cards],
        }
        if reasons != self._reasons:
            self._reasons = reasons
            found["why"] = reasons
        return json.dumps(found, separators=(",", ":"), allow_nan=False)


def _figures(look: Look) -> dict[str, float]:
    return {name: round(value, DIGITS) for name, value in look.values.items()}


def _card(card: CardSample) -> dict[str, Any]:
    found: dict[str, Any] = {"look": _figures(card.look)}
    if not isinstance(card.slowdowns, Unknown):
        found["slowdowns"] = card.slowdowns
    if not isinstance(card.processes, Unknown):
        found["processes"] = [encode(one) for one in card.processes]
    return found


def _card_reasons(card: CardSample) -> Mapping[str, str]:
    more = {
        name: value.reason
        for name, value in (("slowdowns", card.slowdowns), ("processes", card.processes))
        if isinstance(value, Unknown)
    }
    return {**card.look.missing, **more} if more else card.look.missing


def subject_of(line: str) -> Subject | None:
    """The subject, where a line is a file's first; None for any other text. Raises ValueError."""
    if FORM not in line[:60]:
        return None
    found = load(line)
    if not isinstance(found, dict) or found.get("form") != FORM:
        return None
    check_figures(found)
    return subject_from(found.get("subject"), "subject")


@dataclass(frozen=True)
class _CardLine:
    look: Mapping[str, float]
    slowdowns: tuple[str, ...] | None = None
    processes: tuple[ProcessUse, ...] | None = None


@dataclass(frozen=True)
class _Line:
    at_s: float
    late_s: float | None
    machine: Mapping[str, float]
    cards: tuple[_CardLine, ...]
    why: tuple[Mapping[str, str], ...] = ()


def samples_of(lines: Iterable[str]) -> Iterator[Sample]:
    """One watch's samples, without a torn last one. Raises ValueError for another broken line."""
    reasons: Sequence[Mapping[str, str]] = ()
    broken: ValueError | None = None
    for line in lines:
        if broken:
            raise broken
        try:
            found = _read(line)
        except ValueError as error:
            broken = error
            continue
        reasons = found.why or reasons
        yield _sample(found, reasons)


def _read(text: str) -> _Line:
    value = load(text)
    check_figures(value)
    found = decode(_Line, value, "sample")
    if found.at_s < 0:
        raise Misfit(f"sample.at_s: expected a time since the start, found {found.at_s!r}")
    return found


def _sample(line: _Line, reasons: Sequence[Mapping[str, str]]) -> Sample:
    whys = [*reasons, *({} for _ in range(len(line.cards) + 1 - len(reasons)))]
    cards = (_card_sample(card, why) for card, why in zip(line.cards, whys[1:], strict=False))
    return Sample(line.at_s, line.late_s, Look(line.machine, whys[0]), tuple(cards))


def _card_sample(card: _CardLine, why: Mapping[str, str]) -> CardSample:
    slow, uses = (Unknown(why.get(name, "not read")) for name in ("slowdowns", "processes"))
    return CardSample(
        Look(card.look, why),
        slow if card.slowdowns is None else card.slowdowns,
        uses if card.processes is None else card.processes,
    )


def csv_header(subject: Subject) -> str:
    """The names of the columns."""
    cards = [f"card{at}_{name}" for at in range(len(subject.cards)) for name in (*_CARD_COLUMNS, "slowdowns")]
    return _csv_row(["at_s", *_MACHINE_COLUMNS, *cards])


def csv_row(sample: Sample) -> str:
    """One sample; a missing figure is an empty field."""
    cells: list[object] = [round(sample.at_s, DIGITS)]
    cells += [sample.machine.values.get(name, "") for name in _MACHINE_COLUMNS]
    for card in sample.cards:
        cells += [card.look.values.get(name, "") for name in _CARD_COLUMNS]
        cells.append("" if isinstance(card.slowdowns, Unknown) else "; ".join(card.slowdowns) or "none")
    return _csv_row(cells)


def _csv_row(cells: Sequence[object]) -> str:
    made = io.StringIO()
    csv.writer(made, lineterminator="").writerow(cells)
    return made.getvalue()


Line = Callable[[Sample], str]

# Without O_NONBLOCK a pipe without a reader, or with a slow one, would hold up the watch and its command
_OPEN = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Recorder:
    """One file of lines. A line is with the kernel when `add` returns, or the sample is counted as lost."""

    def __init__(self, path: Path, head: str, new_lines: Callable[[], Line], *, columns: bool) -> None:
        """`new_lines` makes what turns samples into lines, which may leave out what the line before said.

        `columns`: the head names those of the lines, so it stands in a file once. Raises ReportError where
        the file can't be opened, has something else than a watch's lines, or another watch writes it.
        """
        self._path, self._head, self._new_lines, self._columns = path, head, new_lines, columns
        self._line = new_lines()
        self._rest = b""  # of a line that was written in part
        self._n_samples = self._n_lost = 0
        self._why = ""
        try:
            self._descriptor, self._is_own = _opened(path)
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._had = self._found() if self._is_own else 0
        except BaseException:
            os.close(self._descriptor)
            raise

    def _found(self) -> int:
        """The bytes that the file has of earlier watches. Raises ReportError."""
        if not lock_now(self._descriptor):
            raise ReportError(
                f"another watch writes {self._path}", "name another file, or wait for it to end"
            )
        head = f"{self._head}\n" if self._columns else f'{{"form": "{FORM}"'
        try:
            with self._path.open("rb") as file:
                same = file.read(len(head.encode())) == head.encode()
                had = file.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._failed(error) from error
        if had and not same:
            lines = "columns" if self._columns else "lines"
            raise ReportError(
                f"{self._path} has other {lines} than this watch writes, and is left as it is",
                "name another file, or remove it",
            )
        return had

    def begin(self) -> None:
        """Write the head, after what the file has of earlier watches. Raises ReportError."""
        try:
            if self._had:
                error(f"note: {self._path} has samples of an earlier watch; this one's come after them")
                self._end_torn_line()
            if not (self._had and self._columns):
                self._write(self._head)
                self._finish_line()
        except OSError as fault:
            if self._is_own:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._had)  # half a head could never be read
            raise self._failed(fault) from fault

    def _end_torn_line(self) -> None:
        """A watch that was killed, or whose disk was full, may have left half a line."""
        with self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                os.write(self._descriptor, b"\n")

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

    def _note(self, fault: OSError) -> None:
        if not self._why:
            error(f"note: {self._path} doesn't take every sample: {reason(fault)}; the watch goes on")
        self._why = reason(fault)

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
    """A descriptor to append to, and whether the file is for this watch alone. Raises OSError."""
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
        found.append(Recorder(jsonl, first_line(subject), lambda: LineWriter().line, columns=False))
    if csv:
        found.append(Recorder(csv, csv_header(subject), lambda: csv_row, columns=True))
    for recorder in found:  # once all of them are open
        recorder.begin()
    return found


OneWatch = tuple[Subject, Iterator[Sample]]

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
    return f'"kind": "{WATCH_KIND}"' in head or FORM in head


def named_watch(path: Path, *, name: Path | None = None) -> tuple[WatchReport, str]:
    """The report in a file and the text that it was read from. Raises ReportError, which calls it `name`."""
    with reading(name or path, f"make one: {probe_command()} watch --report FILE"):
        with path.open(encoding="utf-8") as file:
            lines = _lines(file)
            subject = subject_of(next(lines, ""))
            if subject:
                return _report_from(_watches(subject, lines)), ""
        text = files.read_text(path, most_bytes=MOST_BYTES)
        return watch_from_json(text), text


@contextmanager
def named_samples(path: Path) -> Iterator[Iterator[OneWatch]]:
    """The watches in a file of samples, for the block. Raises ReportError."""
    with (
        reading(path, f"make one: {probe_command()} watch --jsonl FILE"),
        path.open(encoding="utf-8") as file,
    ):
        lines = _lines(file)
        subject = subject_of(next(lines, ""))
        if subject is None:
            raise ReportError("it holds no samples")
        yield _watches(subject, lines)


def _watches(subject: Subject, lines: Iterator[str]) -> Iterator[OneWatch]:
    """The watches that wrote a file one after another: of each the subject, and its samples, which must be
    read before the next one is asked for. Raises ValueError."""
    subjects = [subject]

    def own() -> Iterator[str]:
        for line in lines:
            if found := subject_of(line):
                subjects.append(found)
                return
            yield line

    while subjects:
        yield subjects.pop(), samples_of(own())


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, which may have no end. Raises ValueError for one that is too long."""
    while line := file.readline(MOST_LINE_CHARS):
        if len(line) == MOST_LINE_CHARS and not line.endswith("\n"):
            raise ValueError(f"a line of {MOST_LINE_CHARS >> 20} Mi characters or more")
        yield line


def _report_from(watches: Iterator[OneWatch]) -> WatchReport:
    """One report of all, without the time between them. Raises ReportError where cards differ."""
    subject, samples = next(watches)
    totals = WatchTotals(subject.interval_s, len(subject.cards))
    totals.add_all(samples)
    for other, more in watches:
        if watched_cards(other) != watched_cards(subject):
            raise ReportError(
                f"it has watches of {subject.host} and of {other.host} or of other cards",
                'divide it: a line that begins with {"form" is the first one of a watch',
            )
        totals.goes_on(other.interval_s)
        totals.add_all(more)
    return report_of(subject, totals)


def watched_cards(subject: Subject) -> tuple[str, ...]:
    """What is the same for two watches of the same cards: the host, and each card's name and place."""
    return subject.host, *(text for card in subject.cards for text in (card.name, card.pci_id))


def report_of(subject: Subject, totals: WatchTotals) -> WatchReport:
    """A report of what the samples alone say."""
    return WatchReport(
        kind=WATCH_KIND,
        schema_version=WATCH_VERSION,
        tool_version=tool_version(),
        subject=subject,
        duration_s=totals.duration_s,
        step_s=totals.step_s,
        pace=totals.pace(_NOT_IN_SAMPLES),
        machine=totals.machine(),
        cards=totals.cards(),
        allocator=_NOT_IN_SAMPLES,
        ended=_NOT_IN_SAMPLES,
    )
