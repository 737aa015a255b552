"""The operations that programs are made of, on a tape: linear layers with adapters, norms, attention. Pure.

Only sizes matter, so an operation says what is multiplied, saved and kept alive, as transformers 5 does it
with torch's scaled dot product attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from probes.errors import ModelUnknown, UsageError
from probes.fit.predicted.tape import Tape, Tensor
from probes.fit.question import Question
from probes.placement.models.description import ModelDescription

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
