"""Requests of the Open Inference Protocol (v2). Values only."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.api.requests import (
    OUTPUTS,
    Answer,
    InferRequest,
    check_count,
    check_texts,
    check_token_ids,
    encodable,
    kind_of,
    label_of,
    list_of,
    provenance,
    refuse_unknown,
    timing,
)
from service.errors import bad_request
from service.inference.classifier import ModelInfo
from service.settings import Limits

BINARY_HEADER = "inference-header-content-length"
_NUMBERS = {"INT64": "q", "INT32": "i"}


def split_body(body: bytes, declared: str | None) -> tuple[bytes, bytes]:
    """The JSON and the binary part; `declared` is the header's value, if any. Raises RequestError (400)."""
    if declared is None:
        return body, b""
    if not (declared.isascii() and declared.isdigit() and len(declared) < 12) or int(declared) > len(body):
        raise bad_request(f"Inference-Header-Content-Length must be a number from 0 to {len(body)}")
    return body[: int(declared)], body[int(declared) :]


def decode_tensor(data: bytes, datatype: str, count: int, name: str) -> list[Any]:
    """`count` elements of a tensor, no byte more or less. Raises RequestError (400)."""
    if datatype == "BYTES":
        return _decode_texts(data, count, name)
    kind = _NUMBERS[datatype]
    if len(data) != count * struct.calcsize(f"<{kind}"):
        raise bad_request(f"the binary data of {name} has {len(data)} bytes; its shape needs another number")
    return list(struct.unpack(f"<{count}{kind}", data))


def _decode_texts(data: bytes, count: int, name: str) -> list[str]:
    found: list[str] = []
    at = 0
    while len(found) < count and at + 4 <= len(data):
        (n_bytes,) = struct.unpack_from("<I", data, at)
        piece = data[at + 4 : at + 4 + n_bytes]
        at += 4 + n_bytes
        try:
            found.append(piece.decode())
        except UnicodeDecodeError as error:
            raise bad_request(f"element {len(found)} of {name} is no UTF-8") from error
    if len(found) != count or at != len(data):
        raise bad_request(f"the binary data of {name} doesn't hold {count} elements with their lengths")
    return found


def encode_tensor(values: Sequence[Any], datatype: str) -> bytes:
    """A tensor's bytes: BYTES or FP32."""
    if datatype == "BYTES":
        pieces = [value.encode() for value in values]
        return b"".join(struct.pack("<I", len(piece)) + piece for piece in pieces)
    return struct.pack(f"<{len(values)}f", *values)


VERSION = "1"
TEXT, PAIR, IDS, MASK, TYPES = "text", "text_pair", "input_ids", "attention_mask", "token_type_ids"
_WHOLE = ("INT64", "INT32")
_DATATYPES = {TEXT: ("BYTES",), PAIR: ("BYTES",), IDS: _WHOLE, MASK: _WHOLE, TYPES: _WHOLE}


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    data: list[Any]  # flat, row-major


def parse_infer(document: dict[str, Any], limits: Limits, info: ModelInfo, raw: bytes = b"") -> InferRequest:
    """A `POST /v2/models/M/infer` body; `raw` holds its binary tensors. Raises RequestError (400)."""
    refuse_unknown(document, ("id", "parameters", "inputs", "outputs"), "the request")
    request_id = _request_id(document.get("id"))
    outputs = _wanted_outputs(document.get("outputs"))
    by_default = parameters_of(document).get("binary_data_output") is True
    in_binary = _in_binary(document.get("outputs"), outputs, by_default=by_default)
    tensors = _tensors(list_of(document.get("inputs"), "inputs"), limits, raw)
    names = set(tensors)
    if names in ({TEXT}, {TEXT, PAIR}):
        texts = check_texts(_texts(tensors), limits)
        return InferRequest(texts=texts, request_id=request_id, outputs=outputs, binary=in_binary)
    if IDS in names and names <= {IDS, MASK, TYPES}:
        mask = tensors.get(MASK)
        ids = check_token_ids(_unpadded(IDS, tensors, mask), limits, info)
        segments = _segments(_unpadded(TYPES, tensors, mask)) if TYPES in names else ()
        return InferRequest((), ids, segments, request_id=request_id, outputs=outputs, binary=in_binary)
    raise bad_request(
        f"inputs must be `{TEXT}` with or without `{PAIR}`, or `{IDS}` and with it `{MASK}`, `{TYPES}`"
    )


def parameters_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The request's own parameters. Raises RequestError (400)."""
    found = document.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise bad_request(f"parameters must be an object, not {kind_of(found)}")
    return found


