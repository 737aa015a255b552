"""One pass of known architectures on a tape: the operations of transformers' modules, in their order. Pure.

Only sizes matter, so a program says what is multiplied, saved and kept alive, as transformers 5 does it with
torch's scaled dot product attention. An architecture without a program is traced by torch where torch is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from probes.errors import ModelUnknown, UsageError
from probes.fit.predicted.tape import Tape, Tensor
from probes.fit.question import Question
from probes.placement.models.description import BlockDescription, ModelDescription

Attending = Literal["fused", "math"]
LAYER_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "c_attn", "query", "key", "value")
FULL: Final = 4  # bytes of float32, in which norms, softmax and adapters compute


@dataclass(frozen=True)
class Linear:
    """A linear layer's parameters, with its adapter's where it has one."""

    weight: Tensor
    bias: Tensor | None
    outputs: int
    adapter: tuple[Tensor, Tensor] | None
    rank: int


class Weights:
    """All parameters of a model on a tape, by name; those that are trained have a place for a gradient."""

    def __init__(self, tape: Tape, model: ModelDescription, asked: Question) -> None:
        self._tape, self._asked = tape, asked
        self._names = {tied: group[0] for group in model.tied for tied in group}
        full = asked.task == "training" and not asked.lora_rank
        self._shapes = {t.name: t.shape for block in model.blocks for t in block.tensors}
        self.tensors = {
            t.name: tape.weight(t.numbers, asked.width, trained=full)
            for block in model.blocks
            for t in block.tensors
        }
        self.trained = dict(self.tensors) if full else {}
        self._adapters = self._adapted() if asked.task == "training" and asked.lora_rank else {}

    def _adapted(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        targets = self._asked.lora_targets or LAYER_TARGETS
        found = {}
        for name, shape in self._shapes.items():
            module = name.removesuffix(".weight")
            if module != name and len(shape) == 2 and module.rpartition(".")[2] in targets:
                pair = tuple(
                    self._tape.weight(self._asked.lora_rank * side, FULL, trained=True)
                    for side in (shape[1], shape[0])
                )
                found[module] = (pair[0], pair[1])
                self.trained[f"{module}.lora_A"], self.trained[f"{module}.lora_B"] = pair
        if not found:
            raise UsageError(
                f"no linear layer of this model is named {', '.join(targets)[:120]}",
                "name others: --targets q_proj,v_proj",
            )
        return found

    def one(self, name: str) -> Tensor | None:
        """A parameter, under any of its names."""
        return self.tensors.get(self._names.get(name, name))

    def sure(self, name: str) -> Tensor:
        """A parameter that the program can't do without. Raises ModelUnknown."""
        found = self.one(name)
        if found is None:
            raise ModelUnknown(
                f"the model has no {name[:120]}, which its architecture has", "give its config.json"
            )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter."""
        self.sure(name)
        return self._shapes[self._names.get(name, name)]

    def linear(self, name: str, *, inputs_first: bool = False) -> Linear:
        """A linear layer."""
        weight = self.sure(f"{name}.weight")
        shape = self.shape(f"{name}.weight")
        adapter = self._adapters.get(name)
        return Linear(
            weight,
            self.one(f"{name}.bias"),
            shape[1 if inputs_first else 0],
            (adapter[1], adapter[0]) if adapter and inputs_first else adapter,
            self._asked.lora_rank,
        )


@dataclass(frozen=True)
class Pass:
    """What a program works on: the tape, the weights, and how large the batch is."""

    tape: Tape
    weights: Weights
    asked: Question
    attending: Attending
    cache: list[Tensor] | None = None  # keys and values that are kept, for generating

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.asked.batch * self.asked.tokens

    def apply(self, linear: Linear, x: Tensor) -> Tensor:
        """A linear layer of x, with its adapter as peft computes it: in float32."""
        tape = self.tape
        made = tape.linear(x, linear.weight, linear.bias, outputs=linear.outputs, rows=self.rows)
        if linear.adapter is None:
            return made
        down, up = linear.adapter
        low = tape.linear(tape.cast(x, FULL), down, None, outputs=linear.rank, rows=self.rows)
        high = tape.linear(low, up, None, outputs=linear.outputs, rows=self.rows)
        scaled = tape.op(high.numbers, high.width, (high,))
        del low, high
        return tape.cast(tape.add(made, scaled), made.width)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """A root-mean-square norm, in float32."""
        tape, rows = self.tape, self.rows
        full = tape.cast(x, FULL)
        squares = tape.op(full.numbers, FULL, (full,), saved=(full,), work=2 * full.n_bytes)
        mean = tape.op(rows, FULL, (squares,), work=full.n_bytes)
        del squares
        root = tape.op(rows, FULL, (mean,), saves_result=True)
        normed = tape.cast(tape.mul(full, root), x.width)
        del full
        return tape.mul(weight, normed)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """A layer norm; under autocast in float32."""
        tape = self.tape
        x = tape.cast(x, FULL) if self.asked.is_mixed else x
        moments = tape.fresh(2 * self.rows, FULL)
        saved = (x, moments) if x.source or weight.source else ()
        return tape.op(x.numbers, x.width, (x, weight, bias), saved=saved)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """Scaled dot product attention. Keys and values are kept from here on where there is a cache."""
        found = self._attended(q, k, v, heads)
        if self.cache is not None:
            self.cache.append(self.tape.fresh(k.numbers + v.numbers, k.width, "kv_cache"))
        return found

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        tape, asked = self.tape, self.asked
        if asked.is_mixed:
            q, k, v = (tape.cast(x, 2) for x in (q, k, v))
        if self.attending == "fused":
            sums = tape.fresh(asked.batch * heads * asked.tokens, FULL)
            work = 3 * q.numbers * FULL if q.width < FULL else 0
            return tape.op(q.numbers, q.width, (q, k, v), saved=(q, k, v, sums), saves_result=True, work=work)
        width = q.width
        q, k, v = (tape.cast(x, FULL) for x in (q, k, v))  # as torch does for sums in halves
        if k.numbers < q.numbers:
            k, v = (tape.op(q.numbers, FULL, (x,)) for x in (k, v))
        q, k = (tape.op(q.numbers, FULL, (x,)) for x in (q, k))  # each scaled
        pairs = asked.batch * heads * asked.tokens * asked.tokens
        scores = tape.op(pairs, FULL, (q, k), saved=(q, k))
        chances = tape.op(pairs, FULL, (scores,), saves_result=True)
        del scores
        return tape.cast(tape.op(q.numbers, FULL, (chances, v), saved=(chances, v)), width)

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotary positions."""
        tape = self.tape
        direct = tape.mul(x, angles)
        turned = tape.op(x.numbers, x.width, (x,), work=2 * x.n_bytes)
        return tape.add(direct, tape.mul(turned, angles))


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
    found = work.attend(q, k, v, block.attention.heads)
    del q, k, v
    x = tape.add(x, work.apply(weights.linear(f"{at}.self_attn.o_proj"), found))
    del found
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
    """All layers, each checkpointed where that is asked."""
    for block in _layers(model):

        def run(given: Tensor, block: BlockDescription = block) -> Tensor:
            return layer(work, block, given)

        x = work.tape.checkpoint(run, x) if work.asked.checkpointing else run(x)
    return x


