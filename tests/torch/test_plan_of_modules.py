"""Plans of module trees: on meta, with or without a configuration, and accepted by `place`."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from probes.core.errors import PlacementError, PlanImpossible
from probes.placement import load, place, plan
from probes.placement.models.modules import describe_module
from probes.placement.models.reading import describe
from probes.placement.planner.api import resolve_model
from probes.placement.types import LOADING_BYTES, Workload

MIB = 1 << 20


def qwen(layers=4):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=300,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def test_keys_and_values_of_a_cache_are_counted_where_they_are_used_whatever_the_architecture():
    """By a rule for its config a module of another architecture had no cache at all."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
    with torch.device("meta"):
        models = {"qwen": (qwen(), 2), "falcon": (FalconForCausalLM(FalconConfig(**sizes)), 1)}
    for model, key_heads in models.values():
        blocks = resolve_model(model, Workload(2, 8, 32)).blocks
        layers = [block.cache_bytes for block in blocks if re.search(r"\.\d+$", block.name)]
        assert layers == [2 * 32 * 2 * key_heads * 16 * 4] * len(layers)
        assert len(layers) > 2
        assert sum(block.cache_bytes for block in blocks) == sum(layers)
        assert plan(
            model, vram=2048 * MIB, machine="h200", batch=2, tokens=8, context=32
        ).vram.kv_cache == sum(layers)


def test_the_description_has_every_parameter_once():
    with torch.device("meta"):
        model = qwen()
    names = [tensor.name for block in describe_module(model).blocks for tensor in block.tensors]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_a_parameter_that_no_called_module_holds_is_planned_resident():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1024))
            self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + self.token
            return x

    model = Model()
    made = plan(model, vram=300 * MIB, machine="h200")
    assert {block.name: block.tier for block in made.blocks}["token"] == "resident"
    tight = plan(model, vram=16 * MIB + 256 * MIB, machine="wx4100")
    tiers = {block.name: block.tier for block in tight.blocks}
    assert tiers["token"] == "resident"


@pytest.mark.parametrize("objective", ["exact", "fast"])
def test_a_planned_module_can_be_placed(objective):
    torch.manual_seed(0)
    model = qwen().eval()
    ids = torch.randint(0, 300, (2, 9))
    with torch.inference_mode():
        want = model(ids).logits
    made = plan(model, vram=1024 * MIB, machine="h200", objective=objective)
    handle = place(model, made, device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, want)
    handle.remove()


def test_a_known_name_is_still_described_without_torch():
    assert describe("qwen2.5-3b").blocks


