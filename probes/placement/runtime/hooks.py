"""The forwards that a placed model's modules have instead of their own, and what goes into and out of them.

`BlockHook` has a moving block's weights brought for each call, `CpuBlockHook` lets a block compute on the
CPU, `ModelHook` makes threads take turns and replays recorded passes, `InputConversionHook` converts inputs.
Their inputs and outputs may be tensors in nested tuples, lists, mappings and dataclasses: `map_tensors` and
`RoundTrip` handle those.
"""

from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from types import CodeType
from typing import Any, Final, NoReturn, TypeAlias

import torch
from torch import is_grad_enabled, nn
from torch._functorch import pyfunctorch
from torch.nn.utils.rnn import PackedSequence

from probes.core.errors import PlacementError
from probes.placement.models.modules import RecurrentLayers
from probes.placement.runtime.call_order import Turns
from probes.placement.runtime.engine import Engine, active_transform, refuse_training, training_error
from probes.placement.runtime.offloaded import (
    CpuBlock,
    MovingBlock,
    refuse_copy,
)

_EVAL_FRAME: Final[Any] = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
# returns None where nothing is compiled
_COMPILE_CALLBACK: Final[Callable[[], object]] = getattr(_EVAL_FRAME, "get_eval_frame_callback", bool)
_IS_COMPILING: Final[Callable[[], bool]] = torch.compiler.is_compiling
_UNTRACED: Final = "a placed model can't be compiled or exported: its weights come and go between operations"


class ForwardHook:
    """A module's forward with something done before and after. A copy of the module is refused.

    `torch.compile` doesn't look inside: the call is made as it is, uncompiled.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.__wrapped__ = forward  # for `inspect.signature`, which generation asks
        self.__doc__ = forward.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return self.forward(*args, **kwargs)

    @property
    def __code__(self) -> CodeType:
        """The forward's own, which `torch.export` asks for."""
        return self.forward.__code__

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy()


def is_compiled() -> bool:
    """Whether the calling frame is run or traced by `torch.compile` or `torch.export`."""
    return _IS_COMPILING() or bool(_COMPILE_CALLBACK())


