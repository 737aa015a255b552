"""Predicts what a question takes: the bytes at its peak, and the largest size within a budget. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from probes.fit.architectures import program_of
from probes.fit.report import STATES, Axis, Largest, Question, Taken, Task
from probes.fit.tape import AttentionKind, Pass, Storage, Tape, Tensor, Weights
from probes.placement.models.description import ModelDescription
from probes.placement.planner.machine import Constants

SEGMENT: Final = 2 << 20  # torch's allocator takes blocks of more than 1 MiB in multiples of this
LOOSE_SEGMENTS: Final = 4  # partly used: small blocks, and what of segments of 20 MiB isn't
MOST: Final = 1 << 40  # of a batch or a sequence


@dataclass(frozen=True)
class Forecast:
    """Predicted bytes at the peak, and when that is."""

    taken: Taken
    moment: str


@dataclass(frozen=True)
class Place:
    """Where it would run, as far as bytes are concerned."""

    workspace: int  # bytes of one library handle
    context: int
    attending: AttentionKind
    foreach: bool  # the optimizer goes over all weights at once, as torch does on a GPU
    rounds: bool  # by torch's caching allocator


CPU: Final = Place(0, 0, "fused", foreach=False, rounds=False)
# Bytes that C libraries take in a process for each direction of a pass, beside tensors: code that oneDNN
# generates, buffers, the heap. Measured on an x86-64 with torch 2.13, in `tuned` cases of bench_fit.py.
LIBRARIES: Final[Mapping[tuple[Task, bool], int]] = MappingProxyType(
    {
        ("inference", False): 3 << 19,
        ("inference", True): 3 << 20,  # in halves
        ("training", False): 5 << 19,
        ("training", True): 6 << 20,
    }
)


def libraries(question: Question) -> int:
    """Bytes that C libraries take besides on a CPU."""
    return LIBRARIES[question.task, question.precision != "fp32"] * _directions(question)


def _directions(question: Question) -> int:
    """Of a pass: a backward pass has a thread, and a library's handle, of its own."""
    return 2 if question.task == "training" else 1


def place_of(machine: Constants, model: ModelDescription, question: Question) -> Place:
    """A machine as a place."""
    if not machine.has_gpu:
        return replace(CPU, workspace=LIBRARIES[question.task, question.precision != "fp32"])
    grouped = any(b.attention and b.attention.heads != b.attention.key_value_heads for b in model.blocks)
    halves = question.precision != "fp32"
    fused = machine.fuses_attention(halves=halves, grouped=grouped)
    return Place(
        machine.workspace_bytes,
        machine.context_bytes,
        "fused" if fused else "math",
        foreach=True,
        rounds=True,
    )


def forecast(model: ModelDescription, question: Question, place: Place) -> Forecast:
    """The peak of a steady step: the second one, when the optimizer has its state. Raises ModelUnknown."""
    run = program_of(model)
    training = question.task == "training"
    tape = Tape(training=training, half=2 if question.is_mixed else 0)
    weights = Weights(tape, model, question)
    cache: list[Tensor] | None = None if training else []
    work = Pass(tape, weights, question, place.attending, cache)
    if training:
        _train(work, model, run, place)
    else:
        with tape.named("forward"):
            run(work, model)
    ledger = tape.ledger
    workspace = place.workspace * _directions(question)
    rounding = 0
    if place.rounds:
        used = ledger.highest + workspace
        rounding = -(-used // SEGMENT) * SEGMENT - used + LOOSE_SEGMENTS * SEGMENT
    taken = Taken(**ledger.at_highest, workspace=workspace, context=place.context, rounding=rounding)
    return Forecast(taken, ledger.moment_of_highest)


def _train(
    work: Pass, model: ModelDescription, run: Callable[[Pass, ModelDescription], Tensor], place: Place
) -> None:
    """One step with the optimizer's state there already."""
    tape, question = work.tape, work.question
    trained = list(work.weights.trained.values())
    states = STATES[question.optimizer]
    kept = [Storage(tape.ledger, states * t.n_bytes, "optimizer") for t in trained]
    for _ in range(min(question.accumulate, 2)):  # all after the second are like it
        with tape.named("forward"):
            loss = run(work, model)
        tape.forget_casts()
        with tape.named("backward"):
            tape.backward(loss)
        del loss
    with tape.named("optimizer step"):
        if question.optimizer == "adamw":
            sizes = [t.n_bytes for t in trained]
            temporary = sum(sizes) if place.foreach else 2 * max(sizes, default=0)
            Storage(tape.ledger, temporary)
    del kept


def with_size(question: Question, axis: Axis, size: int) -> Question:
    """The question with another batch or sequence."""
    return replace(question, batch=size) if axis == "batch" else replace(question, tokens=size)


def most_of(model: ModelDescription, axis: Axis) -> int:
    """Where an axis ends: at the last learned position, if the model has a table of them."""
    return (model.learned_positions or MOST) if axis == "tokens" else MOST


def largest(total: Callable[[int], int], budget: int, axis: Axis, *, most: int = MOST) -> Largest:
    """The largest size up to `most` whose total is within the budget.

    `total` never falls as the size grows.
    """
    if total(1) > budget:
        return Largest(axis, 0, 1, exact=True)
    low, high = 1, 2
    while high <= most and total(high) <= budget:
        low, high = high, _next(total, low, high, budget)
    if high > most:
        if total(most) <= budget:
            return Largest(axis, most, None, exact=most < MOST)
        high = most
    while high - low > 1:
        middle = _between(total, low, high, budget)
        if total(middle) <= budget:
            low = middle
        else:
            high = middle
    return Largest(axis, low, high, exact=True)


def _next(total: Callable[[int], int], low: int, high: int, budget: int) -> int:
    """A little beyond where a straight line through both meets the budget; at least twice as far."""
    rise, run = total(high) - total(low), high - low
    ahead = high + (budget - total(high)) * run // rise + 1 if rise > 0 else 4 * high
    return max(2 * high, min(ahead, 64 * high))


def _between(total: Callable[[int], int], low: int, high: int, budget: int) -> int:
    """Near where a straight line between both meets the budget, and never in the outer eighths."""
    below, above = total(low), total(high)
    guess = low + (high - low) * (budget - below) // max(above - below, 1)
    margin = max((high - low) // 8, 1)
    return min(max(guess, low + margin), high - margin)
