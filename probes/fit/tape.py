"""An autograd tape of sizes: which bytes are alive at each moment of a forward and a backward pass. Pure.

Tensors here have a size and a dtype's width, and no numbers. Their bytes are counted from their making until
nothing refers to them, so a pass is written as torch's code is: what a local variable holds, what an
operation saves for its backward pass, what a gradient takes. What each operation saves follows torch's
derivative formulas; tests/torch compares whole models with torch's own trace.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from probes.core.errors import ModelUnknown, UsageError
from probes.fit.report import Question
from probes.placement.models.description import ModelDescription

ALIGNMENT: Final = 512  # bytes: torch's allocator on a GPU rounds every request up to this
KINDS: Final = ("weights", "gradients", "optimizer", "activations", "kv_cache")


class Ledger:
    """Bytes alive by kind, and those at the moment of the largest sum."""

    def __init__(self) -> None:
        self.alive = dict.fromkeys(KINDS, 0)
        self.sum = 0
        self.highest = 0
        self.at_highest = dict(self.alive)
        self.moment = self.moment_of_highest = ""

    def take(self, kind: str, n_bytes: int) -> None:
        """Count bytes that are now alive."""
        self.alive[kind] += n_bytes
        self.sum += n_bytes
        if self.sum > self.highest:
            self.highest = self.sum
            self.at_highest = dict(self.alive)
            self.moment_of_highest = self.moment

    def give(self, kind: str, n_bytes: int) -> None:
        """Count bytes that are no longer alive."""
        self.alive[kind] -= n_bytes
        self.sum -= n_bytes


class Storage:
    """Bytes that are alive as long as this object is."""

    __slots__ = ("_kind", "_ledger", "n_bytes")

    def __init__(self, ledger: Ledger, n_bytes: int, kind: str = "activations") -> None:
        self._ledger, self._kind = ledger, kind
        self.n_bytes = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        ledger.take(kind, self.n_bytes)

    def __del__(self) -> None:
        self._ledger.give(self._kind, self.n_bytes)


class Leaf:
    """A weight's place for its gradient."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Storage | None = None


class Node:
    """One operation of the backward pass. Edges name where gradients go; they hold no tensors."""

    __slots__ = ("edges", "frame", "number", "passes", "pending", "saved", "work")

    def __init__(self, number: int, edges: "Sequence[Edge]", *, work: int, passes: bool) -> None:
        self.number, self.edges, self.work, self.passes = number, edges, work, passes
        self.saved: Sequence[Tensor] = ()
        self.pending: Storage | None = None
        self.frame: Frame | None = None


Edge = tuple[Node | Leaf, int]  # and the bytes of the gradient


class Tensor:
    """Numbers of one width in a storage; `source` is where its gradient goes, if it needs one."""

    __slots__ = ("numbers", "source", "storage", "width")

    def __init__(self, numbers: int, width: int, storage: Storage, source: Node | Leaf | None) -> None:
        self.numbers, self.width, self.storage, self.source = numbers, width, storage, source

    @property
    def n_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.numbers * self.width


class Frame:
    """A checkpointed part: what it was called with, and its nodes, whose saved tensors are made again."""

    def __init__(self, run: Callable[[Tensor], Tensor], given: Tensor) -> None:
        self.run, self.given = run, given
        self.nodes: list[Node] = []


