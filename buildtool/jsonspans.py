"""Finds values in a JSON text by position, without parsing what isn't needed. Every fault is a ValueError."""

import json
import re
from collections.abc import Iterator

from buildtool.jsontext import TOKEN, after_string

_BLANK = re.compile(r"[ \t\n\r]*+")
_SCALAR = re.compile(r"[^\s,\]}{\[\":]++")
_DECODER = json.JSONDecoder()
Span = tuple[int, int]  # of a value in its text: first character, and the one behind the last


def members(text: str) -> Iterator[tuple[str, Span]]:
    """The keys of a text's object, each with the position of its value; values aren't parsed, however deep.

    Raises ValueError where the object's own level isn't JSON.
    """
    at = _expect(text, 0, "{")
    while text[at : at + 1] != "}":
        key, at = _string(text, at)
        start = _expect(text, at, ":")
        end = _after_value(text, start)
        yield key, (start, end)
        at = _blank(text, end)
        if text[at : at + 1] != "}":
            at = _expect(text, at, ",")


def strings(text: str, span: Span) -> Iterator[str]:
    """The strings of an array of strings, or the single string, at that position. Raises ValueError."""
    at = span[0]
    if text[at] == '"':
        yield _string(text, at)[0]
        return
    at = _expect(text, at, "[")
    while text[at] != "]":
        value, at = _string(text, at)
        yield value
        at = _blank(text, at)
        if text[at : at + 1] != "]":
            at = _expect(text, at, ",")


def _string(text: str, at: int) -> tuple[str, int]:
    if text[at : at + 1] != '"':
        raise ValueError(f"a string is missing at character {at:,}")
    value, end = _DECODER.raw_decode(text, at)
    return str(value), end


def _blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _expect(text: str, at: int, sign: str) -> int:
    at = _blank(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign!r} is missing at character {at:,}")
    return _blank(text, at + 1)


def _after_value(text: str, at: int) -> int:
    first = text[at : at + 1]
    if first == '"':
        return after_string(text, at + 1)
    if first and first in "{[":
        return _after_brackets(text, at)
    scalar = _SCALAR.match(text, at)
    if not scalar:
        raise ValueError(f"a value is missing at character {at:,}")
    return scalar.end()


def _after_brackets(text: str, at: int) -> int:
    level = 0
    while found := TOKEN.search(text, at):
        at = found.end()
        if found[0] == '"':
            at = after_string(text, at)
        else:
            level += 1 if found[0] in "{[" else -1
            if not level:
                return at
    raise ValueError("an object or array has no end")
