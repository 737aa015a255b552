"""The two forms of a request: the Open Inference Protocol's `infer` and the plain `/predict`. Values only.

Whatever a caller sends ends as an `Ask` or as a RequestError that says what is wrong with it.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from service.errors import bad_request
from service.model.classifier import Encoded, ModelInfo, Probabilities
from service.settings import Limits

VERSION = "1"
OUTPUTS = ("label", "probabilities")
_TEXT, _IDS, _MASK = "text", "input_ids", "attention_mask"
_DATATYPES = {_TEXT: ("BYTES",), _IDS: ("INT64", "INT32"), _MASK: ("INT64", "INT32")}


@dataclass(frozen=True)
class Ask:
    """One checked request: texts or rows of token ids, never both."""

    texts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    request_id: str | None = None
    outputs: tuple[str, ...] = OUTPUTS


@dataclass(frozen=True)
class Answer:
    """What the model made of an Ask, and the seconds that each step took."""

    rows: tuple[Encoded, ...]
    probabilities: tuple[Probabilities, ...]
    wait_s: float
    encode_s: float
    inference_s: float


def read_json(body: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises RequestError (400); NaN and Infinity are no JSON."""
    try:
        document = json.loads(body, parse_constant=_no_constant)
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    except ValueError as error:  # malformed JSON, bytes that aren't UTF-8, integers of thousands of digits
        raise bad_request(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise bad_request(f"the body must be a JSON object, not {_kind(document)}")
    return document


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_unknown(document: dict[str, Any], known: Sequence[str], what: str) -> None:
    unknown = [key for key in document if key not in known]
    if unknown:
        raise bad_request(f"{what} has no key {unknown[0][:60]!r}; it takes {', '.join(known)}")


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad_request(f"{what} must be a list, not {_kind(value)}")
    if not value:
        raise bad_request(f"{what} is empty")
    return value


# ---- what may be asked -------------------------------------------------------------------------------


def check_texts(values: Sequence[object], limits: Limits) -> tuple[str, ...]:
    """Texts within the limits. Raises RequestError (400)."""
    _check_rows(len(values), "texts", limits)
    return tuple(_check_text(value, f"text {at}", limits) for at, value in enumerate(values))


def _check_rows(count: int, what: str, limits: Limits) -> None:
    if count > limits.max_texts:
        raise bad_request(f"{count} {what}; at most {limits.max_texts} are taken at once")


def _check_text(value: object, what: str, limits: Limits) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{what} is {_kind(value)}; a string is needed")
    if len(value) > limits.max_text_chars:
        raise bad_request(f"{what} has {len(value)} characters; at most {limits.max_text_chars} are taken")
    if not value.strip():
        raise bad_request(f"{what} is empty")
    return _encodable(value, what)


def _encodable(text: str, what: str) -> str:
    """JSON's escapes may write what UTF-8 can't: a text that holds it is neither tokenised nor sent back."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"{what} holds half a surrogate pair, which is no character") from error
    return text


def check_token_ids(rows: Sequence[object], limits: Limits, info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Rows of token ids, [CLS] and [SEP] included, that the model knows. Raises RequestError (400)."""
    _check_rows(len(rows), "rows of token ids", limits)
    return tuple(_check_ids(row, f"row {at}", info) for at, row in enumerate(rows))


def _check_ids(row: object, what: str, info: ModelInfo) -> tuple[int, ...]:
    ids = _list(row, what)
    if len(ids) > info.max_tokens:
        raise bad_request(f"{what} has {len(ids)} tokens; at most {info.max_tokens} are taken")
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < info.vocab_size:
            raise bad_request(f"{what} holds {str(number)[:40]}; token ids are 0 to {info.vocab_size - 1}")
    return tuple(ids)


# ---- plain form --------------------------------------------------------------------------------------


def parse_predict(document: dict[str, Any], limits: Limits, info: ModelInfo) -> Ask:
    """`{"texts": [...]}` or `{"token_ids": [[...]]}`. Raises RequestError (400)."""
    _refuse_unknown(document, ("texts", "token_ids"), "the request")
    if len(document) != 1:
        raise bad_request("give `texts` or `token_ids`, one of the two")
    if "texts" in document:
        return Ask(texts=check_texts(_list(document["texts"], "texts"), limits))
    rows = _list(document["token_ids"], "token_ids")
    return Ask(token_ids=check_token_ids(rows, limits, info))


def render_predict(info: ModelInfo, answer: Answer) -> dict[str, Any]:
    """The plain answer: a label and all scores for each text, and what answered."""
    predictions = [
        {
            "label": label_of(info, row),
            "scores": dict(zip(info.labels, row, strict=True)),
            "tokens": len(encoded.ids),
            "truncated": encoded.truncated,
        }
        for encoded, row in zip(answer.rows, answer.probabilities, strict=True)
    ]
    return {"model": info.name, **provenance(info), "predictions": predictions, "timing_s": timing(answer)}


def label_of(info: ModelInfo, row: Probabilities) -> str:
    """The most probable label."""
    return info.labels[max(range(len(row)), key=row.__getitem__)]


def provenance(info: ModelInfo) -> dict[str, str]:
    """What every answer says of its origin: a random model's answers must never pass for a trained one's."""
    return {"weights": info.weights, "tokenizer": info.tokenizer, "device": info.device}


def timing(answer: Answer) -> dict[str, float]:
    """Seconds of each step, as both forms report them."""
    return {
        "wait": round(answer.wait_s, 6),
        "encode": round(answer.encode_s, 6),
        "inference": round(answer.inference_s, 6),
    }


# ---- Open Inference Protocol (v2) --------------------------------------------------------------------


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    data: list[Any]  # flat, row-major


def parse_infer(document: dict[str, Any], limits: Limits, info: ModelInfo) -> Ask:
    """A `POST /v2/models/M/infer` body with JSON tensors. Raises RequestError (400)."""
    _refuse_unknown(document, ("id", "parameters", "inputs", "outputs"), "the request")
    request_id = document.get("id")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= 200):
        raise bad_request("id must be a string of at most 200 characters")
    if request_id is not None:
        _encodable(request_id, "id")
    outputs = _wanted_outputs(document.get("outputs"))
    tensors = _tensors(_list(document.get("inputs"), "inputs"))
    if set(tensors) == {_TEXT}:
        texts = check_texts(_column(tensors[_TEXT]).data, limits)
        return Ask(texts=texts, request_id=request_id, outputs=outputs)
    if set(tensors) in ({_IDS}, {_IDS, _MASK}):
        rows = _unpadded(tensors[_IDS], tensors.get(_MASK))
        ids = check_token_ids(rows, limits, info)
        return Ask(token_ids=ids, request_id=request_id, outputs=outputs)
    raise bad_request(f"inputs must be `{_TEXT}`, or `{_IDS}` with or without `{_MASK}`")