def test_layers_are_divisible_unless_torch_reads_their_weights_itself():
    with torch.device("meta"):
        model = qwen()
        torchs = nn.Sequential(nn.TransformerEncoderLayer(64, 4), nn.Linear(64, 64))
        own = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), nn.Linear(64, 8))
    blocks = {block.name: block for block in describe_module(model).blocks}
    parts = {block.name for block in blocks["model.layers.0"].divided()}
    assert {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"} <= parts
    assert not {block.name: block.divisible for block in describe_module(torchs).blocks}["0"]
    assert all(block.divisible for block in describe_module(own).blocks if block.name.startswith("0"))


def test_a_captured_plan_in_parts_of_layers_is_followed():
    model = qwen(layers=8).eval()
    found = describe_module(model)
    made = plan(found.divided(), vram=500 * MIB, machine="h200", captured=True)
    assert len(made.blocks) > len(found.blocks)
    tiers = ("resident", "packed", "streamed", "streamed_packed")
    blocks = tuple(replace(b, tier=tiers[i % 4]) for i, b in enumerate(made.blocks))
    mixed = replace(made, blocks=blocks, vram_budget=0, host_budget=0)
    ids = torch.randint(0, 300, (1, 5))
    with torch.inference_mode():
        before = model(input_ids=ids).logits
    handle = place(model, mixed, device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, before)
    handle.remove()


def test_blocks_planned_dense_are_packed_with_three_bit_codes_and_give_the_same_bits():
    model = nn.Sequential(*(nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(4))).eval()
    made = plan(model, vram=400 * MIB, machine="h200", captured=True)
    tiers = ("packed", "streamed_packed", "packed", "streamed_packed")
    mixed = replace(
        made,
        blocks=tuple(replace(b, tier=tiers[i], dense=i < 2) for i, b in enumerate(made.blocks)),
        vram_budget=0,
        host_budget=0,
    )
    x = torch.randn(3, 512, dtype=torch.bfloat16)
    with torch.inference_mode():
        before = model(x)
    handle = place(model, mixed, device="cpu")
    layouts = [
        [item.form.layout for item in one.stored.items if item.form] for one in handle._builder.placements
    ]
    assert layouts == [["b10"], ["b10"], ["b12"], ["b12"]]
    with torch.inference_mode():
        assert torch.equal(model(x).view(torch.int16), before.view(torch.int16))
    handle.remove()


def layers(n=4):
    return nn.Sequential(*(nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(n))).eval()


@pytest.mark.parametrize("vram", [300 * MIB, 41 * MIB])  # all layers, or one of them
def test_a_model_in_memory_needs_no_host_memory_for_loading(vram):
    """64 MiB were wanted for it, which only a checkpoint's tensors pass through."""
    model = layers()
    torch.manual_seed(0)
    x = torch.randn(3, 512, dtype=torch.bfloat16)
    with torch.inference_mode():
        before = model(x)
    made = plan(model, vram=vram, machine="h200", host=2 * MIB)
    assert made.host.loading == 0
    assert made.host.total <= made.host_budget == 2 * MIB
    handle = place(model, made, device="cpu")
    with torch.inference_mode():
        assert torch.equal(model(x), before)
    handle.remove()


def test_a_model_on_meta_is_planned_with_what_loading_takes():
    with torch.device("meta"):
        model = layers()
    with pytest.raises(PlanImpossible) as refused:
        plan(model, vram=300 * MIB, machine="h200", host=63 * MIB)
    assert "--host 64MiB" in refused.value.hint
    assert "65MiB" not in refused.value.hint
    made = plan(model, vram=300 * MIB, machine="h200", host=64 * MIB)
    assert made.host.total == made.host.loading == LOADING_BYTES


def test_load_refuses_a_plan_of_a_model_in_memory_that_has_no_room_for_loading(tmp_path):
    model = layers()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    tight, roomy = (plan(model, vram=300 * MIB, machine="h200", host=host * MIB) for host in (63, 64))
    with pytest.raises(PlacementError, match=r"loading takes 64\.00 MiB besides") as refused:
        load(layers, tmp_path, tight, device="cpu", cache=False)
    assert "on meta" in refused.value.hint
    loaded = load(layers, tmp_path, roomy, device="cpu", cache=False)
    x = torch.ones(1, 512, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(loaded(x), model(x))
    loaded.placement.remove()


def test_blocks_that_cannot_compute_on_the_cpu_of_a_machine_with_a_gpu_are_known():
    """Hooks run before a call, on the GPU, and parameters of other blocks are there."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = nn.Sequential(nn.utils.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    logged = nn.Linear(64, 64)
    logged.register_forward_pre_hook(lambda _module, _args: None)
    assert [block.gpu_only for block in describe_module(normed).blocks] == [True, False]
    assert not describe_module(nn.Sequential(logged)).blocks[0].gpu_only


class Inner(nn.Module):
    """As GPT-Neo's: one module is called as a whole, and its table of words is the head's weight as well."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(50, 64), nn.Linear(64, 64)

    def forward(self, ids):
        return self.layer(self.words(ids))


def test_a_block_that_calls_another_block_cannot_compute_on_the_cpu_of_a_machine_with_a_gpu():
    model = nn.ModuleDict({"inner": Inner(), "head": nn.Linear(64, 50, bias=False)})
    model["head"].weight = model["inner"].words.weight
    assert {block.name: block.gpu_only for block in describe_module(model).blocks} == {
        "inner": True,
        "inner.words.weight": False,
    }


class Holding(nn.Module):
    """A parameter of some kind, and a layer."""

    def __init__(self, values):
        super().__init__()
        self.odd, self.linear = nn.Parameter(values, requires_grad=False), nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x)


def two_linears():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


REFUSED = {
    "scripted": (lambda: torch.jit.script(two_linears()), "scripted or compiled"),
    "compiled": (lambda: torch.compile(two_linears(), backend="eager"), "scripted or compiled"),
    "compiled in part": (
        lambda: nn.Sequential(torch.compile(two_linears(), backend="eager"), two_linears()),
        "scripted or compiled",
    ),
    "of compressed rows": (lambda: Holding(torch.eye(4).to_sparse_csr()), "odd is sparse, nested"),
    "nested": (
        lambda: Holding(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])),
        "odd is sparse, nested",
    ),
}


@pytest.mark.filterwarnings("ignore")  # of torch, for what is deprecated or beta
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_that_cannot_be_placed_is_refused_by_its_plan_too(name):
    make, why = REFUSED[name]
    model, by_hand = make(), plan(two_linears(), vram=600 * MIB, machine="h200")
    for refused in (
        lambda: plan(model, vram=600 * MIB, machine="h200", inputs=torch.ones(2, 16)),
        lambda: place(model, by_hand, device="cpu"),
    ):
        with pytest.raises(PlacementError, match=why) as caught:
            refused()
        assert caught.value.hint


def test_what_is_no_module_is_refused_by_its_type():
    made = plan(two_linears(), vram=600 * MIB, machine="h200")
    for thing in (5, None, two_linears, [two_linears()], {"state": 1}):
        with pytest.raises(PlacementError, match=f"not a {type(thing).__name__}"):
            place(thing, made, device="cpu")
