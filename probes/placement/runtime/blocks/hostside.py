"""Blocks that compute on the host: what goes in comes to the host, what comes out goes back."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from types import CodeType
from typing import Any, Final, NoReturn

import torch

from probes.errors import PlacementError
from probes.placement.runtime.blocks.lazy import refuse_copy

_FRAMES: Final[Any] = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_ASKED: Final[Callable[[], object]] = getattr(_FRAMES, "get_eval_frame_callback", bool)  # None: not compiled


_UNTRACED: Final = "a placed model can't be compiled or exported: its weights come and go between operations"


class Guard:
    """A module's forward with something done before and after. A copy of the module is refused.

    `torch.compile` doesn't look inside: the call is made as it is, uncompiled.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.__wrapped__ = forward  # for `inspect.signature`, which generation asks
        self.__doc__ = forward.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward."""
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
    return torch.compiler.is_compiling() or bool(_ASKED())


def uncompiled(guard: Guard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same call where `torch.compile` makes it. Raises PlacementError where it is exported."""
    if not _ASKED():
        raise PlacementError(
            _UNTRACED, "compile or export the model before it is placed, or call remove() of the handle"
        )
    return torch.compiler.disable(guard)(*args, **kwargs)


def _hide(function: Any) -> None:
    """Let `torch.compile` neither inline nor compile it. Its own decorators take 2 s to import."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=_UNTRACED)
    if hasattr(_FRAMES, "skip_code"):  # until torch 2.6
        _FRAMES.skip_code(function.__code__)
    elif hasattr(_FRAMES, "set_code_exec_strategy"):
        skip, usual = _FRAMES._FrameAction.SKIP, _FRAMES._FrameAction.DEFAULT
        _FRAMES.set_code_exec_strategy(function.__code__, _FRAMES._FrameExecStrategy(skip, usual))


_hide(uncompiled)


class OnHost(Guard):
    """A forward that computes on the CPU, of a model whose other blocks compute elsewhere.

    `advance` begins copies for the blocks that come next.
    """

    def __init__(
        self, forward: Callable[..., Any], device: torch.device, advance: Callable[[], None]
    ) -> None:
        super().__init__(forward)
        self._device, self._advance = device, advance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute there. Waits for what the caller's stream computes, not for copies of other blocks.

        Those are begun before: nothing else would begin them while this thread computes.
        """
        if is_compiled():
            return uncompiled(self, args, kwargs)
        host = torch.device("cpu")
        self._advance()
        given, named = moved(args, host), moved(kwargs, host)
        self._advance()  # what was read from disk meanwhile can be copied now
        return moved(self.forward(*given, **named), self._device)


class Inputs(Guard):
    """The forward of a whole model that computes in another dtype than its own: what goes in follows it."""

    def __init__(self, forward: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(forward)
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One pass."""
        if is_compiled():
            return uncompiled(self, args, kwargs)
        if any(tensor.dtype is torch.bfloat16 for tensor in tensors_in((args, kwargs))):
            args, kwargs = exchanged(args, self._converted), exchanged(kwargs, self._converted)
        return self.forward(*args, **kwargs)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.dtype is torch.bfloat16 else tensor


def moved(thing: Any, device: torch.device) -> Any:
    """Every tensor in tuples, lists, mappings and dataclasses on the device; other things as they are."""
    return exchanged(thing, lambda tensor: tensor.to(device))


def exchanged(thing: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every tensor in tuples, lists, mappings and dataclasses changed."""
    if isinstance(thing, torch.Tensor):
        return change(thing)
    kind = type(thing)
    if isinstance(thing, tuple | list):
        parts = [exchanged(one, change) for one in thing]
        return kind(*parts) if hasattr(thing, "_fields") else kind(parts)
    if isinstance(thing, dict):
        named = {key: exchanged(value, change) for key, value in thing.items()}
        return kind(**named) if is_dataclass(thing) else kind(named)  # a dataclass: transformers' outputs
    if is_dataclass(thing) and not isinstance(thing, type):
        made = copy(thing)
        for part in fields(thing):
            object.__setattr__(made, part.name, exchanged(getattr(thing, part.name), change))
        return made
    return thing


def tensors_in(thing: Any) -> Iterator[torch.Tensor]:
    """Every tensor in tuples, lists, mappings and dataclasses."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for one in thing:
            yield from tensors_in(one)
    elif isinstance(thing, Mapping):
        for one in thing.values():
            yield from tensors_in(one)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for part in fields(thing):
            yield from tensors_in(getattr(thing, part.name))
