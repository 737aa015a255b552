"""Puts an answer together from predictions and trials, with the changes that would save memory. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final, Literal

from probes.core.errors import DoesNotFit, ModelUnknown, ProbeError, UsageError
from probes.core.units import binary_bytes
from probes.core.unknown import Unknown
from probes.fit.forecast import MOST, Forecast, Place, forecast, largest, most_of, place_of, with_size
from probes.fit.precision import default_precision, halves, precision_note
from probes.fit.report import (
    SHORT_OF_MEMORY,
    STATES,
    VERDICTS,
    Axis,
    Built,
    FitReport,
    Knob,
    Largest,
    Measured,
    Precision,
    Question,
    Taken,
    Trial,
)
from probes.fit.search import LARGEST_ON_LINE, Line, largest_on_lines, lines_through, peak_on_lines
from probes.placement.models.description import ModelDescription
from probes.placement.planner.machine import Constants, profile

LORA_RANK: Final = 16
Predict = Callable[[Question], Forecast]
Half = Literal["bf16", "fp16"]

HALVES: Final = "weights and sums have 8 bits of precision; small updates may be lost"
HALF_FLOATS: Final = "largest value 65504: losses need scaling"


# ---- changes that save memory -------------------------------------------------------------------------


def changes(question: Question, half: Half = "bf16") -> Iterator[tuple[str, Question, str]]:
    """Each single change: its name, the question after it, what it costs. `half`: the 16 bits of the card."""
    if question.batch > 1:
        fewer = (question.batch + 1) // 2
        if question.task == "training":
            times = -(-question.batch * question.accumulate // fewer)
            yield (
                f"batch {fewer}, accumulated {times} times",
                replace(question, batch=fewer, accumulate=times),
                "same step, more and smaller passes; no such sum for batch norms",
            )
        yield f"batch {fewer}", replace(question, batch=fewer), "fewer sequences at once"
    if question.tokens > 1:
        fewer = (question.tokens + 1) // 2
        yield f"sequences of {fewer} tokens", replace(question, tokens=fewer), "shorter texts"
    yield from _precisions(question, half)
    if question.task == "training":
        yield from _training(question)


def _precisions(question: Question, half: Half) -> Iterator[tuple[str, Question, str]]:
    mixed: Precision = "amp-bf16" if half == "bf16" else "amp-fp16"
    if question.precision == "fp32" and question.task == "training":
        costs = "products in halves; weights and updates stay exact"
        yield f"precision {mixed}", replace(question, precision=mixed), costs
    if question.precision in ("fp32", "amp-bf16", "amp-fp16"):
        costs = HALVES if half == "bf16" else HALF_FLOATS
        yield f"precision {half}", replace(question, precision=half), costs
    if question.precision == "fp32" and question.task == "inference" and half == "bf16":
        yield "precision fp16", replace(question, precision="fp16"), HALF_FLOATS


def _training(question: Question) -> Iterator[tuple[str, Question, str]]:
    if not question.checkpointing:
        yield (
            "gradient checkpointing",
            replace(question, checkpointing=True),
            "each layer is computed once more: about a third more time a step",
        )
    if not question.lora_rank:
        yield (
            f"LoRA of rank {LORA_RANK}",
            replace(question, lora_rank=LORA_RANK),
            "trains adapters only; needs peft",
        )
    if question.optimizer == "adamw":
        yield (
            "optimizer momentum",
            replace(question, optimizer="momentum"),
            "one state instead of two; the learning rate must be tuned again",
        )
    if question.optimizer != "sgd":
        yield (
            "optimizer sgd",
            replace(question, optimizer="sgd"),
            "no state; the learning rate must be tuned again",
        )
    if question.accumulate > 1:
        yield (
            "no accumulation",
            replace(question, accumulate=1),
            "smaller steps; gradients aren't kept during a forward pass",
        )


def knobs(question: Question, predict: Predict, budget: int, *, half: Half = "bf16") -> tuple[Knob, ...]:
    """All single changes, the one that saves most first. `budget` is without the driver's context."""
    now = predict(question).taken
    found_knobs = []
    for name, changed, cost in changes(question, half):
        try:
            then = predict(changed).taken
        except ProbeError:  # it can't be asked of this model
            continue

        def total(batch: int, changed: Question = changed) -> int:
            taken = predict(with_size(changed, "batch", batch)).taken
            return taken.total - taken.context

        most = largest(total, budget, "batch").fits
        found_knobs.append(Knob(name, now.total - then.total, then.total, most, cost))
    return tuple(sorted(found_knobs, key=lambda knob: -knob.saves))


# ---- by rules -----------------------------------------------------------------------------------------

MOST_BLOCKS: Final = 256  # twice those of the deepest published model; each is gone through for every size
NOT_ASKED = Unknown("no trial was asked for: add --measure cpu or --measure gpu")


