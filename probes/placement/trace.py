"""A pass of a module on tensors without numbers: what it computes, in which order, and which bytes are alive.

`trace_pass` runs a module once under torch's FakeTensorMode: no weights are needed, no GPU, and no time for
arithmetic. Under inference mode torch hands whole operations to a dispatch mode (`linear`, `conv2d`,
`scaled_dot_product_attention`), which is what a GPU is asked for as well; what it composes of others is
decomposed. `probes fit` counts bytes of training steps by the same `AliveBytes`.
"""

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from probes.core.errors import PlacementError
from probes.placement.allocator import Event, peak_of
from probes.placement.attributes import empty_caches, exchange, held_by, other, undo_of
from probes.placement.models.modules import RecurrentLayers, has_layers
from probes.placement.models.operations import (
    EXPERTS,
    GATHERS,
    Operation,
    OperationKind,
    PeakBytes,
    Trace,
    WeightUse,
)
from probes.placement.operation_facts import (
    LAYERS_IN_ONE,
    LOOKUPS,
    NO_KERNEL,
    WHOLE,
    dtype_name,
    numbers_bytes,
    operation_facts,
    result_by_shape,
)
from probes.placement.operation_times import OperationCall, OperationTime, measured

ALIGNMENT: Final = {"cuda": 512, "cpu": 64}  # bytes that torch's allocators round to
MOST_OPERATIONS: Final = 300_000  # of a pass; one that calls more isn't traced to its end
MOST_WORDS: Final = 200  # characters of torch's own errors


