"""What a pass may change: noted before it, so that it can be done again as if it had not begun."""

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from probes.placement.attributes import has_parts, held_by, parts_of, undo_of

_SMALL: Final = 1 << 20  # bytes of an inference tensor that is copied before each pass
MOST_COPIED: Final = 256 << 20  # bytes of tensors of which a pass's state keeps values
_DEPTH: Final = 6  # of objects in objects that are looked at
# what a pass can't change, or what it changes of modules, which is noted by itself
_LEFT_OUT: Final = (int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module)


class PassState:
    """How inputs and buffers are before a pass: what objects hold, and which tensors are written to.

    `buffers` are those of all modules, `given` is what the pass gets: tensors, and containers of them. What
    other objects hold (a cache of keys and values) isn't noted, or it would be kept alive meanwhile: such a
    pass can't be undone. With `modules`, their attributes are noted, too, the values of all these tensors, in
    host memory, and the state of random numbers of `device`. Without, a tensor that was written to can't be
    restored.
    """

    def __init__(
        self,
        buffers: Sequence[dict[str, Any]],
        *given: Any,
        modules: Sequence[nn.Module],
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._has_objects = False
        self._random: tuple[torch.Tensor, ...] = ()
        self._held = [(holder, parts_of(holder)) for holder in held_by(modules)] if modules else []
        self._undo: list[Callable[[], None]] = []
        self._tensors: list[tuple[torch.Tensor, int | None, torch.Tensor | None]] = []
        self._seen: dict[int, Any] = {}
        self._undo += [undo_of(holder) for holder, _ in self._held] if modules else []
        self._room = MOST_COPIED if self._undo else -1
        if self._undo:
            self._note_random_numbers()
        self._note_buffers(buffers)
        for thing in given:
            if type(thing) is torch.Tensor:
                self._note_tensor(thing)
            else:
                self._note(thing, 0)

    def _note_buffers(self, buffers: Sequence[dict[str, Any]]) -> None:
        """In each pass, so without the detours that anything else needs."""
        held = [(holder, tuple(holder.items())) for holder in buffers]
        self._undo.append(partial(_put_back_all, held))
        tensors = [tensor for _, items in held for _, tensor in items if tensor is not None]
        if self._room < 0:
            self._tensors += [(tensor, _version(tensor), None) for tensor in tensors]
        else:
            for tensor in tensors:
                self._note_tensor(tensor)

    def _note(self, thing: Any, depth: int) -> None:
        if isinstance(thing, _LEFT_OUT) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, torch.Tensor):
            self._note_tensor(thing)
        elif depth <= _DEPTH:
            for part in self._parts(thing):
                self._note(part, depth + 1)

    def _parts(self, thing: Any) -> Iterator[Any]:
        """What it holds. What may be changed there is noted."""
        if isinstance(thing, MutableMapping | MutableSequence | deque):
            self._undo.append(undo_of(thing))
        if isinstance(thing, MutableMapping):
            yield from thing.values()
        elif isinstance(thing, MutableSequence | deque | tuple | set | frozenset):
            yield from thing
        else:
            self._has_objects = True

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        copy, version = None, _version(tensor)
        if self._room < 0 and version is None and tensor.nbytes <= _SMALL and not tensor.is_meta:
            copy = tensor.clone()  # torch doesn't count when it is written to
        elif tensor.layout is torch.strided and not tensor.is_meta and tensor.nbytes <= self._room:
            with suppress(torch.cuda.OutOfMemoryError):  # then its values can't be restored
                copy = tensor.detach().to("cpu", copy=True)
                self._room -= tensor.nbytes
        self._tensors.append((tensor, version, copy))

    def _note_random_numbers(self) -> None:
        self._random = _random_state(self._device)
        self._undo.append(partial(_set_random_state, self._random, self._device))

    @property
    def left_modules_alone(self) -> bool:
        """Whether no attribute of a module, or list in one, was changed since, and no random number drawn."""
        same = all(has_parts(holder, before) for holder, before in self._held)
        now = _random_state(self._device) if self._random else ()
        return same and all(map(torch.equal, self._random, now))

    @property
    def is_whole(self) -> bool:
        """Whether everything that a pass may write to can be restored."""
        return not self._has_objects and all(copy is not None for _, _, copy in self._tensors)

    @property
    def is_lost(self) -> bool:
        """Whether a tensor was written to, or may have been, and what it held isn't known."""
        return self._has_objects or any(
            copy is None and (version is None or _version(tensor) != version)
            for tensor, version, copy in self._tensors
        )

    def restore(self) -> None:
        """Undo what a pass that failed has done so far. It may be undone again after another one."""
        for undo in self._undo:
            undo()
        with torch.no_grad():
            for number, (tensor, version, copy) in enumerate(self._tensors):
                if copy is not None and (version is None or _version(tensor) != version):
                    with torch.inference_mode(tensor.is_inference()):
                        tensor.copy_(copy)
                    self._tensors[number] = tensor, _version(tensor), copy


def _random_state(device: torch.device | None) -> tuple[torch.Tensor, ...]:
    on_gpu = torch.cuda.is_initialized() and device is not None and device.type == "cuda"
    return (torch.get_rng_state(), *((torch.cuda.get_rng_state(device),) if on_gpu and device else ()))


def _set_random_state(states: tuple[torch.Tensor, ...], device: torch.device | None) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and device is not None:
        torch.cuda.set_rng_state(states[1], device)


def _version(tensor: torch.Tensor) -> int | None:
    """How often it was written to; None for an inference tensor, of which torch doesn't count that."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return None


def _put_back_all(held: Sequence[tuple[dict[str, Any], tuple[tuple[str, Any], ...]]]) -> None:
    for holder, items in held:
        if len(holder) != len(items) or any(holder.get(key) is not tensor for key, tensor in items):
            holder.clear()
            holder.update(items)
