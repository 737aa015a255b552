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
from functools import cache, partial
from typing import TypeAlias, TypeVar

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
T = TypeVar("T")
Number = TypeVar("Number", int, float)
Reader: TypeAlias = Callable[[object, str], object]  # of a value and its place; raises Misfit

TAG = "is"
DEPTH = 64  # levels of JSON; no document that is read here needs more than eight
MOST_VALUES = 5_000_000  # of a text from outside: 400 MB in memory; a full run on an H200 has 66,000
LARGEST = 1e30  # of a measured figure: none comes near, and squares, products and sums stay finite
DERIVED = types.MappingProxyType({"derived": True})  # metadata of a field that a file doesn't hold

_NUMBER = (int, float)
_SCALAR = (float, str, int)  # a bool is an int
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
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError(f"an object has the key {doubled_key(pairs)[:40]!r} twice")
    return value


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
            if isinstance(item, list):
                below += item
            elif not isinstance(item, _SCALAR) and isinstance(item, Mapping):
                below += item.values()
        if not below:
            return
        level = below
    raise TooDeep(f"nested more than {DEPTH} levels deep")


def check_figures(value: Json) -> None:
    """No figure of a measurement is beyond LARGEST. Raises Misfit for one that is."""
    if isinstance(value, _NUMBER):
        if not abs(value) <= LARGEST:
            raise Misfit(f"a figure is beyond {LARGEST:g}")
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_figures(item)


