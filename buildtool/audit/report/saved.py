"""A saved JSON report, read back. Its text is trusted no more than an image's: controls are escaped again."""

import dataclasses
import errno
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from buildtool.audit.report.schema import SCHEMA_VERSION, AuditReport
from buildtool.errors import DataError
from probes.shared import files
from probes.shared.invocation import host_command
from probes.shared.quoting import terminal

MAX_REPORT_BYTES = 64 << 20
_LARGEST = (1 << 63) - 1  # of a count of bytes or of anything else

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def read_report(path: Path) -> AuditReport:
    """The report in a file. Raises DataError for one that can't be read or isn't a report."""
    try:
        text = files.read_text(path, most_bytes=MAX_REPORT_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DataError(
                f"{path} is larger than any audit report ({MAX_REPORT_BYTES >> 20} MiB)"
            ) from error
        raise DataError(f"can't read {path}: {error.strerror or error}", "check the path") from error
    except UnicodeDecodeError as error:
        raise _not_a_report(str(path), "not UTF-8 text") from error
    return parse_report(text, str(path))


def parse_report(text: str, label: str) -> AuditReport:
    """What `schema.to_json` wrote. Raises DataError naming the place of what is wrong."""
    try:
        document: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_a_report(label, f"not JSON ({error})") from error
    top = _object(document, label)
    if top.get("schema_version") != SCHEMA_VERSION:
        raise _not_a_report(
            label, f"schema_version is {top.get('schema_version')!r}, this program reads {SCHEMA_VERSION}"
        )
    return typing.cast(AuditReport, _decode(AuditReport, _fields(top, label), label))


def _fields(top: dict[str, Json], label: str) -> dict[str, Json]:
    """The report's keys under the names that the dataclasses have."""
    gpu_code = _object(top.get("gpu_code"), f"{label}: gpu_code")
    findings = [
        _object(row, f"{label}: findings") for row in _list(top.get("findings"), f"{label}: findings")
    ]
    directories = [
        _object(row, f"{label}: top_directories")
        for row in _list(top.get("top_directories"), f"{label}: top_directories")
    ]
    return {
        **top,
        "gpu_code": gpu_code.get("by_target"),
        "gpu_in_libraries": gpu_code.get("in_libraries"),
        "findings": [{**row, "unpacked_bytes": row.get("bytes")} for row in findings],
        "top_directories": [[row.get("path"), row.get("visible_bytes")] for row in directories],
    }


def _decode(hint: object, value: Json, where: str) -> object:
    """A value of the hinted type. Keys that a dataclass lacks are passed over: newer reports have more."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _decode(inner[0], value, where)  # the other one is None
    if origin is tuple:
        items = _list(value, where)
        hints = inner[:1] * len(items) if Ellipsis in inner else inner
        return tuple(_decode(*pair, f"{where}[{n}]") for n, pair in enumerate(zip(hints, items, strict=True)))
    if origin is Mapping:
        return {
            terminal(key): _decode(inner[1], item, f"{where}.{terminal(key)}")
            for key, item in _object(value, where).items()
        }
    return _decode_class(hint, value, where)


def _decode_class(hint: object, value: Json, where: str) -> object:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, _object(value, where), where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        allowed = [member.value for member in hint]
        if value not in allowed:
            raise _not_a_report(where, f"{value!r} is none of {', '.join(allowed)}")
        return hint(value)
    if type(value) is not hint or (isinstance(value, int) and not 0 <= value <= _LARGEST):
        raise _not_a_report(where, f"{str(value)[:60]!r} where {getattr(hint, '__name__', hint)} belongs")
    return terminal(value, keep="\n\t") if isinstance(value, str) else value


def _decode_dataclass(shape: type, value: dict[str, Json], where: str) -> object:
    hints = typing.get_type_hints(shape)
    found = {}
    for field in dataclasses.fields(shape):
        if field.name in value:
            found[field.name] = _decode(hints[field.name], value[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise _not_a_report(where, f"{field.name} is missing")
    return shape(**found)


def _object(value: Json, where: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise _not_a_report(where, "an object belongs here")
    return value


def _list(value: Json, where: str) -> list[Json]:
    if not isinstance(value, list):
        raise _not_a_report(where, "a list belongs here")
    return value


def _not_a_report(where: str, why: str) -> DataError:
    return DataError(
        terminal(f"{where}: {why}: this is no audit report"),
        f"write one with: {host_command()} audit IMAGE --json FILE",
    )
