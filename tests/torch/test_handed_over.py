"""What a call of a placed block hands to the device: each step and each mark costs the host."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

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


@pytest.mark.parametrize("scratches", [1, 2])
def test_a_packed_block_is_one_launch_and_no_mark(scratches):
    assert handed_over("packed", PrefetchPool(1, scratches=scratches)) == {
        ("compute", "follow"): 1,
        ("compute", "run"): 1,
    }


@pytest.mark.parametrize("scratches", [1, 2])
def test_a_streamed_packed_block_needs_marks_for_its_copy_alone(scratches):
    assert handed_over("streamed_packed", PrefetchPool(2, scratches=scratches)) == {
        ("copy", "wait"): 1,
        ("copy", "run"): 1,
        ("copy", "record"): 1,
        ("compute", "follow"): 1,
        ("compute", "wait"): 1,
        ("compute", "run"): 1,
        ("compute", "record"): 1,
    }


def test_a_streamed_block_is_unpacked_nowhere():
    found = handed_over("streamed", PrefetchPool(2, scratches=0))
    assert not [key for key in found if key[0] == "unpack" or key[1] == "follow"]


class Replaying(Streams):
    """Lanes of one device, whose graphs do their work again."""

    records = True

    def record(self, work, *, beside):
        return SimpleNamespace(outputs=work(), replay=work)


def test_a_pass_after_a_replay_waits_for_it_before_a_block_is_unpacked():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))).eval()
    counts: Counter = Counter()
    lanes = Replaying()
    lanes.compute = lanes.copy = lanes.unpack = Counting("compute", counts)
    plan = plan_of(model, {"0": "packed", "1": "packed"})
    plan = replace(plan, rings=PrefetchPool(1, scratches=1))
    with torch.no_grad():
        handle = place_model(model, plan, ModuleWeights(), lanes, capture=True)
        for _ in range(4):
            model(torch.randn(2, 64))
        assert handle.recorder.count == 1
        counts.clear()
        model(torch.randn(3, 64))
    assert counts["compute", "wait"] == 1
    handle.remove()
