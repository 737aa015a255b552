"""An answer for a model without rules: weights by its modules, the rest by two small trials. Pure."""

from collections.abc import Mapping, Sequence
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
    Question,
    Taken,
    Trial,
)
from probes.placement.planner.constants import Constants
from probes.shared.unknown import Unknown

TWO_TRIALS: Final = "two trials"
MOST: Final = 10**9  # of a size: what grows by less than a byte a step
NOT_TRIED: Final = Unknown("there are no rules for this architecture, and no trial made this larger")


def by_trials(asked: Question, machine: Constants, budget: int, measured: Measured) -> FitReport:
    """What two small trials say. Raises DeviceUnusable where not even they fit."""
    axis = measured.largest.axis
    lines = through(measured.trials)
    if isinstance(lines, Unknown) or isinstance(measured.built, Unknown):
        why = lines if isinstance(lines, Unknown) else measured.built
        raise DeviceUnusable(
            f"two trials are needed where there are no rules: {why}", "give a larger --budget or --limit"
        )
    taken = _taken(measured.built, asked, _highest(lines, asked.batch if axis == "batch" else asked.tokens))
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
        predicted_at_largest=_taken(measured.built, asked, _highest(lines, measured.largest.fits)),
        measured=measured,
        notes=(
            "there are no rules for this architecture: weights are exact, from its modules; activations are "
            "those of two small trials, extrapolated; which change buys most isn't known",
        ),
    )


Lines = Mapping[str, tuple[float, float]]  # phase -> bytes at size 0, and for each step of the size


def through(trials: Sequence[Trial]) -> Lines | Unknown:
    """A straight line for each phase of a step, through its peaks at the two smallest sizes that fit."""
    divided = sorted((t.size, t.parts.phases) for t in trials if not isinstance(t.parts, Unknown))
    if len(divided) < 2:
        return Unknown("fewer than two sizes fit")
    (first, low), (second, high) = divided[:2]
    lines = {}
    for before, after in zip(low, high, strict=True):
        steep = max((after.peak_bytes - before.peak_bytes) / (second - first), 0.0)
        lines[before.name] = (before.peak_bytes - steep * first, steep)
    return lines


def _highest(lines: Lines, size: int) -> int:
    return round(max(start + steep * size for start, steep in lines.values()))


def _largest(lines: Lines, budget: int, axis: Axis) -> Largest:
    """The last size at which every phase is within the budget."""
    fits = min(
        (int((budget - start) // steep) if steep else MOST * (start <= budget))
        for start, steep in lines.values()
    )
    fits = max(min(fits, MOST), 0)
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