class AliveBytes(TorchDispatchMode):  # type: ignore[misc]
    """Counts the bytes of storages from their making until nothing refers to them, and operations."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._align = ALIGNMENT[device.partition(":")[0]]
        self._seen: Any = weakref.WeakKeyDictionary()
        self.alive = self.highest = self.dispatched = 0
        self.at_highest: Callable[[], None] = lambda: None

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # what the operation gives
        """Run an operation and count what it made."""
        made = function(*args, **(kwargs or {}))
        self.dispatched += 1
        self.count(made)
        return made

    def count(self, made: object) -> None:
        """Count the storages of all tensors in a value that aren't counted yet."""
        for value in tree_iter(made):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        n_bytes = -(-storage.nbytes() // self._align) * self._align
        self._seen[storage] = n_bytes
        weakref.finalize(storage, self._free, n_bytes).atexit = False
        self.alive += n_bytes
        if self.alive > self.highest:
            self.highest = self.alive
            self.at_highest()

    def _free(self, n_bytes: int) -> None:
        self.alive -= n_bytes

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages of tensors, each once."""
        storages = {id(t.untyped_storage()): t.untyped_storage() for t in tensors}
        return sum(self._seen.get(storage, 0) for storage in storages.values())


@contextmanager
def no_packed_sequences() -> Iterator[None]:
    """Tell transformers that a batch has whole sequences: it looks at values for that, and a trace has none.

    Otherwise it makes a mask, and repeats keys and values, that a real step does without.
    """
    masks = sys.modules.get("transformers.masking_utils")
    before = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or before is None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = before  # type: ignore[attr-defined]


@contextmanager
def as_if_recording() -> Iterator[None]:
    """Let models find that a graph is being recorded: some then make masks that other passes do without."""
    before = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = before


def fill(module: nn.Module, device: str) -> None:
    """Replace every parameter and buffer by one of the same size on a device; shared ones stay shared."""
    made: dict[int, torch.Tensor] = {}
    before: list[torch.Tensor] = []  # whose identities mustn't become those of new ones

    def like(old: torch.Tensor) -> torch.Tensor:
        if id(old) not in made:
            before.append(old)
            new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
            made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        return made[id(old)]

    for part in module.modules():
        for held in (part._parameters, part._buffers):
            held.update({name: like(old) for name, old in held.items() if old is not None})
    exchange(module.modules(), other(made))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the traceback that torch logs for an operation that fake tensors don't know."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """Give a module back all attributes that it had, parameters and buffers too, and what they held."""
    registered = [
        held for part in module.modules() for held in (part._parameters, part._buffers, part._modules)
    ]
    undo = [undo_of(held) for held in (*held_by(module.modules()), *registered)]
    references = sys.getrefcount(FakeTensor)
    try:
        yield
    finally:
        for put_back in undo:
            put_back()
        if sys.getrefcount(FakeTensor) > references:  # each tensor has one to its class
            empty_caches(FakeTensor)


MEANWHILE: Final = 0  # the name of what an operation takes while it runs: storages are numbered from 1


class Tracer(AliveBytes):
    """Records a pass's operations under their modules, and every storage that it makes and frees."""

    def __init__(
        self, module: nn.Module, there: Iterable[torch.Tensor] = (), *, keeps_calls: bool = False
    ) -> None:
        super().__init__("cuda")
        self.operations: list[Operation] = []
        self._keeps_calls = keeps_calls
        self._made_by: list[OperationCall | None] = []  # the call of each operation, where those are kept
        self.calls: dict[str, int] = {}
        self._events: list[Event | int] = []  # an operation by its place, for what it takes while it runs
        self._stack = [""]
        self._weights: Any = weakref.WeakKeyDictionary()
        self._there: Any = weakref.WeakKeyDictionary(
            {t.untyped_storage(): t.untyped_storage().nbytes() for t in there}
        )
        self.kept: dict[str, int] = {}
        self._next = 0
        for name, parameter in module.named_parameters():
            storage = parameter.untyped_storage()
            self._weights.setdefault(storage, name)
            self._seen[storage] = 0
        for storage in (*(tensor.untyped_storage() for tensor in module.buffers()), *self._there):
            self._seen[storage] = 0

    # ---- modules -------------------------------------------------------------------------------------------

    def follow(self, module: nn.Module) -> None:
        """Follow which module is called, by its forward, as the runtime does. `as_it_was` undoes it.

        Recurrent modules are called layer by layer, as where their layers are blocks.
        """
        for name, part in module.named_modules():
            if has_layers(part) and part.num_layers > 1:
                part.forward = functools.partial(RecurrentLayers.of(part).call, part.forward)
            part.forward = self._followed(name, part.forward)

    def _followed(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def called(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the forward has them
            self._stack.append(name)
            self.calls[name] = self.calls.get(name, 0) + 1
            try:
                return forward(*args, **kwargs)
            finally:
                self._stack.pop()

        return called

    # ---- storages ------------------------------------------------------------------------------------------

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        n_bytes = storage.nbytes()
        self._seen[storage] = n_bytes
        if not n_bytes:
            return
        self._next += 1
        self._events.append((self._next, n_bytes))
        weakref.finalize(storage, self._ended, self._next).atexit = False

    def _ended(self, name: int) -> None:
        self._events.append((name, 0))

    def _allocations(self, *, with_scores: bool) -> Iterator[Event]:
        """All events, with what operations take while they run, and have freed afterwards."""
        for event in self._events:
            if not isinstance(event, int):
                yield event
                continue
            operation = self.operations[event]
            for n_bytes in (operation.workspace, operation.scores if with_scores else 0):
                if n_bytes:
                    yield from ((MEANWHILE, n_bytes), (MEANWHILE, 0))

    def peak(self, *, with_scores: bool) -> PeakBytes:
        """The pass's peak, by a simulation of the allocator, and room for the largest measured workspace.

        A library that finds none, where segments are divided otherwise, takes another algorithm without a
        word: slower, and of other bits.
        """
        alive, reserved = peak_of(self._allocations(with_scores=with_scores))
        measured_bytes = (each.workspace for each in self.operations if each.device_s is not None)
        return PeakBytes(alive, reserved + max(measured_bytes, default=0))

    # ---- operations ----------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401  # torch's OpOverload
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # what the operation gives
        """Run an operation, or those that it is composed of, and record it."""
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if function.namespace == "prim":
            return function(*args, **kwargs)
        whole = name in WHOLE or name.startswith("upsample_")
        if not whole and (parts := self._parts(function, args, kwargs)) is not NotImplemented:
            return parts
        made = result_by_shape(name, args)
        if made is None:
            made = function(*args, **kwargs)
        if len(self.operations) >= MOST_OPERATIONS:
            raise PlacementError(f"the pass calls more than {MOST_OPERATIONS:,} operations")
        self.count(made)
        call = OperationCall.of(function, args, kwargs, self._is_weight) if self._keeps_calls else None
        for operation in self._described(function, name, args, kwargs, made):
            self._events.append(len(self.operations))
            self.operations.append(operation)
            self._made_by.append(call)
        return made

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._weights

    def measure(self, device: torch.device) -> None:
        """Give each operation what its call takes on a device, where that can be run alone.

        Of a call that is several operations here, the first has it all.
        """
        launches: dict[OperationCall, bool] = {}
        made_by = list(zip(self._made_by, self.operations, strict=True))
        for call, operation in made_by:
            if call is not None and operation.name not in EXPERTS:  # which are chosen isn't known
                launches[call] = launches.get(call, False) or operation.kind != "view"
        row = [
            call
            for place, (call, _) in enumerate(made_by)
            if call is not None and launches.get(call) and (not place or made_by[place - 1][0] is not call)
        ]
        times = measured(row, device)
        before: OperationCall | None = None
        for place, (call, operation) in enumerate(made_by):
            if call is not None and (seen := times.get(call)) is not None:
                taken = OperationTime(0.0, 0.0, 0) if call is before else seen
                self.operations[place] = replace(
                    operation,
                    device_s=taken.device_s,
                    host_s=taken.host_s,
                    workspace=taken.workspace,
                    scores=0,
                )
            before = call

    def _parts(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        with self:
            return function.decompose(*args, **kwargs)

    def _described(
        self,
        function: Any,  # noqa: ANN401  # torch's OpOverload
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: object,
    ) -> Iterator[Operation]:
        """The record of an operation; of a layer that torch computes in one call, those inside."""
        name = name.rstrip("_") if not name.startswith("_") else name
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
        results = [value for value in tree_iter(made) if isinstance(value, torch.Tensor)]
        results = results or _changed(function, args)  # as those of an optimizer, which return nothing
        for tensor in given:  # what was there before the pass belongs to the module that uses it first
            if n_bytes := self._there.pop(tensor.untyped_storage(), 0):
                self.kept[self._stack[-1]] = self.kept.get(self._stack[-1], 0) + n_bytes
        if not results:
            return
        mutable = function._schema.is_mutable
        dtype = str((results[0] if results else given[0]).dtype).removeprefix("torch.")
        storages = {id(t.untyped_storage()) for t in given}
        if name in NO_KERNEL or (not mutable and all(id(t.untyped_storage()) in storages for t in results)):
            yield Operation("view", name, self._stack[-1], dtype, launches=0)
            return
        weights, activations = self._split(name, given)
        if name in LAYERS_IN_ONE:
            yield from self._layer_in_one(name, args, weights)
            return
        facts = operation_facts(name, args, kwargs, given, results)
        yield Operation(
            name=name,
            at=self._stack[-1],
            weights=weights,
            read=facts.pop("read", sum(map(numbers_bytes, activations))),
            written=sum(map(numbers_bytes, results)),
            dtype=facts.pop("dtype", dtype),
            **facts,
        )

    def _split(
        self, name: str, given: Sequence[torch.Tensor]
    ) -> tuple[tuple[WeightUse, ...], list[torch.Tensor]]:
        """The weights among an operation's tensors, and the other tensors."""
        weights: dict[str, int] = {}
        activations = []
        for tensor in given:
            held = self._weights.get(tensor.untyped_storage())
            if held is None:
                activations.append(tensor)
                continue
            n_bytes = numbers_bytes(tensor)
            if name in LOOKUPS or name in GATHERS:
                row = n_bytes // max(tensor.shape[0], 1) if tensor.dim() else 0
                rows = max((t.numel() for t in given if not t.is_floating_point()), default=1)
                n_bytes = min(n_bytes, rows * row)
            weights[held] = weights.get(held, 0) + n_bytes
        return tuple(WeightUse(held, n_bytes) for held, n_bytes in weights.items()), activations

    def _layer_in_one(
        self, name: str, args: Sequence[Any], weights: tuple[WeightUse, ...]
    ) -> Iterator[Operation]:
        """torch's own encoder layer or attention: its products, attention between them, and the rest."""
        x, width = args[0], args[0].shape[-1]
        heads = next((a for a in args[1:5] if type(a) is int and a != width), 1)
        batch, rows = (x.shape[0], x.shape[1]) if x.dim() == 3 else (1, x.shape[0])
        n_bytes, at, dtype = x.numel() * x.element_size(), self._stack[-1], dtype_name(x)
        own = {use.name: use for use in weights}
        for matrix in (t for t in args if isinstance(t, torch.Tensor) and t.dim() == 2):
            held = self._weights.get(matrix.untyped_storage())
            outputs, inputs = matrix.shape
            made = batch * rows * outputs * x.element_size()
            yield Operation(
                "product",
                name,
                at,
                dtype,
                flops=2 * batch * rows * matrix.numel(),
                read=batch * rows * inputs * x.element_size(),
                written=made,
                rows=batch * rows,
                outputs=outputs,
                inputs=inputs,
                weights=(own.pop(held),) if held in own else (),
                workspace=made + n_bytes,
            )
            if inputs == width and outputs != inputs and outputs == 3 * width:
                yield Operation(
                    "attention",
                    name,
                    at,
                    dtype,
                    flops=4 * batch * rows * rows * width,
                    read=3 * n_bytes,
                    written=n_bytes,
                    launches=2,
                    scores=2 * 4 * batch * heads * rows * rows,
                )
        layer = name == "_transformer_encoder_layer_fwd"
        kinds: tuple[OperationKind, ...] = ("norm", "plain") * 2 if layer else ("plain",)
        for place, kind in enumerate(kinds):
            used = tuple(own.values()) if not place else ()
            yield Operation(kind, name, at, dtype, read=n_bytes, written=n_bytes, weights=used)


def _changed(function: Any, args: Sequence[Any]) -> list[torch.Tensor]:  # noqa: ANN401  # torch's OpOverload
    """The tensors that an operation writes to."""
    written = zip(function._schema.arguments, args, strict=False)
    values = [value for of, value in written if of.alias_info is not None and of.alias_info.is_write]
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]


# Given the module and the named inputs: the inputs of the pass, and tensors that are there before it
Prepare = Callable[[nn.Module, dict[str, Any]], tuple[dict[str, Any], Iterable[torch.Tensor]]]


def trace_pass(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    prepare: Prepare | None = None,
    measure: torch.device | None = None,
    captured: bool = False,
) -> Trace:
    """The operations and the bytes of one pass of a module, called with tensors of any device or none.

    The module may be on meta; it is as it was before afterwards. `prepare` is called first, with the module
    and the inputs as they are traced; it gives other inputs, and tensors that are there before the pass.
    `measure`: the device on which each distinct operation is run, and timed, afterwards. `captured`: the pass
    as it is while a graph records it.
    Raises PlacementError, naming what fake tensors can't follow: a value that decides what is computed, an
    operation that isn't known without data.
    """
    recorded = as_if_recording() if captured else no_packed_sequences()
    with FakeTensorMode(allow_non_fake_inputs=True), as_it_was(module), recorded, _quietly():
        fill(module, "cpu")
        given, named = tree_map(_without_numbers, (tuple(args), dict(kwargs or {})))
        there: Iterable[torch.Tensor] = ()
        if prepare is not None:
            with _named_errors(module), torch.inference_mode():
                named, there = prepare(module, named)
        tracer = _traced(module, given, named, there, keeps_calls=measure is not None)
        del given, named, there
    return _finished(tracer, "fake tensors", measure)


def trace_real_pass(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    measure: torch.device | None = None,
) -> Trace:
    """The same by a real pass on the CPU, for what depends on values. The module's weights are read.

    What it writes to its buffers is lost, and random numbers come again. Raises PlacementError for what the
    module itself raises.
    """
    with as_it_was(module), torch.random.fork_rng(devices=[]):
        for part in module.modules():
            copies = {name: held.clone() for name, held in part._buffers.items() if held is not None}
            part._buffers.update(copies)
        tracer = _traced(module, tuple(args), dict(kwargs or {}), (), keeps_calls=measure is not None)
    return _finished(tracer, "a real pass on the CPU", measure)


def _traced(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    there: Iterable[torch.Tensor],
    *,
    keeps_calls: bool,
) -> Tracer:
    tracer = Tracer(module, there, keeps_calls=keeps_calls)
    with _named_errors(module), torch.inference_mode():
        tracer.follow(module)
    with _named_errors(module), torch.inference_mode(), tracer:
        tracer.count((args, kwargs))
        result = module(*args, **kwargs)
        del result
    return tracer


def _finished(tracer: Tracer, how: str, measure: torch.device | None) -> Trace:
    if measure is not None:
        tracer.measure(measure)
    return Trace(
        tuple(tracer.operations),
        dict(tracer.calls),
        tracer.peak(with_scores=False),
        tracer.peak(with_scores=True),
        tracer.kept,
        how,
        str(measure or ""),
    )


@contextmanager
def _named_errors(module: nn.Module) -> Iterator[None]:
    """Say of an error which module's pass it was in."""
    try:
        yield
    except PlacementError:
        raise
    except Exception as error:  # torch's and the module's own, of any kind
        text = str(error).strip().partition("\n")[0][:MOST_WORDS]
        raise PlacementError(
            f"a pass of {type(module).__name__} can't be traced: {type(error).__name__}: {text}"
        ) from error


def _without_numbers(value: object) -> object:
    """A fake tensor of the same shape on the CPU, for a tensor."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return value
