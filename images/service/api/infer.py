"""The Open Inference Protocol (v2): `parse_infer`, `render_infer` and `render_model`, and its extension for
binary tensors behind the JSON (`split_body`, `join_body`). gRPC uses them, too. Values only.
"""

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
VERSION = "1"
TEXT, PAIR, IDS, MASK, TYPES = "text", "text_pair", "input_ids", "attention_mask", "token_type_ids"
_NUMBERS = {"INT64": "q", "INT32": "i"}  # in the format of `struct`
_WHOLE = tuple(_NUMBERS)
_DATATYPES = {TEXT: ("BYTES",), PAIR: ("BYTES",), IDS: _WHOLE, MASK: _WHOLE, TYPES: _WHOLE}


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    data: list[Any]  # flat, row-major


def parse_infer(document: dict[str, Any], limits: Limits, info: ModelInfo, raw: bytes = b"") -> InferRequest:
    """Parse the body of `POST /v2/models/M/infer`; `raw`: its binary part. Raises RequestError (400)."""
    refuse_unknown(document, ("id", "parameters", "inputs", "outputs"), "the request")
    request_id = _request_id(document.get("id"))
    outputs = _requested_outputs(document.get("outputs"))
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
    """Return the `parameters` of a request, an input or an output. Raises RequestError (400)."""
    parameters = document.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise bad_request(f"parameters must be an object, not {kind_of(parameters)}")
    return parameters


def _request_id(value: object) -> str | None:
    if value is None:
        return None
    if not (isinstance(value, str) and len(value) <= 200):
        raise bad_request("id must be a string of at most 200 characters")
    return encodable(value, "id")


def _requested_outputs(value: object) -> tuple[str, ...]:
    if value is None:
        return OUTPUTS
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in list_of(value, "outputs")]
    for name in names:
        if name not in OUTPUTS:
            raise bad_request(f"there is no such output; the model gives {', '.join(OUTPUTS)}")
    return tuple(name for name in OUTPUTS if name in names)


def _in_binary(value: object, outputs: tuple[str, ...], *, by_default: bool) -> frozenset[str]:
    """Return the outputs to send as bytes: as each output says, else as the request says."""
    in_bytes = dict.fromkeys(outputs, by_default)
    for entry in value if isinstance(value, list) else ():
        in_bytes[entry["name"]] = parameters_of(entry).get("binary_data", by_default) is True
    return frozenset(name for name, is_binary in in_bytes.items() if is_binary)


def _tensors(entries: list[Any], limits: Limits, raw: bytes) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    at = 0
    for number, entry in enumerate(entries):
        name = _name(entry, number, tensors)
        n_bytes = _binary_bytes(entry, name)
        if n_bytes is None:
            tensors[name] = _tensor(entry, name, limits)
        else:
            if at + n_bytes > len(raw):
                raise bad_request(f"the binary data ends before that of {name} does")
            tensors[name] = _binary_tensor(entry, name, raw[at : at + n_bytes], limits)
            at += n_bytes
    if at != len(raw):
        raise bad_request(f"the binary data has {len(raw)} bytes; the inputs say {at}")
    return tensors


def _name(entry: object, number: int, earlier: Mapping[str, _Tensor]) -> str:
    if not isinstance(entry, dict):
        raise bad_request(f"input {number} must be an object, not {kind_of(entry)}")
    refuse_unknown(entry, ("name", "shape", "datatype", "parameters", "data"), f"input {number}")
    name = entry.get("name")
    if not isinstance(name, str) or name not in _DATATYPES or name in earlier:
        raise bad_request(f"input {number} must be named one of {', '.join(_DATATYPES)}, each once")
    if entry.get("datatype") not in _DATATYPES[name]:
        raise bad_request(f"input {name} must be of datatype {' or '.join(_DATATYPES[name])}")
    return name


def _binary_bytes(entry: dict[str, Any], name: str) -> int | None:
    """Return the bytes of binary data that are this tensor's, or None for one in the JSON."""
    n_bytes = parameters_of(entry).get("binary_data_size")
    if n_bytes is None:
        return None
    if type(n_bytes) is not int or n_bytes < 0 or "data" in entry:
        raise bad_request(f"input {name} needs `data` or a binary_data_size of 0 or more, one of the two")
    return n_bytes


