"""bfloat16 models placed where nothing computes in bfloat16: the results of the model that torch converts."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from random_models import plan_of
from safetensors.torch import save_file
from tied_model import Model

from probes.core.errors import PlacementError
from probes.placement import load, place, plan
from probes.placement.planner.machine import profile

torch.set_num_threads(1)
KEPT = ("resident", "packed", "streamed_packed", "streamed")
WAYS = [(tier, False) for tier in (*KEPT, "in_place", "cpu")] + [(tier, True) for tier in KEPT]
STORED = [*WAYS, ("disk", False), ("disk", True)]
MIB = 2**20


def made(spoilt=True, **size):
    """With numbers that float16 rounds or makes zero, where they are spoilt."""
    torch.manual_seed(0)
    model = Model(**size).to(torch.bfloat16).eval().requires_grad_(False)
    weight = model.layers[1].up.weight
    if spoilt:
        weight[0, :4] = torch.tensor([1e-6, 3.1e-7, 1e-30, -0.0])
        weight[1] *= 2.0**-20
    return model


def tiers_of(model, tier):
    names = [f"layers.{i}" for i in range(len(model.layers))]
    return dict.fromkeys([*names, "embed.weight"], tier)


def words(model):
    state = model.state_dict()
    return {name: tensor.clone().view(torch.int16) for name, tensor in state.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


IDS = torch.arange(42).reshape(6, 7)


@pytest.mark.parametrize("becomes", ["float16", "float32"])
@pytest.mark.parametrize(("tier", "kept"), WAYS)
def test_a_placed_model_computes_what_the_converted_one_does(tier, kept, becomes):
    model = made()
    before, objects = words(model), list(model.parameters())
    want = deepcopy(model).to(getattr(torch, becomes))
    tiers = tiers_of(model, tier)
    handle = place(model, plan_of(model, tiers, becomes=becomes, kept=tiers if kept else ()), device="cpu")
    with torch.inference_mode():
        for _ in range(3):
            found = model(IDS)
            assert found.dtype is getattr(torch, becomes)
            assert torch.equal(found, want(IDS))
    assert next(model.parameters()).dtype is getattr(torch, becomes)
    handle.remove()
    assert same(words(model), before)
    assert all(one is other for one, other in zip(model.parameters(), objects, strict=True))


class Scaled(torch.nn.Module):
    """With a parameter that is a single number, one that float16 rounds, and one without any."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.scale = torch.nn.Parameter(torch.tensor(3.1e-7))
        self.none = torch.nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.parametrize("becomes", ["float16", "float32"])
