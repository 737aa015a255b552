"""JSON and back, by type hints: whatever doesn't fit is named with its place, what was expected and found."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal

import pytest

from probes.core.codec import DERIVED, Json, Misfit, decode, encode


@dataclass(frozen=True)
class Red:
    tag: ClassVar[str] = "red"
    depth: int = 3


@dataclass(frozen=True)
class Blue:
    tag: ClassVar[str] = "blue"
    share: float


@dataclass(frozen=True)
class Box:
    name: str
    count: int
    share: float
    kind: Literal["a", "b"]
    is_open: bool
    nothing: None
    sizes: tuple[int, ...]
    either: int | str | Blue | None
    paints: tuple[Red | Blue, ...]
    later: str = "as before"
    sums: int = field(default=7, metadata=DERIVED)


BOX = Box("x", 2, 0.5, "b", True, None, (1, 2), "text", (Red(4), Blue(0.25)))
TEXT: dict[str, Json] = {
    "name": "x",
    "count": 2,
    "share": 0.5,
    "kind": "b",
    "is_open": True,
    "nothing": None,
    "sizes": [1, 2],
    "either": "text",
    "paints": [{"is": "red", "depth": 4}, {"is": "blue", "share": 0.25}],
    "later": "as before",
}


def test_what_is_written_holds_each_field_and_tag_and_nothing_derived() -> None:
    assert encode(BOX) == TEXT
    assert decode(Box, TEXT) == BOX


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("share", 1, 1.0),  # JSON has one kind of number
        ("either", 5, 5),
        ("either", None, None),
        ("either", {"is": "blue", "share": 1.5}, Blue(1.5)),
        ("sizes", [], ()),
        ("is_open", False, False),
    ],
)
def test_each_alternative_of_a_field_is_read(key: str, value: Json, read: object) -> None:
    found = getattr(decode(Box, TEXT | {key: value}), key)
    assert found == read
    assert type(found) is type(read)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("name", 1, "box.name: expected str, found '1'"),
        ("count", 2.5, "box.count: expected int, found '2.5'"),
        ("count", None, "box.count: expected int, found 'None'"),
        ("share", "1", "box.share: expected float, found '1'"),
        ("share", True, "box.share: expected float, found 'True'"),
        ("kind", "c", "box.kind: expected one of a, b, found 'c'"),
        ("is_open", 0, "box.is_open: expected bool, found '0'"),
        ("nothing", 0, "box.nothing: expected NoneType, found '0'"),
        ("sizes", {"0": 1}, "box.sizes: expected a list, found"),
        ("sizes", [1, "2"], "box.sizes[1]: expected int, found '2'"),
        ("either", [1], "box.either: expected int or str or Blue or NoneType, found '[1]'"),
        ("either", {"is": "red"}, "box.either: expected an object whose \"is\" is one of blue, found 'red'"),
        ("either", {}, "box.either: expected an object whose \"is\" is one of blue, found 'None'"),
        ("paints", [{"is": "green"}], 'box.paints[0]: expected an object whose "is" is one of red, blue'),
        ("paints", [{"is": "blue"}], "box.paints[0]: the key `share` is missing"),
        ("paints", ["red"], "box.paints[0]: expected Red or Blue, found 'red'"),
        ("name", ["y" * 99], f'found "[\'{"y" * 58}"'),  # no more than 60 characters of it
    ],
)
def test_a_value_that_does_not_fit_is_named(key: str, value: Json, message: str) -> None:
    with pytest.raises(Misfit) as caught:
        decode(Box, TEXT | {key: value}, "box")
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "text", 5])
def test_what_is_no_object_is_refused(value: Json) -> None:
    with pytest.raises(Misfit, match="report: expected an object"):
        decode(Box, value)


def test_fields_with_a_default_may_be_missing_and_others_are_named_in_order() -> None:
    kept = {key: TEXT[key] for key in TEXT if key != "later"}
    assert decode(Box, kept) == BOX
    assert decode(Red, {}) == Red(3)
    with pytest.raises(Misfit, match="the key `name` is missing"):
        decode(Box, {"later": "x"})


def test_a_derived_field_is_not_read_from_a_file_either() -> None:
    assert decode(Box, TEXT | {"sums": 99}) == BOX


@pytest.mark.parametrize("value", [{"a": 1}, [1], {1}, b"x", Red, (Red(), object())])
def test_what_has_no_json_form_is_a_programming_error(value: object) -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        encode(value)


class Shade(Enum):
    """One of two."""

    LIGHT = "light"
    DARK = "dark"


@dataclass(frozen=True)
class Drawer:
    """What the host's files need beside what reports need."""

    shade: Shade
    counts: Mapping[str, int]
    pair: tuple[str, int]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shade": "grey"}, "report.shade: expected one of light, dark, found 'grey'"),
        ({"shade": ["light"]}, "report.shade: expected one of"),
        ({"counts": {"a": "1"}}, "report.counts.a: expected int, found '1'"),
        ({"counts": []}, "report.counts: expected an object"),
        ({"pair": ["a"]}, "report.pair: expected 2 items"),
        ({"pair": ["a", 1, 2]}, "report.pair: expected 2 items"),
        ({"pair": ["a", "b"]}, "report.pair[1]: expected int"),
        ({"pair": 1}, "report.pair: expected a list"),
    ],
)
def test_enums_mappings_and_pairs_are_read_as_strictly_as_the_rest(
    change: dict[str, Json], message: str
) -> None:
    kept: dict[str, Json] = {"shade": "dark", "counts": {"a": 1}, "pair": ["b", 2]}
    assert decode(Drawer, kept) == Drawer(Shade.DARK, {"a": 1}, ("b", 2))
    assert encode(Shade.DARK) == "dark"
    with pytest.raises(Misfit, match=re.escape(message)):
        decode(Drawer, kept | change)