def _shape(entry: dict[str, Any], name: str, limits: Limits) -> tuple[int, ...]:
    """Return the shape, after checking the number of rows: no work is done for each row before this."""
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
    """Return a tensor's rows without padding. The mask must be ones, then zeros: padding only at the end."""
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


def render_infer(info: ModelInfo, request: InferRequest, answer: Answer) -> tuple[dict[str, Any], bytes]:
    """Return the answer and its binary part. `parameters` has what the protocol has no field for."""
    count = len(answer.rows)
    results: dict[str, tuple[list[int], str, list[Any]]] = {
        "label": ([count], "BYTES", [label_of(info, row) for row in answer.vectors]),
        "probabilities": ([count, len(info.labels)], "FP32", [p for row in answer.vectors for p in row]),
    }
    outputs: list[dict[str, Any]] = []
    binary = b""
    for name in request.outputs:
        shape, datatype, values = results[name]
        output: dict[str, Any] = {"name": name, "shape": shape, "datatype": datatype}
        if name in request.binary:
            piece = encode_tensor(values, datatype)
            output["parameters"] = {"binary_data_size": len(piece)}
            binary += piece
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
    return (rendered if request.request_id is None else {"id": request.request_id} | rendered), binary


def render_model(info: ModelInfo) -> dict[str, Any]:
    """Return the answer to `GET /v2/models/M`; -1 in a shape means any size."""
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


# ---- binary tensors ---------------------------------------------------------------------------------------
# The bytes behind the JSON, in the order of the tensors. Numbers are little-endian. An element of BYTES is
# its length in 4 bytes, and its bytes.


def split_body(body: bytes, declared: str | None) -> tuple[bytes, bytes]:
    """Split a body into JSON and binary part, by BINARY_HEADER's value. Raises RequestError (400)."""
    if declared is None:
        return body, b""
    if not (declared.isascii() and declared.isdigit() and len(declared) < 12) or int(declared) > len(body):
        raise bad_request(f"Inference-Header-Content-Length must be a number from 0 to {len(body)}")
    return body[: int(declared)], body[int(declared) :]


def decode_tensor(data: bytes, datatype: str, count: int, name: str) -> list[Any]:
    """Decode `count` elements, which must take all bytes of `data`. Raises RequestError (400)."""
    if datatype == "BYTES":
        return _decode_texts(data, count, name)
    kind = _NUMBERS[datatype]
    if len(data) != count * struct.calcsize(f"<{kind}"):
        raise bad_request(f"the binary data of {name} has {len(data)} bytes; its shape needs another number")
    return list(struct.unpack(f"<{count}{kind}", data))


def _decode_texts(data: bytes, count: int, name: str) -> list[str]:
    texts: list[str] = []
    at = 0
    while len(texts) < count and at + 4 <= len(data):
        (n_bytes,) = struct.unpack_from("<I", data, at)
        piece = data[at + 4 : at + 4 + n_bytes]
        at += 4 + n_bytes
        try:
            texts.append(piece.decode())
        except UnicodeDecodeError as error:
            raise bad_request(f"element {len(texts)} of {name} is no UTF-8") from error
    if len(texts) != count or at != len(data):
        raise bad_request(f"the binary data of {name} doesn't hold {count} elements with their lengths")
    return texts


def encode_tensor(values: Sequence[Any], datatype: str) -> bytes:
    """Encode the elements of a BYTES or FP32 tensor."""
    if datatype == "BYTES":
        pieces = [value.encode() for value in values]
        return b"".join(struct.pack("<I", len(piece)) + piece for piece in pieces)
    return struct.pack(f"<{len(values)}f", *values)


def join_body(document: dict[str, Any], binary: bytes) -> tuple[bytes, dict[str, str]]:
    """Return an answer's body and headers, with the binary part after the JSON."""
    head = json.dumps(document, separators=(",", ":")).encode()
    if not binary:
        return head, {"Content-Type": "application/json"}
    return head + binary, {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