def with_defaults(
    question: Question,
    model: ModelDescription,
    machine: Constants,
    *,
    tokens: int | None,
    precision: Precision | None,
) -> Question:
    """The question with these; where they are None, with its tokens or as many as the model has positions
    for, and in the precision that `plan` computes in.
    """
    longest = min(question.tokens, most_of(model, "tokens"))
    question = replace(question, tokens=longest if tokens is None else tokens)
    return replace(question, precision=precision or default_precision(model, machine, question))


def answer(
    model: ModelDescription,
    question: Question,
    machine: Constants,
    *,
    budget: int | None,
    place: Place | None = None,
    measured: Measured | Unknown = NOT_ASKED,
) -> FitReport:
    """The answer by rules, beside what was measured, if anything. Raises ModelUnknown and UsageError."""
    where = place or place_of(machine, model, question)
    if len(model.blocks) > MOST_BLOCKS:
        raise ModelUnknown(
            f"{model.name[:80]} has {len(model.blocks):,} blocks, more than the {MOST_BLOCKS} predicted here",
            "check its number of layers: num_hidden_layers or n_layer",
        )
    longest = most_of(model, "tokens")
    if longest < MOST and question.tokens > longest:
        raise UsageError(
            f"{model.name[:80]} has {longest} learned positions, and {question.tokens} tokens are asked for",
            f"ask for shorter sequences: --tokens {longest}",
        )

    @lru_cache(maxsize=4096)
    def predict(changed: Question) -> Forecast:
        return forecast(model, changed, where)

    most = budget_for_torch(machine, budget, where)
    predicted = predict(question)
    needs = predicted.taken.total - predicted.taken.context
    return FitReport(
        question=question,
        machine=machine.name,
        constants=machine.origin,
        budget_bytes=most,
        predicted_by="rules",
        predicted=predicted.taken,
        moment=predicted.moment,
        fits=needs <= most,
        predicted_largest_batch=_largest(predict, model, question, "batch", budget=most),
        predicted_largest_tokens=_largest(predict, model, question, "tokens", budget=most),
        smallest_budget_bytes=needs,
        knobs=knobs(question, predict, most, half=halves(machine)),
        measured=measured,
        notes=_notes(model, question, machine, place=where, budget=budget),
    )


def predicted_rise(
    model: ModelDescription, question: Question, machine: Constants, axis: Axis, size: int
) -> int:
    """Bytes that one further step of an axis takes at a size, predicted."""
    where, least = place_of(machine, model, question), max(min(size, most_of(model, axis) - 1), 1)
    low, high = (forecast(model, with_size(question, axis, n), where).taken.total for n in (least, least + 1))
    return high - low


def compared(report: FitReport, model: ModelDescription, machine: Constants, measured: Measured) -> FitReport:
    """The answer with what was measured, and what is predicted at the largest size that fits."""
    if not measured.largest.fits:
        return replace(report, measured=measured)
    question = with_size(report.question, measured.largest.axis, measured.largest.fits)
    taken = forecast(model, question, place_of(machine, model, question)).taken
    return replace(report, measured=measured, predicted_at_largest=taken)


def cpu_constants() -> Constants:
    """The constants of a machine without a GPU, as far as bytes go."""
    return replace(
        profile("h200"), name="the CPU's memory", origin="no GPU", vram_bytes=0, notes=(), target=""
    )


def budget_for_torch(machine: Constants, budget: int | None, place: Place) -> int:
    """Bytes that torch may take: the budget, and never more than the card has beside the context."""
    card = max(machine.vram_bytes - place.context, 0) if machine.has_gpu else None
    if budget is None:
        return card or 0
    return budget if card is None else min(budget, card)


def _largest(
    predict: Callable[[Question], Forecast],
    model: ModelDescription,
    question: Question,
    axis: Axis,
    *,
    budget: int,
) -> Largest:
    def total(size: int) -> int:
        taken = predict(with_size(question, axis, size)).taken
        return taken.total - taken.context

    return largest(total, budget, axis, most=most_of(model, axis))


def _notes(
    model: ModelDescription, question: Question, machine: Constants, *, place: Place, budget: int | None
) -> tuple[str, ...]:
    notes = [*model.notes, precision_note(model, machine, question), *machine.notes]
    if budget is not None and (most := budget_for_torch(machine, budget, place)) < budget:
        notes.append(f"beside the driver's context the card has {binary_bytes(most)}, less than the budget")
    if machine.has_gpu and place.attending == "math":
        notes.append(
            "attention is counted as torch computes it without fused kernels: its scores are kept whole"
        )
    notes.append("dropout is off, the loss is the model's own over its vocabulary, padding isn't used")
    return tuple(filter(None, notes))


# ---- by two trials, where there are no rules ----------------------------------------------------------

TWO_TRIALS: Final = "two trials"
LEAST_RISE: Final = 1 << 20  # bytes; two processes that do the same differ by less than this
NOT_TRIED: Final = Unknown("there are no rules for this architecture, and no trial made this larger")
TOO_CLOSE: Final = Unknown(f"no two trials that fit differ by {binary_bytes(LEAST_RISE)} or more")


