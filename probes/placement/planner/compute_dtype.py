"""The dtype in which a machine computes with bfloat16 weights, where its GPU has no bfloat16 units."""

from dataclasses import replace
from typing import Literal

from probes.core.errors import UsageError
from probes.placement.models.description import ModelDescription
from probes.placement.planner.machine import Constants
from probes.placement.types import Objective

Compute = Literal["auto", "float16", "float32"]


def with_compute_dtype(
    model: ModelDescription, machine: Constants, *, objective: Objective, compute: Compute = "auto"
) -> ModelDescription:
    """The model with `becomes` set to what its bfloat16 weights are converted to, and a note that says so.

    `auto` means float32 for the objective `exact`, because it holds every bfloat16 number, and float16 for
    `fast`. Raises UsageError where a dtype is asked for and nothing has to be converted. A model whose
    `becomes` is set already is returned unchanged.
    """
    if model.becomes:
        return model
    if not machine.converts or all(t.dtype != "bfloat16" for block in model.blocks for t in block.tensors):
        if compute != "auto":
            why = "has bfloat16 units" if machine.bfloat16 else "has no bfloat16 weights to convert"
            subject = machine.name if machine.bfloat16 or not machine.has_gpu else model.name
            raise UsageError(f"nothing is computed in {compute}: {subject} {why}", "leave --compute out")
        return model
    if compute == "float32" or (compute == "auto" and objective == "exact"):
        exact = "its weights become float32, which holds every number and takes twice the bytes"
        note = f"{exact}; where the plan keeps them as bfloat16, each pass converts them"
        return _becoming(model, machine, "float32", note)
    low = "numbers below 8e-6 lose low bits and those below 3e-8 become zero"
    unread = "one beyond 65504 is refused when it is placed or loaded, by name"
    return _becoming(model, machine, "float16", f"its weights become float16, in which {low}; {unread}")


def _becoming(
    model: ModelDescription, machine: Constants, dtype: Literal["float16", "float32"], note: str
) -> ModelDescription:
    note = f"{machine.name} has no bfloat16 units: {note}"
    return replace(model, becomes=dtype, notes=(*model.notes, note))


def computed_in(model: ModelDescription, machine: Constants | None) -> str:
    """The dtype in which most of a model's weights are multiplied with the objective `exact`.

    `machine` None: the dtype that most of them have.
    """
    if model.main_dtype != "bfloat16" or machine is None or not machine.converts:
        return model.main_dtype
    return model.becomes or "float32"