@pytest.mark.parametrize(("tier", "kept"), WAYS)
def test_a_parameter_that_is_a_single_number_is_converted_and_comes_back(tier, kept, becomes):
    """It was a traceback: what its conversion changes was looked up as if it had dimensions."""
    model = torch.nn.Sequential(*(Scaled() for _ in range(3))).to(torch.bfloat16).requires_grad_(False)
    before, want = words(model), deepcopy(model).to(getattr(torch, becomes))
    tiers = dict.fromkeys(["0", "1", "2"], tier)
    handle = place(model, plan_of(model, tiers, becomes=becomes, kept=tiers if kept else ()), device="cpu")
    x = torch.randn(2, 16).to(torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(model(x), want(x.to(getattr(torch, becomes))))
    handle.remove()
    assert same(words(model), before)


@pytest.mark.parametrize("becomes", ["float16", "float32"])
@pytest.mark.parametrize(("tier", "kept"), STORED)
def test_a_loaded_model_computes_what_the_converted_one_does(tier, kept, becomes, tmp_path):
    model = made()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    before, want = words(model), deepcopy(model).to(getattr(torch, becomes))
    tiers = tiers_of(model, tier)
    how = plan_of(model, tiers, becomes=becomes, kept=tiers if kept else ())
    for _ in range(2):  # the second reads what the first has packed
        placed = load(
            lambda: Model().to(torch.bfloat16), tmp_path, how, device="cpu", cache=tmp_path / "packed"
        )
        with torch.inference_mode():
            assert torch.equal(placed(IDS), want(IDS))
            assert torch.equal(placed(IDS), want(IDS))
        placed.placement.remove()
        assert same(words(placed), before)


@pytest.mark.parametrize(("tier", "kept"), STORED)
def test_a_number_that_float16_cannot_hold_is_refused_by_name(tier, kept, tmp_path):
    model = made()
    model.layers[2].down.weight[5, 3] = 70_000.0
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    tiers, before = tiers_of(model, tier), words(model)
    how = plan_of(model, tiers, becomes="float16", kept=tiers if kept else ())
    with pytest.raises(PlacementError, match=r"layers\.2\.down\.weight can't be converted"):
        load(lambda: Model().to(torch.bfloat16), tmp_path, how, device="cpu", cache=False)
    if tier != "disk":
        with pytest.raises(PlacementError, match=r"layers\.2\.down\.weight can't be converted"):
            place(model, how, device="cpu")
        assert same(words(model), before)


def test_inputs_in_bfloat16_follow_the_model():
    model = made().layers[0]
    x = torch.randn(3, 64).bfloat16()
    want = deepcopy(model).float()(x.float())
    handle = place(model, plan_of(model, becomes="float32"), device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(x), want)
        assert torch.equal(model(x.float()), want)
    handle.remove()


def without_units(vram):
    """A WX 4100 with so little memory that a small model doesn't fit."""
    return replace(profile("wx4100"), context_bytes=0, workspace_bytes=0, vram_bytes=vram)


@pytest.mark.parametrize("compute", ["float16", "float32"])
@pytest.mark.parametrize("mib", [16, 24])
def test_what_is_planned_for_a_card_without_units_runs(compute, mib):
    model = made(width=512, layers=8)  # 16.8 MB
    planned = plan(model, vram=mib * MIB, machine=without_units(mib * MIB), compute=compute)
    assert planned.bfloat16_becomes == planned.compute_dtype == compute
    want = deepcopy(model).to(getattr(torch, compute))
    handle = place(model, planned, device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(IDS), want(IDS))
        assert torch.equal(model(IDS), want(IDS))
    report = handle.report()
    counted = planned.vram.weights + planned.vram.slots + planned.vram.scratch
    assert report.vram_taken == pytest.approx(counted, rel=0.01)
    assert report.vram_taken + planned.vram.activations <= mib * MIB
    handle.remove()


def test_auto_is_float16_for_fast_and_a_number_beyond_it_is_refused_by_name():
    model, machine = made(), without_units(64 * MIB)
    assert plan(model, vram=64 * MIB, machine=machine).bfloat16_becomes == "float32"
    fast = plan(model, vram=64 * MIB, machine=machine, objective="fast")
    assert fast.bfloat16_becomes == "float16"
    model.layers[2].down.weight[5, 3] = 70_000.0
    with pytest.raises(PlacementError, match=r"layers\.2\.down\.weight can't be converted") as refused:
        place(model, fast, device="cpu")
    assert "--compute float32" in refused.value.hint


class Buffered(torch.nn.Module):
    """With a buffer that float16 can't hold, one that each pass writes to, and one that it exchanges."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("tiny", torch.tensor([1e-9, 1.0]))
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("exchanged", torch.zeros(2))

    def forward(self, x):
        self.written.add_(1)
        self.exchanged = self.exchanged + 1
        return self.linear(x) + self.tiny[1]


@pytest.mark.parametrize("becomes", ["float16", "float32"])
def test_buffers_come_back_in_their_dtype_with_what_was_written_and_no_bits_lost(becomes):
    model = torch.nn.Sequential(Buffered(), Buffered()).to(torch.bfloat16).eval().requires_grad_(False)
    tiny, written = model[0].tiny, model[0].written
    before = tiny.clone()
    handle = place(model, plan_of(model, {"0": "streamed"}, becomes=becomes), device="cpu")
    with torch.inference_mode():
        model(torch.ones(2, 16, dtype=torch.bfloat16))
    assert model[0].exchanged.dtype is getattr(torch, becomes)
    handle.remove()
    assert model[0].tiny is tiny
    assert torch.equal(tiny.view(torch.int16), before.view(torch.int16))
    assert model[0].written is written
    assert written.tolist() == [1, 1]
    assert model[0].exchanged.dtype is torch.bfloat16
    assert model[0].exchanged.tolist() == [1, 1]