class Tape:
    """Records operations on sizes. `half` is the width that products are computed in under autocast, or 0."""

    def __init__(self, *, training: bool, half: int = 0) -> None:
        self.ledger = Ledger()
        self._training, self._half = training, half
        self._count = 0
        self._frame: Frame | None = None
        self._again: list[Sequence[Tensor]] | None = None
        self._casts: dict[int, Tensor] = {}  # of weights, kept by autocast until its block ends

    def weight(self, numbers: int, width: int, *, trained: bool) -> Tensor:
        """A parameter."""
        kept = Storage(self.ledger, numbers * width, "weights")
        return Tensor(numbers, width, kept, Leaf() if trained and self._training else None)

    def fresh(self, numbers: int, width: int, kind: str = "activations") -> Tensor:
        """A tensor that needs no gradient."""
        return Tensor(numbers, width, Storage(self.ledger, numbers * width, kind), None)

    def op(
        self,
        numbers: int,
        width: int,
        inputs: Sequence[Tensor],
        *,
        saved: Sequence[Tensor] = (),
        saves_result: bool = False,
        work: int = 0,
    ) -> Tensor:
        """An operation's result. `work` are further bytes that its backward takes while it runs."""
        made = self.fresh(numbers, width)
        self._record(made, inputs, saved=(*saved, made) if saves_result else saved, work=work, passes=False)
        return made

    def view(self, tensor: Tensor) -> Tensor:
        """The same bytes under another shape."""
        made = Tensor(tensor.numbers, tensor.width, tensor.storage, None)
        self._record(made, (tensor,), saved=(), work=0, passes=True)
        return made

    def part(self, tensor: Tensor, numbers: int) -> Tensor:
        """Some of a tensor's numbers, in its own storage. Its gradient is as large as the whole."""
        made = Tensor(numbers, tensor.width, tensor.storage, None)
        self._record(made, (tensor,), saved=(), work=0, passes=False)
        return made

    def _record(
        self, made: Tensor, inputs: Sequence[Tensor], *, saved: Sequence[Tensor], work: int, passes: bool
    ) -> None:
        edges = [(tensor.source, tensor.n_bytes) for tensor in inputs if tensor.source is not None]
        if not edges or not self._training:
            return
        kept = [Tensor(t.numbers, t.width, t.storage, None) for t in saved]  # a saved result isn't a circle
        if self._again is not None:
            self._again.append(kept)
            made.source = Node(0, (), work=0, passes=False)
            return
        self._count += 1
        node = Node(self._count, edges, work=work, passes=passes)
        if self._frame is not None:
            node.frame = self._frame
            self._frame.nodes.append(node)
        else:
            node.saved = kept
        made.source = node

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """A sum, whose gradient passes to both."""
        made = self.fresh(max(a.numbers, b.numbers), max(a.width, b.width))
        same = a.n_bytes == b.n_bytes
        self._record(made, (a, b), saved=(), work=0, passes=same)
        return made

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """A product. Each factor is saved if the other one needs a gradient."""
        numbers, width = max(a.numbers, b.numbers), max(a.width, b.width)
        saved = [x for x, other in ((a, b), (b, a)) if other.source is not None]
        summed = (
            numbers * width if a.numbers != b.numbers and (b if a.numbers > b.numbers else a).source else 0
        )
        return self.op(numbers, width, (a, b), saved=saved, work=summed)

    def cast(self, tensor: Tensor, width: int) -> Tensor:
        """The tensor in another width: itself where it has that already."""
        return tensor if tensor.width == width else self.op(tensor.numbers, width, (tensor,))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, outputs: int, rows: int) -> Tensor:
        """A product with a weight, as addmm and mm compute it."""
        width = self._half or x.width
        x = self.cast(x, width)
        weight = self._weight_cast(weight, width)
        inputs = [x, weight]
        if bias is not None:
            inputs.append(self._weight_cast(bias, width))
        saved = ([x] if weight.source else []) + ([weight] if x.source else [])
        return self.op(rows * outputs, width, inputs, saved=saved)

    def _weight_cast(self, weight: Tensor, width: int) -> Tensor:
        if weight.width == width:
            return weight
        if weight.source is None:  # autocast keeps casts of trained weights only
            return self.cast(weight, width)
        if id(weight) not in self._casts:
            self._casts[id(weight)] = self.cast(weight, width)
        return self._casts[id(weight)]

    def forget_casts(self) -> None:
        """Release the casts of weights, as autocast does at the end of its block."""
        self._casts.clear()

    def checkpoint(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`run` of x, whose saved tensors are made again in the backward pass."""
        if not self._training:
            return run(x)
        self._frame = Frame(run, x)
        try:
            return run(x)
        finally:
            self._frame = None

    def backward(self, last: Tensor) -> None:
        """Run the backward pass from a tensor, in torch's order: the latest operation first."""
        node = last.source
        if not isinstance(node, Node):
            return
        node.pending = Storage(self.ledger, last.n_bytes)
        heap = [(-node.number, node)]
        while heap:
            _, node = heapq.heappop(heap)
            for target, gradient in self._step(node):
                if isinstance(target, Leaf):
                    target.grad = target.grad or gradient
                elif target.pending is None:
                    target.pending = gradient
                    heapq.heappush(heap, (-target.number, target))

    def _step(self, node: Node) -> list[tuple[Node | Leaf, Storage]]:
        """The gradients that one node hands on; what it had saved is released."""
        if node.frame is not None:
            self._recompute(node.frame)
        given, node.pending = node.pending, None
        work = Storage(self.ledger, node.work) if node.work else None
        gradients = []
        for target, n_bytes in node.edges:
            stays = isinstance(target, Leaf) and target.grad is None  # a second one is added to the first
            kind = "gradients" if stays else "activations"
            passed = given if node.passes and isinstance(target, Node) else None
            gradients.append((target, passed or Storage(self.ledger, n_bytes, kind)))
        del work
        node.saved = ()
        return gradients

    def _recompute(self, frame: Frame) -> None:
        """Run a checkpointed part again and give its nodes what they would have saved."""
        self._again = []
        try:
            frame.run(frame.given)
            for node, saved in zip(frame.nodes, self._again, strict=True):
                node.saved, node.frame = saved, None
        finally:
            self._again = None
            self._casts.clear()

    @contextmanager
    def named(self, moment: str) -> Iterator[None]:
        """Name what goes on, for the moment of the highest sum."""
        before, self.ledger.moment = self.ledger.moment, moment
        yield
        self.ledger.moment = before


# ---- weights and layers of models ---------------------------------------------------------------------

AttentionKind = Literal["fused", "math"]
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

    def __init__(self, tape: Tape, model: ModelDescription, question: Question) -> None:
        self._tape, self._question = tape, question
        self._names = {tied: group[0] for group in model.tied for tied in group}
        full = question.task == "training" and not question.lora_rank
        self._shapes = {t.name: t.shape for block in model.blocks for t in block.tensors}
        self.tensors = {
            t.name: tape.weight(t.numbers, question.width, trained=full)
            for block in model.blocks
            for t in block.tensors
        }
        self.trained = dict(self.tensors) if full else {}
        self._adapters = self._adapted() if question.task == "training" and question.lora_rank else {}

    def _adapted(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        targets = self._question.lora_targets or LAYER_TARGETS
        adapters = {}
        for name, shape in self._shapes.items():
            module = name.removesuffix(".weight")
            if module != name and len(shape) == 2 and module.rpartition(".")[2] in targets:
                pair = tuple(
                    self._tape.weight(self._question.lora_rank * side, FULL, trained=True)
                    for side in (shape[1], shape[0])
                )
                adapters[module] = (pair[0], pair[1])
                self.trained[f"{module}.lora_A"], self.trained[f"{module}.lora_B"] = pair
        if not adapters:
            raise UsageError(
                f"no linear layer of this model is named {', '.join(targets)[:120]}",
                "name others: --targets q_proj,v_proj",
            )
        return adapters

    def one(self, name: str) -> Tensor | None:
        """A parameter, under any of its names."""
        return self.tensors.get(self._names.get(name, name))

    def sure(self, name: str) -> Tensor:
        """A parameter that the program can't do without. Raises ModelUnknown."""
        tensor = self.one(name)
        if tensor is None:
            raise ModelUnknown(
                f"the model has no {name[:120]}, which its architecture has", "give its config.json"
            )
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter."""
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
            self._question.lora_rank,
        )


@dataclass(frozen=True)
class Pass:
    """What a program works on: the tape, the weights, and how large the batch is."""

    tape: Tape
    weights: Weights
    question: Question
    attending: AttentionKind
    cache: list[Tensor] | None = None  # keys and values that are kept, for generating

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.question.batch * self.question.tokens

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
        x = tape.cast(x, FULL) if self.question.is_mixed else x
        moments = tape.fresh(2 * self.rows, FULL)
        saved = (x, moments) if x.source or weight.source else ()
        return tape.op(x.numbers, x.width, (x, weight, bias), saved=saved)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """Scaled dot product attention. Keys and values are kept from here on where there is a cache."""
        attended = self._attended(q, k, v, heads)
        if self.cache is not None:
            self.cache.append(self.tape.fresh(k.numbers + v.numbers, k.width, "kv_cache"))
        return attended

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        tape, question = self.tape, self.question
        if question.is_mixed:
            q, k, v = (tape.cast(x, 2) for x in (q, k, v))
        if self.attending == "fused":
            sums = tape.fresh(question.batch * heads * question.tokens, FULL)
            work = 3 * q.numbers * FULL if q.width < FULL else 0
            return tape.op(q.numbers, q.width, (q, k, v), saved=(q, k, v, sums), saves_result=True, work=work)
        width = q.width
        q, k, v = (tape.cast(x, FULL) for x in (q, k, v))  # as torch does for sums in halves
        if k.numbers < q.numbers:
            k, v = (tape.op(q.numbers, FULL, (x,)) for x in (k, v))
        q, k = (tape.op(q.numbers, FULL, (x,)) for x in (q, k))  # each scaled
        pairs = question.batch * heads * question.tokens * question.tokens
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
