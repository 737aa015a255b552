"""What bfloat16 weights become on a card without units for them."""

import pytest

from probes.core.errors import UsageError
from probes.placement.models.description import BlockDescription, ModelDescription, TensorDescription
from probes.placement.planner.compute_dtype import with_compute_dtype
from probes.placement.planner.machine import profile

MODEL = ModelDescription(
    "m", (BlockDescription("0", (TensorDescription("0.weight", (4, 4), "bfloat16"),)),), "drawn"
)
CARD = profile("wx4100")


def test_auto_is_what_the_objective_allows() -> None:
    assert with_compute_dtype(MODEL, CARD, objective="exact").becomes == "float32"
    assert with_compute_dtype(MODEL, CARD, objective="fast").becomes == "float16"
    assert with_compute_dtype(MODEL, profile("h200"), objective="exact") == MODEL


def test_what_is_ready_stays_so() -> None:
    made = with_compute_dtype(MODEL, CARD, objective="exact", compute="float16")
    assert with_compute_dtype(made, CARD, objective="exact", compute="float32") == made


@pytest.mark.parametrize(
    ("machine", "why"), [("h200", "has bfloat16 units"), ("w7900", "has bfloat16 units")]
)
def test_nothing_is_converted_where_nothing_has_to_be(machine: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        with_compute_dtype(MODEL, profile(machine), objective="exact", compute="float32")
    half = ModelDescription(
        "m", (BlockDescription("0", (TensorDescription("w", (4, 4), "float16"),)),), "drawn"
    )
    with pytest.raises(UsageError, match="no bfloat16 weights to convert"):
        with_compute_dtype(half, CARD, objective="exact", compute="float32")
