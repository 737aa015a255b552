"""Models loaded by a plan compute what the models they come from compute."""

import pytest
import torch
from placement_plans import plan_of
from safetensors.torch import save_file
from torch import nn

from probes.placement.loading.load import load
from probes.placement.values import Tier

TIERS: tuple[Tier, ...] = ("resident", "packed", "streamed_packed", "streamed", "in_place", "cpu", "disk")


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("angles", torch.arange(width) / width, persistent=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x + self.angles))))


class Model(nn.Module):
    def __init__(self, width=64, layers=5):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Model().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return model, tmp_path


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_computes_what_the_saved_one_does(saved, tier, dtype):
    model, folder = saved

    def factory():
        return Model().to(dtype)

    model = model.to(dtype)
    ids = torch.randint(0, 50, (3, 7))
    placed = load(factory, folder, plan_of(model, {f"layers.{i}": tier for i in range(5)}), device="cpu")
    with torch.inference_mode():
        want = model(ids)
        for _ in range(3):
            assert torch.equal(placed(ids), want)
    placed.placement.remove()
    with torch.inference_mode():
        assert torch.equal(placed(ids), want)
    for name, tensor in model.state_dict().items():
        assert torch.equal(placed.state_dict()[name], tensor), name