def _embedded(work: Pass, name: str) -> Tensor:
    """Rows of a table."""
    table, width = work.weights.sure(name), work.weights.shape(name)[1]
    indices = work.tape.fresh(work.rows, 8)
    return work.tape.op(work.rows * width, table.width, (table,), saved=(indices,))


def _result(work: Pass, x: Tensor, head: str) -> Tensor:
    """What a step's loss is computed from, and the loss: over the vocabulary where the model has a head."""
    tape, asked = work.tape, work.asked
    has_head = work.weights.one(f"{head}.weight") is not None
    if not has_head:
        if asked.task == "inference":
            return x
        full = tape.cast(x, FULL)
        squares = tape.op(full.numbers, FULL, (full,), saved=(full,), work=2 * full.n_bytes)
        return tape.op(1, FULL, (squares,), work=0)
    if asked.task == "inference":  # of the last token only, as generating does
        last = tape.fresh(x.numbers // asked.tokens, x.width)
        linear = work.weights.linear(head)
        return tape.linear(last, linear.weight, linear.bias, outputs=linear.outputs, rows=asked.batch)
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
    angles = work.tape.fresh(2 * work.asked.tokens * first.attention.head_width, x.width)
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
    found = work.attend(q, k, v, block.attention.heads)
    del q, k, v
    x = tape.add(work.apply(weights.linear(f"{at}.attn.c_proj", inputs_first=True), found), x)
    del found
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
    places = work.tape.op(work.asked.tokens * width, weight.width, (weight,))
    return work.tape.add(words, places)


def _bert_layer(work: Pass, block: BlockDescription, x: Tensor) -> Tensor:
    tape, weights, at = work.tape, work.weights, block.name
    assert block.attention
    q, k, v = (
        work.apply(weights.linear(f"{at}.attention.self.{name}"), x) for name in ("query", "key", "value")
    )
    found = work.attend(q, k, v, block.attention.heads)
    del q, k, v
    out = work.apply(weights.linear(f"{at}.attention.output.dense"), found)
    del found
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