def call_uncompiled(hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a call that `torch.compile` has reached, uncompiled. Raises PlacementError for `torch.export`."""
    if not _COMPILE_CALLBACK():
        raise PlacementError(
            _UNTRACED, "compile or export the model before it is placed, or call remove() of the handle"
        )
    return torch.compiler.disable(hook)(*args, **kwargs)


def _exclude_from_compiling(function: Any) -> None:
    """Let `torch.compile` neither inline nor compile a function. Its own decorators take 2 s to import."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_UNTRACED)
    if hasattr(_EVAL_FRAME, "skip_code"):  # until torch 2.6
        _EVAL_FRAME.skip_code(function.__code__)
    elif hasattr(_EVAL_FRAME, "set_code_exec_strategy"):
        skip, usual = _EVAL_FRAME._FrameAction.SKIP, _EVAL_FRAME._FrameAction.DEFAULT
        _EVAL_FRAME.set_code_exec_strategy(function.__code__, _EVAL_FRAME._FrameExecStrategy(skip, usual))


_exclude_from_compiling(call_uncompiled)


class BlockHook(ForwardHook):
    """The forward of a moving block's module: its weights are there meanwhile."""

    def __init__(self, forward: Callable[..., Any], engine: Engine, block: MovingBlock) -> None:
        super().__init__(forward)
        self._engine, self._block = engine, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Bring the weights, compute, release them."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        engine, block = self._engine, self._block
        enter, leave = engine.enter, engine.leave
        if active_transform() is not None:
            enter, leave = outside_transforms(enter), outside_transforms(leave)
        had_turn = engine.turns.mine()
        depth = block.depth if had_turn else 0
        try:  # an interruption may come anywhere, and in `finally` would come before what ends the call
            enter(block, args, kwargs, had_turn=had_turn)
            output = _with_own_memory(block, self.forward(*args, **kwargs))
            if is_grad_enabled():
                refuse_graph(block.name, output)
            leave(block)
            if not had_turn:
                engine.turns.end()
        except BaseException:
            engine.abandon(block, depth, had_turn=had_turn)
            raise
        return output


def _with_own_memory(block: MovingBlock, output: Any) -> Any:
    """A call's output, with copies of tensors in the block's buffers: another block uses those soon.

    A table of positions returns a part of its weight. To be called before the call ends.
    """
    if type(output) is torch.Tensor:
        return output.clone() if block.holds(output) else output
    if any(map(block.holds, tensors_in(output))):
        own = partial(map_tensors, change=lambda tensor: tensor.clone() if block.holds(tensor) else tensor)
        return own(output, within=True)  # a list or mapping may be the caller's
    return output


class CpuBlockHook(ForwardHook):
    """The forward of a module that computes on the CPU, of a model whose other blocks compute elsewhere."""

    def __init__(self, forward: Callable[..., Any], engine: Engine, block: CpuBlock) -> None:
        super().__init__(forward)
        self._engine, self._block = engine, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute there. Waits for what the caller's stream computes, not for copies of other blocks.

        Those are begun before: nothing else would begin them while this thread computes.
        """
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        engine, block = self._engine, self._block
        had_turn = engine.turns.mine()
        depth = block.depth if had_turn else 0
        try:
            engine.enter_cpu_block(block, had_turn=had_turn)
            engine.advance()
            here = partial(on_device, device=engine.streams.device)
            trip = RoundTrip(partial(on_device, device=torch.device("cpu")), here)
            given, named = trip.go(args), trip.go(kwargs)
            engine.advance()  # what was read from disk meanwhile can be copied now
            output = trip.come(self.forward(*given, **named))
            engine.leave_cpu_block(block)
            if not had_turn:
                engine.turns.end()
        except BaseException:
            engine.abandon_cpu_block(block, depth, had_turn=had_turn)
            raise
        return output


class RecurrentHook(ForwardHook):
    """The forward of a recurrent module of which layers are blocks: they are called one after the other."""

    def __init__(self, forward: Callable[..., Any], recurrent: RecurrentLayers) -> None:
        super().__init__(forward)
        self._recurrent = recurrent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call each layer with what the one before gave, and its own part of the state."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        return self._recurrent.call(self.forward, *args, **kwargs)


class ModelHook(ForwardHook):
    """The forward of a placed model. Threads take turns. `run(*args, **kwargs)` is a pass."""

    def __init__(
        self,
        forward: Callable[..., Any],
        turns: Turns,
        model: nn.Module,
        failed: Callable[[], None],
        *,
        trainable: bool,
        run: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(forward)
        self._turns, self._model, self._trainable = turns, model, trainable
        self._failed, self._run = failed, run or forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        return self._turns.taken(partial(self._pass, args, kwargs), self._failed)

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            refuse_training("", (self._model,), args, kwargs, trainable=self._trainable)
        return self._run(*args, **kwargs)


class InputConversionHook(ForwardHook):
    """The forward of a whole model that computes in another dtype than its own: what goes in follows it."""

    def __init__(self, forward: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(forward)
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        if any(tensor.dtype is torch.bfloat16 for tensor in tensors_in((args, kwargs))):
            change = partial(converted, dtype=self._dtype)
            args, kwargs = map_tensors(args, change), map_tensors(kwargs, change)
        return self.forward(*args, **kwargs)


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in another dtype, if it is bfloat16."""
    return tensor.to(dtype) if tensor.dtype is torch.bfloat16 else tensor


def outside_transforms(step: Callable[..., None]) -> Callable[..., None]:
    """Wrap a step so that it runs outside all functorch transforms, which refuse writes to foreign memory."""

    @wraps(step)
    def plain(*args: Any, **kwargs: Any) -> None:
        with pyfunctorch.temporarily_clear_interpreter_stack():
            step(*args, **kwargs)

    return plain


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself, or a copy on the device whose changes torch counts: under inference mode, too."""
    if tensor.device == device:
        return tensor
    # torch counts no changes in transforms
    if not torch.is_inference_mode_enabled() or active_transform() is not None:
        return tensor.to(device)
    with torch.inference_mode(False), torch.no_grad():
        return tensor.to(device)


Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Seen: TypeAlias = dict[int, tuple[Any, Any]]  # by identity: a thing, and what it has become


class RoundTrip:
    """What goes elsewhere for one call and comes back: `there` and `back` bring a tensor.

    Each thing goes once, so one that is passed twice is one thing there, too. What the call writes into a
    container or a tensor is written to the caller's.
    """

    def __init__(self, there: Change, back: Change) -> None:
        self._there, self._back = there, back
        self._gone: Seen = {}
        self._before: list[tuple[Any, Any, Any]] = []  # those that may be changed, and how they were

    def go(self, thing: Any) -> Any:
        """Bring a call's argument there."""
        known = len(self._gone)
        result = map_tensors(thing, self._there, self._gone)
        gone = list(self._gone.values())[known:]
        self._before += [(ours, there, _change_key(there)) for ours, there in gone if ours is not there]
        return result

    def come(self, output: Any) -> Any:
        """The call's output here. What it wrote is written before; what was given to it is the caller's."""
        known = self.write()
        here = {
            key: (there, self._back(ours) if isinstance(ours, torch.Tensor) else ours)
            for key, (there, ours) in known.items()
        }
        return map_tensors(output, self._back, here)

    def write(self) -> Seen:
        """Write what the call wrote. Returns what is there, with what it is here."""
        known: Seen = {id(there): (there, ours) for ours, there, _ in self._before}
        for ours, there, before in self._before:
            if isinstance(there, torch.Tensor):
                if _change_key(there) != before:
                    with torch.no_grad(), torch.inference_mode(ours.is_inference()):
                        ours.copy_(there)
            elif _is_changeable(there):
                now = _change_key(there)
                if now != before:
                    _replace_parts(
                        ours, {key: map_tensors(part, self._back, known) for key, part in _parts(there)}
                    )
        return known


def map_tensors(thing: Any, change: Change, seen: Seen | None = None, *, within: bool = False) -> Any:
    """Change every tensor in tuples, lists, mappings and dataclasses; returns the thing itself if none is.

    `seen`: what has been changed before, by identity, to which this adds. `within`: what can be changed is
    changed as it is, not as a copy.
    """
    seen = {} if seen is None else seen
    if id(thing) in seen:
        return seen[id(thing)][1]
    if isinstance(thing, torch.Tensor):
        changed = change(thing)
    else:
        parts = _parts(thing)
        new = {key: map_tensors(part, change, seen, within=within) for key, part in parts}
        if all(new[key] is part for key, part in parts):
            return thing
        changed = _rebuilt(thing, new, within=within)
    seen[id(thing)] = (thing, changed)
    return changed


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Every tensor in tuples, lists, mappings and dataclasses."""
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    for _, part in _parts(thing):
        yield from tensors_in(part)


def _parts(thing: Any) -> list[tuple[Any, Any]]:
    """What a container holds, by key, index or field; nothing of other things."""
    if isinstance(thing, Mapping):
        return list(thing.items())
    if isinstance(thing, PackedSequence):  # its batch sizes stay on the host, wherever it is used
        return [(index, part) for index, part in enumerate(thing) if part is not thing.batch_sizes]
    if isinstance(thing, tuple | list | deque | UserList):
        return list(enumerate(thing))
    if is_dataclass(thing) and not isinstance(thing, type):
        return [
            (field.name, getattr(thing, field.name)) for field in fields(thing) if hasattr(thing, field.name)
        ]
    return []


def _is_changeable(thing: Any) -> bool:
    return not isinstance(thing, tuple) and (not isinstance(thing, Mapping) or hasattr(thing, "__setitem__"))


def _rebuilt(thing: Any, parts: dict[Any, Any], *, within: bool) -> Any:
    """A container of the same kind, with these parts."""
    kind = type(thing)
    if isinstance(thing, tuple):
        if isinstance(thing, PackedSequence):
            return thing._replace(**{thing._fields[index]: part for index, part in parts.items()})
        return kind(*parts.values()) if hasattr(thing, "_fields") else kind(parts.values())
    if not _is_changeable(thing):
        return kind(parts)
    rebuilt = thing if within else copy(thing)
    for key, part in parts.items():
        _set_part(rebuilt, key, part)
    return rebuilt


def _replace_parts(container: Any, parts: dict[Any, Any]) -> None:
    """Let it hold these parts and no others."""
    if isinstance(container, Mapping):
        for key in [key for key in container if key not in parts]:
            del container[key]  # type: ignore[attr-defined]  # a changeable one
    elif isinstance(container, list | deque | UserList):
        container.clear()
        container.extend(parts.values())
        return
    for key, part in parts.items():
        _set_part(container, key, part)


def _set_part(container: Any, key: Any, part: Any) -> None:
    if isinstance(container, Mapping | list | deque | UserList):
        container[key] = part  # type: ignore[index]  # a changeable one
    else:
        object.__setattr__(container, key, part)  # a frozen dataclass, too


def _change_key(thing: Any) -> Any:
    """What differs after a change: a tensor's version, a container's parts."""
    if isinstance(thing, torch.Tensor):
        try:
            return thing._version
        except RuntimeError:  # torch counts no changes of an inference tensor
            return None
    return [(key, id(part)) for key, part in _parts(thing)]


def refuse_graph(name: str, output: Any) -> None:
    """Raise PlacementError where gradients of what a block returns would need weights that are gone then.

    They are wanted by parameters that were added to it after it had been placed.
    """
    if any(tensor.requires_grad for tensor in tensors_in(output)):
        raise training_error(name)
