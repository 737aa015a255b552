"""Frozen dataclasses to JSON and back, guided by their type hints: the one way of both programs.

A class with a `tag` can stand in a union: the tag is written under the key "is". `load` reads text from
outside within bounds: depth, numbers, keys.
"""

import dataclasses
import json
import math
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import TypeAlias, TypeVar

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")
Number = TypeVar("Number", int, float)

TAG = "is"
DEPTH = 64  # levels of JSON; no document that is read here needs more than eight
MOST_VALUES = 5_000_000  # of a text from outside: 400 MB in memory; a full run on an H200 has 66,000
LARGEST = 1e30  # of a measured figure: none comes near, and squares, products and sums stay finite
DERIVED = types.MappingProxyType({"derived": True})  # metadata of a field that a file doesn't hold


_NUMBER_CHARS = 400  # longer numbers are beyond 64 bits and, except for their last digits, beyond a double
_SHOWN_CHARS = 60  # of a value or a key in a message


class Misfit(ValueError):
    """A JSON value that isn't of the shape asked for; the message names its place."""


class TooDeep(ValueError):
    """More levels than `DEPTH`."""


def load(text: bytes | str) -> Json:
    """A JSON value, without NaN, keys given twice, deep nesting or endless lists. Raises ValueError."""
    words = text if isinstance(text, str) else text.decode("utf-8")
    if sum(map(words.count, ",[{")) > MOST_VALUES:  # an upper bound, before memory is taken for them
        raise ValueError(f"more than {MOST_VALUES:,} values")
    return parsed(words, _unique)


def parsed(text: str, members: Callable[[list[tuple[str, typing.Any]]], object]) -> Json:
    """A JSON value whose objects `members` makes of their keys and values. Raises TooDeep and ValueError."""
    try:
        value = json.loads(
            text, object_pairs_hook=members, parse_constant=_refuse, parse_int=_integer, parse_float=_float
        )
    except RecursionError as error:
        raise TooDeep(f"nested more than {DEPTH} levels deep") from error
    _check_depth(value)
    return typing.cast(Json, value)


def doubled_key(pairs: Sequence[tuple[str, object]]) -> str:
    """The first key that occurs more than once. Raises StopIteration where there is none."""
    counted = Counter(key for key, _ in pairs)
    return next(key for key, times in counted.items() if times > 1)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object has the key {doubled_key(pairs)[:40]!r} twice")
    return found


def _refuse(word: str) -> typing.NoReturn:
    raise ValueError(f"{word} is not JSON")


def _integer(digits: str) -> int | float:
    """A long integer becomes infinite: Python's own conversion takes quadratic time, and nothing needs it."""
    if len(digits) <= _NUMBER_CHARS:
        return int(digits)
    return -math.inf if digits.startswith("-") else math.inf


def _float(digits: str) -> float:
    return float(digits) if len(digits) <= _NUMBER_CHARS else math.nan


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list):
                below += item
        if not below:
            return
        level = below
    raise TooDeep(f"nested more than {DEPTH} levels deep")


def check_figures(value: Json) -> None:
    """No figure of a measurement is beyond LARGEST. Raises Misfit for one that is."""
    if isinstance(value, dict):
        for item in value.values():
            check_figures(item)
    elif isinstance(value, list):
        for item in value:
            check_figures(item)
    elif isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise Misfit(f"a figure is beyond {LARGEST:g}")


