"""What modules hold in plain attributes: caches of tensors, lists of parameters, objects with such.

Parameters, buffers and modules that are registered aren't meant: torch has those.
"""

import gc
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch import nn

_DEPTH: Final = 6  # of containers in containers that are looked at
_MAPPINGS: Final = (dict, OrderedDict, defaultdict)  # exactly these: reading others may do anything
_SEQUENCES: Final = (list, deque)
_LEAVES: Final = (int, float, bool, str, bytes, type(None))
_REGISTERED: Final = ("_parameters", "_buffers", "_modules")
_OTHERS: Final = {"probes", "torch", *sys.stdlib_module_names}  # whose objects keep nothing of a pass
Change = Callable[[Any], Any]
_LruCache: Final = type(lru_cache(int))
_LruEntry: Final = "_lru_list_elem"  # the name of its entries' type


def held_by(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Every mapping and sequence that can be changed, in attributes of modules: of objects there, too; once.

    The attributes themselves are such a mapping.
    """
    seen: dict[int, Any] = {}
    for module in modules:
        attributes = vars(module)
        yield attributes
        for name, value in list(attributes.items()):
            if name not in _REGISTERED:
                yield from _within(value, seen, 0)


def _within(thing: Any, seen: dict[int, Any], depth: int) -> Iterator[Any]:
    holder = thing if type(thing) in (*_MAPPINGS, *_SEQUENCES, tuple) else _attributes(thing)
    if holder is None or id(thing) in seen or depth > _DEPTH:
        return
    seen[id(thing)] = thing
    if type(holder) is not tuple:
        yield holder
    for part in list(holder.values() if type(holder) in _MAPPINGS else holder):
        if type(part) not in _LEAVES:  # of which there may be very many
            yield from _within(part, seen, depth + 1)


def _attributes(thing: Any) -> Any:
    """An object's attributes, if it is one in which models keep what they compute; else None."""
    if isinstance(thing, torch.Tensor | nn.Module | ModuleType | type) or (
        type(thing).__module__.partition(".")[0] in _OTHERS and type(thing) is not SimpleNamespace
    ):
        return None
    found = getattr(thing, "__dict__", None)
    return found if type(found) is dict else None


def parts_of(holder: Any) -> Any:
    """What a mapping or sequence holds now."""
    return dict(holder) if hasattr(holder, "keys") else list(holder)


def has_parts(holder: Any, parts: Any) -> bool:
    """Whether a mapping or sequence holds these very parts and no others."""
    if isinstance(parts, dict):
        return len(holder) == len(parts) and all(holder.get(key) is part for key, part in parts.items())
    return len(holder) == len(parts) and all(a is b for a, b in zip(holder, parts, strict=True))


def undo_of(holder: Any) -> Callable[[], None]:
    """What puts the present parts of a mapping or sequence back, if it holds others then."""
    parts = parts_of(holder)

    def put_back() -> None:
        if has_parts(holder, parts):
            return
        if isinstance(parts, dict):
            for key in [key for key in holder if key not in parts]:
                del holder[key]
            for key, part in parts.items():
                if holder.get(key) is not part:
                    holder[key] = part
        else:
            holder.clear()
            holder.extend(parts)

    return put_back


def exchange(modules: Iterable[nn.Module], change: Change) -> bool:
    """Let attributes, what they hold and parameters be what `change` makes of them. Whether any is new."""
    is_new, modules = False, tuple(modules)
    for holder in [*held_by(modules), *(module._parameters for module in modules)]:
        for key in range(len(holder)) if type(holder) in _SEQUENCES else list(holder):
            value = holder[key]
            if (new := _changed(value, change)) is not value:
                holder[key], is_new = new, True
    return is_new


def _changed(value: Any, change: Change) -> Any:
    if type(value) is not tuple:
        return change(value)
    new = tuple(_changed(part, change) for part in value)
    return new if any(a is not b for a, b in zip(new, value, strict=True)) else value


def other(instead: Mapping[int, Any]) -> Change:
    """The change to other things, by the identity of those that they replace."""
    return lambda thing: instead.get(id(thing), thing)


def empty_caches(kind: type[torch.Tensor]) -> None:
    """Empty every `lru_cache` that has kept tensors of this kind, such as those of a trace."""
    if is_frozen := gc.get_freeze_count() > 0:  # servers do so: what is frozen isn't found
        gc.collect()
        gc.unfreeze()
    caches = [thing for thing in gc.get_objects() if type(thing) is _LruCache]
    if is_frozen:
        gc.freeze()
    for cache in caches:
        if any(_has(part, kind, _DEPTH) for part in gc.get_referents(cache)):
            cache.cache_clear()


def _has(thing: Any, kind: type[torch.Tensor], depth: int) -> bool:
    if isinstance(thing, kind):
        return True
    if type(thing).__name__ != _LruEntry and not isinstance(thing, (*_MAPPINGS, *_SEQUENCES, tuple)):
        thing = _attributes(thing)
    return (
        bool(depth) and thing is not None and any(_has(p, kind, depth - 1) for p in gc.get_referents(thing))
    )
