"""The answer of `fit`: as text, as a document for a page, and as a picture of what takes the bytes. Pure."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from probes.core.quoting import terminal
from probes.core.units import binary_bytes, duration
from probes.core.unknown import Unknown
from probes.fit.report import VERDICTS, FitReport, Largest, Measured, Parts, Taken
from probes.reports.document import Document, PageSection, Table
from probes.reports.text import draw_grid

if TYPE_CHECKING:
    from probes.fit.step_plan import StepPlan

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
    """Return the whole answer."""
    parts = [_answer(report), bars(report), _knobs(report)]
    if isinstance(report.measured, Measured):
        parts.append(_measured(report.measured))
        parts.append(_comparison(report, report.measured))
    else:
        parts.append(f"not measured: {terminal(report.measured.reason)}")
    parts += [f"note: {terminal(note)}" for note in report.notes]
    return "\n\n".join(part for part in parts if part)


def step_lines(plan: "StepPlan") -> str:
    """A training step's time, then the bytes that it takes."""
    memory, time = plan.memory, plan.time
    question = memory.question
    bound = "launching operations, which the host does" if time.waits_for_host else "computing on the GPU"
    how = (
        f"as measured one by one on {plan.measured}"
        if plan.measured
        else "by their classes and the card's rates"
    )
    rates = f"{plan.samples_per_s:.3g} samples/s, {plan.samples_per_s * question.tokens:.3g} tokens/s"
    interval = f"{duration(time.low_s)} to {duration(time.high_s)} in 9 of 10 cases, predicted"
    parts = [
        f"{terminal(verdict(memory))}\n"
        f"Takes {duration(time.step_s)} a step ({interval}): {rates}. Most of that is {bound}.\n"
        f"traced: {time.operations:,} operations, {time.flops / 1e12:.3g} TFLOP, {how}",
        draw_grid(
            ["a step", "predicted"],
            [
                ["forward, on the GPU", duration(time.forward_s)],
                ["backward, on the GPU", duration(time.backward_s)],
                ["optimizer, on the GPU", duration(time.optimizer_s)],
                ["launching all of it, on the host", duration(time.host_s)],
            ],
        ),
        bars(memory),
        *(f"note: {terminal(note)}" for note in memory.notes),
    ]
    return "\n\n".join(parts)


def verdict(report: FitReport) -> str:
    """Whether it fits and what it needs, in a sentence each."""
    question = report.question
    what = f"{question.model}, {described(report)}, batch {question.batch} x {question.tokens} tokens"
    answer = "fits" if report.fits else "doesn't fit"
    needs = binary_bytes(report.smallest_budget_bytes)
    budget = binary_bytes(report.budget_bytes)
    return (
        f"{what}: {answer} into {budget} of {report.machine}, predicted. Smallest budget that works: {needs}"
        f" (and {binary_bytes(report.predicted.context)} for the driver's context)."
    )


def _answer(report: FitReport) -> str:
    question, card = report.question, terminal(report.constants.rpartition(": ")[2])
    return (
        f"{terminal(verdict(report))}\n"
        f"Largest batch of {question.tokens} tokens: {size(report.predicted_largest_batch)}; "
        f"longest sequence at batch {question.batch}: {size(report.predicted_largest_tokens)}; "
        "both predicted.\n"
        f"predicted by {report.predicted_by}; the card's figures: {card}"
    )


def described(report: FitReport) -> str:
    """What is done, in a few words."""
    question = report.question
    if question.task == "inference":
        return f"inference in {question.precision}"
    words = [f"a training step in {question.precision} with {question.optimizer}"]
    if question.lora_rank:
        words.append(f"LoRA of rank {question.lora_rank}")
    if question.checkpointing:
        words.append("gradient checkpointing")
    if question.accumulate > 1:
        words.append(f"{question.accumulate} batches accumulated")
    return ", ".join(words)


