"""The scenarios' model gives one output in each of its ways, tried on the CPU."""

import pytest
import torch

from probes.core.unknown import Unknown
from probes.measure import placement_row as trial_stack
from probes.measure.placement_row import LayerStack
from probes.measure.scenarios import SPLIT
from probes.measure.stacks import linear_shape, plan_stack

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_all_ways_through_the_model_give_one_output_and_place_it_no_more_often_than_needed(
    dtype, monkeypatch
):
    shape = linear_shape(1024, dtype)
    layer = shape.layer_bytes
    plan = plan_stack(shape, weight_bytes=16 * layer, budget_bytes=12 * layer, room_bytes=2**30)
    stack = LayerStack(plan, 1, zero_copy=None, wait=lambda _: None)
    for rows in (1, 4):
        assert stack.difference("resident", rows) == 0.0
    assert stack.left_bytes("resident", 1) == 0
    stack.spill()
    left = {}
    placed = []
    place = trial_stack.place

    def counted(module, plan, **options):
        placed.append(scenario)
        return place(module, plan, **options)

    monkeypatch.setattr(trial_stack, "place", counted)
    for scenario in (*SPLIT, *SPLIT):
        for rows in (1, 4):
            assert stack.difference(scenario, rows) == 0.0
        left[scenario] = stack.left_bytes(scenario, 1)
    assert placed[:3] == ["zero_copy_weights", "streamed", "packed"]  # as zero_copy_all needs it
    assert "zero_copy_all" not in placed
    assert left["streamed"] == left["zero_copy_all"] == plan.spilled_bytes
    if dtype == "bfloat16":
        assert left["packed"] < plan.spilled_bytes
    assert isinstance(stack.split("streamed", 1), Unknown)
    stack.release()
