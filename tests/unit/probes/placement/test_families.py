"""Every architecture that a config alone describes: published sizes, tensors by name, costs of a layer."""

import re
from typing import Any

import pytest

from probes.placement.models.description import ModelDescription
from probes.placement.models.families import families, from_config
from probes.placement.planner.rules import count_rule

PUBLISHED = {
    "facebook/opt-125m": (
        {
            "model_type": "opt",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
            "max_position_embeddings": 2048,
        },
        125_239_296,
    ),
    "facebook/opt-350m": (
        {
            "model_type": "opt",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "vocab_size": 50272,
            "word_embed_proj_dim": 512,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": False,
        },
        331_196_416,
    ),
    "EleutherAI/pythia-160m": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        162_322_944,
    ),
    "microsoft/phi-2": (
        {
            "model_type": "phi",
            "hidden_size": 2560,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 10240,
            "vocab_size": 51200,
            "tie_word_embeddings": False,
        },
        2_779_683_840,
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "vocab_size": 32064,
            "tie_word_embeddings": False,
        },
        3_821_079_552,
    ),
    "google/gemma-2-2b": (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "intermediate_size": 9216,
            "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    "Qwen/Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "openai-community/gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
}
HEADS = {"gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "opt": "OPTForCausalLM"}
HEADS |= {"phi": "PhiForCausalLM", "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM"}
HEADS |= {"qwen3": "Qwen3ForCausalLM"}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 120,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "type_vocab_size": 2,
}


def described(values: dict[str, Any]) -> ModelDescription:
    return from_config(values, name="m", where="a test")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_numbers_as_its_authors_published(name: str) -> None:
    values, numbers = PUBLISHED[name]
    model = described({**values, "architectures": [HEADS[values["model_type"]]]})
    assert sum(tensor.numbers for block in model.blocks for tensor in block.tensors) == numbers


@pytest.mark.parametrize("kind", sorted(families()))
@pytest.mark.parametrize("whole", [False, True])
def test_layers_differ_in_their_numbers_alone(kind: str, whole: bool) -> None:
    more = {"architectures": [f"{kind}ForCausalLM"]} if whole else {}
    model = described({"model_type": kind, **SMALL, **more})
    names = [tensor.name for block in model.blocks for tensor in block.tensors]
    assert len(set(names)) == len(names)
    layers = [block for block in model.blocks if re.search(r"\.\d+$", block.name)]
    assert len(layers) == SMALL["num_hidden_layers"]
    assert all(tensor.name.startswith(f"{one.name}.") for one in layers for tensor in one.tensors)
    unnumbered = [
        tuple((tensor.name.removeprefix(one.name), tensor.shape) for tensor in one.tensors) for one in layers
    ]
    assert len(set(unnumbered)) == 1
    assert all(count_rule(one).kernels > 10 for one in layers)
    assert sum(block.around for block in model.blocks) > 0


@pytest.mark.parametrize("kind", sorted(families()))
def test_a_layer_in_parts_has_the_tensors_costs_and_attention_of_the_whole(kind: str) -> None:
    model = described({"model_type": kind, **SMALL})
    for block in model.blocks:
        parts = block.divided()
        assert sorted(t.name for part in parts for t in part.tensors) == sorted(t.name for t in block.tensors)
        assert sum(part.around for part in parts) == block.around
        assert [part.attention for part in parts if part.attention] == [block.attention] * bool(
            block.attention
        )
