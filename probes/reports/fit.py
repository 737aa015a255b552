"""The answer of `fit` as text: what fits, bars of what takes the bytes, the knobs, the trials. Pure."""

from collections.abc import Iterator
from typing import Final

from probes.core.quoting import html, terminal
from probes.core.units import binary_bytes, duration
from probes.core.unknown import Unknown
from probes.fit.report import VERDICTS, FitReport, Largest, Measured, Parts, Taken
from probes.reports.text import table

BAR: Final = 32  # characters of the longest bar
MOST_WORDS: Final = 100  # characters of an error in the table; the JSON has more
PARTS: Final = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer's state",
    "activations": "activations",
    "kv_cache": "keys and values",
    "workspace": "workspace of libraries",
    "rounding": "rounding of torch's allocator",
    "context": "the driver's context",
}
DIVIDED: Final = ("weights", "optimizer's state", "gradients, activations and all else")


def lines(report: FitReport) -> str:
    """The whole answer."""
    parts = [_answer(report), bars(report), _knobs(report)]
    if isinstance(report.measured, Measured):
        parts.append(_measured(report.measured))
        parts.append(_beside(report, report.measured))
    else:
        parts.append(f"not measured: {terminal(report.measured.reason)}")
    parts += [f"note: {terminal(note)}" for note in report.notes]
    return "\n\n".join(part for part in parts if part)


def verdict(report: FitReport) -> str:
    """Whether it fits and what it needs, in a sentence each."""
    asked = report.question
    what = f"{asked.model}, {described(report)}, batch {asked.batch} x {asked.tokens} tokens"
    answer = "fits" if report.fits else "doesn't fit"
    needs = binary_bytes(report.smallest_budget_bytes)
    budget = binary_bytes(report.budget_bytes)
    return (
        f"{what}: {answer} into {budget} of {report.machine}, predicted. Smallest budget that works: {needs}"
        f" (and {binary_bytes(report.predicted.context)} for the driver's context)."
    )


def _answer(report: FitReport) -> str:
    asked, card = report.question, terminal(report.constants.rpartition(": ")[2])
    return (
        f"{terminal(verdict(report))}\n"
        f"Largest batch of {asked.tokens} tokens: {size(report.predicted_largest_batch)}; "
        f"longest sequence at batch {asked.batch}: {size(report.predicted_largest_tokens)}; both predicted.\n"
        f"predicted by {report.predicted_by}; the card's figures: {card}"
    )


def described(report: FitReport) -> str:
    """What is done, in a few words."""
    asked = report.question
    if asked.task == "inference":
        return f"inference in {asked.precision}"
    words = [f"a training step in {asked.precision} with {asked.optimizer}"]
    if asked.lora_rank:
        words.append(f"LoRA of rank {asked.lora_rank}")
    if asked.checkpointing:
        words.append("gradient checkpointing")
    if asked.accumulate > 1:
        words.append(f"{asked.accumulate} batches accumulated")
    return ", ".join(words)


def size(found: Largest | Unknown) -> str:
    """A largest size, with what is open about it."""
    if isinstance(found, Unknown):
        return "not known"
    if found.contradictions:
        return f"{found.fits} to {found.top}"
    if found.exact:
        return str(found.fits)
    return f"at least {found.fits}" + (f", less than {found.fails}" if found.fails else "")


def bars(report: FitReport) -> str:
    """What takes the bytes at the peak, as a table with bars."""
    parts = shares(report.predicted)
    most = max((n for _, n in parts), default=1)
    rows = [[name, binary_bytes(n), "#" * max(round(BAR * n / most), 1)] for name, n in parts]
    rows.append(["in all", binary_bytes(report.predicted.total), ""])
    return table([f"at the peak ({report.moment})", "predicted", ""], rows, markdown=False)


def shares(taken: Taken) -> list[tuple[str, int]]:
    """What takes bytes, and how many; nothing that takes none."""
    return [(name, getattr(taken, key)) for key, name in PARTS.items() if getattr(taken, key)]


def largest_parts(found: Measured) -> Parts | Unknown:
    """What the largest size that fits took, measured."""
    at = next((trial.parts for trial in found.trials if trial.size == found.largest.fits), None)
    return at or Unknown("nothing fits")


