"""The dtype in which a machine computes with bfloat16 weights, where its GPU has no bfloat16 units."""

from dataclasses import replace
from typing import Literal

from probes.core.errors import PlacementError, UsageError
from probes.placement.models.description import ModelDescription, most_bytes
from probes.placement.models.ranges import Ranges
from probes.placement.planner.machine import Constants
from probes.placement.types import Becomes, Objective

Compute = Literal["auto", "float16", "float32"]


def needs_weight_ranges(
    model: ModelDescription, machine: Constants, *, objective: Objective, compute: Compute
) -> bool:
    """Whether the choice depends on the weights' values: float16 doesn't hold every bfloat16 number."""
    maybe_float16 = compute == "float16" or (compute == "auto" and objective == "fast")
    return maybe_float16 and machine.converts and _has_bfloat16(model)


def with_compute_dtype(
    model: ModelDescription,
    machine: Constants,
    *,
    objective: Objective,
    compute: Compute = "auto",
    ranges: Ranges | None = None,
) -> ModelDescription:
    """The model with `becomes` set to what its bfloat16 weights are converted to, and a note that says why.

    `auto` means float32 for the objective `exact`, because it holds every bfloat16 number, and float16 for
    `fast` unless `ranges` name a number that is too large for it. Raises PlacementError for such a number
    where float16 is asked for, and UsageError where a dtype is asked for and nothing has to be converted.
    A model whose `becomes` is set already is returned unchanged.
    """
    if model.becomes:
        return model
    if not machine.converts or not _has_bfloat16(model):
        if compute != "auto":
            why = "has bfloat16 units" if machine.bfloat16 else "has no bfloat16 weights to convert"
            subject = machine.name if machine.bfloat16 or not machine.has_gpu else model.name
            raise UsageError(f"nothing is computed in {compute}: {subject} {why}", "leave --compute out")
        return model
    dtype, note = _choice(machine, objective=objective, compute=compute, ranges=ranges)
    note = f"{machine.name} has no bfloat16 units: {note}"
    return replace(model, becomes=dtype, notes=(*model.notes, note))


def computed_in(model: ModelDescription, machine: Constants | None, *, objective: Objective = "exact") -> str:
    """The dtype in which most of a model's weights are multiplied, by torch's name.

    `machine` None: the dtype that most of them have. The weights aren't read, so `fast` means float16 where
    bfloat16 has to be converted.
    """
    dtype = most_bytes((tensor.dtype, tensor.n_bytes) for block in model.blocks for tensor in block.tensors)
    if dtype != "bfloat16" or machine is None or not machine.converts:
        return dtype
    return model.becomes or ("float32" if objective == "exact" else "float16")


def _has_bfloat16(model: ModelDescription) -> bool:
    return any(t.dtype == "bfloat16" for block in model.blocks for t in block.tensors)


def _choice(
    machine: Constants, *, objective: Objective, compute: Compute, ranges: Ranges | None
) -> tuple[Becomes, str]:
    """The dtype, and a note for the plan's reader. Raises PlacementError as `with_compute_dtype` does."""
    exact = "its weights become float32, which holds every number and takes twice the bytes"
    low = "numbers below 8e-6 lose low bits and those below 3e-8 become zero"
    lossy = f"its weights become float16, in which {low}"
    if compute == "float32" or (compute == "auto" and objective == "exact"):
        return "float32", f"{exact}; where the plan keeps them as bfloat16, each pass converts them"
    if ranges is None:
        unread = "the weights weren't read: a number beyond 65504 is refused when it is loaded, by name"
        return "float16", f"{lossy}; {unread}"
    if not ranges.beyond:
        return "float16", (
            f"{lossy}; of {ranges.numbers:,} numbers {ranges.rounded:,} may "
            f"lose low bits, {ranges.vanished:,} become zero and none is too large"
        )
    why = f"{ranges.beyond} has a number beyond 65504, the largest of float16"
    if compute == "float16":
        raise PlacementError(f"{why}, and {machine.name} has no bfloat16 units", "--compute float32")
    return "float32", f"{why}, so {exact}"