def by_trials(question: Question, machine: Constants, budget: int, measured: Measured) -> FitReport:
    """The answer of two small trials, where there are no rules.

    Raises DoesNotFit, or ProbeError where they don't say whether the question fits.
    """
    axis = measured.largest.axis
    wanted = question.batch if axis == "batch" else question.tokens
    lines = _through(measured.trials)
    peak = _peak(lines, measured.trials, wanted)
    if peak is None or isinstance(measured.built, Unknown):
        raise _unanswered(measured, wanted, budget)
    taken = _taken(measured.built, question, peak)
    largest_by_lines = _largest_on_lines(lines, budget, axis)
    return FitReport(
        question=question,
        machine=machine.name,
        constants=machine.origin,
        budget_bytes=budget,
        predicted_by=TWO_TRIALS,
        predicted=taken,
        moment="in two small trials, extrapolated",
        fits=taken.total <= budget,
        predicted_largest_batch=largest_by_lines if axis == "batch" else NOT_TRIED,
        predicted_largest_tokens=largest_by_lines if axis == "tokens" else NOT_TRIED,
        smallest_budget_bytes=taken.total,
        knobs=(),
        predicted_at_largest=lines
        if isinstance(lines, Unknown)
        else _taken(measured.built, question, peak_on_lines(lines, measured.largest.fits)),
        measured=measured,
        notes=(
            "there are no rules for this architecture: weights are exact, from its modules; activations are "
            "those of two small trials, extrapolated, which can be off by half; the trials at the "
            "largest size that fits are what counts; which change buys most isn't known",
        ),
    )


def _through(trials: Sequence[Trial]) -> tuple[Line, ...] | Unknown:
    """The lines through the smallest size that fits and the next one that takes clearly more bytes."""
    peaks_of_sizes = _peaks(trials)
    for size, peaks in peaks_of_sizes[1:]:
        first, low = peaks_of_sizes[0]
        alike = len(low) == len(peaks)  # parts of a model that few tokens don't reach have no phases
        before, after = (low, peaks) if alike else ([max(low)], [max(peaks)])
        if max(map(int.__sub__, after, before)) >= LEAST_RISE:
            return lines_through(first, before, size, after)
    return TOO_CLOSE


def _peaks(trials: Sequence[Trial]) -> list[tuple[int, list[int]]]:
    """The sizes that fit, in order, each with the peaks of its phases."""
    return sorted(
        (t.size, [phase.peak_bytes for phase in t.parts.phases])
        for t in trials
        if not isinstance(t.parts, Unknown)
    )


def _peak(lines: Sequence[Line] | Unknown, trials: Sequence[Trial], wanted: int) -> int | None:
    """Bytes that the asked size takes: by the lines, or as the next larger one that was tried."""
    if not isinstance(lines, Unknown):
        return peak_on_lines(lines, wanted)
    return next((max(peaks) for size, peaks in _peaks(trials) if size >= wanted), None)


def _unanswered(measured: Measured, wanted: int, budget: int) -> ProbeError:
    """The error for trials that don't show what the wanted size takes."""
    axis = measured.largest.axis
    failed = min((t for t in measured.trials if t.verdict != "fits"), key=lambda t: t.size, default=None)
    if failed is None:
        why = measured.built.reason if isinstance(measured.built, Unknown) else measured.ended
        return ProbeError(f"too few trials: {why}", "give a larger --limit")
    if failed.verdict in SHORT_OF_MEMORY and failed.size <= wanted:
        built = measured.built
        weights = (
            "" if isinstance(built, Unknown) else f"; its weights alone take {binary_bytes(built.weights)}"
        )
        return DoesNotFit(
            f"{axis} {failed.size} doesn't fit into {binary_bytes(budget)}, measured: "
            f"{VERDICTS[failed.verdict]}{weights}",
            "give a larger --vram",
        )
    said = f": {failed.said}" if failed.said else ""
    return ProbeError(
        f"{axis} {failed.size}: {VERDICTS[failed.verdict]}{said}",
        "where there are no rules, the asked size or two sizes have to run to their end",
    )


def _largest_on_lines(lines: Sequence[Line] | Unknown, budget: int, axis: Axis) -> Largest | Unknown:
    if isinstance(lines, Unknown):
        return lines
    fits = largest_on_lines(lines, budget)
    return Largest(axis, fits, fits + 1 if fits < LARGEST_ON_LINE else None, exact=fits < LARGEST_ON_LINE)


def _taken(built: Built, question: Question, peak: int) -> Taken:
    """A peak divided: weights, gradients and the optimizer's state by the modules, activations the rest."""
    training = question.task == "training"
    known = Taken(
        weights=built.weights,
        gradients=built.trained if training else 0,
        optimizer=STATES[question.optimizer] * built.trained if training else 0,
    )
    return replace(known, activations=max(peak - known.total, 0))
