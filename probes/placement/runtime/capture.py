"""Passes of a placed model as recorded graphs: copies, unpacking and products are begun by one call.

Small layers are bound by Python otherwise. A pass is recorded when it comes for the third time with the same
shapes: the first two are done as always, so that libraries have chosen their kernels, the order of blocks
is known and buffers hold at a pass's beginning what they hold at its end. Each call is done exactly once.
"""

import gc
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MemberDescriptorType
from typing import Any, Final
from weakref import ref

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.hardware.torch_build import first_line
from probes.placement.runtime.engine import Engine, EngineState, active_transform
from probes.placement.runtime.packed_tables import autocast_dtype
from probes.placement.runtime.streams import Graph

EAGER_FIRST: Final = 2  # calls with the same shapes before one is recorded
MAX_COUNTED: Final = 4096  # kinds of calls that are counted; a text's length may be another one each time
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH: Final = 6  # of objects in objects that are inspected


@dataclass(eq=False)
class _RecordedPass:
    """One recorded pass: its inputs at fixed addresses, and the buffers before and after it."""

    graph: Graph
    inputs: list[torch.Tensor]
    before: EngineState
    after: EngineState
    epoch: int = -1  # of the engine, right after the latest replay


class Recorder:
    """Records a function's calls, one graph for each combination of shapes, and replays them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._passes: dict[Hashable, _RecordedPass] = {}
        self._seen: Counter[Hashable] = Counter()
        self._done = engine.streams.event()
        self._ran_out: set[Hashable] = set()  # calls whose recording ran out of memory once
        self.refused: dict[Hashable, str] = {}  # why some calls can't be recorded

    @property
    def count(self) -> int:
        """How many graphs there are."""
        return len(self._passes)

    @property
    def is_counting(self) -> bool:
        """Whether nothing is recorded or refused yet, and will be."""
        return self._engine.streams.records and not self._passes and not self.refused

    def call(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call. What a replayed call returns is overwritten by the next one of the same shapes.

        A call that can't be recorded is done as always; `refused` says why.
        """
        plain = self._engine.recording or active_transform() is not None  # a model that calls itself; jvp
        if plain or not self._engine.streams.records:  # no GPU
            return work(*args, **kwargs)
        key = (
            call_key(args),
            call_key(kwargs),
            _repeated(args, kwargs),
            torch.is_inference_mode_enabled(),
            *map(autocast_dtype, ("cuda", "cpu")),
        )
        recorded = self._passes.get(key)
        if recorded is None:
            if len(self._seen) >= MAX_COUNTED:
                self._seen.clear()
            self._seen[key] += 1
            if self._seen[key] <= EAGER_FIRST or key in self.refused:
                return work(*args, **kwargs)
            recorded = self._recorded(key, work, args, kwargs)
            if recorded is None:
                return work(*args, **kwargs)
        return self._replay(recorded, _distinct_tensors(args, kwargs))

    def _recorded(
        self, key: Hashable, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _RecordedPass | None:
        """The recorded pass; None where it can't be recorded, or VRAM is too small for what a graph keeps.

        Raises torch's OutOfMemoryError the first time that VRAM is: room may be made for it.
        """
        try:
            recorded = self._passes[key] = self._record(work, args, kwargs)
        except RuntimeError as error:
            if (interruption := _interruption(error)) is not None:
                raise interruption from None
            if isinstance(error, torch.cuda.OutOfMemoryError) and key not in self._ran_out:
                self._ran_out.add(key)
                raise
            self.refused[key] = first_line(error)
        else:
            self._engine.streams.passes_recorded += 1
            return recorded
        gc.collect()  # the failed recording's tensors: the call that follows needs their memory
        return None

    def _record(
        self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _RecordedPass:
        engine = self._engine
        engine.drain()
        before = engine.state()
        fixed = {id(tensor): tensor.clone() for tensor in _distinct_tensors(args, kwargs)}
        fixed_args, fixed_kwargs = _with_copies(args, fixed), _with_copies(kwargs, fixed)
        beside = next((recorded.graph for recorded in self._passes.values()), None)
        try:
            engine.recording = True
            graph = engine.streams.record(lambda: work(*fixed_args, **fixed_kwargs), beside=beside)
            after = engine.state()
            engine.recording = False
            engine.resume(before, None)  # nothing has been done yet
        except BaseException:
            engine.recording, engine.changing = False, True
            raise
        return _RecordedPass(graph, list(fixed.values()), before, after)

    def _replay(self, recorded: _RecordedPass, given: list[torch.Tensor]) -> Any:
        engine = self._engine
        for fixed, tensor in zip(recorded.inputs, given, strict=True):
            if fixed is not tensor:
                fixed.copy_(tensor, non_blocking=True)
        try:
            if engine.changing or recorded.epoch != engine.epoch:
                engine.reach(recorded.before)
            engine.streams.compute.wait(self._done)
            recorded.graph.replay()
            engine.streams.compute.record(self._done)
            engine.resume(recorded.after, self._done)
        except BaseException:
            engine.changing = True  # nobody knows what the buffers hold
            raise
        recorded.epoch = engine.epoch if recorded.after.holds == recorded.before.holds else -1
        return recorded.graph.outputs

    def clear(self) -> None:
        """Release all graphs and their memory."""
        self._passes.clear()
        self._seen.clear()

    def renew(self, engine: Engine) -> None:
        """The model has been placed again, and is run by this engine: record anew."""
        self.clear()
        self._engine, self._done = engine, engine.streams.event()


def _interruption(error: BaseException | None) -> BaseException | None:
    """What ended a recording, where the driver complains of that end and hides it."""
    while isinstance(error, Exception):
        error = error.__context__
    return error


def call_key(thing: Any, depth: int = 0) -> Hashable:
    """What must be the same for a recorded call to be the same work.

    Of tensors that are passed directly, or in lists, tuples and dicts: shape, strides, dtype, device. Of
    tensors that an object keeps, such as a KV cache's: also the address. Numbers (numpy's, too), texts,
    slices and sets by value, other objects by identity and by what they keep.
    """
    if isinstance(thing, torch.Tensor):
        address = thing.data_ptr() if depth else 0
        return (tuple(thing.shape), tuple(thing.stride()), thing.dtype, thing.device, address)
    if isinstance(thing, _PLAIN):
        return (type(thing), thing)
    if isinstance(thing, nn.Module) or depth > _DEPTH:
        return _identity(thing)
    if isinstance(thing, dict | list | tuple | deque | set | frozenset | slice | range):
        return (type(thing), *_parts(thing, depth))
    if hasattr(thing, "tobytes") and hasattr(thing, "shape"):  # numpy's arrays and numbers
        return (type(thing), str(thing.dtype), thing.shape, thing.tobytes())
    return (_identity(thing), *((name, call_key(value, depth + 1)) for name, value in _attributes(thing)))


def _parts(thing: Any, depth: int) -> Iterator[Hashable]:
    """The keys of what a collection holds, in an order that is the same for an equal one."""
    if isinstance(thing, slice | range):
        yield from (call_key(part, depth) for part in (thing.start, thing.stop, thing.step))
        return
    if isinstance(thing, set | frozenset):
        yield frozenset(call_key(part, depth) for part in thing)
        return
    inner = depth if type(thing) in (dict, list, tuple) or hasattr(thing, "_fields") else depth + 1
    if isinstance(thing, dict):
        yield from ((call_key(key, inner), call_key(value, inner)) for key, value in thing.items())
    else:
        yield from (call_key(part, inner) for part in thing)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """An object's attributes by name, those in slots too."""
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        if "__slots__" in vars(kind):
            for name, slot in vars(kind).items():
                with suppress(AttributeError):  # a slot that is empty
                    if isinstance(slot, MemberDescriptorType):
                        yield name, slot.__get__(thing)


def _identity(thing: Any) -> Hashable:
    """What no other object has, even one at the address of one that is gone, where that can be seen."""
    try:
        return _ObjectIdentity(id(thing), ref(thing))
    except TypeError:
        return (type(thing), id(thing))


@dataclass(frozen=True, eq=False)
class _ObjectIdentity:
    """An object by identity, which isn't kept alive for it."""

    address: int
    thing: Callable[[], Any]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ObjectIdentity) and self.thing is other.thing
        )  # an object has one such reference

    def __hash__(self) -> int:
        return self.address


