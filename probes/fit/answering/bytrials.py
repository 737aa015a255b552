"""An answer for a model without rules: weights by its modules, the rest by two small trials. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from probes.errors import DeviceUnusable
from probes.fit.question import (
    STATES,
    Axis,
    Built,
    FitReport,
    Largest,
    Measured,
    Parts,
    Question,
    Taken,
    Trial,
)
from probes.fit.straight import MOST, Line, highest, last, through
from probes.placement.planner.constants import Constants
from probes.shared.unknown import Unknown

TWO_TRIALS: Final = "two trials"
NOT_TRIED: Final = Unknown("there are no rules for this architecture, and no trial made this larger")


def by_trials(asked: Question, machine: Constants, budget: int, measured: Measured) -> FitReport:
    """What two small trials say. Raises DeviceUnusable where not even they fit."""
    axis = measured.largest.axis
    lines = _through(measured.trials)
    if isinstance(lines, Unknown) or isinstance(measured.built, Unknown):
        why = lines if isinstance(lines, Unknown) else measured.built
        raise DeviceUnusable(
            f"two trials are needed where there are no rules: {why}", "give a larger --budget or --limit"
        )
    taken = _taken(measured.built, asked, highest(lines, asked.batch if axis == "batch" else asked.tokens))
    found = _largest(lines, budget, axis)
    return FitReport(
        question=asked,
        machine=machine.name,
        constants=machine.origin,
        budget_bytes=budget,
        predicted_by=TWO_TRIALS,
        predicted=taken,
        moment="in two small trials, extrapolated",
        fits=taken.total <= budget,
        predicted_largest_batch=found if axis == "batch" else NOT_TRIED,
        predicted_largest_tokens=found if axis == "tokens" else NOT_TRIED,
        smallest_budget_bytes=taken.total,
        knobs=(),
        predicted_at_largest=_taken(measured.built, asked, highest(lines, measured.largest.fits)),
        measured=measured,
        notes=(
            "there are no rules for this architecture: weights are exact, from its modules; activations are "
            "those of two small trials, extrapolated; which change buys most isn't known",
        ),
    )


def _through(trials: Sequence[Trial]) -> tuple[Line, ...] | Unknown:
    """The lines through the two smallest sizes that fit."""
    found = sorted((t.size, _peaks(t.parts)) for t in trials if not isinstance(t.parts, Unknown))
    if len(found) < 2:
        return Unknown("fewer than two sizes fit")
    (first, low), (second, high) = found[:2]
    return through(first, low, second, high)


def _peaks(parts: Parts) -> tuple[int, ...]:
    return tuple(phase.peak_bytes for phase in parts.phases)


def _largest(lines: Sequence[Line], budget: int, axis: Axis) -> Largest:
    fits = last(lines, budget)
    return Largest(axis, fits, fits + 1 if fits < MOST else None, exact=fits < MOST)


def _taken(built: Built, asked: Question, peak: int) -> Taken:
    """A peak divided: weights, gradients and the optimizer's state by the modules, activations the rest."""
    training = asked.task == "training"
    known = Taken(
        weights=built.weights,
        gradients=built.trained if training else 0,
        optimizer=STATES[asked.optimizer] * built.trained if training else 0,
    )
    return replace(known, activations=max(peak - known.total, 0))
