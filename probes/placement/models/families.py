"""The architectures that a `config.json` alone describes: what tensors each has, named as transformers does.

An architecture is a list of its tensors, a line each: what it is, its name, its sizes, and conditions.
tests/torch compares every one with the module that transformers builds from the same config.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from probes.core.errors import CheckpointUnreadable
from probes.placement.models.configs import ConfigFields, Parts, Sizes, TensorMaker, output_head
from probes.placement.models.description import TensorDescription

# Lines: `linear` NAME INPUTS OUTPUTS, `turned` (the same, stored transposed, with a bias), `norm` NAME WIDTH,
# `table` NAME ROWS WIDTH, `expert` NAME SHAPE, `one` NAME SHAPE. Sizes are sums of products of numbers and
# names. `+` ends a line with a bias, `+NAME` one that has it where the condition NAME holds, and `?NAME` one
# that is there where it does. A condition is a key of the config, or of `Family.always` or `Family.when`.
ATTENTION: Final = """
linear self_attn.q_proj width queries +{q}
linear self_attn.k_proj width keys +{q}
linear self_attn.v_proj width keys +{q}
linear self_attn.o_proj queries width +{o}
"""
HEAD_NORMS: Final = """
norm self_attn.q_norm head_width
norm self_attn.k_norm head_width
"""
GATED: Final = """
linear mlp.gate_proj width inner +{i}
linear mlp.up_proj width inner +{i}
linear mlp.down_proj inner width +{i}
"""
NORMS: Final = """
norm input_layernorm width
norm post_attention_layernorm width
"""
FOUR_NORMS: Final = f"""{NORMS}
norm pre_feedforward_layernorm width
norm post_feedforward_layernorm width
"""
EXPERTS: Final = """
one mlp.gate.weight experts width
expert mlp.experts.gate_up_proj experts 2*expert_inner width
expert mlp.experts.down_proj experts width expert_inner
"""
SHARED_EXPERT: Final = """
linear mlp.shared_expert.gate_proj width shared_inner
linear mlp.shared_expert.up_proj width shared_inner
linear mlp.shared_expert.down_proj shared_inner width
"""


@dataclass(frozen=True)
class Family:
    """An architecture: its tensors in call order, before the layers, in each, and after them."""

    layer: str
    before: str = "table embed_tokens vocabulary width"
    after: str = "norm norm width"
    top: str = "model."  # before names of a model with its output
    bare: str = ""  # before those of the base alone
    layers: str = "layers"
    table: str = "embed_tokens"  # whose weights the output may share; empty: the output depends on the task
    tied: bool = False  # by default
    head_bias: bool = False
    # more sizes: keys of the config, and the default, which may be another size
    numbers: Mapping[str, tuple[tuple[str, ...], int | str]] = field(default_factory=dict)
    when: Callable[[ConfigFields, Mapping[str, int]], Mapping[str, bool]] = lambda _fields, _sizes: {}

    def parts(self, fields: ConfigFields, size: Sizes, make: TensorMaker, whole: bool) -> Parts:
        """The parts by a config: of the model with its output, or of the base alone. Raises as `fields`."""
        top = self.top if whole else self.bare
        sizes = {
            name: getattr(size, name)
            for name in ("width", "queries", "keys", "head_width", "inner", "vocabulary")
        }
        for name, (keys, default) in self.numbers.items():
            sizes[name] = fields.number(
                *keys, default=default if isinstance(default, int) else sizes[default]
            )
        reader = _Reader(fields, make, sizes, {"bare": not whole, **self.when(fields, sizes)})
        head: tuple[TensorDescription, ...] = ()
        shared: tuple[tuple[str, ...], ...] = ()
        if self.table:
            wide = replace(size, width=sizes.get("word", size.width))
            head, shared = output_head(
                fields, wide, make, whole, table=top + self.table, tied=self.tied, bias=self.head_bias
            )
        return Parts(
            tuple(reader.tensors(self.before, top)),
            f"{top}{self.layers}",
            lambda at: reader.tensors(self.layer, f"{at}."),
            (*reader.tensors(self.after, top), *head),
            shared,
        )


@dataclass(frozen=True)
class _Reader:
    """Makes tensors of lines."""

    fields: ConfigFields
    make: TensorMaker
    sizes: Mapping[str, int]
    conditions: Mapping[str, bool]

    def tensors(self, lines: str, top: str) -> Iterator[TensorDescription]:
        for line in filter(None, lines.splitlines()):
            words = [word for word in line.split() if word[0] not in "+?"]
            marks = {word[0]: word[1:] for word in line.split() if word[0] in "+?"}
            if "?" in marks and not self._holds(marks["?"]):
                continue
            yield from self._made(*words, top=top, bias="+" in marks and self._holds(marks["+"]))

    def _made(self, kind: str, name: str, *sizes: str, top: str, bias: bool) -> Iterator[TensorDescription]:
        shape, name = tuple(map(self._size, sizes)), top + name
        if kind == "linear":
            yield from self.make.linear(name, *shape, bias=bias)
        elif kind == "turned":
            yield from self.make.inputs_first(name, *shape)
        elif kind == "norm":
            yield from self.make.norm(name, *shape, bias=bias)
        elif kind == "table":
            yield from self.make.table(name, *shape)
        else:
            yield self.make.one(name, *shape, active=self._active() if kind == "expert" else 1.0)

    def _size(self, text: str) -> int:
        terms = (term.split("*") for term in text.split("+"))
        return sum(math.prod(int(n) if n.isdecimal() else self.sizes[n] for n in term) for term in terms)

    def _holds(self, name: str) -> bool:
        if not name or name in self.conditions:
            return self.conditions.get(name, True)
        return name != "no" and self.fields.flag(name, default=False)

    def _active(self) -> float:
        """The share of experts that a row chooses."""
        experts = self.sizes["experts"]
        chosen = self.fields.number("num_experts_per_tok", default=min(2, experts))
        if chosen > experts:
            raise CheckpointUnreadable(
                f"{self.fields.where}: num_experts_per_tok is {chosen:,}, and there are {experts:,} experts",
                "give the model's own config.json",
            )
        return chosen / experts


def _llama(inside: str = GATED, norms: str = NORMS, *, q: str = "no", o: str = "no", i: str = "no") -> str:
    """A layer of the Llama family: RMS norms, rotary positions, a gated inner layer or experts."""
    return ATTENTION.format(q=q, o=o) + inside.replace("{i}", i) + norms


LLAMA: Final = Family(_llama(q="attention_bias", o="attention_bias", i="mlp_bias"))
MISTRAL: Final = Family(_llama())
GEMMA: Final = replace(MISTRAL, tied=True)
PHI3: Final = """
linear self_attn.qkv_proj width queries+2*keys
linear self_attn.o_proj queries width
linear mlp.gate_up_proj width 2*inner
linear mlp.down_proj inner width
"""
GPT2: Final = Family(
    """
