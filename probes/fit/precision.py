"""The number format in which a question is counted where none is asked for: the one that `plan` computes in.

Pure.
"""

from typing import Final, Literal

from probes.fit.report import Precision, Question
from probes.placement.models.description import ModelDescription
from probes.placement.planner.compute_dtype import computed_in
from probes.placement.planner.machine import Constants

PRECISION_OF: Final[dict[str, Precision]] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DTYPE_OF: Final = {precision: dtype for dtype, precision in PRECISION_OF.items()}


def default_precision(model: ModelDescription, machine: Constants, question: Question) -> Precision:
    """The precision that `plan` computes in with `--objective exact`.

    Where all weights are trained they are kept as float32, and only products are computed in halves.
    """
    if question.task == "training" and not question.lora_rank:
        return "amp-bf16" if halves(machine) == "bf16" else "amp-fp16"
    fallback: Precision = "fp32" if machine.converts else "bf16"
    return PRECISION_OF.get(computed_in(model, machine), fallback)


def halves(machine: Constants) -> Literal["bf16", "fp16"]:
    """The format of 16 bits that a machine computes in: bfloat16 unless its GPU has no units for it."""
    return "fp16" if machine.converts else "bf16"


def precision_note(model: ModelDescription, machine: Constants, question: Question) -> str:
    """What a reader should know where bfloat16 weights meet a GPU without units for them; empty elsewhere."""
    stored = computed_in(model, None)
    if not machine.converts:
        return ""
    lacks = f"{machine.name} has no bfloat16 units"
    if question.precision in ("bf16", "amp-bf16"):
        return f"{lacks}: {question.precision} is counted as asked, and `plan` computes in float32 or float16"
    if stored != "bfloat16":
        return ""
    if question.precision == "fp32":
        return (
            f"{lacks}: its weights are counted as float32, which holds every number, as `plan` has them with "
            "--objective exact; --precision fp16 counts half the bytes"
        )
    return f"{lacks}: {question.precision} is counted"
