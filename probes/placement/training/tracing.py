"""A training step on tensors without numbers: what each block saves, and what is alive beside that."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from probes.core.errors import PlacementError
from probes.placement.models.modules import Block
from probes.placement.trace import AliveBytes, as_it_was, fill, no_packed_sequences
from probes.placement.training.activations import in_backward
from probes.placement.training.weights import is_cast

INPUTS: Final = 4  # that leave or come back at once


@dataclass(frozen=True)
class Step:
    """What a step takes beside weights, gradients that stay and optimizer states. Bytes, and operations.

    `saved`: alive after a block's forward and not before, its output too. `beside`: alive in a block's
    backward beyond what was alive when it began.
    """

    order: tuple[str, ...]  # blocks as they are called
    saved: Mapping[str, int]
    output: Mapping[str, int]
    beside: Mapping[str, int]
    before: int  # alive when the first block is called
    after: int  # alive at most between the last block's forward and its backward, beyond what blocks saved
    casts: Mapping[
        str, int
    ]  # what autocast keeps of a block's weights where the card has them in their own dtype
    buffers: int  # of the model
    products: int  # of a step, 2 for each multiply-add
    forward_products: Mapping[str, int]
    forward_calls: Mapping[str, int]  # operations that the host hands over, of blocks
    calls: int  # of a step
    on_gpu: bool

    def products_again(self, recomputed: Collection[str]) -> int:
        """Products of making these blocks' activations again."""
        return sum(self.forward_products[name] for name in recomputed)

    def calls_again(self, recomputed: Collection[str]) -> int:
        """Operations of making these blocks' activations again."""
        return sum(self.forward_calls[name] for name in recomputed)

    def input(self, name: str) -> int:
        """Bytes that a block is called with, as the block before it returns them."""
        place = self.order.index(name)
        return self.output[self.order[place - 1]] if place else self.before

    def peak(self, recomputed: Collection[str], moved: Collection[str] = ()) -> int:
        """The most bytes alive at once, if blocks are recomputed, some of them from inputs that moved."""
        alive = most = self.before
        for name in self.order:
            most = max(most, alive + self.saved[name] + self.beside[name])
            alive += self.output[name] if name in recomputed else self.saved[name]
            alive -= self.input(name) if name in moved else 0
        on_their_way = INPUTS * max((self.input(name) for name in moved), default=0)
        return max(most, alive + self.after) + on_their_way


def traced(
    model: nn.Module,
    loss: Callable[[nn.Module], torch.Tensor],
    blocks: Sequence[Block],
    *,
    autocast: torch.dtype | None,
    device: torch.device,
) -> Step:
    """Trace one forward and backward. Raises PlacementError where the model needs values for its way."""
    buffers = sum(tensor.nbytes for tensor in model.buffers())
    called = {block.modules[0]: block.name for block in blocks if block.called and len(block.modules) == 1}
    casts = {block.name: _cast_bytes(block, autocast) for block in blocks}
    flops = FlopCounterMode(display=False, custom_mapping=_attention_products())
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            as_it_was(model),
            no_packed_sequences(),
            torch.random.fork_rng(devices=[]),
        ):
            fill(model, device.type)
            if autocast is not None:
                _narrow(model, autocast)
            counter = AliveBytes(device.type)
            counter.count([*model.parameters(), *model.buffers()])  # a view of a weight takes nothing more
            counter.alive = counter.highest = 0
            marks = _Marks(counter, flops, called)
            with flops, counter, _hooks(model, marks):
                mode = torch.autocast(device.type, autocast) if autocast else nullcontext()
                with mode:
                    value = loss(model)
                marks.end_of_forward()
                value.backward()
                marks.end()
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        if "SparseTensor" in str(error):
            raise PlacementError(
                "the model has sparse gradients", "build its embeddings without sparse=True"
            ) from error
        raise PlacementError(
            f"a step can't be traced: {str(error).strip().splitlines()[0][:300] if str(error) else error!r}",
            "give a `loss` that calls the model on a batch that is on its device, and returns one number",
        ) from error
    return marks.step(casts, buffers, flops.get_total_flops(), on_gpu=device.type == "cuda")