def direct_tensors(thing: Any) -> Iterator[torch.Tensor]:
    """The tensors that are passed directly, or in lists, tuples and dicts."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif type(thing) in (dict, list, tuple) or hasattr(thing, "_fields"):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from direct_tensors(part)


def _distinct_tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Each tensor that is passed directly, once: attention asks whether its query is its key."""
    return list({id(tensor): tensor for tensor in (*direct_tensors(args), *direct_tensors(kwargs))}.values())


def _repeated(args: Any, kwargs: Any) -> tuple[int, ...]:
    """Which of the tensors that are passed directly are the same."""
    numbers: dict[int, int] = {}
    return tuple(
        numbers.setdefault(id(tensor), len(numbers))
        for tensor in (*direct_tensors(args), *direct_tensors(kwargs))
    )


def _with_copies(thing: Any, copies: dict[int, torch.Tensor]) -> Any:
    """A call's arguments with copies instead of the tensors that are passed directly."""
    if isinstance(thing, torch.Tensor):
        return copies[id(thing)]
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_with_copies(part, copies) for part in thing))
    if type(thing) in (list, tuple):
        return type(thing)(_with_copies(part, copies) for part in thing)
    if type(thing) is dict:
        return {key: _with_copies(value, copies) for key, value in thing.items()}
    return thing


class Captured:
    """A function that calls a placed model, for fixed shapes. Its next call overwrites what it returns.

    `guarded(call, args, kwargs)` takes the model's turn, and makes room where VRAM runs out.
    """

    def __init__(
        self,
        recorder: Recorder,
        guarded: Callable[..., Any],
        work: Callable[..., Any],
        example: tuple[Any, ...],
    ) -> None:
        self.recorder = recorder
        self._guarded, self._work = guarded, work
        self._shapes = call_key(example)
        for _ in range(EAGER_FIRST + 1):
            self(*example)
        for _ in range(EAGER_FIRST + 1):
            if recorder.is_counting:  # the model was placed again meanwhile
                self(*example)
        if self.recorder.refused:
            why = next(iter(self.recorder.refused.values()))
            raise PlacementError(
                f"the function can't be captured: {why}",
                "it may not wait for the GPU, as .item() does; call it directly",
            )

    def __call__(self, *args: Any) -> Any:
        """Replay with these inputs. Raises PlacementError for others than the example's shapes and dtypes."""
        if call_key(args) != self._shapes:
            raise PlacementError(
                "this capture is for other shapes, dtypes or objects than those that it was called with",
                "capture the function once for each of them",
            )
        return self._guarded(partial(self.recorder.call, self._work), args, {})