norm ln_1 width +
turned attn.c_attn width 3*width
turned attn.c_proj width width
norm ln_2 width +
turned mlp.c_fc width inner
turned mlp.c_proj inner width
""",
    before="table wte vocabulary width\ntable wpe positions width",
    after="norm ln_f width +",
    top="transformer.",
    layers="h",
    table="wte",
    tied=True,
    numbers={"positions": (("n_positions", "n_ctx"), 1024)},
)
NEOX: Final = Family(
    """
norm input_layernorm width +
norm post_attention_layernorm width +
linear attention.query_key_value width 3*width +
linear attention.dense width width +
linear mlp.dense_h_to_4h width inner +
linear mlp.dense_4h_to_h inner width +
""",
    before="table embed_in vocabulary width",
    after="norm final_layer_norm width +",
    top="gpt_neox.",
    table="embed_in",
)
PHI: Final = Family(
    """
linear self_attn.q_proj width queries +
linear self_attn.k_proj width keys +
linear self_attn.v_proj width keys +
linear self_attn.dense queries width +
linear mlp.fc1 width inner +
linear mlp.fc2 inner width +
norm input_layernorm width +
""",
    after="norm final_layernorm width +",
    head_bias=True,
)
OPT: Final = Family(
    """
norm self_attn_layer_norm width +
linear self_attn.q_proj width width +
linear self_attn.k_proj width width +
linear self_attn.v_proj width width +
linear self_attn.out_proj width width +
norm final_layer_norm width +
linear fc1 width inner +
linear fc2 inner width +
""",
    before="table embed_tokens vocabulary word\ntable embed_positions positions+2 width\n"
    "linear project_in word width ?projected",
    after="norm final_layer_norm width + ?normed\nlinear project_out width word ?projected",
    top="model.decoder.",
    bare="decoder.",
    tied=True,
    numbers={"word": (("word_embed_proj_dim",), "width"), "positions": (("max_position_embeddings",), 2048)},
    when=lambda fields, sizes: {
        "projected": sizes["word"] != sizes["width"],
        "normed": fields.flag("do_layer_norm_before", default=True)
        and not fields.flag("_remove_final_layer_norm", default=False),
    },
)
BERT: Final = Family(
    """