def encode(value: object) -> Json:
    """The JSON form of a dataclass, enum, tuple or plain value. Raises TypeError for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return encode(value.value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    tag = getattr(type(value), "tag", None)
    fields = {field.name: encode(getattr(value, field.name)) for field in kept_fields(type(value))}
    return {TAG: tag, **fields} if tag else fields


def kept_fields(shape: type) -> tuple[dataclasses.Field[typing.Any], ...]:
    """The fields of a dataclass that a file holds."""
    return tuple(f for f in dataclasses.fields(shape) if f.metadata != DERIVED)


def decode(shape: type[T], value: object, where: str = "report") -> T:
    """The value of type `shape` that `encode` had written. Keys that the shape lacks are ignored.
    A field with a default may be missing: files written before it was added can still be read.

    Raises Misfit naming the place (`report.runs[2].records[0].wall_s`), what was expected and found.
    """
    return typing.cast(T, _decode(shape, value, where))


def _decode(hint: object, value: object, where: str) -> object:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return _one_of(typing.get_args(hint), value, where)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(hint), value, where)
    if origin is tuple:
        return _tuple(typing.get_args(hint), value, where)
    if origin in (Mapping, dict):
        if not isinstance(value, dict):
            raise _mismatch("an object", value, where)
        item = typing.get_args(hint)[1]
        return {key: _decode(item, each, f"{where}.{key[:_SHOWN_CHARS]}") for key, each in value.items()}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where)
    return _plain(hint, value, where)


def _tuple(items: tuple[object, ...], value: object, where: str) -> tuple[object, ...]:
    """Of any length for a hint with an ellipsis, else of the hint's own."""
    if not isinstance(value, list):
        raise _mismatch("a list", value, where)
    hints = items[:1] * len(value) if Ellipsis in items else items
    if len(hints) != len(value):
        raise _mismatch(f"{len(hints)} items", value, where)
    return tuple(_decode(hint, value[i], f"{where}[{i}]") for i, hint in enumerate(hints))


def _one_of(allowed: tuple[object, ...], value: object, where: str) -> object:
    if value not in allowed:
        raise _mismatch(f"one of {', '.join(map(str, allowed))}", value, where)
    return value


def _union(members: tuple[object, ...], value: object, where: str) -> object:
    if isinstance(value, dict):
        for member in members:
            if dataclasses.is_dataclass(member) and getattr(member, "tag", None) == value.get(TAG):
                return _decode(member, value, where)
        tags = [str(member.tag) for member in members if hasattr(member, "tag")]
        raise _mismatch(f'an object whose "{TAG}" is one of {", ".join(tags)}', value.get(TAG), where)
    for member in members:
        if not hasattr(member, "tag"):
            try:
                return _decode(member, value, where)
            except Misfit:
                continue
    raise _mismatch(" or ".join(getattr(m, "__name__", str(m)) for m in members), value, where)


def _dataclass(shape: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _mismatch("an object", value, where)
    hints = _hints(shape)
    fields = kept_fields(shape)
    missing = [
        f.name
        for f in fields
        if f.name not in value and f.default is f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise Misfit(f"{where}: the key `{missing[0]}` is missing")
    return shape(
        **{
            f.name: _decode(hints[f.name], value[f.name], f"{where}.{f.name}")
            for f in fields
            if f.name in value
        }
    )


_hints = cache(typing.get_type_hints)


def _plain(hint: object, value: object, where: str) -> object:
    if hint is float and type(value) in (int, float):
        return float(_finite(typing.cast(float, value), where))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(_one_of(tuple(member.value for member in hint), value, where))
    if hint is types.NoneType and value is None:
        return None
    if hint is int and type(value) is int:
        return _finite(value, where)
    if hint in (str, bool) and type(value) is hint:
        return value
    raise _mismatch(getattr(hint, "__name__", str(hint)), value, where)


def _finite(value: Number, where: str) -> Number:
    """A number that a double can hold: 1e999 and integers of 400 digits are valid JSON, too."""
    if not abs(value) <= sys.float_info.max:  # also false for what isn't a number
        raise _mismatch("a finite number", value, where)
    return value


def _mismatch(expected: str, found: object, where: str) -> Misfit:
    return Misfit(f"{where}: expected {expected}, found {shown(found)}")


def shown(value: object) -> str:
    """The beginning of a value that doesn't fit, for a message."""
    return repr(str(value)[:_SHOWN_CHARS])
