"""What requests of every format are parsed into (`InferRequest`), and the checks and fields that all share.

The formats are `service.api.predict` (/predict and OpenAI's /v1/embeddings) and `service.api.infer` (the Open
Inference Protocol). Values only: a parser returns an InferRequest, or raises a RequestError (400) that says
what is wrong.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from service.errors import bad_request
from service.inference.classifier import Encoded, ModelInfo, Probabilities, Task, Text, Vector
from service.settings import Limits

OUTPUTS = ("label", "probabilities")


@dataclass(frozen=True)
class InferRequest:
    """A checked request: texts or rows of token ids, never both.

    `segments`: for each row of token ids, which of two texts each token belongs to; empty when all are 0.
    `outputs`, `binary`: the outputs to send, and those of them to send as bytes after the JSON.
    `base64`: send embeddings in base64.
    """

    texts: tuple[Text, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    segments: tuple[tuple[int, ...], ...] = ()
    request_id: str | None = None
    outputs: tuple[str, ...] = OUTPUTS
    binary: frozenset[str] = frozenset()
    task: Task = "classify"
    base64: bool = False

    @property
    def encoded(self) -> tuple[Encoded, ...]:
        """The rows of token ids in the form that tokenized texts have."""
        types = self.segments or ((),) * len(self.token_ids)
        return tuple(Encoded(ids, False, kinds) for ids, kinds in zip(self.token_ids, types, strict=True))


@dataclass(frozen=True)
class Answer:
    """The results of an InferRequest, and the seconds that each step took.

    `vectors`: probabilities or embeddings, one for each row. `inference_s` is that of whole batches, which
    may include rows of other requests.
    """

    rows: tuple[Encoded, ...]
    vectors: tuple[Vector, ...]
    wait_s: float
    encode_s: float
    inference_s: float


def read_json(body: bytes) -> dict[str, Any]:
    """Parse the request's JSON object. Raises RequestError (400), also for NaN and Infinity."""
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    except ValueError as error:  # malformed JSON, bytes that aren't UTF-8, integers of thousands of digits
        raise bad_request(f"the body is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise bad_request(f"the body must be a JSON object, not {kind_of(document)}")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def kind_of(value: object) -> str:
    """Return what a JSON value is, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def refuse_unknown(document: dict[str, Any], known: Sequence[str], what: str) -> None:
    """Raise RequestError (400) that names the first unknown key."""
    unknown = [key for key in document if key not in known]
    if unknown:
        raise bad_request(f"{what} has no key {unknown[0][:60]!r}; it takes {', '.join(known)}")


def list_of(value: object, what: str) -> list[Any]:
    """Return `value` if it is a list that isn't empty. Raises RequestError (400)."""
    if not isinstance(value, list):
        raise bad_request(f"{what} must be a list, not {kind_of(value)}")
    if not value:
        raise bad_request(f"{what} is empty")
    return value


def check_texts(values: Sequence[object], limits: Limits) -> tuple[Text, ...]:
    """Return texts and pairs of texts that are within the limits. Raises RequestError (400)."""
    check_count(len(values), "texts", limits)
    return tuple(_check_entry(value, f"text {at}", limits) for at, value in enumerate(values))


def check_count(count: int, what: str, limits: Limits) -> None:
    """Raise RequestError (400) for more rows than one request may have."""
    if count > limits.max_texts:
        raise bad_request(f"{count} {what}; at most {limits.max_texts} are taken at once")


def _check_entry(value: object, what: str, limits: Limits) -> Text:
    if not isinstance(value, list):
        return _check_text(value, what, limits)
    if len(value) != 2:
        raise bad_request(f"{what} has {len(value)} parts; a text, or a pair of two, is needed")
    first, second = (_check_text(part, f"a part of {what}", limits) for part in value)
    return first, second


def _check_text(value: object, what: str, limits: Limits) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{what} is {kind_of(value)}; a string is needed")
    if len(value) > limits.max_text_chars:
        raise bad_request(f"{what} has {len(value)} characters; at most {limits.max_text_chars} are taken")
    if not value.strip():
        raise bad_request(f"{what} is empty")
    return encodable(value, what)


def encodable(text: str, what: str) -> str:
    """Return a text that UTF-8 can encode: JSON's escapes may write half a surrogate pair.

    Raises RequestError (400).
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"{what} holds half a surrogate pair, which is no character") from error
    return text


def check_token_ids(rows: Sequence[object], limits: Limits, info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Return rows of ids of the model's vocabulary, [CLS] and [SEP] included. Raises RequestError (400)."""
    check_count(len(rows), "rows of token ids", limits)
    return tuple(_check_ids(row, f"row {at}", info) for at, row in enumerate(rows))


def _check_ids(row: object, what: str, info: ModelInfo) -> tuple[int, ...]:
    ids = list_of(row, what)
    if len(ids) > info.max_tokens:
        raise bad_request(f"{what} has {len(ids)} tokens; at most {info.max_tokens} are taken")
    for number in ids:
        if type(number) is not int or not 0 <= number < info.vocab_size:
            shown = str(number)[:40] if type(number) in (int, float) else kind_of(number)
            raise bad_request(f"{what} holds {shown}; token ids are 0 to {info.vocab_size - 1}")
    return tuple(ids)


def timeout_of(parameters: Mapping[str, Any], header: str | None) -> float | None:
    """Return the seconds that the caller waits, or None: of `timeout_ms`, Triton's `timeout` (microseconds),
    or the header X-Timeout-Ms. Raises RequestError (400).
    """
    if "timeout_ms" in parameters:
        return _seconds(parameters["timeout_ms"], 1000, "timeout_ms")
    if "timeout" in parameters:
        return _seconds(parameters["timeout"], 1_000_000, "timeout (microseconds)")
    if header is None:
        return None
    digits = header if header.isascii() and header.isdigit() and len(header) < 10 else "0"
    return _seconds(int(digits), 1000, "X-Timeout-Ms")


def _seconds(value: object, per_second: int, what: str) -> float:
    limit = Limits.max_timeout_s * per_second  # in the value's unit: JSON's integers may exceed any float
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
        raise bad_request(f"{what} must be a number above 0, of at most an hour")
    return value / per_second


def label_of(info: ModelInfo, row: Probabilities) -> str:
    """Return the most probable label."""
    return info.labels[max(range(len(row)), key=row.__getitem__)]


def provenance(info: ModelInfo) -> dict[str, str]:
    """Return what every answer says of its origin: a random model's mustn't pass for a trained one's."""
    return {"weights": info.weights, "tokenizer": info.tokenizer, "device": info.device}


def timing(answer: Answer) -> dict[str, float]:
    """Return the seconds of each step, rounded, as /predict and the Open Inference Protocol report them."""
    return {
        "wait": round(answer.wait_s, 6),
        "encode": round(answer.encode_s, 6),
        "inference": round(answer.inference_s, 6),
    }
