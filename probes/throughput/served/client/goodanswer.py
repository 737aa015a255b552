"""Whether an answer holds what was asked for: outputs of the protocol, with their values. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from probes.shared.codec import Json, load
from probes.throughput.served.client.httpanswer import AnswerReader
from probes.throughput.served.client.payload import value_bytes

JSON_LENGTH = b"inference-header-content-length"  # of an answer's JSON, where binary tensors follow it
READ_BYTES = 4096  # longer JSON is judged by its length alone: reading numbers takes the client's time
SHORTEST = 0.5  # of the first answer's length
_OTHER_VALUES = "with other values than an output's shape says"


@dataclass(frozen=True)
class Wanted:
    """What each answer must hold. `protocol`: outputs, one of them with `rows`, if the model takes any.

    `first_bytes`: the length of the answer before anything was timed; 0 for that one itself.
    """

    protocol: bool
    rows: int | None = None
    first_bytes: int = 0

    def outcome(self, answer: AnswerReader) -> str:
        """What an answer with status 200 lacks, alike for all that lack it; empty for a good one."""
        if answer.body_bytes < SHORTEST * self.first_bytes:
            return "status 200, but much shorter than the first answer"
        length = answer.headers.get(JSON_LENGTH, b"")
        json_bytes = int(length) if length.isdigit() else answer.body_bytes
        if not self.protocol or (self.first_bytes and json_bytes > READ_BYTES):
            return ""
        why = lacking(bytes(answer.body[:json_bytes]), answer.body_bytes - json_bytes, rows=self.rows)
        return f"status 200, but {why}" if why else ""


def lacking(document: bytes, binary_bytes: int, *, rows: int | None) -> str:
    """What an answer lacks whose JSON is `document` and is followed by that many bytes; empty for nothing."""
    try:
        found = load(document)
    except ValueError:
        return "not in JSON"
    outputs = found.get("outputs") if isinstance(found, dict) else None
    if not isinstance(outputs, list) or not outputs:
        return "without outputs"
    left, first_sizes = binary_bytes, set()
    for one in outputs:
        shape = _shape(one)
        if not isinstance(one, dict) or shape is None:
            return "with an output that has no name, datatype or shape"
        parameters = one.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if not _has_its_values(one, math.prod(shape), size):
            return _OTHER_VALUES
        left -= size if isinstance(size, int) else 0
        first_sizes |= set(shape[:1])
    if left != 0:
        return _OTHER_VALUES
    return "" if rows is None or rows in first_sizes else "with no output that has a row for each input"


def _shape(output: Json) -> list[int] | None:
    """The shape of an output that says what it is."""
    if not isinstance(output, dict) or not all(isinstance(output.get(k), str) for k in ("name", "datatype")):
        return None
    shape = output.get("shape")
    sizes = shape if isinstance(shape, list) else [None]
    whole = [size for size in sizes if type(size) is int and size >= 0]
    return whole if len(whole) == len(sizes) else None


def _has_its_values(output: Mapping[str, Json], count: int, size: Json) -> bool:
    """Whether it has as many values as its shape says: of texts in binary form the size may be any."""
    if size is None:
        return _count(output.get("data")) == count
    each = value_bytes(str(output["datatype"]))
    return isinstance(size, int) and (size == count * each if each else size >= count)


def _count(data: Json) -> int:
    """The values in a list, which may be nested as its shape is."""
    return (
        sum(_count(item) if isinstance(item, list) else 1 for item in data) if isinstance(data, list) else -1
    )