def _wanted_outputs(value: object) -> tuple[str, ...]:
    if value is None:
        return OUTPUTS
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in _list(value, "outputs")]
    for name in names:
        if name not in OUTPUTS:
            raise bad_request(f"there is no such output; the model gives {', '.join(OUTPUTS)}")
    return tuple(name for name in OUTPUTS if name in names)


def _tensors(entries: list[Any]) -> dict[str, _Tensor]:
    found: dict[str, _Tensor] = {}
    for at, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise bad_request(f"input {at} must be an object, not {_kind(entry)}")
        _refuse_unknown(entry, ("name", "shape", "datatype", "parameters", "data"), f"input {at}")
        name = entry.get("name")
        if not isinstance(name, str) or name not in _DATATYPES or name in found:
            raise bad_request(f"input {at} must be named one of {', '.join(_DATATYPES)}, each once")
        if entry.get("datatype") not in _DATATYPES[name]:
            raise bad_request(f"input {name} must be of datatype {' or '.join(_DATATYPES[name])}")
        found[name] = _tensor(entry, name)
    return found


def _tensor(entry: dict[str, Any], name: str) -> _Tensor:
    shape = _list(entry.get("shape"), f"shape of {name}")
    if len(shape) > 2 or not all(type(size) is int and size > 0 for size in shape):
        raise bad_request(f"shape of {name} must be one or two whole numbers above 0")
    data = _list(entry.get("data"), f"data of {name}")
    if len(shape) == 2 and all(isinstance(row, list) for row in data):  # nested form
        if len(data) != shape[0] or any(len(row) != shape[1] for row in data):
            raise bad_request(f"data of {name} doesn't have the shape {shape}")
        data = [value for row in data for value in row]
    if len(data) != math.prod(shape):
        raise bad_request(
            f"data of {name} has {len(data)} values; its shape {shape} needs {math.prod(shape)}"
        )
    return _Tensor(tuple(shape), data)


