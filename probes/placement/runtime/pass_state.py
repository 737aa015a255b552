"""What a pass may change: noted before it, so that it can be done again as if it had not begun."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch import nn

MOST_COPIED: Final = 256 << 20  # bytes of tensors of which a pass's state keeps values
_DEPTH: Final = 6  # of objects in objects that are looked at
# what a pass can't change, or what it changes of modules, which is noted by itself
_LEFT_OUT: Final = (int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module)


class PassState:
    """How inputs and buffers are before a pass: what objects hold, and which tensors are written to.

    `buffers` are those of all modules, `given` is what the pass gets. With `modules`, their attributes are
    noted, too, the values of all these tensors, in host memory, and the state of random numbers. Without, a
    tensor that was written to can't be restored.
    """

    def __init__(self, buffers: Sequence[dict[str, Any]], *given: Any, modules: Iterable[nn.Module]) -> None:
        self._undo: list[Callable[[], None]] = []
        self._tensors: list[tuple[torch.Tensor, int | None, torch.Tensor | None]] = []
        self._seen: dict[int, Any] = {}
        self._undo += [_undo_of(vars(module)) for module in modules]
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
            self._undo.append(_undo_of(thing))
        if isinstance(thing, MutableMapping):
            yield from thing.values()
        elif isinstance(thing, MutableSequence | deque | tuple | set | frozenset):
            yield from thing
        if isinstance(held := getattr(thing, "__dict__", None), dict):
            self._undo.append(_undo_of(held))
            yield from held.values()

    def _note_tensor(self, tensor: torch.Tensor) -> None:
        copy = None
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.nbytes <= self._room:
            with suppress(torch.cuda.OutOfMemoryError):  # then its values can't be restored
                copy = tensor.detach().to("cpu", copy=True)
                self._room -= tensor.nbytes
        self._tensors.append((tensor, _version(tensor), copy))

    def _note_random_numbers(self) -> None:
        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        if torch.cuda.is_initialized():
            self._undo.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))

    @property
    def is_whole(self) -> bool:
        """Whether everything that a pass may write to can be restored."""
        return all(copy is not None for _, _, copy in self._tensors)

    @property
    def is_lost(self) -> bool:
        """Whether a tensor was written to, and what it held isn't known."""
        return any(copy is None and _version(tensor) != version for tensor, version, copy in self._tensors)

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


def _undo_of(holder: Any) -> Callable[[], None]:
    """What puts the present parts of a mapping or sequence back, if it holds others then."""
    if isinstance(holder, MutableMapping):
        kept = dict(holder)

        def undo() -> None:
            for key in [key for key in holder if key not in kept]:
                del holder[key]
            for key, part in kept.items():
                if holder.get(key) is not part:
                    holder[key] = part

        return undo
    parts = list(holder)

    def put_back() -> None:
        if len(parts) != len(holder) or any(a is not b for a, b in zip(parts, holder, strict=True)):
            holder.clear()
            holder.extend(parts)

    return put_back