linear attention.self.query width width +
linear attention.self.key width width +
linear attention.self.value width width +
linear attention.output.dense width width +
norm attention.output.LayerNorm width +
linear intermediate.dense width inner +
linear output.dense inner width +
norm output.LayerNorm width +
""",
    before="table embeddings.word_embeddings vocabulary width\n"
    "table embeddings.position_embeddings positions width\n"
    "table embeddings.token_type_embeddings types width\nnorm embeddings.LayerNorm width +",
    after="linear pooler.dense width width + ?bare",
    top="bert.",
    layers="encoder.layer",
    table="",
    numbers={"positions": (("max_position_embeddings",), 512), "types": (("type_vocab_size",), 2)},
)
ROBERTA: Final = replace(BERT, top="roberta.")
MIXTRAL: Final = replace(
    MISTRAL,
    layer=_llama(EXPERTS),
    numbers={"experts": (("num_local_experts",), 8), "expert_inner": (("intermediate_size",), "inner")},
)
QWEN2_MOE: Final = replace(
    MISTRAL,
    layer=_llama(f"{SHARED_EXPERT}{EXPERTS}linear mlp.shared_expert_gate width 1\n", q=""),
    numbers={
        "shared_inner": (("shared_expert_intermediate_size",), 5632),
        "experts": (("num_experts",), 60),
        "expert_inner": (("moe_intermediate_size",), 1408),
    },
)
QWEN3_MOE: Final = replace(
    MISTRAL,
    layer=_llama(HEAD_NORMS + EXPERTS),
    numbers={
        "experts": (("num_experts", "num_local_experts"), 128),
        "expert_inner": (("moe_intermediate_size",), 768),
    },
)

BARE: Final = ("bert", "roberta", "xlm-roberta")  # without a head unless the config names a task
# All architectures, by model_type
FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "bert": BERT,
        "gemma": GEMMA,
        "gemma2": replace(GEMMA, layer=_llama(norms=FOUR_NORMS)),
        "gemma3_text": replace(GEMMA, layer=_llama(HEAD_NORMS + GATED, FOUR_NORMS)),
        "gpt2": GPT2,
        "gpt_neox": NEOX,
        "granite": LLAMA,
        "llama": LLAMA,
        "mistral": MISTRAL,
        "mixtral": MIXTRAL,
        "opt": OPT,
        "phi": PHI,
        "phi3": replace(MISTRAL, layer=PHI3 + NORMS),
        "qwen2": replace(MISTRAL, layer=_llama(q="")),
        "qwen2_moe": QWEN2_MOE,
        "qwen3": replace(MISTRAL, layer=_llama(HEAD_NORMS + GATED, q="attention_bias", o="attention_bias")),
        "qwen3_moe": QWEN3_MOE,
        "roberta": ROBERTA,
        "xlm-roberta": ROBERTA,
    }
)