def encode(value: object) -> Json:
    """The JSON form of a dataclass, enum, tuple or plain value. Raises TypeError for anything else."""
    if value is None or isinstance(value, _SCALAR):
        return typing.cast(Json, value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, Enum):
        return encode(value.value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    tag = getattr(type(value), "tag", None)
    fields = {field.name: encode(getattr(value, field.name)) for field in kept_fields(type(value))}
    return {TAG: tag, **fields} if tag else fields


def to_json(value: object) -> str:
    """The text of a value's JSON form, as files hold it. Raises TypeError or ValueError if it has none."""
    return json.dumps(encode(value), indent=1, allow_nan=False) + "\n"


@cache
def kept_fields(shape: type) -> tuple[dataclasses.Field[typing.Any], ...]:
    """The fields of a dataclass that a file holds."""
    return tuple(f for f in dataclasses.fields(shape) if f.metadata != DERIVED)


def decode(shape: type[T], value: object, where: str = "report") -> T:
    """The value of type `shape` that `encode` had written. Keys that the shape lacks are ignored.
    A field with a default may be missing: files written before it was added can still be read.

    Raises Misfit naming the place (`report.runs[2].records[0].wall_s`), what was expected and found.
    """
    return typing.cast(T, _reader(shape)(value, where))


def _reader(hint: object) -> Reader:
    """The function that reads a value of this type, given the value and its place."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return partial(_one_of, inner)
    if origin in (typing.Union, types.UnionType):
        return partial(_union, tuple(map(_member, inner)))
    if origin is tuple:
        if Ellipsis in inner:
            return partial(_list, _reader(inner[0]))
        return partial(_row, tuple(map(_reader, inner)))
    if origin in (Mapping, dict):
        return partial(_mapping, _reader(inner[1]))
    return _named(hint)


def _named(hint: object) -> Reader:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return partial(_dataclass, hint)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return partial(_enum, hint)
    return _PLAIN.get(hint) or partial(_nothing, hint)


def _mapping(item: Reader, value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _mismatch("an object", value, where)
    return {key: item(each, f"{where}.{key[:_SHOWN_CHARS]}") for key, each in value.items()}


def _list(item: Reader, value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise _mismatch("a list", value, where)
    if item is _figure and _only_figures(value):  # nearly all of a report; it needs no place for each
        return tuple(value)
    return tuple(item(each, f"{where}[{i}]") for i, each in enumerate(value))


def _only_figures(value: list[typing.Any]) -> bool:
    return {float}.issuperset(map(type, value)) and all(map(math.isfinite, value))


def _row(items: tuple[Reader, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise _mismatch("a list", value, where)
    if len(items) != len(value):
        raise _mismatch(f"{len(items)} items", value, where)
    return tuple(item(value[i], f"{where}[{i}]") for i, item in enumerate(items))


def _one_of(allowed: tuple[object, ...], value: object, where: str) -> object:
    if value not in allowed:
        raise _mismatch(f"one of {', '.join(map(str, allowed))}", value, where)
    return value


def _enum(kind: type[Enum], value: object, where: str) -> Enum:
    return kind(_one_of(tuple(member.value for member in kind), value, where))


@dataclasses.dataclass(frozen=True)
class _Member:
    """One type of a union."""

    name: str
    tag: object  # None without one
    is_object: bool
    read: Reader


def _member(hint: object) -> _Member:
    name = getattr(hint, "__name__", str(hint))
    return _Member(
        name, getattr(hint, "tag", None), is_object=dataclasses.is_dataclass(hint), read=_reader(hint)
    )


def _union(members: tuple[_Member, ...], value: object, where: str) -> object:
    if isinstance(value, dict):
        for member in members:
            if member.is_object and member.tag == value.get(TAG):
                return member.read(value, where)
        tags = [str(member.tag) for member in members if member.tag is not None]
        raise _mismatch(f'an object whose "{TAG}" is one of {", ".join(tags)}', value.get(TAG), where)
    for member in members:
        if member.tag is None:
            try:
                return member.read(value, where)
            except Misfit:
                continue
    raise _mismatch(" or ".join(member.name for member in members), value, where)


def _dataclass(shape: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _mismatch("an object", value, where)
    parts = _parts(shape)
    for name, _, needed in parts:
        if needed and name not in value:
            raise Misfit(f"{where}: the key `{name}` is missing")
    return shape(**{name: read(value[name], f"{where}.{name}") for name, read, _ in parts if name in value})


@cache
def _parts(shape: type) -> tuple[tuple[str, Reader, bool], ...]:
    """Name, reader and need of each field: made once, a report holds thousands of some classes.

    Hints themselves are no keys of a cache: `int | float` equals `float | int`, which reads 1 as 1.0.
    """
    hints = typing.get_type_hints(shape)
    return tuple(
        (f.name, _reader(hints[f.name]), f.default is f.default_factory is dataclasses.MISSING)
        for f in kept_fields(shape)
    )


def _figure(value: object, where: str) -> float:
    if type(value) not in (int, float):
        raise _mismatch("float", value, where)
    return float(_finite(typing.cast(float, value), where))


def _whole(value: object, where: str) -> int:
    if type(value) is not int:
        raise _mismatch("int", value, where)
    return _finite(value, where)


def _same(kind: type, value: object, where: str) -> object:
    if type(value) is not kind:
        raise _mismatch(kind.__name__, value, where)
    return value


def _nothing(hint: object, value: object, where: str) -> typing.NoReturn:
    raise _mismatch(getattr(hint, "__name__", str(hint)), value, where)


_PLAIN: Mapping[object, Reader] = {
    float: _figure,
    int: _whole,
    **{kind: partial(_same, kind) for kind in (str, bool, types.NoneType)},
}


def _finite(value: Number, where: str) -> Number:
    """A number that a double can hold: 1e999 and integers of 400 digits are valid JSON, too."""
    if not abs(value) <= sys.float_info.max:  # also false for what isn't a number
        raise _mismatch("a finite number", value, where)
    return value


def _mismatch(expected: str, value: object, where: str) -> Misfit:
    return Misfit(f"{where}: expected {expected}, found {shown(value)}")


def shown(value: object) -> str:
    """The beginning of a value that doesn't fit, for a message."""
    return repr(str(value)[:_SHOWN_CHARS])