def beside(report: FitReport, found: Measured) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: what takes the bytes at the largest size measured to fit, predicted and measured."""
    predicted = [
        (name, taken)
        for name, taken in (
            (f"predicted by {report.predicted_by}", report.predicted_at_largest),
            ("predicted by a trace", found.at_size),
        )
        if isinstance(taken, Taken)
    ]
    columns = [(t.weights, t.optimizer, t.allocated - t.weights - t.optimizer) for _, t in predicted]
    headers = [f"at {found.largest.axis} {found.largest.fits}", *(name for name, _ in predicted)]
    parts = largest_parts(found)
    if isinstance(parts, Parts):
        columns.append((parts.weights, parts.optimizer, parts.rest))
        headers.append("measured")
    rows = [[name, *(binary_bytes(column[n]) for column in columns)] for n, name in enumerate(DIVIDED)]
    rows.append(["in all", *(binary_bytes(sum(column)) for column in columns)])
    return headers, rows


def phases(parts: Parts) -> list[list[str]]:
    """The peak of each part of a step, measured."""
    return [[phase.name, binary_bytes(phase.peak_bytes)] for phase in parts.phases]


def _beside(report: FitReport, found: Measured) -> str:
    headers, rows = beside(report, found)
    if len(headers) == 1:
        return ""
    parts = largest_parts(found)
    more = ""
    if isinstance(parts, Parts):
        more = "\n\n" + table(["while", "measured peak"], phases(parts), markdown=False)
    return table(headers, rows, markdown=False) + more


def _knobs(report: FitReport) -> str:
    if not report.knobs:
        return ""
    return f"{buys_most(report)}\n{table(KNOBS, knob_rows(report), markdown=False)}"


def buys_most(report: FitReport) -> str:
    """Which single change saves most, in a sentence; empty where none is known to save anything."""
    best = report.knobs[0] if report.knobs else None
    if best is None or best.saves <= 0:
        return ""
    return (
        f"The single change that saves most, predicted: {best.name} ({saved(best.saves)} less; {best.cost})."
    )


KNOBS: Final = (
    "one change",
    "saves, predicted",
    "then in all, predicted",
    "largest batch then, predicted",
    "what it costs",
)


def knob_rows(report: FitReport) -> list[list[str]]:
    """Every single change, as rows under `KNOBS`."""
    return [
        [knob.name, saved(knob.saves), binary_bytes(knob.total), str(knob.largest_batch), knob.cost]
        for knob in report.knobs
    ]


def saved(n_bytes: int) -> str:
    """Bytes with a sign where they are lost."""
    return binary_bytes(n_bytes) if n_bytes >= 0 else f"-{binary_bytes(-n_bytes)}"


def _measured(found: Measured) -> str:
    what = found.largest
    axis = "batch" if what.axis == "batch" else "sequence"
    parts = [
        f"Measured on {terminal(found.device)}: largest {axis} {size(what)} "
        f"({len(found.trials)} trials, {duration(found.seconds)}). {terminal(found.cap)}"
    ]
    if found.ended:
        parts.append(f"ended early: {terminal(found.ended)}")
    if what.contradictions:
        share = f" ({what.top / what.fits - 1:.1%} more)" if what.fits else ""
        parts.append(
            f"trials near the edge disagree: up to {axis} {what.fits} every one fitted, and one fitted at "
            f"{what.top}{share}"
        )
    for fails, fits in what.contradictions:
        parts.append(
            f"{axis} {fails} fitted in one trial and failed in another"
            if fails == fits
            else f"{axis} {fails} failed, and the larger {fits} fits: not every larger one needs more"
        )
    if isinstance(found.at_size, Taken) and isinstance(found.peak_bytes, int):
        error = found.at_size.allocated / max(found.peak_bytes, 1) - 1
        parts.append(
            f"peak at {axis} {what.fits}: {binary_bytes(found.at_size.allocated)} predicted by a trace, "
            f"{binary_bytes(found.peak_bytes)} measured ({error:+.1%})"
        )
    parts += [f"note: {terminal(note)}" for note in found.notes]
    parts.append(table(TRIALS, list(trials(found)), markdown=False))
    return "\n".join(parts)


TRIALS: Final = ("size", "verdict", "measured peak", "took")


def trials(found: Measured) -> Iterator[list[str]]:
    """Every size that was tried, as rows under `TRIALS`."""
    for trial in sorted(found.trials, key=lambda trial: trial.size):
        peak = "" if isinstance(trial.peak_bytes, Unknown) else binary_bytes(trial.peak_bytes)
        words = VERDICTS[trial.verdict]
        if trial.verdict == "crashed" and trial.said:
            words += f": {terminal(trial.said[:MOST_WORDS])}"
        yield [str(trial.size), words, peak, duration(trial.seconds)]


WIDTH, LEFT, RIGHT = 1100, 210, 130  # of the drawing and its margins
ROW, TOP = 30, 120
# Hues after M. Okabe and K. Ito, "Color Universal Design" (2008), as the report page has; words say the same.
COLOURS: Final = dict(
    zip(
        PARTS.values(),
        ("#0069a8", "#007a58", "#8f6400", "#c14a00", "#a8487f", "#5a6675", "#8b97a5", "#1b2330"),
        strict=True,
    )
)
STYLE: Final = (
    "svg{background:#fefefe;color:#1b2330;font:13px system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{background:#12171f;color:#e6eaf0}rect{filter:brightness(1.6)}}"
)


def draw(report: FitReport) -> str:
    """The SVG document."""
    return drawn(report, f"<style>{STYLE}</style>") + "\n"


def drawn(report: FitReport, style: str) -> str:
    """The SVG element. A page has a style of its own."""
    height = TOP + (len(report.knobs) + 1) * ROW + 24
    title = f"{report.question.model}, {described(report)}: what takes the bytes, predicted"
    words = "; ".join(f"{name} {binary_bytes(n)}" for name, n in shares(report.predicted))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="fit-title fit-words" fill="currentColor" font-size="13">'
        f'<title id="fit-title">{html(title)}</title>',
        f'<desc id="fit-words">{html(words)}</desc>{style}',
        f'<text x="16" y="26" font-size="16">{html(title)}</text>',
        *_legend(report),
        *_peak(report),
        *_changes(report),
        *_budget(report, height),
        "</svg>",
    ]
    return "\n".join(parts)


def _scale(report: FitReport) -> float:
    whole = report.budget_bytes + report.predicted.context
    most = max(whole, report.predicted.total, *(knob.total for knob in report.knobs), 1)
    return (WIDTH - LEFT - RIGHT) / most


def _legend(report: FitReport) -> Iterator[str]:
    x, y = 16, 44
    for name, n_bytes in shares(report.predicted):
        said = f"{name} {binary_bytes(n_bytes)}"
        if x + 40 + 7 * len(said) > WIDTH:
            x, y = 16, y + 20
        yield f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[name]}"/>'
        yield f'<text x="{x + 17}" y="{y + 11}">{html(said)}</text>'
        x += 36 + 7 * len(said)


def _peak(report: FitReport) -> Iterator[str]:
    at, scale = float(LEFT), _scale(report)
    yield f'<text x="16" y="{TOP + 17}">as asked</text>'
    for name, n_bytes in shares(report.predicted):
        said = f"{name}: {binary_bytes(n_bytes)}"
        yield _mark(at, TOP, n_bytes * scale, COLOURS[name], said)
        at += n_bytes * scale
    yield _total(report.predicted.total, scale, TOP)


def _changes(report: FitReport) -> Iterator[str]:
    scale = _scale(report)
    for row, knob in enumerate(report.knobs, start=1):
        y = TOP + row * ROW
        said = f"{knob.name}: {binary_bytes(knob.total)}; {knob.cost}"
        yield f'<text x="16" y="{y + 17}">{html(knob.name)}</text>'
        yield _mark(LEFT, y, knob.total * scale, "#8b97a5", said)
        yield _total(knob.total, scale, y)


def _total(n_bytes: int, scale: float, y: int) -> str:
    return f'<text x="{LEFT + n_bytes * scale + 6:.1f}" y="{y + 17}">{binary_bytes(n_bytes)}</text>'


def _budget(report: FitReport, height: int) -> Iterator[str]:
    whole = report.budget_bytes + report.predicted.context
    x = LEFT + whole * _scale(report)
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 18}"'
    yield f'<line stroke="currentColor" stroke-dasharray="4 3" {ends}/>'
    words = f"budget and context {binary_bytes(whole)}"
    yield f'<text x="{x:.1f}" y="{height - 5}" text-anchor="middle">{words}</text>'


def _mark(x: float, y: float, width: float, colour: str, said: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{ROW - 8}" fill="{colour}">'
        f"<title>{html(said)}</title></rect>"
    )
