"""Which tier each layer of a scenario's model goes to."""

import pytest

from probes.measure.placement_scenarios import (
    budget_bytes,
    bytes_outside_vram,
    fixed_plan,
    layer_tiers,
    packed_bytes,
)
from probes.measure.stacks import Shape, linear_shape, plan_stack

WAYS = ("resident", "zero_copy_weights", "zero_copy_all", "streamed", "packed")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layers", [8, 16, 40])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.75, 0.9])
def test_no_way_takes_more_vram_than_the_streamed_one(dtype: str, layers: int, share: float) -> None:
    shape = linear_shape(2048, dtype)
    each = shape.layer_bytes
    plan = plan_stack(
        shape, weight_bytes=layers * each, budget_bytes=int(layers * each * share), room_bytes=2**40
    )
    packed = packed_bytes(shape)
    for way in WAYS[1:]:
        tiers = layer_tiers(plan, way)
        taken = tiers.count("resident") * each + tiers.count("packed") * packed
        taken += 2 * each * bool({"streamed", "packed"} & set(tiers))  # slots, or scratch buffers
        taken += 2 * packed * ("streamed_packed" in tiers)
        if tiers.count("packed"):
            assert taken <= budget_bytes(plan), way
        assert len(tiers) == layers


def test_packed_weights_that_all_fit_do_not_move() -> None:
    shape = linear_shape(2048, "bfloat16")
    each = shape.layer_bytes
    plan = plan_stack(shape, weight_bytes=40 * each, budget_bytes=33 * each, room_bytes=2**40)
    assert set(layer_tiers(plan, "packed")) == {"packed"}
    assert set(layer_tiers(plan, "streamed")) == {"resident", "streamed"}
    assert set(layer_tiers(plan, "resident")) == {"resident"}


def test_what_is_left_in_host_memory_is_counted_unpacked() -> None:
    assert (
        bytes_outside_vram([("packed", 10), ("resident", 20), ("streamed", 3), ("in_place", 4), ("cpu", 5)])
        == 12
    )


def test_a_plan_of_given_tiers_predicts_nothing() -> None:
    plan = fixed_plan("mlp", [("0", "streamed", 8), ("1", "resident", 8)])
    assert [(block.name, block.tier) for block in plan.blocks] == [("0", "streamed"), ("1", "resident")]
    assert plan.time.middle_s == 0.0
    assert plan.constants.startswith("none")


def test_a_model_of_unequal_layers_keeps_its_fixed_part_in_the_budget() -> None:
    shape = Shape("gpt2-xl", "float16", 1600, 2**26, 2**27, 48, 128)
    plan = plan_stack(shape, weight_bytes=0, budget_bytes=2**31, room_bytes=2**40)
    assert budget_bytes(plan) <= 2**31
