"""Activations that a block doesn't keep for its backward pass: they are made again from its inputs.

The inputs stay on the card, or are in host memory until the backward pass comes back to the block; a closure
has them, so that nothing else holds them meanwhile. Buffers that a block's forward changes (statistics of
BatchNorm) have their values of before while it is done again, and keep what the first forward gave them.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten

from probes.core.errors import PlacementError
from probes.placement.packing.staging import host_buffer
from probes.placement.runtime.packed_tables import autocast_dtype
from probes.placement.runtime.streams import Event, Streams

LEAST_BYTES: Final = 1 << 18  # of an input that moves


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: a forward is a recomputation then."""
    return bool(torch._C._current_graph_task_id() != -1)


@dataclass(eq=False)
class _Input:
    """One tensor that a block was called with, at one or more places among the call's arguments."""

    places: list[int]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    host: torch.Tensor  # bytes
    gone: Event
    arrived: Event
    version: int
    here: torch.Tensor | None  # until it is gone, and again once it is brought back


@dataclass(eq=False)
class _Call:
    """One forward of a block, until its backward."""

    inputs: list[_Input] = field(default_factory=list)


class _Buffers:
    """A module's buffers at one call: those that its forward changes, with their values of before."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        """`parts`: of the module, all that may have buffers."""
        self._held: list[tuple[dict[str, Any], str, Any]] = [
            (part._buffers, key, value)
            for part in parts
            if part._buffers
            for key, value in part._buffers.items()
            if value is not None
        ]
        # batch norm's kernels write without autograd's knowledge
        self._written = {id(part._buffers) for part in parts if isinstance(part, _NormBase)}
        self._before: list[torch.Tensor] | None = None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """See what changes, the first time; then compute with the values of before, and lose changes."""
        if not self._held:
            yield
            return
        if self._before is None:
            versions = [value._version for _, _, value in self._held]
            copies = [value.detach().clone() for _, _, value in self._held]
            yield
            changed = [
                at
                for at, (holder, key, value) in enumerate(self._held)
                if value._version != versions[at]
                or holder.get(key) is not value
                or id(holder) in self._written
            ]
            self._held, self._before = [self._held[at] for at in changed], [copies[at] for at in changed]
            return
        now = [holder.get(key) for holder, key, _ in self._held]
        for (holder, key, _), value in zip(self._held, self._before, strict=True):
            holder[key] = value.clone()
        try:
            yield
        finally:
            for (holder, key, _), kept in zip(self._held, now, strict=True):
                holder[key] = kept


class _Versions:
    """How often the tensors that a block is called with had been changed by then."""

    def __init__(self, values: Sequence[object]) -> None:
        self._versions = [_version(value) for value in values]

    def check(self, values: Sequence[object], module: nn.Module) -> None:
        """Raises PlacementError where one has been changed since."""
        for value, before in zip(values, self._versions, strict=True):
            if isinstance(value, torch.Tensor) and _version(value) != before:
                raise _changed(f"a block, a {type(module).__name__},")


def _changed(block: str) -> PlacementError:
    return PlacementError(
        f"an input of {block} is changed in place, and the block's activations are made again from it",
        "let the model change a copy (without inplace=True), or plan with more vram",
    )


def _version(value: object) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


class _Saved:
    """A place of a tensor that an operation saves for its backward pass: filled when it is asked for."""

    __slots__ = ("__weakref__", "again", "like", "tensor")

    def __init__(self, again: "_Again", like: tuple[torch.Size, torch.dtype]) -> None:
        self.again, self.like = again, like
        self.tensor: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """The tensor, made again with all others of its block if need be."""
        if self.tensor is None:
            self.again.make()
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise self.again.differs()
        return tensor


class _Enough(Exception):
    """All that is asked for is there."""


class _Again:
    """A block's forward whose saved tensors aren't kept: it is done again when the first is asked for.

    What torch's non-reentrant checkpoint does, with the same graph and so the same sums of gradients, in a
    part of its Python: a place for each saved tensor instead of handles by graph and hashes of holders.
    """

    def __init__(self, forward: Callable[[], Any], module: nn.Module, device: torch.device) -> None:
        self._forward, self._module, self._device = forward, module, device
        self._places: list[weakref.ref[_Saved]] = []
        self._random = _random_states(device)
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self._autocast = [(kind, autocast_dtype(kind)) for kind in kinds]
        self._caches = torch.is_autocast_cache_enabled()

    def __call__(self) -> Any:  # noqa: ANN401  # the block's
        """The forward, the first time."""
        with torch.autograd.graph.saved_tensors_hooks(self._place, _Saved.take):
            return self._forward()

    def _place(self, tensor: torch.Tensor) -> _Saved:
        place = _Saved(self, (tensor.shape, tensor.dtype))
        self._places.append(weakref.ref(place))
        return place

    def make(self) -> None:
        """Do the forward again and fill the places that something still asks for."""
        places = iter(self._places)
        left = len(self._places)

        def fill(tensor: torch.Tensor) -> None:
            nonlocal left
            place = next(places, lambda: None)()
            if place is not None:
                if place.like != (tensor.shape, tensor.dtype):
                    raise self.differs()
                place.tensor = tensor.detach()
            left -= 1
            if not left:
                raise _Enough

        now = _random_states(self._device)
        _set_random_states(self._random)
        try:
            with torch.enable_grad(), ExitStack() as stack:
                for kind, dtype in self._autocast:
                    cast = {"enabled": False} if dtype is None else {"dtype": dtype}
                    stack.enter_context(torch.autocast(kind, cache_enabled=self._caches, **cast))
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(fill, _never))
                self._forward()
        except _Enough:
            return
        finally:
            _set_random_states(now)
        raise self.differs()

    def differs(self) -> PlacementError:
        """What is said where the second forward isn't like the first."""
        return PlacementError(
            f"a block, a {type(self._module).__name__}, computes something else when its forward is done "
            "again for the backward pass",
            "let its forward depend on its inputs alone (models of transformers: use_cache=False), or "
            "plan with more vram",
        )


