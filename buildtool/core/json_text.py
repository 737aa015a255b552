"""JSON text from outside as Docker and containerd read it, and parts of it that are read without the rest.

Every fault is a ValueError. `load_as_engines_do` accepts what Go's encoding/json accepts and lists what was
unusual; `probes.core.codec.load` is strict.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from string import ascii_lowercase, ascii_uppercase

from probes.core.codec import DEPTH, TooDeep, doubled_key, parsed

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

ENGINE_DEPTH = 10_000  # levels that Go's encoding/json reads
_TOKEN = re.compile(r'[{}\[\]"]')
_STRING_END = re.compile(r'["\\]')
_BLANK = re.compile(r"[ \t\n\r]*+")
_SCALAR = re.compile(r"[^\s,\]}{\[\":]++")
_DECODER = json.JSONDecoder()
Span = tuple[int, int]  # of a value in its text: first character, and the one behind the last


@dataclass(frozen=True)
class Loaded:
    """A value, and a sentence for each thing that a strict reader would refuse."""

    value: Json
    notes: tuple[str, ...]


def load_as_engines_do(text: bytes) -> Loaded:
    """A JSON value as Docker and containerd read it.

    The last of several equal keys counts, objects under equal keys are merged, bytes that aren't UTF-8 become
    U+FFFD, and deeper nesting than `DEPTH` levels is replaced by null. Keys stay as they are written; see
    `spellings` for those that name fields. Raises ValueError for what the engines refuse, too.
    """
    notes: list[str] = []
    doubled: list[str] = []
    words = text.decode("utf-8", "replace")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        notes.append(f"it isn't UTF-8 from byte {error.start:,} on")
    try:
        value = _parsed(words, doubled)
    except TooDeep:
        notes.append(f"it is nested more than {DEPTH} levels deep; deeper levels were left out")
        doubled.clear()
        value = _parsed(_cut_below(words, DEPTH), doubled)
    if doubled:
        notes.append(f"it has the key {doubled[0][:40]!r} twice in one object; the last one counts")
    return Loaded(value, tuple(notes))


def joined(pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    """An object from its members, as Go's encoding/json reads equal keys. The last one's place counts."""
    return _add({}, pairs)


def merged(earlier: Json, later: Json) -> Json:
    """What Go's encoding/json makes of two values of one field: merged objects, else the later value.

    The later one's members are added to `earlier`, so many small objects after a large one take linear time.
    """
    if isinstance(earlier, dict) and isinstance(later, Mapping):
        return _add(earlier, later.items())
    return later


def _add(members: dict[str, Json], pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    for key, value in pairs:
        members[key] = merged(members.pop(key), value) if key in members else value
    return members


# Go's folding of letter case, for names of fields that are ASCII: K and long s are the only other letters
_FOLDED = str.maketrans(f"{ascii_uppercase}\u212a\u017f", f"{ascii_lowercase}ks")


def folded(key: str) -> str:
    """A key in the form that is equal for all keys that Go's encoding/json takes for one field."""
    return key.translate(_FOLDED)


def spellings(names: Iterable[str]) -> dict[str, list[str]]:
    """The keys of an object by their `folded` form, in the object's order.

    Engines take all keys of one form for one field. Keys of maps (labels, annotations) keep their case.
    """
    by_form: dict[str, list[str]] = {}
    for name in names:
        by_form.setdefault(folded(name), []).append(name)
    return by_form


def with_names(value: Json, fields: Mapping[str, Sequence[str]]) -> Json:
    """A JSON value in which these fields, if it is an object, have only their right names.

    Each field comes with those of the object that is its value.
    """
    if not isinstance(value, dict):
        return value
    by_form = spellings(value)
    for field, inner in fields.items():
        names = by_form.get(folded(field), [])
        if any(name != field for name in names):
            value[field] = reduce(merged, [value.pop(name) for name in names])
        if field in value:
            value[field] = with_names(value[field], dict.fromkeys(inner, ()))
    return value


def _parsed(text: str, doubled: list[str]) -> Json:
    def noting(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        members = joined(pairs)
        if len(members) != len(pairs) and not doubled:
            doubled.append(doubled_key(pairs))
        return members

    return parsed(text, noting)


def _cut_below(text: str, depth: int) -> str:
    """The text with every object and array below `depth` levels replaced by null."""
    kept: list[str] = []
    level = at = 0  # `at`: end of what is kept or was cut
    position = 0
    while token := _TOKEN.search(text, position):
        position = token.end()
        if token[0] == '"':
            position = _after_string(text, position)
        elif token[0] in "{[":
            level += 1
            if level == depth:
                kept += text[at : position - 1], "null"
            if level > ENGINE_DEPTH:
                raise ValueError(f"nested more than {ENGINE_DEPTH:,} levels deep")
        else:
            if level == depth:
                at = position
            level -= 1
    if level:
        raise ValueError("an object or array has no end")
    return "".join([*kept, text[at:]])


def _after_string(text: str, position: int) -> int:
    """Where a string ends whose first character is at `position`; the text's length if it has no end."""
    while end := _STRING_END.search(text, position):
        if end[0] == '"':
            return end.end()
        position = end.end() + 1
    return len(text)


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
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _expect(text: str, at: int, sign: str) -> int:
    at = _blank(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign!r} is missing at character {at:,}")
    return _blank(text, at + 1)


def _after_value(text: str, at: int) -> int:
    first = text[at : at + 1]
    if first == '"':
        return _after_string(text, at + 1)
    if first and first in "{[":
        return _after_brackets(text, at)
    scalar = _SCALAR.match(text, at)
    if not scalar:
        raise ValueError(f"a value is missing at character {at:,}")
    return scalar.end()


def _after_brackets(text: str, at: int) -> int:
    level = 0
    while token := _TOKEN.search(text, at):
        at = token.end()
        if token[0] == '"':
            at = _after_string(text, at)
        else:
            level += 1 if token[0] in "{[" else -1
            if not level:
                return at
    raise ValueError("an object or array has no end")


def why_unread(error: Exception) -> str:
    """What is wrong with a text of ours that can't be read back, in words rather than Python's names."""
    match error:
        case UnicodeDecodeError():
            return "not UTF-8 text"
        case json.JSONDecodeError():
            return f"not JSON: {error}"
        case KeyError():
            return f"the key `{error.args[0]}` is missing"
        case OSError() | ValueError():
            return str(error)
        case _:
            return "a list or an object is expected where it has something else"
