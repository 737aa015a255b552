"""Request bodies of the Open Inference Protocol, made of a model's own description. Pure.

A body is one JSON document, followed by the tensors' bytes where the server takes binary tensors (the
protocol's `binary_tensor_data` extension): numbers in JSON cost the client more than the server.
"""

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from probes.errors import UsageError

SAMPLES = 32  # different bodies, sent by turns
MOST_VALUES = 4_000_000  # of all bodies together: about a second to draw
TEXT_WORDS = 10  # of each text; a word counts as a value
MOST_IDS = 1000  # random whole numbers stay below: ids of tokens of any vocabulary
_ARRAYS = {
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}
DATATYPES = (*_ARRAYS, "BOOL", "FP16", "BF16", "BYTES")
_WORDS = (
    "profits",
    "rose",
    "fell",
    "sharply",
    "in",
    "the",
    "third",
    "quarter",
    "as",
    "demand",
    "grew",
    "slowly",
)
# inputs whose content a model checks, under the names that Hugging Face gives them
_ALL_ONES, _ALL_ZEROS = "attention_mask", "token_type_ids"


@dataclass(frozen=True)
class Tensor:
    """One input; -1 in the shape is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Body:
    """One request's body. `json_bytes` is the length of its JSON part where binary tensors follow."""

    data: bytes
    json_bytes: int | None = None


def sized(
    inputs: Sequence[Tensor], *, rows: int, dim: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor, ...]:
    """The inputs with whole shapes: `rows` where the first dimension is open, `dim` for the other open ones.

    Raises UsageError for a shape that doesn't fit, and for several rows of a model whose size is fixed.
    """
    for name in shapes.keys() - {one.name for one in inputs}:
        known = ", ".join(one.name for one in inputs)
        raise UsageError(f"--tensor names {name!r}, which isn't sent", f"the inputs are {known}")
    if rows > 1 and not any(one.shape[:1] == (-1,) for one in inputs):
        raise UsageError(
            "the model takes one input at a time: no first dimension is open", "leave --rows out"
        )
    return tuple(_sized(one, rows, dim, shapes.get(one.name)) for one in inputs)


def _sized(one: Tensor, rows: int, dim: int, given: tuple[int, ...] | None) -> Tensor:
    open_first = one.shape[:1] == (-1,)
    inner = one.shape[1:] if open_first else one.shape
    if given is not None:
        fits = len(given) == len(inner) and all(a in (-1, b) for a, b in zip(inner, given, strict=True))
        if not fits:
            raise UsageError(
                f"--tensor {one.name}:{','.join(map(str, given))} doesn't fit the model's {list(inner)}",
                "give its dimensions without the batch",
            )
        inner = given
    whole = tuple(dim if size == -1 else size for size in inner)
    return replace(one, shape=((rows,) if open_first else ()) + whole)


def bodies(inputs: Sequence[Tensor], *, seed: int, binary: bool) -> tuple[Body, ...]:
    """Bodies with fresh random values: standard normal, or ids below 1,000, or texts.

    Raises UsageError where one of them would be too large.
    """
    values = sum(math.prod(one.shape) * (TEXT_WORDS if one.datatype == "BYTES" else 1) for one in inputs)
    if values > MOST_VALUES:
        raise UsageError(
            f"one request would have {values:,} values", "choose smaller --rows, --dim or --tensor"
        )
    count = max(1, min(SAMPLES, MOST_VALUES // max(values, 1)))
    rng = random.Random(seed)
    return tuple(_body(inputs, rng, binary=binary) for _ in range(count))


def _body(inputs: Sequence[Tensor], rng: random.Random, *, binary: bool) -> Body:
    entries, tail = [], []
    for one in inputs:
        values = _values(one, rng)
        entry: dict[str, object] = {"name": one.name, "shape": list(one.shape), "datatype": one.datatype}
        if binary:
            piece = _packed(one.datatype, values)
            entry["parameters"] = {"binary_data_size": len(piece)}
            tail.append(piece)
        else:
            entry["data"] = values
        entries.append(entry)
    document: dict[str, object] = {"inputs": entries}
    if binary:
        document["parameters"] = {"binary_data_output": True}
    head = json.dumps(document, separators=(",", ":")).encode()
    return Body(head + b"".join(tail), len(head) if binary else None)


def _values(one: Tensor, rng: random.Random) -> list[float] | list[int] | list[bool] | list[str]:
    count = math.prod(one.shape)
    if one.name in (_ALL_ONES, _ALL_ZEROS):
        return [int(one.name == _ALL_ONES)] * count
    if one.datatype == "BYTES":
        return [" ".join(rng.choices(_WORDS, k=TEXT_WORDS)) for _ in range(count)]
    if one.datatype == "BOOL":
        return [rng.random() < 0.5 for _ in range(count)]
    if one.datatype in ("FP16", "BF16", "FP32", "FP64"):
        return [rng.gauss(0.0, 1.0) for _ in range(count)]
    most = 128 if one.datatype == "INT8" else 256 if one.datatype == "UINT8" else MOST_IDS
    return [rng.randrange(1, most) for _ in range(count)]


def _packed(datatype: str, values: Sequence[object]) -> bytes:
    """As the extension has it: little-endian; texts each behind their length."""
    if datatype == "BYTES":
        texts = [str(value).encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BOOL":
        return bytes(bool(value) for value in values)
    if datatype == "FP16":
        return struct.pack(f"<{len(values)}e", *values)
    if datatype == "BF16":  # the upper half of a float
        whole = struct.pack(f"<{len(values)}f", *values)
        return b"".join(whole[at + 2 : at + 4] for at in range(0, len(whole), 4))
    return struct.pack(f"<{len(values)}{_ARRAYS[datatype]}", *values)


def value_bytes(datatype: str) -> int | None:
    """The size of one value in binary form; None for texts, and for a datatype that isn't known."""
    known = {
        "BOOL": 1,
        "FP16": 2,
        "BF16": 2,
        **{name: struct.calcsize(f"<{c}") for name, c in _ARRAYS.items()},
    }
    return known.get(datatype)


def request(body: Body, *, path: str, authority: str, keep: bool) -> bytes:
    """The whole HTTP request."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {authority}",
        f"Content-Length: {len(body.data)}",
        f"Content-Type: {'application/json' if body.json_bytes is None else 'application/octet-stream'}",
    ]
    if body.json_bytes is not None:
        lines.append(f"Inference-Header-Content-Length: {body.json_bytes}")
    if not keep:
        lines.append("Connection: close")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body.data


def get(path: str, *, authority: str) -> bytes:
    """A GET."""
    return f"GET {path} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()
