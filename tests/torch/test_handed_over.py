"""What a call of a placed block hands to the device: each step and each mark costs the host."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from placement_plans import plan_of
from torch import nn

from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

BLOCKS, PASSES = 6, 4


class Counting:
    """A lane that does its work at once, and counts what it is given."""

    def __init__(self, name, counts):
        self._name, self._counts = name, counts

    def run(self, work):
        self._counts[self._name, "run"] += 1
        work()

    def record(self, mark):
        self._counts[self._name, "record"] += 1

    def wait(self, mark):
        self._counts[self._name, "wait"] += 1

    def follow(self):
        self._counts[self._name, "follow"] += 1


def handed_over(tier, rings):
    """What each lane is given for a block's call, in the steady state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(BLOCKS))).eval()
    x = torch.randn(2, 64)
    counts: Counter = Counter()
    lanes = Streams()
    lanes.compute, lanes.copy, lanes.unpack = (
        Counting(name, counts) for name in ("compute", "copy", "unpack")
    )
    plan = plan_of(model, {str(i): tier for i in range(BLOCKS)})
    with torch.no_grad():
        want = model(x)
        handle = place_model(model, replace(plan, rings=rings), ModuleWeights(), lanes)
        for _ in range(2):
            assert torch.equal(model(x), want)
        counts.clear()
        for _ in range(PASSES):
            assert torch.equal(model(x), want)
    steady = {key: number / (BLOCKS * PASSES) for key, number in counts.items()}
    handle.remove()
    return steady


def test_a_packed_block_with_one_scratch_buffer_is_one_launch_and_no_mark():
    assert handed_over("packed", PrefetchPool(1, scratches=1)) == {
        ("compute", "follow"): 1,
        ("compute", "run"): 1,
    }


def test_a_streamed_packed_block_with_one_scratch_buffer_needs_marks_for_its_copy_alone():
    assert handed_over("streamed_packed", PrefetchPool(2, scratches=1)) == {
        ("copy", "wait"): 1,
        ("copy", "run"): 1,
        ("copy", "record"): 1,
        ("compute", "follow"): 1,
        ("compute", "wait"): 1,
        ("compute", "run"): 1,
        ("compute", "record"): 1,
    }


@pytest.mark.parametrize("tier", ["packed", "streamed_packed"])
def test_with_two_scratch_buffers_blocks_are_unpacked_beside_those_that_compute(tier):
    found = handed_over(tier, PrefetchPool(2, scratches=2))
    assert found["unpack", "run"] == 1
    assert ("compute", "run") not in found


def test_a_streamed_block_is_unpacked_nowhere():
    found = handed_over("streamed", PrefetchPool(2, scratches=0))
    assert not [key for key in found if key[0] == "unpack" or key[1] == "follow"]
