"""Samples as lines: JSON, which can be read back, and CSV for spreadsheets. Pure.

The first JSON line is the subject. A reason for a missing figure is written when it appears or changes, not
with every sample.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probes.records.samples import (
    CARD_GAUGES,
    MACHINE_GAUGES,
    CardSample,
    Look,
    ProcessUse,
    Sample,
    Subject,
    subject_from,
)
from probes.shared.codec import Misfit, check_figures, decode, encode, load
from probes.shared.unknown import Unknown

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
    """The samples after a first line, without a torn last one. Raises ValueError for another broken line."""
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