def _request_id(value: object) -> str | None:
    if value is None:
        return None
    if not (isinstance(value, str) and len(value) <= 200):
        raise bad_request("id must be a string of at most 200 characters")
    return encodable(value, "id")


def _wanted_outputs(value: object) -> tuple[str, ...]:
    if value is None:
        return OUTPUTS
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in list_of(value, "outputs")]
    for name in names:
        if name not in OUTPUTS:
            raise bad_request(f"there is no such output; the model gives {', '.join(OUTPUTS)}")
    return tuple(name for name in OUTPUTS if name in names)


def _in_binary(value: object, outputs: tuple[str, ...], *, by_default: bool) -> frozenset[str]:
    """The outputs to send as bytes: as each says, else as the request says."""
    said = dict.fromkeys(outputs, by_default)
    for entry in value if isinstance(value, list) else ():
        said[entry["name"]] = parameters_of(entry).get("binary_data", by_default) is True
    return frozenset(name for name, in_bytes in said.items() if in_bytes)


def _tensors(entries: list[Any], limits: Limits, raw: bytes) -> dict[str, _Tensor]:
    found: dict[str, _Tensor] = {}
    at = 0
    for number, entry in enumerate(entries):
        name = _name(entry, number, found)
        n_bytes = _binary_bytes(entry, name)
        if n_bytes is None:
            found[name] = _tensor(entry, name, limits)
        else:
            if at + n_bytes > len(raw):
                raise bad_request(f"the binary data ends before that of {name} does")
            found[name] = _binary_tensor(entry, name, raw[at : at + n_bytes], limits)
            at += n_bytes
    if at != len(raw):
        raise bad_request(f"the binary data has {len(raw)} bytes; the inputs say {at}")
    return found


def _name(entry: object, number: int, found: Mapping[str, _Tensor]) -> str:
    if not isinstance(entry, dict):
        raise bad_request(f"input {number} must be an object, not {kind_of(entry)}")
    refuse_unknown(entry, ("name", "shape", "datatype", "parameters", "data"), f"input {number}")
    name = entry.get("name")
    if not isinstance(name, str) or name not in _DATATYPES or name in found:
        raise bad_request(f"input {number} must be named one of {', '.join(_DATATYPES)}, each once")
    if entry.get("datatype") not in _DATATYPES[name]:
        raise bad_request(f"input {name} must be of datatype {' or '.join(_DATATYPES[name])}")
    return name


def _binary_bytes(entry: dict[str, Any], name: str) -> int | None:
    """How many bytes of binary data are this tensor's; None: it is in the JSON."""
    n_bytes = parameters_of(entry).get("binary_data_size")
    if n_bytes is None:
        return None
    if type(n_bytes) is not int or n_bytes < 0 or "data" in entry:
        raise bad_request(f"input {name} needs `data` or a binary_data_size of 0 or more, one of the two")
    return n_bytes


def _shape(entry: dict[str, Any], name: str, limits: Limits) -> tuple[int, ...]:
    """The shape, whose rows are within the limit: whatever is done for each row comes after this."""
    shape = list_of(entry.get("shape"), f"shape of {name}")
    if len(shape) > 2 or not all(type(size) is int and 0 < size < 1 << 63 for size in shape):
        raise bad_request(f"shape of {name} must be one or two whole numbers above 0, of 63 bits at most")
    in_texts = name in (TEXT, PAIR)
    count = math.prod(shape if in_texts else shape[:-1])  # [n] is one row of n token ids
    check_count(count, "texts" if in_texts else "rows of token ids", limits)
    return tuple(shape)


def _binary_tensor(entry: dict[str, Any], name: str, data: bytes, limits: Limits) -> _Tensor:
    shape = _shape(entry, name, limits)
    return _Tensor(shape, decode_tensor(data, entry["datatype"], math.prod(shape), name))


def _tensor(entry: dict[str, Any], name: str, limits: Limits) -> _Tensor:
    shape = _shape(entry, name, limits)
    data = list_of(entry.get("data"), f"data of {name}")
    if len(shape) == 2 and all(isinstance(row, list) for row in data):  # nested form
        if len(data) != shape[0] or any(len(row) != shape[1] for row in data):
            raise bad_request(f"data of {name} doesn't have the shape {list(shape)}")
        data = [value for row in data for value in row]
    if len(data) != math.prod(shape):
        raise bad_request(
            f"data of {name} has {len(data)} values; its shape {list(shape)} needs {math.prod(shape)}"
        )
    return _Tensor(shape, data)