def _never(_: object) -> torch.Tensor:
    raise AssertionError("the graph of a forward that is done again has no backward pass")


def _random_states(device: torch.device) -> list[tuple[torch.Generator, torch.Tensor]]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    return [(generator, generator.get_state()) for generator in generators]


def _set_random_states(states: Sequence[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


class Recomputation:
    """Blocks whose activations are made again, and the inputs of those that have them in host memory."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._waiting: list[weakref.ref[_Call]] = []  # for their backward; the last one comes first
        self._leaving: deque[_Input] = deque()
        self._spare: dict[int, list[torch.Tensor]] = {}  # host memory by size

    def again(self, module: nn.Module, *, moves: bool) -> Callable[..., Any]:
        """A module's forward whose saved tensors are made again; `moves`: from inputs in host memory."""
        forward, parts = module.forward, list(module.modules())

        @functools.wraps(forward)
        def again(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the forward has them
            if not torch.is_grad_enabled() or in_backward():
                return forward(*args, **kwargs)
            values, shape = tree_flatten((args, kwargs))
            call = _Call()
            given: list[Any] = list(values)
            buffers, inputs = _Buffers(parts), _Versions(values)
            del args, kwargs, values
            first = True

            def run() -> Any:  # noqa: ANN401
                nonlocal first
                if first:
                    first = False
                    held = given
                else:
                    inputs.check(given, module)
                    held = self._restored(call, given)
                a, k = tree_unflatten(held, shape)
                with buffers.as_before():
                    return forward(*a, **k)

            result = _Again(run, module, self._streams.device)()
            inputs.check(given, module)
            if moves:
                self._leave(call, given)
            return result

        return again

    def _leave(self, call: _Call, given: list[Any]) -> None:
        """Copy a call's inputs to the host; what is left in `given` stays."""
        streams = self._streams
        self._released()
        by_tensor: dict[int, _Input] = {}  # a block may ask whether two of its inputs are the same one
        for place, value in enumerate(given):
            if not isinstance(value, torch.Tensor) or not value.requires_grad or value.nbytes < LEAST_BYTES:
                continue
            moved = by_tensor.get(id(value))
            if moved is None:
                if not _is_dense(value):
                    continue
                spare = self._spare.get(value.nbytes)
                host = spare.pop() if spare else host_buffer(value.nbytes, pinned=value.is_cuda)
                moved = by_tensor[id(value)] = _Input(
                    [],
                    value.shape,
                    value.stride(),
                    value.dtype,
                    host,
                    streams.event(),
                    streams.event(),
                    value._version,
                    value.detach(),
                )
                streams.compute.record(moved.arrived)
                streams.unpack.wait(moved.arrived)
                streams.unpack.run(partial(_copy_bytes, host, value.detach()))
                streams.unpack.record(moved.gone)
                self._leaving.append(moved)
                call.inputs.append(moved)
            moved.places.append(place)
        for moved in call.inputs:
            for place in moved.places:
                given[place] = None
        if call.inputs:
            self._waiting = [each for each in self._waiting if each() is not None]  # others have no backward
            self._waiting.append(weakref.ref(call))
            weakref.finalize(call, self._returned, call.inputs).atexit = False

    def _returned(self, inputs: Sequence[_Input]) -> None:
        for moved in inputs:
            if moved.here is not None:  # its memory is in use until the copy is done
                self._streams.compute.wait(moved.arrived)
            self._spare.setdefault(moved.host.numel(), []).append(moved.host)

    def _released(self) -> None:
        while self._leaving and self._leaving[0].gone.reached():
            moved = self._leaving.popleft()
            if _version(moved.here) != moved.version:  # perhaps before the copy was made
                raise _changed("a block")
            moved.here = None

    def _settle(self) -> None:
        """All that leaves has left: what comes back can't be mistaken for it."""
        while self._leaving:
            self._leaving[0].gone.block()
            self._released()

    def _bring(self, call: _Call) -> None:
        self._settle()
        streams = self._streams
        for moved in call.inputs:
            if moved.here is None:
                moved.here = torch.empty_strided(
                    moved.shape, moved.stride, dtype=moved.dtype, device=streams.device
                )
                streams.compute.record(moved.gone)  # what used this memory before is done by then
                streams.copy.wait(moved.gone)
                streams.copy.run(partial(_copy_bytes_back, moved.here, moved.host))
                streams.copy.record(moved.arrived)

    def _bring_next(self) -> None:
        call = next(filter(None, (each() for each in reversed(self._waiting))), None)
        if call is not None:
            self._bring(call)

    def _restored(self, call: _Call, given: Sequence[Any]) -> list[Any]:
        values = list(given)
        if not call.inputs:
            self._bring_next()
            return values
        self._bring(call)
        self._waiting = [each for each in self._waiting if each() is not call]
        for moved in call.inputs:
            assert moved.here is not None
            self._streams.compute.wait(moved.arrived)
            for place in moved.places:
                values[place] = moved.here.requires_grad_(True)
            moved.here = None
        self._bring_next()
        return values


def _is_dense(value: torch.Tensor) -> bool:
    """Whether its numbers fill its memory without holes, in whatever order."""
    numbers = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != numbers:
            return False
        numbers *= size
    return True


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _copy_bytes(host: torch.Tensor, dense: torch.Tensor) -> None:
    host.copy_(_bytes_of(dense), non_blocking=True)


def _copy_bytes_back(here: torch.Tensor, host: torch.Tensor) -> None:
    _bytes_of(here).copy_(host, non_blocking=True)
