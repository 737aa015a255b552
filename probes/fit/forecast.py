"""What a question takes, by rules: the bytes at its peak, and the largest size within a budget. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from probes.core.errors import ModelUnknown
from probes.fit.question import STATES, Axis, Largest, Question, Taken, Task
from probes.fit.tape import FULL, Attending, Pass, Storage, Tape, Tensor, Weights
from probes.placement.models.description import BlockDescription, ModelDescription
from probes.placement.planner.machine import Constants

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


SEGMENT: Final = 2 << 20  # torch's allocator takes blocks of more than 1 MiB in multiples of this
LOOSE_SEGMENTS: Final = 4  # partly used: small blocks, and what of segments of 20 MiB isn't
MOST: Final = 1 << 40  # of a batch or a sequence


@dataclass(frozen=True)
class Forecast:
    """Predicted bytes at the peak, and when that is."""

    taken: Taken
    moment: str


@dataclass(frozen=True)
class Place:
    """Where it would run, as far as bytes are concerned."""

    workspace: int  # bytes of one library handle
    context: int
    attending: Attending
    foreach: bool  # the optimizer goes over all weights at once, as torch does on a GPU
    rounds: bool  # by torch's caching allocator


CPU: Final = Place(0, 0, "fused", foreach=False, rounds=False)
# Bytes that C libraries take in a process for each direction of a pass, beside tensors: code that oneDNN
# generates, buffers, the heap. Measured on an x86-64 with torch 2.13, in `tuned` cases of bench_fit.py.
LIBRARIES: Final[Mapping[tuple[Task, bool], int]] = MappingProxyType(
    {
        ("inference", False): 3 << 19,
        ("inference", True): 3 << 20,  # in halves
        ("training", False): 5 << 19,
        ("training", True): 6 << 20,
    }
)


def libraries(asked: Question) -> int:
    """Bytes that C libraries take besides on a CPU."""
    return LIBRARIES[asked.task, asked.precision != "fp32"] * _directions(asked)


def _directions(asked: Question) -> int:
    """Of a pass: a backward pass has a thread, and a library's handle, of its own."""
    return 2 if asked.task == "training" else 1


def place_of(machine: Constants, model: ModelDescription, asked: Question) -> Place:
    """A machine as a place. Fused attention needs units for halves; of grouped heads also halves."""
    if not machine.has_gpu:
        return replace(CPU, workspace=LIBRARIES[asked.task, asked.precision != "fp32"])
    grouped = any(b.attention and b.attention.heads != b.attention.key_value_heads for b in model.blocks)
    halves = asked.precision != "fp32"
    fused = machine.triton and machine.bfloat16 and (halves or not grouped)
    return Place(
        machine.workspace_bytes,
        machine.context_bytes,
        "fused" if fused else "math",
        foreach=True,
        rounds=True,
    )


def forecast(model: ModelDescription, asked: Question, place: Place) -> Forecast:
    """The peak of a steady step: the second one, when the optimizer has its state. Raises ModelUnknown."""
    run = program_of(model)
    training = asked.task == "training"
    tape = Tape(training=training, half=2 if asked.is_mixed else 0)
    weights = Weights(tape, model, asked)
    cache: list[Tensor] | None = None if training else []
    work = Pass(tape, weights, asked, place.attending, cache)
    if training:
        _train(work, model, run, place)
    else:
        with tape.named("forward"):
            run(work, model)
    ledger = tape.ledger
    workspace = place.workspace * _directions(asked)
    rounding = 0
    if place.rounds:
        used = ledger.highest + workspace
        rounding = -(-used // SEGMENT) * SEGMENT - used + LOOSE_SEGMENTS * SEGMENT
    taken = Taken(**ledger.at_highest, workspace=workspace, context=place.context, rounding=rounding)
    return Forecast(taken, ledger.moment_of_highest)


def _train(
    work: Pass, model: ModelDescription, run: Callable[[Pass, ModelDescription], Tensor], place: Place
) -> None:
    """One step with the optimizer's state there already."""
    tape, asked = work.tape, work.asked
    trained = list(work.weights.trained.values())
    states = STATES[asked.optimizer]
    kept = [Storage(tape.ledger, states * t.n_bytes, "optimizer") for t in trained]
    for _ in range(min(asked.accumulate, 2)):  # all after the second are like it
        with tape.named("forward"):
            loss = run(work, model)
        tape.forget_casts()
        with tape.named("backward"):
            tape.backward(loss)
        del loss
    with tape.named("optimizer step"):
        if asked.optimizer == "adamw":
            sizes = [t.n_bytes for t in trained]
            temporary = sum(sizes) if place.foreach else 2 * max(sizes, default=0)
            Storage(tape.ledger, temporary)
    del kept


def with_size(asked: Question, axis: Axis, size: int) -> Question:
    """The question with another batch or sequence."""
    return replace(asked, batch=size) if axis == "batch" else replace(asked, tokens=size)


def most_of(model: ModelDescription, axis: Axis) -> int:
    """Where an axis ends: at the last learned position, if the model has a table of them."""
    return (model.learned_positions or MOST) if axis == "tokens" else MOST


def largest(total: Callable[[int], int], budget: int, axis: Axis, *, most: int = MOST) -> Largest:
    """The largest size up to `most` whose total is within the budget.

    `total` never falls as the size grows.
    """
    if total(1) > budget:
        return Largest(axis, 0, 1, exact=True)
    low, high = 1, 2
    while high <= most and total(high) <= budget:
        low, high = high, _next(total, low, high, budget)
    if high > most:
        if total(most) <= budget:
            return Largest(axis, most, None, exact=most < MOST)
        high = most
    while high - low > 1:
        middle = _between(total, low, high, budget)
        if total(middle) <= budget:
            low = middle
        else:
            high = middle
    return Largest(axis, low, high, exact=True)


def _next(total: Callable[[int], int], low: int, high: int, budget: int) -> int:
    """A little beyond where a straight line through both meets the budget; at least twice as far."""
    rise, run = total(high) - total(low), high - low
    ahead = high + (budget - total(high)) * run // rise + 1 if rise > 0 else 4 * high
    return max(2 * high, min(ahead, 64 * high))


def _between(total: Callable[[int], int], low: int, high: int, budget: int) -> int:
    """Near where a straight line between both meets the budget, and never in the outer eighths."""
    below, above = total(low), total(high)
    guess = low + (high - low) * (budget - below) // max(above - below, 1)
    margin = max((high - low) // 8, 1)
    return min(max(guess, low + margin), high - margin)