def _texts(tensors: Mapping[str, _Tensor]) -> list[Any]:
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and tensor.shape[1] != 1:
            raise bad_request(f"{name} must have the shape [n] or [n, 1]")
        for at, value in enumerate(tensor.data):
            if isinstance(value, list):
                raise bad_request(f"element {at} of {name} is a list; a string is needed")
    first = tensors[TEXT].data
    if PAIR not in tensors:
        return first
    second = tensors[PAIR].data
    if len(first) != len(second):
        raise bad_request(f"{PAIR} must have as many texts as {TEXT}")
    return [list(pair) for pair in zip(first, second, strict=True)]


def _rows(tensor: _Tensor) -> list[list[Any]]:
    width = tensor.shape[-1]
    return [tensor.data[at : at + width] for at in range(0, len(tensor.data), width)]


def _unpadded(name: str, tensors: Mapping[str, _Tensor], mask: _Tensor | None) -> list[list[Any]]:
    """The rows of a tensor that the mask leaves: ones, then zeros. Padding elsewhere isn't supported."""
    tensor = tensors[name]
    for other in (mask, tensors[IDS]):
        if other is not None and other.shape != tensor.shape:
            raise bad_request(f"{MASK} and {TYPES} must have the shape of {IDS}")
    rows = _rows(tensor)
    if mask is None:
        return rows
    kept = []
    for row, flags in zip(rows, _rows(mask), strict=True):
        length = sum(flag == 1 for flag in flags)
        if flags != [1] * length + [0] * (len(flags) - length):
            raise bad_request(f"{MASK} must be ones followed by zeros")
        kept.append(row[:length])
    return kept


def _segments(rows: list[list[Any]]) -> tuple[tuple[int, ...], ...]:
    for at, row in enumerate(rows):
        if not all(type(kind) is int and kind in (0, 1) for kind in row):
            raise bad_request(f"row {at} of {TYPES} must be zeros and ones")
    return tuple(tuple(row) for row in rows)


def render_infer(info: ModelInfo, ask: InferRequest, answer: Answer) -> tuple[dict[str, Any], bytes]:
    """The protocol's answer and its binary part; what it has no field for goes into `parameters`."""
    count = len(answer.rows)
    made: dict[str, tuple[list[int], str, list[Any]]] = {
        "label": ([count], "BYTES", [label_of(info, row) for row in answer.vectors]),
        "probabilities": ([count, len(info.labels)], "FP32", [p for row in answer.vectors for p in row]),
    }
    outputs: list[dict[str, Any]] = []
    tail = b""
    for name in ask.outputs:
        shape, datatype, values = made[name]
        output: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
        if name in ask.binary:
            piece = encode_tensor(values, datatype)
            output["parameters"] = {"binary_data_size": len(piece)}
            tail += piece
        else:
            output["data"] = values
        outputs.append(output)
    rendered: dict[str, Any] = {
        "model_name": info.name,
        "model_version": VERSION,
        "outputs": outputs,
        "parameters": {
            **provenance(info),
            "truncated_rows": sum(row.truncated for row in answer.rows),
            **{f"{step}_s": seconds for step, seconds in timing(answer).items()},
        },
    }
    return (rendered if ask.request_id is None else {"id": ask.request_id} | rendered), tail


def join_body(document: dict[str, Any], tail: bytes) -> tuple[bytes, dict[str, str]]:
    """An answer's body and headers, with the binary part behind the JSON."""
    head = json.dumps(document, separators=(",", ":")).encode()
    if not tail:
        return head, {"Content-Type": "application/json"}
    return head + tail, {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }


def render_model(info: ModelInfo) -> dict[str, Any]:
    """The answer to `GET /v2/models/M`; -1 in a shape is any size, as the protocol has it."""
    return {
        "name": info.name,
        "versions": [VERSION],
        "platform": "pytorch",
        "inputs": [
            {"name": TEXT, "datatype": "BYTES", "shape": [-1]},
            {"name": PAIR, "datatype": "BYTES", "shape": [-1]},
            *({"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in (IDS, MASK, TYPES)),
        ],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(info.labels)]},
        ],
        "parameters": {
            **provenance(info),
            "weights_source": info.weights_source,
            "device_description": info.device_description,
            "dtype": info.dtype,
            "largest_difference_from_float32": info.accuracy,
            "labels": list(info.labels),
            "parameter_count": info.parameters,
            "max_tokens": info.max_tokens,
        },
    }