def size(largest: Largest | Unknown) -> str:
    """A largest size, with what is open about it."""
    if isinstance(largest, Unknown):
        return "not known"
    if largest.contradictions:
        return f"{largest.fits} to {largest.top}"
    if largest.exact:
        return str(largest.fits)
    return f"at least {largest.fits}" + (f", less than {largest.fails}" if largest.fails else "")


def bars(report: FitReport) -> str:
    """What takes the bytes at the peak, as a table with bars."""
    parts = shares(report.predicted)
    most = max((n for _, n in parts), default=1)
    rows = [[name, binary_bytes(n), "#" * max(round(BAR * n / most), 1)] for name, n in parts]
    rows.append(["in all", binary_bytes(report.predicted.total), ""])
    return draw_grid([f"at the peak ({report.moment})", "predicted", ""], rows)


def shares(taken: Taken) -> list[tuple[str, int]]:
    """What takes bytes, and how many; nothing that takes none."""
    return [(name, getattr(taken, key)) for key, name in PARTS.items() if getattr(taken, key)]


def largest_parts(measured: Measured) -> Parts | Unknown:
    """What the largest size that fits took, measured."""
    at = next((trial.parts for trial in measured.trials if trial.size == measured.largest.fits), None)
    return at or Unknown("nothing fits")