def _attention_products() -> dict[Any, Callable[..., int]]:
    """Products of fused attention by its tensors' shapes, also with fewer heads of keys than of queries.

    torch 2.11's own counter refuses those.
    """

    def forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: object, **__: object) -> int:
        return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])

    def backward(
        _: object, q: Sequence[int], k: Sequence[int], v: Sequence[int], *__: object, **___: object
    ) -> int:
        return 2 * math.prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])

    known = torch.ops.aten
    kinds = ("flash", "efficient", "cudnn")
    return {
        getattr(known, f"_scaled_dot_product_{kind}_attention{end}"): counted
        for kind in kinds
        for end, counted in (("", forward), ("_backward", backward))
    }


def _cast_bytes(block: Block, autocast: torch.dtype | None) -> int:
    if autocast is None:
        return 0
    return sum(
        entry.n_bytes // 2
        for entry in block.entries
        if entry.dtype is torch.float32 and all(is_cast(owner, key) for owner, key in entry.owners)
    )


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Let weights that autocast casts have its dtype: their casts take no memory of their own then."""
    held: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in model.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                held.setdefault(id(parameter), []).append((part, key))
    for owners in held.values():
        owner, key = owners[0]
        parameter = owner._parameters[key]
        assert parameter is not None
        if parameter.dtype is torch.float32 and all(is_cast(o, k) for o, k in owners):
            made = nn.Parameter(torch.empty_like(parameter, dtype=dtype), parameter.requires_grad)
            for holder, name in owners:
                holder._parameters[name] = made


@contextmanager
def _hooks(model: nn.Module, marks: "_Marks") -> Iterator[None]:
    handles: list[Any] = []
    for module in model.modules():
        if module in marks.names:
            handles.append(module.register_forward_pre_hook(marks.called))
            handles.append(module.register_forward_hook(marks.returned))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_drop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


class _Marks:
    """Bytes alive at the borders of blocks, and the most in between."""

    def __init__(self, counter: AliveBytes, flops: FlopCounterMode, names: Mapping[nn.Module, str]) -> None:
        self._counter, self._flops, self.names = counter, flops, names
        self._order: list[str] = []
        self._saved: dict[str, int] = {}
        self._output: dict[str, int] = {}
        self._products: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._beside: dict[str, int] = {}
        self._at = self._flops_at = self._calls_at = 0
        self._first = -1
        self._last = 0
        self._segment = ("", 0)
        self._after = 0

    def called(self, *_: object) -> None:
        """A block is called."""
        if in_backward():
            return
        self._at, self._flops_at = self._counter.alive, self._flops.get_total_flops()
        self._calls_at = self._counter.dispatched
        if self._first < 0:
            self._first = self._at

    def returned(self, module: nn.Module, _: object, output: object) -> None:
        """A block returns."""
        if in_backward():  # of a model that makes activations again itself
            return
        name = self.names[module]
        if name not in self._saved:
            self._order.append(name)
        self._saved[name] = self._saved.get(name, 0) + self._counter.alive - self._at
        tensors = [value for value in tree_iter(output) if isinstance(value, torch.Tensor)]
        self._output[name] = self._output.get(name, 0) + self._counter.bytes_of(tensors)
        products = self._flops.get_total_flops() - self._flops_at
        self._products[name] = self._products.get(name, 0) + products
        self._calls[name] = self._calls.get(name, 0) + self._counter.dispatched - self._calls_at
        self._last = self._counter.alive
        self._counter.highest = self._last
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._began, name))
                break

    def end_of_forward(self) -> None:
        """The loss is there."""
        self._first = max(self._first, 0)
        self._segment = ("", self._last)

    def _began(self, name: str, _: torch.Tensor) -> None:
        self._end_segment()
        self._segment = (name, self._counter.alive)
        self._counter.highest = self._counter.alive

    def _end_segment(self) -> None:
        name, begun = self._segment
        most = self._counter.highest - begun
        if name:
            self._beside[name] = max(self._beside.get(name, 0), most)
        else:
            self._after = max(self._after, most)

    def end(self) -> None:
        """The backward pass is done."""
        self._end_segment()

    def step(self, casts: Mapping[str, int], buffers: int, products: int, *, on_gpu: bool) -> Step:
        """What was seen."""
        return Step(
            tuple(self._order),
            self._saved,
            self._output,
            {name: self._beside.get(name, 0) for name in self._order},
            self._first,
            self._after,
            casts,
            buffers,
            products,
            self._products,
            self._calls,
            self._counter.dispatched,
            on_gpu,
        )
