"""What a block's call costs the host once passes repeat, and what lies in VRAM between calls."""

import sys
from collections import Counter

import pytest
import torch
from random_models import plan_of
from torch import nn

from probes.placement.runtime.offloaded import OffloadedParameter
from probes.placement.runtime.place import place_model
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

BLOCKS = 24
OF_A_PASS = (
    "Handle",
    "PlacedModel",
    "PassState",
    "_tried",
    "_version",
    "direct_tensors",
)  # whatever its blocks


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(BLOCKS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def placed(tiers, rings):
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16).eval()
    names = [f"layers.{number}" for number in range(BLOCKS)]
    plan = plan_of(model, {name: tiers[i % len(tiers)] for i, name in enumerate(names)}, rings, names=names)
    return model, place_model(model, plan, ModuleWeights(), Streams())


def our_calls(work):
    """How often each function of the runtime is called."""
    found = Counter()

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and "placement/runtime" in name:
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


@torch.no_grad()
@pytest.mark.parametrize("first", ["streamed_packed", "packed"])
def test_a_steady_call_is_a_handful_of_functions(first):
    """Each costs a slow host 0.5 to 1 us, for every block of every token."""
    model, handle = placed([first, "packed", "packed", "packed"], PrefetchPool(1, scratches=1))
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    want = model(x)
    for _ in range(3):
        assert torch.equal(model(x), want)
    calls = our_calls(lambda: model(x))
    handle.remove()
    of_the_pass = sum(count for name, count in calls.items() if name.startswith(OF_A_PASS))
    assert of_the_pass <= 20, calls
    assert (calls.total() - of_the_pass) / BLOCKS <= 36, calls.most_common(12)


@torch.no_grad()
def test_a_slot_that_is_taken_is_asked_once():
    model, handle = placed(["streamed_packed", "packed", "packed", "packed"], PrefetchPool(1, scratches=1))
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    for _ in range(4):
        model(x)
    calls = our_calls(lambda: model(x))
    handle.remove()
    moved = BLOCKS // 4
    assert calls["Engine._copy"] == moved
    assert calls["Engine._begun"] <= 3 * moved


@torch.no_grad()
@pytest.mark.parametrize("tier", ["packed", "streamed_packed"])
def test_between_calls_a_packed_block_in_vram_has_what_is_not_packed(tier):
    model, handle = placed([tier], PrefetchPool(1, scratches=1))
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    want = model(x)
    there = [name for name, one in model.named_parameters() if type(one) is not OffloadedParameter]
    unpacked = [name for name, one in model.named_parameters() if one.dim() == 1]
    assert there == (unpacked if tier == "packed" else [])
    assert torch.equal(model(x), want)
    model.layers[3].norm.bias = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    if tier == "packed":
        assert not torch.equal(model(x), want)  # as of a resident block
    handle.remove()
    assert all(type(one) is nn.Parameter for one in model.parameters())
    assert torch.equal(model.layers[3].norm.bias, torch.ones(64, dtype=torch.bfloat16))
