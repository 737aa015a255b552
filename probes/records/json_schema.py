"""The JSON Schema of a file, derived from the classes that write and read it. Pure.

Keys that the schema lacks are allowed, as the reader ignores them; keys with a default may be missing.
"""

import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum

from probes.core.codec import TAG, Json, kept_fields
from probes.records.schema import READABLE, ProbeReport

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}
_UNITS = {"_bytes": "bytes", "_s": "seconds", "gb_per_s": "GB/s, 10^9 bytes per second"}


def report_schema() -> str:
    """The schema of a probe report, as its file holds it."""
    return document(
        ProbeReport,
        title="Weir probe report",
        description="What a machine's memory placement costs: settings, machine and every raw sample. "
        'Derived figures are not stored. A figure that may be {"is": "unknown", "reason": ...} is never 0.',
        versions={"schema_version": READABLE},
    )


def document(
    shape: type, *, title: str, description: str, versions: Mapping[str, Sequence[int | str]]
) -> str:
    """The schema of a class's files. `versions` has the values that a key of it may have."""
    defs: dict[str, Json] = {}
    root = _of_hint(shape, defs)
    properties = typing.cast("dict[str, dict[str, Json]]", defs[shape.__name__])["properties"]
    for key, values in versions.items():
        properties[key] = {"enum": list(values)}
    schema: dict[str, Json] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": description,
        **typing.cast("dict[str, Json]", root),
        "$defs": dict(sorted(defs.items())),
    }
    return json.dumps(schema, indent=1) + "\n"


def _of_hint(hint: object, defs: dict[str, Json]) -> Json:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of_hint(arg, defs) for arg in args]}
    if origin is tuple:
        return _of_tuple(args, defs)
    if origin in (Mapping, dict):
        return {"type": "object", "additionalProperties": _of_hint(args[1], defs)}
    return _of_named(hint, defs)


def _of_named(hint: object, defs: dict[str, Json]) -> Json:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if hint.__name__ not in defs:
            defs[hint.__name__] = {}  # placeholder while its fields are read
            defs[hint.__name__] = _of_class(hint, defs)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    return {"type": _PLAIN[typing.cast(type, hint)]}


def _of_tuple(args: Sequence[object], defs: dict[str, Json]) -> Json:
    """A list of any length, or one item for each type."""
    if Ellipsis in args:
        return {"type": "array", "items": _of_hint(args[0], defs)}
    items = [_of_hint(arg, defs) for arg in args]
    return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}


def _of_class(shape: type, defs: dict[str, Json]) -> Json:
    hints = typing.get_type_hints(shape)
    fields = kept_fields(shape)
    properties: dict[str, Json] = {f.name: _of_field(f.name, hints[f.name], defs) for f in fields}
    required: list[Json] = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    tag = getattr(shape, "tag", None)
    if tag is not None:
        properties = {TAG: {"const": tag}, **properties}
        required = [TAG, *required]
    return {
        "type": "object",
        "description": inspect.getdoc(shape),
        "required": required,
        "properties": properties,
    }


def _of_field(name: str, hint: object, defs: dict[str, Json]) -> Json:
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), None)
    schema = _of_hint(hint, defs)
    return {"description": unit, **schema} if unit and isinstance(schema, dict) else schema
