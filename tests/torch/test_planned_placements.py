"""A planner's plan is placed as it is: never more memory than it says, and the same bits."""

import pytest
import torch
from random_models import plan_of
from torch import nn

from probes.core.errors import PlanImpossible
from probes.placement import place, plan

torch.set_num_threads(1)
MIB = 2**20


class Stack(nn.Module):
    def __init__(self, layers=12, width=512):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=i % 3 == 0) for i in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def built(dtype):
    torch.manual_seed(0)
    model = Stack()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.03)
    return model.to(dtype).eval()


@torch.no_grad()
@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 64, 2048])
@pytest.mark.parametrize("objective", ["exact", "fast"])
def test_what_is_taken_is_never_above_the_plan(dtype, batch, objective):
    model = built(dtype)
    weights = sum(p.nbytes for p in model.parameters())
    x = torch.randn(3, 512).to(dtype)
    want = model(x)
    options = {"machine": "h200", "batch": batch, "objective": objective}
    use = plan(model, vram=2**40, **options).vram
    beside = use.activations + use.workspace + use.rounding
    tiers = set()
    for share in (0.2, 0.4, 0.6, 0.8, 0.95, 1.2):
        try:
            made = plan(model, vram=int(weights * share) + beside, **options)
        except PlanImpossible:
            continue
        tiers |= {block.tier for block in made.blocks}
        handle = place(model, made)
        report = handle.report()
        planned = made.vram.weights + made.vram.slots + made.vram.scratch
        assert report.vram_taken <= 1.02 * max(planned, report.vram_asked)
        assert report.vram_asked <= 1.02 * planned
        host = sum(
            use.kept_bytes for use in report.tiers if use.tier in ("streamed", "streamed_packed", "in_place")
        )
        assert host <= 1.02 * made.host.pinned
        assert torch.allclose(model(x).float(), want.float(), atol=1e-2)
        if objective == "exact":
            assert torch.equal(model(x), want)
        handle.remove()
    assert len(tiers) >= 2


def test_a_plan_made_on_meta_fits_the_model_itself():
    with torch.device("meta"):
        described = Stack().to(torch.bfloat16)
    made = plan(described, vram=66 * MIB, machine="h200")
    handle = place(built(torch.bfloat16), made)
    assert [block.name for block in made.blocks] == [b.name for b in plan_of(Stack()).blocks]
    handle.remove()


def test_a_plan_for_a_card_without_bfloat16_units_computes_in_what_it_says():
    """It was refused: the model had to be built in another dtype and planned again."""
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16)).eval().requires_grad_(False)
    for objective, wanted in (("exact", torch.float32), ("fast", torch.float16)):
        made = plan(model, vram=1 << 30, machine="wx4100", objective=objective)
        assert f"torch.{made.bfloat16_becomes}" == str(wanted)
        handle = place(model, made)
        with torch.inference_mode():
            assert model(torch.zeros(1, 64, dtype=wanted)).dtype is wanted
        handle.remove()
        assert model[0].weight.dtype is torch.bfloat16
