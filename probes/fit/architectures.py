"""What each known architecture computes, written as operations on the tape of `tape`. Pure.

Each program is one forward pass, in the order and with the local variables of transformers' code: what a
variable holds is alive.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from probes.core.errors import ModelUnknown
from probes.fit.tape import FULL, Pass, Tape, Tensor
from probes.placement.models.description import BlockDescription, ModelDescription

Program = Callable[[Pass, ModelDescription], Tensor]
Layer = Callable[[Pass, BlockDescription, Tensor], Tensor]


def _layers(model: ModelDescription) -> list[BlockDescription]:
    layers = [block for block in model.blocks if block.attention is not None]
    if not layers:
        raise ModelUnknown("nothing says how this model attends", "give its config.json")
    return layers


def _top(layer: BlockDescription) -> str:
    """What the names of all blocks of the stack begin with: `model` of `model.layers.0`."""
    return layer.name.rpartition(".")[0].rpartition(".")[0]


def _named(top: str, name: str) -> str:
    return f"{top}.{name}" if top else name


def _llama_layer(work: Pass, block: BlockDescription, angles: Tensor, x: Tensor) -> Tensor:
    """A decoder layer with RMS norms, rotary positions and a gated inner layer."""
    tape, weights, at = work.tape, work.weights, block.name
    assert block.attention
    normed = work.rms_norm(x, weights.sure(f"{at}.input_layernorm.weight"))
    q, k, v = _queries(work, block, normed)
    q, k = work.rotate(q, angles), work.rotate(k, angles)
    attended = work.attend(q, k, v, block.attention.heads)
    del q, k, v
    x = tape.add(x, work.apply(weights.linear(f"{at}.self_attn.o_proj"), attended))
    del attended
    normed = work.rms_norm(x, weights.sure(f"{at}.post_attention_layernorm.weight"))
    inner = _gated(work, at, normed)
    return tape.add(x, work.apply(weights.linear(f"{at}.mlp.down_proj"), inner))


def _queries(work: Pass, block: BlockDescription, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, tape, at, shape = work.weights, work.tape, f"{block.name}.self_attn", block.attention
    assert shape
    if weights.one(f"{at}.qkv_proj.weight"):
        merged = work.apply(weights.linear(f"{at}.qkv_proj"), x)
        sizes = [shape.heads, shape.key_value_heads, shape.key_value_heads]
        parts = [work.rows * heads * shape.head_width for heads in sizes]
        q, k, v = (tape.part(merged, n) for n in parts)
    else:
        q, k, v = (work.apply(weights.linear(f"{at}.{name}_proj"), x) for name in "qkv")
    if weights.one(f"{at}.q_norm.weight"):
        q = work.rms_norm(q, weights.sure(f"{at}.q_norm.weight"))
        k = work.rms_norm(k, weights.sure(f"{at}.k_norm.weight"))
    return q, k, v


def _gated(work: Pass, at: str, x: Tensor) -> Tensor:
    weights, tape = work.weights, work.tape
    if weights.one(f"{at}.mlp.gate_up_proj.weight"):
        merged = work.apply(weights.linear(f"{at}.mlp.gate_up_proj"), x)
        gate = tape.part(merged, merged.numbers // 2)
        up = tape.part(merged, merged.numbers // 2)
        return tape.mul(up, tape.op(gate.numbers, gate.width, (gate,), saved=(gate,)))
    gate = work.apply(weights.linear(f"{at}.mlp.gate_proj"), x)
    active = tape.op(gate.numbers, gate.width, (gate,), saved=(gate,))
    del gate
    return tape.mul(active, work.apply(weights.linear(f"{at}.mlp.up_proj"), x))


def _through(work: Pass, model: ModelDescription, x: Tensor, layer: Layer) -> Tensor:
    """All layers one after the other, each checkpointed where the question says so."""
    for block in _layers(model):

        def run(given: Tensor, block: BlockDescription = block) -> Tensor:
            return layer(work, block, given)

        x = work.tape.checkpoint(run, x) if work.question.checkpointing else run(x)
    return x


def _embedded(work: Pass, name: str) -> Tensor:
    """Rows of a table."""
    table, width = work.weights.sure(name), work.weights.shape(name)[1]
    indices = work.tape.fresh(work.rows, 8)
    return work.tape.op(work.rows * width, table.width, (table,), saved=(indices,))


def _result(work: Pass, x: Tensor, head: str) -> Tensor:
    """What a step's loss is computed from, and the loss: over the vocabulary where the model has a head."""
    tape, question = work.tape, work.question
    has_head = work.weights.one(f"{head}.weight") is not None
    if not has_head:
        if question.task == "inference":
            return x
        full = tape.cast(x, FULL)
        squares = tape.op(full.numbers, FULL, (full,), saved=(full,), work=2 * full.n_bytes)
        return tape.op(1, FULL, (squares,), work=0)
    if question.task == "inference":  # of the last token only, as generating does
        last = tape.fresh(x.numbers // question.tokens, x.width)
        linear = work.weights.linear(head)
        return tape.linear(last, linear.weight, linear.bias, outputs=linear.outputs, rows=question.batch)
    logits = work.apply(work.weights.linear(head), x)
    full = tape.cast(logits, FULL)
    chances = tape.op(full.numbers, FULL, (full,), saves_result=True)
    return tape.op(1, FULL, (chances,), saved=(chances,))


def _llama(work: Pass, model: ModelDescription) -> Tensor:
    """Decoders of the Llama family."""
    first = _layers(model)[0]
    top = _top(first)
    x = _embedded(work, _named(top, "embed_tokens.weight"))
    assert first.attention
    angles = work.tape.fresh(2 * work.question.tokens * first.attention.head_width, x.width)
    angles.numbers //= 2  # cosines and sines, each of which is multiplied by itself

    def layer(work: Pass, block: BlockDescription, given: Tensor) -> Tensor:
        return _llama_layer(work, block, angles, given)

    x = _through(work, model, x, layer)
    x = work.rms_norm(x, work.weights.sure(_named(top, "norm.weight")))
    return _result(work, x, "lm_head")


def _norm(work: Pass, name: str, x: Tensor) -> Tensor:
    return work.layer_norm(x, work.weights.sure(f"{name}.weight"), work.weights.sure(f"{name}.bias"))


def _gpt2_layer(work: Pass, block: BlockDescription, x: Tensor) -> Tensor:
    tape, weights, at = work.tape, work.weights, block.name
    assert block.attention
    merged = work.apply(weights.linear(f"{at}.attn.c_attn", inputs_first=True), _norm(work, f"{at}.ln_1", x))
    q, k, v = (tape.part(merged, merged.numbers // 3) for _ in range(3))
    del merged
    attended = work.attend(q, k, v, block.attention.heads)
    del q, k, v
    x = tape.add(work.apply(weights.linear(f"{at}.attn.c_proj", inputs_first=True), attended), x)
    del attended
    inner = work.apply(weights.linear(f"{at}.mlp.c_fc", inputs_first=True), _norm(work, f"{at}.ln_2", x))
    inner = _tanh_gelu(tape, inner)
    return tape.add(x, work.apply(weights.linear(f"{at}.mlp.c_proj", inputs_first=True), inner))


def _tanh_gelu(tape: Tape, x: Tensor) -> Tensor:
    """GELU by a tanh, in single operations, as transformers' GPT-2 computes it."""
    n, w = x.numbers, x.width
    half = tape.op(n, w, (x,))
    cube = tape.op(n, w, (x,), saved=(x,), work=2 * x.n_bytes)
    cube = tape.op(n, w, (cube,))
    scaled = tape.op(n, w, (tape.add(x, cube),))
    del cube
    curve = tape.op(n, w, (scaled,), saves_result=True)
    del scaled
    return tape.mul(half, tape.op(n, w, (curve,)))


def _gpt2(work: Pass, model: ModelDescription) -> Tensor:
    top = _top(_layers(model)[0])
    words = _embedded(work, _named(top, "wte.weight"))
    x = _placed(work, words, _named(top, "wpe.weight"))
    del words
    x = _through(work, model, x, _gpt2_layer)
    return _result(work, _norm(work, _named(top, "ln_f"), x), "lm_head")


def _placed(work: Pass, words: Tensor, table: str) -> Tensor:
    """Embeddings with those of positions, which are the same for all sequences of a batch."""
    weight, width = work.weights.sure(table), work.weights.shape(table)[1]
    places = work.tape.op(work.question.tokens * width, weight.width, (weight,))
    return work.tape.add(words, places)


def _bert_layer(work: Pass, block: BlockDescription, x: Tensor) -> Tensor:
    tape, weights, at = work.tape, work.weights, block.name
    assert block.attention
    q, k, v = (
        work.apply(weights.linear(f"{at}.attention.self.{name}"), x) for name in ("query", "key", "value")
    )
    attended = work.attend(q, k, v, block.attention.heads)
    del q, k, v
    out = work.apply(weights.linear(f"{at}.attention.output.dense"), attended)
    del attended
    x = _norm(work, f"{at}.attention.output.LayerNorm", tape.add(out, x))
    del out
    inner = work.apply(weights.linear(f"{at}.intermediate.dense"), x)
    active = tape.op(inner.numbers, inner.width, (inner,), saved=(inner,))
    del inner
    out = work.apply(weights.linear(f"{at}.output.dense"), active)
    del active
    return _norm(work, f"{at}.output.LayerNorm", tape.add(out, x))


def _bert(work: Pass, model: ModelDescription) -> Tensor:
    top = _named(_top(_layers(model)[0]).rpartition("encoder")[0].rstrip("."), "embeddings")
    x = work.tape.add(
        _embedded(work, f"{top}.word_embeddings.weight"),
        _embedded(work, f"{top}.token_type_embeddings.weight"),
    )
    x = _norm(work, f"{top}.LayerNorm", _placed(work, x, f"{top}.position_embeddings.weight"))
    encoder = replace(work, cache=None)
    return _result(work, _through(encoder, model, x, _bert_layer), "cls")


# the model_type of a config.json -> its program
PROGRAMS: Final[Mapping[str, Program]] = MappingProxyType(
    {
        "bert": _bert,
        "gpt2": _gpt2,
        "granite": _llama,
        "llama": _llama,
        "mistral": _llama,
        "phi3": _llama,
        "qwen2": _llama,
        "qwen3": _llama,
        "roberta": _bert,
    }
)


def program_of(model: ModelDescription) -> Program:
    """The program of a model, by what it was described from. Raises ModelUnknown."""
    family = model.source.rpartition("config.json of ")[2]
    if family in PROGRAMS:
        return PROGRAMS[family]
    names = {t.name.rpartition(".layers.")[2].partition(".")[2] for b in model.blocks for t in b.tensors}
    if {"self_attn.o_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"} <= names and not any(
        "experts" in name or "feedforward_layernorm" in name for name in names
    ):
        return _llama
    raise ModelUnknown(
        f"what {model.name[:80]} keeps for its backward pass isn't known by rules here",
        f"known are {', '.join(PROGRAMS)}; `plan` counts others' weights and inference",
    )
