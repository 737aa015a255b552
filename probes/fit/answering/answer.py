"""Puts an answer together from predictions, and from trials where there were any. Pure."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Final

from probes.errors import ModelUnknown, UsageError
from probes.fit.predicted.forecast import (
    MOST,
    Forecast,
    Place,
    forecast,
    largest,
    most_of,
    place_of,
    with_size,
)
from probes.fit.predicted.knobs import knobs
from probes.fit.question import Axis, FitReport, Largest, Measured, Question
from probes.placement.models.description import ModelDescription
from probes.placement.planner.costs.constants import Constants
from probes.placement.planner.profiles import profile
from probes.shared.units import binary_bytes
from probes.shared.unknown import Unknown

MOST_BLOCKS: Final = 256  # twice those of the deepest published model; each is gone through for every size
NOT_ASKED = Unknown("no trial was asked for: add --measure cpu or --measure gpu")


def answer(
    model: ModelDescription,
    asked: Question,
    machine: Constants,
    *,
    budget: int | None,
    place: Place | None = None,
    measured: Measured | Unknown = NOT_ASKED,
) -> FitReport:
    """What the rules predict for a machine, beside what was measured. Raises ModelUnknown and UsageError."""
    where = place or place_of(machine, model, asked)
    if len(model.blocks) > MOST_BLOCKS:
        raise ModelUnknown(
            f"{model.name[:80]} has {len(model.blocks):,} blocks, more than the {MOST_BLOCKS} predicted here",
            "check its number of layers: num_hidden_layers or n_layer",
        )
    longest = most_of(model, "tokens")
    if longest < MOST and asked.tokens > longest:
        raise UsageError(
            f"{model.name[:80]} has {longest} learned positions, and {asked.tokens} tokens are asked for",
            f"ask for shorter sequences: --tokens {longest}",
        )

    @lru_cache(maxsize=4096)
    def predict(question: Question) -> Forecast:
        return forecast(model, question, where)

    most = room(machine, budget, where)
    found = predict(asked)
    needs = found.taken.total - found.taken.context
    return FitReport(
        question=asked,
        machine=machine.name,
        constants=machine.origin,
        budget_bytes=most,
        predicted_by="rules",
        predicted=found.taken,
        moment=found.moment,
        fits=needs <= most,
        predicted_largest_batch=_largest(predict, model, asked, "batch", budget=most),
        predicted_largest_tokens=_largest(predict, model, asked, "tokens", budget=most),
        smallest_budget_bytes=needs,
        knobs=knobs(asked, predict, most),
        measured=measured,
        notes=_notes(model, machine, where, budget),
    )


def rise(model: ModelDescription, asked: Question, machine: Constants, axis: Axis, size: int) -> int:
    """Bytes that one further step of an axis takes at a size, predicted."""
    where, least = place_of(machine, model, asked), max(min(size, most_of(model, axis) - 1), 1)
    low, high = (forecast(model, with_size(asked, axis, n), where).taken.total for n in (least, least + 1))
    return high - low


def compared(report: FitReport, model: ModelDescription, machine: Constants, found: Measured) -> FitReport:
    """The answer with what was measured, and what is predicted at the largest size that fits."""
    if not found.largest.fits:
        return replace(report, measured=found)
    asked = with_size(report.question, found.largest.axis, found.largest.fits)
    taken = forecast(model, asked, place_of(machine, model, asked)).taken
    return replace(report, measured=found, predicted_at_largest=taken)


def on_cpu() -> Constants:
    """The constants of a machine without a GPU, as far as bytes go."""
    return replace(profile("h200"), name="the CPU's memory", origin="no GPU", vram_bytes=0, notes=())


def room(machine: Constants, budget: int | None, place: Place) -> int:
    """Bytes that torch may take: the budget, and never more than the card has beside the context."""
    card = max(machine.vram_bytes - place.context, 0) if machine.has_gpu else None
    if budget is None:
        return card or 0
    return budget if card is None else min(budget, card)


def _largest(
    predict: Callable[[Question], Forecast],
    model: ModelDescription,
    asked: Question,
    axis: Axis,
    *,
    budget: int,
) -> Largest:
    def total(size: int) -> int:
        taken = predict(with_size(asked, axis, size)).taken
        return taken.total - taken.context

    return largest(total, budget, axis, most=most_of(model, axis))


def _notes(model: ModelDescription, machine: Constants, place: Place, budget: int | None) -> tuple[str, ...]:
    notes = [*model.notes, *machine.notes]
    if budget is not None and (most := room(machine, budget, place)) < budget:
        notes.append(f"beside the driver's context the card has {binary_bytes(most)}, less than the budget")
    if machine.has_gpu and place.attending == "math":
        notes.append(
            "attention is counted as torch computes it without fused kernels: its scores are kept whole"
        )
    notes.append("dropout is off, the loss is the model's own over its vocabulary, padding isn't used")
    return tuple(notes)