def _column(tensor: _Tensor) -> _Tensor:
    if len(tensor.shape) == 2 and tensor.shape[1] != 1:
        raise bad_request("text must have the shape [n] or [n, 1]")
    return tensor


def _rows(tensor: _Tensor) -> list[list[Any]]:
    width = tensor.shape[-1]
    return [tensor.data[at : at + width] for at in range(0, len(tensor.data), width)]


def _unpadded(ids: _Tensor, mask: _Tensor | None) -> list[list[Any]]:
    """The rows of ids that the mask leaves: ones, then zeros. Padding elsewhere isn't supported."""
    rows = _rows(ids)
    if mask is None:
        return rows
    if mask.shape != ids.shape:
        raise bad_request(f"{_MASK} must have the shape of {_IDS}")
    kept = []
    for row, flags in zip(rows, _rows(mask), strict=True):
        length = sum(flag == 1 for flag in flags)
        if flags != [1] * length + [0] * (len(flags) - length):
            raise bad_request(f"{_MASK} must be ones followed by zeros")
        kept.append(row[:length])
    return kept


def render_infer(info: ModelInfo, ask: Ask, answer: Answer) -> dict[str, Any]:
    """The protocol's answer; what it has no field for goes into `parameters`."""
    count = len(answer.rows)
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "label": lambda: _output(
            "label", [count], "BYTES", [label_of(info, r) for r in answer.probabilities]
        ),
        "probabilities": lambda: _output(
            "probabilities",
            [count, len(info.labels)],
            "FP32",
            [p for row in answer.probabilities for p in row],
        ),
    }
    rendered: dict[str, Any] = {
        "model_name": info.name,
        "model_version": VERSION,
        "outputs": [makers[name]() for name in ask.outputs],
        "parameters": {
            **provenance(info),
            "truncated_rows": sum(row.truncated for row in answer.rows),
            **{f"{step}_s": seconds for step, seconds in timing(answer).items()},
        },
    }
    return rendered if ask.request_id is None else {"id": ask.request_id} | rendered


def _output(name: str, shape: list[int], datatype: str, data: list[Any]) -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def render_model(info: ModelInfo) -> dict[str, Any]:
    """The answer to `GET /v2/models/M`; -1 in a shape is any size, as the protocol has it."""
    return {
        "name": info.name,
        "versions": [VERSION],
        "platform": "pytorch",
        "inputs": [
            {"name": _TEXT, "datatype": "BYTES", "shape": [-1]},
            {"name": _IDS, "datatype": "INT64", "shape": [-1, -1]},
            {"name": _MASK, "datatype": "INT64", "shape": [-1, -1]},
        ],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(info.labels)]},
        ],
        "parameters": {
            **provenance(info),
            "weights_source": info.weights_source,
            "device_description": info.device_description,
            "labels": list(info.labels),
            "parameter_count": info.parameters,
            "max_tokens": info.max_tokens,
        },
    }
