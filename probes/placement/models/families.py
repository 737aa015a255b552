"""The architectures that a `config.json` alone describes: what tensors each has, named as transformers does.

tests/torch compares every one with the module that transformers builds from the same config.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from probes.core.errors import CheckpointUnreadable
from probes.placement.models.configs import (
    ConfigFields,
    Family,
    Layers,
    Parts,
    Sizes,
    TensorMaker,
    Tensors,
    output_head,
)

FOUR_NORMS: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
Mixture = Callable[[str], Tensors]


def _llama(
    fields: ConfigFields,
    size: Sizes,
    make: TensorMaker,
    whole: bool,
    *,
    query_bias: bool = False,
    out_bias: bool = False,
    inner_bias: bool = False,
    head_norms: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    tied: bool = False,
    mixture: Mixture | None = None,
    merged: bool = False,
) -> Parts:
    """Decoders of the Llama family: RMS norms, rotary positions, a gated inner layer."""
    top = "model." if whole else ""

    def layer(at: str) -> Tensors:
        if merged:
            yield from make.linear(f"{at}.self_attn.qkv_proj", size.width, size.queries + 2 * size.keys)
        else:
            for name, outputs in (("q", size.queries), ("k", size.keys), ("v", size.keys)):
                yield from make.linear(f"{at}.self_attn.{name}_proj", size.width, outputs, bias=query_bias)
        yield from make.linear(f"{at}.self_attn.o_proj", size.queries, size.width, bias=out_bias)
        if head_norms:
            yield from make.norm(f"{at}.self_attn.q_norm", size.head_width)
            yield from make.norm(f"{at}.self_attn.k_norm", size.head_width)
        if mixture:
            yield from mixture(at)
        elif merged:
            yield from make.linear(f"{at}.mlp.gate_up_proj", size.width, 2 * size.inner)
            yield from make.linear(f"{at}.mlp.down_proj", size.inner, size.width)
        else:
            for name in ("gate", "up"):
                yield from make.linear(f"{at}.mlp.{name}_proj", size.width, size.inner, bias=inner_bias)
            yield from make.linear(f"{at}.mlp.down_proj", size.inner, size.width, bias=inner_bias)
        for name in norms:
            yield from make.norm(f"{at}.{name}", size.width)

    embed = tuple(make.table(f"{top}embed_tokens", size.vocabulary, size.width))
    after = [*make.norm(f"{top}norm", size.width)]
    head, shared = output_head(fields, size, make, whole, table=f"{top}embed_tokens", tied=tied)
    after += head
    return Parts(embed, Layers(f"{top}layers", layer), tuple(after), shared)


def _plain_llama(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    bias = fields.flag("attention_bias", default=False)
    return _llama(
        fields,
        size,
        make,
        whole,
        query_bias=bias,
        out_bias=bias,
        inner_bias=fields.flag("mlp_bias", default=False),
    )


def _mistral(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    return _llama(fields, size, make, whole)


def _qwen2(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    return _llama(fields, size, make, whole, query_bias=True)


def _qwen3(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    bias = fields.flag("attention_bias", default=False)
    return _llama(fields, size, make, whole, query_bias=bias, out_bias=bias, head_norms=True)


def _gemma(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    return _llama(fields, size, make, whole, tied=True)


def _gemma2(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    return _llama(fields, size, make, whole, tied=True, norms=FOUR_NORMS)


def _gemma3(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    return _llama(fields, size, make, whole, tied=True, norms=FOUR_NORMS, head_norms=True)


def _phi3(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    return _llama(fields, size, make, whole, merged=True)


def _routed_experts(
    fields: ConfigFields, size: Sizes, make: TensorMaker, *, experts: int, inner: int
) -> Mixture:
    chosen = fields.number("num_experts_per_tok", default=min(2, experts))
    if chosen > experts:
        raise CheckpointUnreadable(
            f"{fields.where}: num_experts_per_tok is {chosen:,}, and there are {experts:,} experts",
            "give the model's own config.json",
        )
    active = chosen / experts

    def mixture(at: str) -> Tensors:
        yield make.one(f"{at}.mlp.gate.weight", experts, size.width)
        yield make.one(f"{at}.mlp.experts.gate_up_proj", experts, 2 * inner, size.width, active=active)
        yield make.one(f"{at}.mlp.experts.down_proj", experts, size.width, inner, active=active)

    return mixture


def _mixtral(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    experts = fields.number("num_local_experts", default=8)
    mixture = _routed_experts(fields, size, make, experts=experts, inner=size.inner)
    return _llama(fields, size, make, whole, mixture=mixture)


def _qwen2_moe(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    shared = fields.number("shared_expert_intermediate_size", default=5632)
    routed = _routed_experts(
        fields,
        size,
        make,
        experts=fields.number("num_experts", default=60),
        inner=fields.number("moe_intermediate_size", default=1408),
    )

    def mixture(at: str) -> Tensors:
        for name in ("gate", "up"):
            yield from make.linear(f"{at}.mlp.shared_expert.{name}_proj", size.width, shared)
        yield from make.linear(f"{at}.mlp.shared_expert.down_proj", shared, size.width)
        yield from routed(at)
        yield from make.linear(f"{at}.mlp.shared_expert_gate", size.width, 1)

    return _llama(fields, size, make, whole, query_bias=True, mixture=mixture)


def _qwen3_moe(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    mixture = _routed_experts(
        fields,
        size,
        make,
        experts=fields.number("num_experts", "num_local_experts", default=128),
        inner=fields.number("moe_intermediate_size", default=768),
    )
    return _llama(fields, size, make, whole, head_norms=True, mixture=mixture)


def _phi(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    top = "model." if whole else ""

    def layer(at: str) -> Tensors:
        for name, outputs in (("q", size.queries), ("k", size.keys), ("v", size.keys)):
            yield from make.linear(f"{at}.self_attn.{name}_proj", size.width, outputs, bias=True)
        yield from make.linear(f"{at}.self_attn.dense", size.queries, size.width, bias=True)
        yield from make.linear(f"{at}.mlp.fc1", size.width, size.inner, bias=True)
        yield from make.linear(f"{at}.mlp.fc2", size.inner, size.width, bias=True)
        yield from make.norm(f"{at}.input_layernorm", size.width, bias=True)

    after = [*make.norm(f"{top}final_layernorm", size.width, bias=True)]
    head, shared = output_head(fields, size, make, whole, table=f"{top}embed_tokens", tied=False, bias=True)
    return Parts(
        tuple(make.table(f"{top}embed_tokens", size.vocabulary, size.width)),
        Layers(f"{top}layers", layer),
        (*after, *head),
        shared,
    )


def _gpt2(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    top = "transformer." if whole else ""
    width = size.width

    def layer(at: str) -> Tensors:
        yield from make.norm(f"{at}.ln_1", width, bias=True)
        yield from make.inputs_first(f"{at}.attn.c_attn", width, 3 * width)
        yield from make.inputs_first(f"{at}.attn.c_proj", width, width)
        yield from make.norm(f"{at}.ln_2", width, bias=True)
        yield from make.inputs_first(f"{at}.mlp.c_fc", width, size.inner)
        yield from make.inputs_first(f"{at}.mlp.c_proj", size.inner, width)

    before = [*make.table(f"{top}wte", size.vocabulary, width)]
    before += make.table(f"{top}wpe", fields.number("n_positions", "n_ctx", default=1024), width)
    head, shared = output_head(fields, size, make, whole, table=f"{top}wte", tied=True)
    return Parts(
        tuple(before),
        Layers(f"{top}h", layer),
        (*make.norm(f"{top}ln_f", width, bias=True), *head),
        shared,
    )


def _gpt_neox(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    top = "gpt_neox." if whole else ""
    width = size.width

    def layer(at: str) -> Tensors:
        yield from make.norm(f"{at}.input_layernorm", width, bias=True)
        yield from make.norm(f"{at}.post_attention_layernorm", width, bias=True)
        yield from make.linear(f"{at}.attention.query_key_value", width, 3 * width, bias=True)
        yield from make.linear(f"{at}.attention.dense", width, width, bias=True)
        yield from make.linear(f"{at}.mlp.dense_h_to_4h", width, size.inner, bias=True)
        yield from make.linear(f"{at}.mlp.dense_4h_to_h", size.inner, width, bias=True)

    after = [*make.norm(f"{top}final_layer_norm", width, bias=True)]
    head, shared = output_head(fields, size, make, whole, table=f"{top}embed_in", tied=False)
    return Parts(
        tuple(make.table(f"{top}embed_in", size.vocabulary, width)),
        Layers(f"{top}layers", layer),
        (*after, *head),
        shared,
    )


def _opt(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    top = "model.decoder." if whole else "decoder."
    width, word = size.width, fields.number("word_embed_proj_dim", default=size.width)

    def layer(at: str) -> Tensors:
        yield from make.norm(f"{at}.self_attn_layer_norm", width, bias=True)
        for name in ("q", "k", "v", "out"):
            yield from make.linear(f"{at}.self_attn.{name}_proj", width, width, bias=True)
        yield from make.norm(f"{at}.final_layer_norm", width, bias=True)
        yield from make.linear(f"{at}.fc1", width, size.inner, bias=True)
        yield from make.linear(f"{at}.fc2", size.inner, width, bias=True)

    before = [*make.table(f"{top}embed_tokens", size.vocabulary, word)]
    before += make.table(
        f"{top}embed_positions", fields.number("max_position_embeddings", default=2048) + 2, width
    )
    if word != width:
        before += make.linear(f"{top}project_in", word, width)
    normed = fields.flag("do_layer_norm_before", default=True) and not fields.flag(
        "_remove_final_layer_norm", default=False
    )
    closing = [*make.norm(f"{top}final_layer_norm", width, bias=True)] if normed else []
    if word != width:
        closing += make.linear(f"{top}project_out", width, word)
    table = replace(size, width=word)
    head, shared = output_head(fields, table, make, whole, table=f"{top}embed_tokens", tied=True)
    return Parts(
        tuple(before),
        Layers(f"{top}layers", layer),
        (*closing, *head),
        shared,
    )


def _bert(fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
    """The encoder with its pooler; of a `whole` model, whose head depends on the task, the encoder alone."""
    top = f"{fields.text('model_type')}." if whole else ""
    top = top.replace("xlm-roberta", "roberta")
    width = size.width

    def layer(at: str) -> Tensors:
        for name in ("query", "key", "value"):
            yield from make.linear(f"{at}.attention.self.{name}", width, width, bias=True)
        yield from make.linear(f"{at}.attention.output.dense", width, width, bias=True)
        yield from make.norm(f"{at}.attention.output.LayerNorm", width, bias=True)
        yield from make.linear(f"{at}.intermediate.dense", width, size.inner, bias=True)
        yield from make.linear(f"{at}.output.dense", size.inner, width, bias=True)
        yield from make.norm(f"{at}.output.LayerNorm", width, bias=True)

    at = f"{top}embeddings"
    before = [*make.table(f"{at}.word_embeddings", size.vocabulary, width)]
    before += make.table(
        f"{at}.position_embeddings", fields.number("max_position_embeddings", default=512), width
    )
    before += make.table(f"{at}.token_type_embeddings", fields.number("type_vocab_size", default=2), width)
    before += make.norm(f"{at}.LayerNorm", width, bias=True)
    return Parts(
        tuple(before),
        Layers(f"{top}encoder.layer", layer),
        () if whole else tuple(make.linear("pooler.dense", width, width, bias=True)),
    )


BARE: Final = ("bert", "roberta", "xlm-roberta")  # without a head unless the config names a task
# All rules, by model_type
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "bert": _bert,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "gpt2": _gpt2,
        "gpt_neox": _gpt_neox,
        "granite": _plain_llama,
        "llama": _plain_llama,
        "mistral": _mistral,
        "mixtral": _mixtral,
        "opt": _opt,
        "phi": _phi,
        "phi3": _phi3,
        "qwen2": _qwen2,
        "qwen2_moe": _qwen2_moe,
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
        "roberta": _bert,
        "xlm-roberta": _bert,
    }
)
