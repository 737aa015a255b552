"""A config.json is described as transformers builds it: every architecture, block by block, on meta."""

import pytest
import torch

from probes.placement.models.families import families, from_config
from probes.placement.models.modules import find_blocks
from probes.placement.models.reading import known_configs
from probes.placement.planner.api import resolve_model
from probes.placement.types import Workload

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 120,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
# what an architecture's own keys are, or what it needs beside the usual ones
OWN = {
    "bert": {"type_vocab_size": 2},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "n_inner": 96},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
}


def built(values, *, bare):
    """The module that transformers builds from a config, on meta."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**values)
    made = transformers.AutoModel if bare else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return made.from_config(config)


def described_sizes(values):
    return {block.name: block.weight_bytes for block in from_config(values, name="m", where="a test").blocks}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", sorted(families()))
def test_a_described_architecture_has_the_blocks_that_transformers_builds(kind, tied):
    bare = kind in ("bert", "roberta", "xlm-roberta")
    values = {**SMALL, "model_type": kind, "tie_word_embeddings": tied, **OWN.get(kind, {})}
    model = built(values, bare=bare)
    values["architectures"] = [type(model).__name__]
    described_alike(described_sizes(values), model)


def described_alike(said, model):
    """The described blocks are the model's, with their bytes, and none is left."""
    assert {block.name: block.n_bytes for block in find_blocks(model, said)} == said


@pytest.mark.parametrize("name", sorted(known_configs()))
def test_a_known_model_has_the_blocks_that_transformers_builds(name):
    values = dict(known_configs()[name])
    model = built({k: v for k, v in values.items() if k != "architectures"}, bare=name == "bert-base")
    wide = {"float32": 1, "bfloat16": 2, "float16": 2}[values["torch_dtype"]]
    said = {block: n_bytes * wide for block, n_bytes in described_sizes(values).items()}
    if next(model.parameters()).dtype != torch.float32:
        said = described_sizes(values)
    described_alike(said, model)


@pytest.mark.parametrize("kind", sorted(families()))
def test_parts_of_a_layer_are_listed_in_the_order_of_their_calls(kind):
    """OPT defines k, v, q and calls q, k, v: each block waited for the slot of one that came later."""
    transformers = pytest.importorskip("transformers")
    values = {"model_type": kind, **SMALL, **OWN.get(kind, {})}
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModel.from_config(config).eval()
    called = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() == 2 and not list(module.children()):
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    with torch.no_grad():
        model(input_ids=torch.ones(1, 5, dtype=torch.int64))
    layer = [name for name in called if ".1." in name]
    listed = [block.name for block in resolve_model(model, Workload(1, 5)).divided().blocks]
    assert layer
    assert [name for name in listed if name in layer] == layer
