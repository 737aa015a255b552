"""Which single change to a question buys most bytes, by predicting again with each. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from probes.errors import ProbeError
from probes.fit.predicted.forecast import Forecast, largest, with_size
from probes.fit.question import Knob, Question

LORA_RANK: Final = 16
Predict = Callable[[Question], Forecast]

HALVES: Final = "weights and sums have 8 bits of precision; small updates may be lost"
HALF_FLOATS: Final = "largest value 65504: losses need scaling"


def changes(asked: Question) -> Iterator[tuple[str, Question, str]]:
    """Each single change: its name, the question after it, what it costs."""
    if asked.batch > 1:
        fewer = (asked.batch + 1) // 2
        if asked.task == "training":
            times = -(-asked.batch * asked.accumulate // fewer)
            yield (
                f"batch {fewer}, accumulated {times} times",
                replace(asked, batch=fewer, accumulate=times),
                "same step, more and smaller passes; no such sum for batch norms",
            )
        yield f"batch {fewer}", replace(asked, batch=fewer), "fewer sequences at once"
    if asked.tokens > 1:
        fewer = (asked.tokens + 1) // 2
        yield f"sequences of {fewer} tokens", replace(asked, tokens=fewer), "shorter texts"
    yield from _precisions(asked)
    if asked.task == "training":
        yield from _training(asked)


def _precisions(asked: Question) -> Iterator[tuple[str, Question, str]]:
    if asked.precision == "fp32" and asked.task == "training":
        costs = "products in halves; weights and updates stay exact"
        yield "precision amp-bf16", replace(asked, precision="amp-bf16"), costs
    if asked.precision in ("fp32", "amp-bf16", "amp-fp16"):
        yield "precision bf16", replace(asked, precision="bf16"), HALVES
    if asked.precision == "fp32" and asked.task == "inference":
        yield "precision fp16", replace(asked, precision="fp16"), HALF_FLOATS


def _training(asked: Question) -> Iterator[tuple[str, Question, str]]:
    if not asked.checkpointing:
        yield (
            "gradient checkpointing",
            replace(asked, checkpointing=True),
            "each layer is computed once more: about a third more time a step",
        )
    if not asked.lora_rank:
        yield (
            f"LoRA of rank {LORA_RANK}",
            replace(asked, lora_rank=LORA_RANK),
            "trains adapters only; needs peft",
        )
    if asked.optimizer == "adamw":
        yield (
            "optimizer momentum",
            replace(asked, optimizer="momentum"),
            "one state instead of two; the learning rate must be tuned again",
        )
    if asked.optimizer != "sgd":
        yield (
            "optimizer sgd",
            replace(asked, optimizer="sgd"),
            "no state; the learning rate must be tuned again",
        )
    if asked.accumulate > 1:
        yield (
            "no accumulation",
            replace(asked, accumulate=1),
            "smaller steps; gradients aren't kept during a forward pass",
        )


def knobs(asked: Question, predict: Predict, budget: int) -> tuple[Knob, ...]:
    """All single changes, the one that saves most first. `budget` is without the driver's context."""
    now = predict(asked).taken
    found = []
    for name, changed, cost in changes(asked):
        try:
            then = predict(changed).taken
        except ProbeError:  # it can't be asked of this model
            continue

        def total(batch: int, changed: Question = changed) -> int:
            taken = predict(with_size(changed, "batch", batch)).taken
            return taken.total - taken.context

        most = largest(total, budget, "batch").fits
        found.append(Knob(name, now.total - then.total, then.total, most, cost))
    return tuple(sorted(found, key=lambda knob: -knob.saves))
