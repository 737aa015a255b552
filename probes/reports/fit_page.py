"""One HTML page from an answer of `fit`: what fits, what takes the bytes, as a picture and tables. Pure."""

from collections.abc import Sequence

from probes.core.quoting import html
from probes.core.units import binary_bytes, duration
from probes.fit.report import FitReport, Measured, Parts
from probes.reports.fit import (
    KNOBS,
    TRIALS,
    beside,
    buys_most,
    described,
    drawn,
    knob_rows,
    largest_parts,
    phases,
    shares,
    size,
    trials,
    verdict,
)
from probes.reports.html import answer_section, framed, header, prose, raw_section, table_in_sight
from probes.reports.svg import COLOURS

WORDS = frozenset({"verdict", "what it costs", "one change"})


def render_fit(report: FitReport, *, raw: str, name: str) -> str:
    """The whole page. `raw` is the answer's file, which the page includes."""
    title = f"{report.question.model}: what fits into {binary_bytes(report.budget_bytes)}"
    asked = report.question
    details = (described(report), f"batch {asked.batch} x {asked.tokens} tokens", report.machine)
    return framed(
        title,
        header("What fits", title, details),
        _answer(report),
        _picture(report),
        _section("parts", "What takes the bytes", _parts(report)),
        _section("knobs", "What one change saves", _changes(report)),
        _section("trials", "Trials", _trials(report)),
        _notes(report),
        raw_section(raw, name),
    )


def _answer(report: FitReport) -> str:
    said = [
        verdict(report),
        f"Largest batch, predicted: {size(report.predicted_largest_batch)}; "
        f"longest sequence, predicted: {size(report.predicted_largest_tokens)}.",
    ]
    if isinstance(report.measured, Measured):
        found = report.measured.largest
        said.append(f"Largest {found.axis}, measured: {size(found)}.")
    said.append(buys_most(report))
    return answer_section(filter(None, said))


def _picture(report: FitReport) -> str:
    """The bars, in the page's own colours for light and dark."""
    svg = drawn(report, "")
    for colour, (light, _) in COLOURS.items():
        svg = svg.replace(f'fill="{light}"', f'fill="var(--{colour})"')
    caption = "Predicted. First bar: what takes the bytes as asked; other bars: the total after one change."
    return (
        '<section class="plot" id="picture" aria-label="Picture"><figure><div class="sheet scroll" '
        f'tabindex="0">{svg}</div><figcaption>{caption}</figcaption></figure></section>'
    )


def _parts(report: FitReport) -> str:
    rows = [[part, binary_bytes(n_bytes)] for part, n_bytes in shares(report.predicted)]
    rows.append(["in all", binary_bytes(report.predicted.total)])
    found = [table([f"as asked, at the peak ({report.moment})", f"predicted by {report.predicted_by}"], rows)]
    if isinstance(report.measured, Measured):
        headers, compared = beside(report, report.measured)
        parts = largest_parts(report.measured)
        found += [table(headers, compared)] if len(headers) > 1 else []
        found += [table(["while", "measured peak"], phases(parts))] if isinstance(parts, Parts) else []
    else:
        found.append(f"<p>Not measured: {prose(report.measured.reason)}.</p>")
    return "".join(found)


def _changes(report: FitReport) -> str:
    if not report.knobs:
        return "<p>Not known: there are no rules for this architecture.</p>"
    return table(KNOBS, knob_rows(report))


def _trials(report: FitReport) -> str:
    found = report.measured
    if not isinstance(found, Measured):
        return f"<p>{prose(found.reason)}</p>"
    said = f"Measured on {found.device}, in {duration(found.seconds)}. {found.cap}"
    early = f"<p>Ended early: {prose(found.ended)}</p>" if found.ended else ""
    return f"<p>{prose(said)}</p>{early}{table(TRIALS, list(trials(found)))}"


def _notes(report: FitReport) -> str:
    notes = [f"the card's figures: {report.constants.rpartition(': ')[2]}", *report.notes]
    if isinstance(report.measured, Measured):
        notes += report.measured.notes
    items = "".join(f"<li>{prose(note)}</li>" for note in notes)
    return f'<section id="notes"><h2>Notes</h2><ul>{items}</ul></section>'


def _section(name: str, title: str, inner: str) -> str:
    return f'<section id="{name}"><h2>{html(title)}</h2>{inner}</section>'


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in sight; its first column and those of words are set left."""
    return table_in_sight(headers[0], headers, rows, words={headers[0], *WORDS})
