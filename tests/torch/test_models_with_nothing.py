"""Models with empty tensors, scalars, modules without parameters: planned, placed, loaded and given back."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from probes.core.errors import UsageError
from probes.placement import load, place, plan
from probes.placement.planner.machine import profile

MIB = 1 << 20


class Scaled(nn.Module):
    """A scalar and a layer, in modules that hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none, self.first, self.last = nn.ModuleList(), nn.Identity(), nn.Sequential()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(self.first(x))) * self.scale


class Scalar(nn.Module):
    """A scalar alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Experts(nn.Module):
    """Of which there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(0, 64, 64))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.experts.sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "no inputs": (lambda: nn.Sequential(nn.Linear(0, 64), nn.Linear(64, 64)), torch.ones(2, 0)),
    "no outputs": (lambda: nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 64)), torch.ones(2, 64)),
    "nothing": (lambda: nn.Sequential(nn.Linear(0, 0, bias=False)), torch.ones(2, 0)),
    "no width": (lambda: nn.Sequential(nn.Embedding(9, 0), nn.Linear(0, 64)), torch.tensor([[1, 2]])),
    "scaled": (Scaled, torch.ones(2, 64)),
    "scalar": (Scalar, torch.ones(2, 64)),
    "experts": (Experts, torch.ones(2, 64)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("objective", ["exact", "fast"])
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_it_did(name, objective, tmp_path):
    factory, x = MODELS[name]
    torch.manual_seed(0)
    model = factory().eval()
    with torch.inference_mode():
        want = model(x)
    made = plan(model, vram=600 * MIB, machine="h200", objective=objective, batch=2)
    handle = place(model, made, device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(x), want)
    assert str(handle.report())
    handle.remove()
    with torch.inference_mode():
        assert torch.equal(model(x), want)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    assert plan(tmp_path, vram=600 * MIB, machine="h200", objective=objective, batch=2).blocks
    loaded = load(factory, tmp_path, made, device="cpu", cache=tmp_path / "packed")
    with torch.inference_mode():
        assert torch.equal(loaded(x), want)
    loaded.placement.remove()
    assert {name: tuple(p.shape) for name, p in loaded.named_parameters()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("factory", [nn.Identity, nn.Module, lambda: nn.Sequential(nn.ReLU(), nn.Identity())])
def test_a_model_without_parameters_is_refused_with_the_reason(factory):
    with pytest.raises(UsageError, match="has no tensors"):
        plan(factory(), vram=600 * MIB, machine=profile("h200"))
    with pytest.raises(UsageError, match="has no tensors"):
        plan(factory(), vram=600 * MIB, machine=profile("h200"), inputs=torch.ones(2, 64))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", MODELS)
def test_it_is_planned_by_a_trace_of_its_inputs(name):
    factory, x = MODELS[name]
    assert plan(factory(), vram=600 * MIB, machine="h200", inputs=x).rests_on == "trace"