def parts_compared(report: FitReport, measured: Measured) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: what takes the bytes at the largest size measured to fit, predicted and measured."""
    predicted = [
        (name, taken)
        for name, taken in (
            (f"predicted by {report.predicted_by}", report.predicted_at_largest),
            ("predicted by a trace", measured.at_size),
        )
        if isinstance(taken, Taken)
    ]
    columns = [(t.weights, t.optimizer, t.allocated - t.weights - t.optimizer) for _, t in predicted]
    headers = [f"at {measured.largest.axis} {measured.largest.fits}", *(name for name, _ in predicted)]
    parts = largest_parts(measured)
    if isinstance(parts, Parts):
        columns.append((parts.weights, parts.optimizer, parts.rest))
        headers.append("measured")
    rows = [[name, *(binary_bytes(column[n]) for column in columns)] for n, name in enumerate(DIVIDED)]
    rows.append(["in all", *(binary_bytes(sum(column)) for column in columns)])
    return headers, rows


def phases(parts: Parts) -> list[list[str]]:
    """The peak of each part of a step, measured."""
    return [[phase.name, binary_bytes(phase.peak_bytes)] for phase in parts.phases]


def _comparison(report: FitReport, measured: Measured) -> str:
    headers, rows = parts_compared(report, measured)
    if len(headers) == 1:
        return ""
    parts = largest_parts(measured)
    more = ""
    if isinstance(parts, Parts):
        more = "\n\n" + draw_grid(["while", "measured peak"], phases(parts))
    return draw_grid(headers, rows) + more


def _knobs(report: FitReport) -> str:
    if not report.knobs:
        return ""
    return f"{buys_most(report)}\n{draw_grid(KNOBS, knob_rows(report))}"


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


def _measured(measured: Measured) -> str:
    what = measured.largest
    axis = "batch" if what.axis == "batch" else "sequence"
    parts = [
        f"Measured on {terminal(measured.device)}: largest {axis} {size(what)} "
        f"({len(measured.trials)} trials, {duration(measured.seconds)}). {terminal(measured.cap)}"
    ]
    if measured.ended:
        parts.append(f"ended early: {terminal(measured.ended)}")
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
    if isinstance(measured.at_size, Taken) and isinstance(measured.peak_bytes, int):
        error = measured.at_size.allocated / max(measured.peak_bytes, 1) - 1
        parts.append(
            f"peak at {axis} {what.fits}: {binary_bytes(measured.at_size.allocated)} predicted by a trace, "
            f"{binary_bytes(measured.peak_bytes)} measured ({error:+.1%})"
        )
    parts += [f"note: {terminal(note)}" for note in measured.notes]
    parts.append(draw_grid(TRIALS, list(trials(measured))))
    return "\n".join(parts)


TRIALS: Final = ("size", "verdict", "measured peak", "took")


def trials(measured: Measured) -> Iterator[list[str]]:
    """Every size that was tried, as rows under `TRIALS`."""
    for trial in sorted(measured.trials, key=lambda trial: trial.size):
        peak = "" if isinstance(trial.peak_bytes, Unknown) else binary_bytes(trial.peak_bytes)
        words = VERDICTS[trial.verdict]
        if trial.verdict == "crashed" and trial.said:
            words += f": {terminal(trial.said[:MOST_WORDS])}"
        yield [str(trial.size), words, peak, duration(trial.seconds)]


WORDS: Final = frozenset({"verdict", "what it costs", "one change"})  # columns of words, but for the first


def fit_document(report: FitReport) -> Document:
    """What fits, what takes the bytes, what changes would save; the text has a layout of its own."""
    title = f"{report.question.model}: what fits into {binary_bytes(report.budget_bytes)}"
    size_of_batch = f"batch {report.question.batch} x {report.question.tokens} tokens"
    return Document(
        kicker="What fits",
        title=title,
        subject=title,
        details=(described(report), size_of_batch, report.machine),
        headline=_headline(report),
        page_sections=(_parts_section(report), _knobs_section(report), *_trials_sections(report)),
        notes=(
            f"the card's figures: {report.constants.rpartition(': ')[2]}",
            *report.notes,
            *(report.measured.notes if isinstance(report.measured, Measured) else ()),
        ),
        layout=lines(report),
    )


def _headline(report: FitReport) -> tuple[str, ...]:
    measured = ""
    if isinstance(report.measured, Measured):
        largest = report.measured.largest
        measured = f"Largest {largest.axis}, measured: {size(largest)}."
    sentences = (
        verdict(report),
        f"Largest batch, predicted: {size(report.predicted_largest_batch)}; "
        f"longest sequence, predicted: {size(report.predicted_largest_tokens)}.",
        measured,
        buys_most(report),
    )
    return tuple(filter(None, sentences))


def _parts_section(report: FitReport) -> PageSection:
    rows = [[part, binary_bytes(n_bytes)] for part, n_bytes in shares(report.predicted)]
    rows.append(["in all", binary_bytes(report.predicted.total)])
    headers = [f"as asked, at the peak ({report.moment})", f"predicted by {report.predicted_by}"]
    tables = [_table(headers, rows)]
    after: tuple[str, ...] = ()
    if isinstance(report.measured, Measured):
        headers, compared = parts_compared(report, report.measured)
        parts = largest_parts(report.measured)
        tables += [_table(headers, compared)] if len(headers) > 1 else []
        tables += [_table(["while", "measured peak"], phases(parts))] if isinstance(parts, Parts) else []
    else:
        after = (f"Not measured: {report.measured.reason}.",)
    return PageSection("parts", "What takes the bytes", tables=tuple(tables), after=after)


def _knobs_section(report: FitReport) -> PageSection:
    title = "What one change saves"
    if not report.knobs:
        return PageSection("knobs", title, ("Not known: there are no rules for this architecture.",))
    return PageSection("knobs", title, tables=(_table(KNOBS, knob_rows(report)),))


def _trials_sections(report: FitReport) -> Iterator[PageSection]:
    """Every trial; of a prediction nothing, since what takes the bytes says why it isn't measured."""
    found = report.measured
    if not isinstance(found, Measured):
        return
    measured = f"Measured on {found.device}, in {duration(found.seconds)}. {found.cap}"
    ended = (f"Ended early: {found.ended}",) if found.ended else ()
    yield PageSection("trials", "Trials", (measured, *ended), (_table(TRIALS, list(trials(found))),))


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column and those of words are set left."""
    words = WORDS | {headers[0]}
    return Table("", (), tuple(headers), tuple(map(tuple, rows)), words)
