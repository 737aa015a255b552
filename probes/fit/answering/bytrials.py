"""An answer for a model without rules: weights by its modules, the rest by two small trials. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from probes.errors import DoesNotFit, ProbeError
from probes.fit.answering.saying import VERDICTS
from probes.fit.question import (
    SHORT_OF_MEMORY,
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
from probes.fit.straight import MOST, Line, highest, last, through
from probes.placement.planner.costs.constants import Constants
from probes.shared.units import binary_bytes
from probes.shared.unknown import Unknown

TWO_TRIALS: Final = "two trials"
LEAST_RISE: Final = 1 << 20  # bytes; two processes that do the same differ by less than this
NOT_TRIED: Final = Unknown("there are no rules for this architecture, and no trial made this larger")
TOO_CLOSE: Final = Unknown(f"no two trials that fit differ by {binary_bytes(LEAST_RISE)} or more")


def by_trials(asked: Question, machine: Constants, budget: int, measured: Measured) -> FitReport:
    """What two small trials say. Raises DoesNotFit, or ProbeError where the asked size stays open."""
    axis = measured.largest.axis
    wanted = asked.batch if axis == "batch" else asked.tokens
    lines = _through(measured.trials)
    peak = _peak(lines, measured.trials, wanted)
    if peak is None or isinstance(measured.built, Unknown):
        raise _unanswered(measured, wanted, budget)
    taken = _taken(measured.built, asked, peak)
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
        predicted_at_largest=lines
        if isinstance(lines, Unknown)
        else _taken(measured.built, asked, highest(lines, measured.largest.fits)),
        measured=measured,
        notes=(
            "there are no rules for this architecture: weights are exact, from its modules; activations are "
            "those of two small trials, extrapolated, which can be off by half; the trials at the "
            "largest size that fits are what counts; which change buys most isn't known",
        ),
    )


def _through(trials: Sequence[Trial]) -> tuple[Line, ...] | Unknown:
    """The lines through the smallest size that fits and the next one that takes clearly more."""
    found = _peaks(trials)
    for size, peaks in found[1:]:
        first, low = found[0]
        alike = len(low) == len(peaks)  # parts of a model that few tokens don't reach have no phases
        before, after = (low, peaks) if alike else ([max(low)], [max(peaks)])
        if max(map(int.__sub__, after, before)) >= LEAST_RISE:
            return through(first, before, size, after)
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
        return highest(lines, wanted)
    return next((max(peaks) for size, peaks in _peaks(trials) if size >= wanted), None)


def _unanswered(measured: Measured, wanted: int, budget: int) -> ProbeError:
    """What the trials say instead of what the asked size takes."""
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
            "give a larger --budget",
        )
    said = f": {failed.said}" if failed.said else ""
    return ProbeError(
        f"{axis} {failed.size}: {VERDICTS[failed.verdict]}{said}",
        "where there are no rules, the asked size or two sizes have to run to their end",
    )


def _largest(lines: Sequence[Line] | Unknown, budget: int, axis: Axis) -> Largest | Unknown:
    if isinstance(lines, Unknown):
        return lines
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
