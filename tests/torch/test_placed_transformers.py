"""Models of transformers and diffusers with random weights: placed, they give the same tokens and bits."""

import pytest
import torch
from late_lanes import LateLanes
from random_models import TIERS, plan_of

from probes.placement.models.inputs import cache_name
from probes.placement.models.modules import find_blocks
from probes.placement.runtime.capture import call_key
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.place import place, place_model
from probes.placement.runtime.weight_sources import ModuleWeights
from probes.placement.types import PrefetchPool

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")
torch.set_num_threads(1)

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
TOKENS = {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}


def qwen():
    config = transformers.Qwen2Config(**SIZES, **TOKENS, num_key_value_heads=2, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def gpt2():
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 99, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def mixture():
    config = transformers.MixtralConfig(**SIZES, **TOKENS, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES, **TOKENS))


def placed(model, seed=0, *, late=True, **options):
    names = [block.name for block in find_blocks(model) if block.called]
    tiers = {name: TIERS[1 + (i + seed) % 5] for i, name in enumerate(names)}
    plan = plan_of(model, tiers, PrefetchPool(2, scratches=2))
    if not late:
        return place(model, plan, **options)
    lanes = LateLanes(seed)
    with torch.inference_mode(False), torch.no_grad():
        handle = place_model(
            model, plan, ModuleWeights(), lanes, work=PackedOperations(reads=lanes.reads), **options
        )
    lanes.engine = handle._engine
    return handle


def generated(model, **options):
    ids = torch.arange(3, 11)[None]
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        **options,
    )


@pytest.mark.parametrize("make", [qwen, gpt2, mixture])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_generation_gives_the_same_tokens(make, cache):
    torch.manual_seed(0)
    model = make().eval()
    want = generated(model, **cache)
    handle = placed(model)
    for _ in range(2):
        assert torch.equal(generated(model, **cache), want)
    handle.remove()
    assert torch.equal(generated(model, **cache), want)


@pytest.mark.parametrize("make", [bert, qwen, gpt2, mixture])
@pytest.mark.parametrize("seed", [0, 2])
@torch.inference_mode()
def test_a_pass_gives_the_same_bits(make, seed):
    torch.manual_seed(seed)
    model = make().to(torch.bfloat16).eval()
    ids = torch.randint(3, 90, (2, 9))
    want = model(ids)[0]
    handle = placed(model, seed)
    for _ in range(3):
        assert torch.equal(model(ids)[0], want)
    handle.remove()
    assert torch.equal(model(ids)[0], want)


@torch.inference_mode()
def test_a_diffusion_model_gives_the_same_bits():
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()
    given = torch.randn(2, 4, 8, 8), torch.tensor([3, 7]), torch.randn(2, 5, 32)
    want = model(*given).sample
    handle = placed(model)
    for _ in range(2):
        assert torch.equal(model(*given).sample, want)
    handle.remove()
    assert torch.equal(model(*given).sample, want)


@torch.inference_mode()
def test_only_calls_whose_cache_stays_in_place_are_the_same_to_a_recorder():
    model = qwen().eval()
    keys = {}
    for make in (lambda: transformers.StaticCache(model.config, max_cache_len=24), transformers.DynamicCache):
        cache = make()
        keys[type(cache)] = []
        for i in range(6):
            given = {"input_ids": torch.tensor([[7 + i]]), cache_name(model): cache, "use_cache": True}
            keys[type(cache)].append(call_key(given))
            model(**given)
    static, dynamic = keys.values()
    assert len(set(static[1:])) == 1  # the first call allocates
    assert len(set(dynamic)) == 6
