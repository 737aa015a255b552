"""What every form of request becomes, and the checks that all share. Values only.

Whatever a caller sends ends as an `Ask` or as a RequestError that says what is wrong with it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from service.errors import bad_request
from service.inference.classifier import Encoded, ModelInfo, Probabilities, Text, Vector
from service.settings import Limits

OUTPUTS = ("label", "probabilities")
MAX_TIMEOUT_S = 3600

Task = Literal["classify", "embed"]


@dataclass(frozen=True)
class InferRequest:
    """One checked request: texts or rows of token ids, never both.

    `segments`: for each row of token ids which of two texts each token belongs to; empty when all are 0.
    `binary`: the outputs that are sent as bytes behind the JSON.
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
        """The rows of token ids as the model takes them."""
        types = self.segments or ((),) * len(self.token_ids)
        return tuple(Encoded(ids, False, kinds) for ids, kinds in zip(self.token_ids, types, strict=True))


@dataclass(frozen=True)
class Answer:
    """What the model made of an Ask, and the seconds that each step took.

    `vectors`: probabilities or embeddings, one for each row. Other callers' rows share `inference_s`.
    """

    rows: tuple[Encoded, ...]
    vectors: tuple[Vector, ...]
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
        raise bad_request(f"the body must be a JSON object, not {kind_of(document)}")
    return document


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def kind_of(value: object) -> str:
    """What a JSON value is, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def refuse_unknown(document: dict[str, Any], known: Sequence[str], what: str) -> None:
    """Raises RequestError (400) that names the first key that isn't known."""
    unknown = [key for key in document if key not in known]
    if unknown:
        raise bad_request(f"{what} has no key {unknown[0][:60]!r}; it takes {', '.join(known)}")


def list_of(value: object, what: str) -> list[Any]:
    """A list that isn't empty. Raises RequestError (400)."""
    if not isinstance(value, list):
        raise bad_request(f"{what} must be a list, not {kind_of(value)}")
    if not value:
        raise bad_request(f"{what} is empty")
    return value


def check_texts(values: Sequence[object], limits: Limits) -> tuple[Text, ...]:
    """Texts and pairs of texts within the limits. Raises RequestError (400)."""
    check_count(len(values), "texts", limits)
    return tuple(_check_entry(value, f"text {at}", limits) for at, value in enumerate(values))


def check_count(count: int, what: str, limits: Limits) -> None:
    """Raises RequestError (400) for more rows than one request may have."""
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
    """JSON's escapes may write what UTF-8 can't: a text that holds it is neither tokenised nor sent back."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request(f"{what} holds half a surrogate pair, which is no character") from error
    return text


def check_token_ids(rows: Sequence[object], limits: Limits, info: ModelInfo) -> tuple[tuple[int, ...], ...]:
    """Rows of token ids, [CLS] and [SEP] included, that the model knows. Raises RequestError (400)."""
    check_count(len(rows), "rows of token ids", limits)
    return tuple(_check_ids(row, f"row {at}", info) for at, row in enumerate(rows))


def _check_ids(row: object, what: str, info: ModelInfo) -> tuple[int, ...]:
    ids = list_of(row, what)
    if len(ids) > info.max_tokens:
        raise bad_request(f"{what} has {len(ids)} tokens; at most {info.max_tokens} are taken")
    for number in ids:
        if type(number) is not int or not 0 <= number < info.vocab_size:
            held = str(number)[:40] if type(number) in (int, float) else kind_of(number)
            raise bad_request(f"{what} holds {held}; token ids are 0 to {info.vocab_size - 1}")
    return tuple(ids)


def timeout_of(parameters: Mapping[str, Any], header: str | None) -> float | None:
    """Seconds that the caller waits: `timeout_ms`, Triton's `timeout` in microseconds, or the header's ms.

    Raises RequestError (400).
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
    """Compared before it is divided: JSON's integers may be larger than any float."""
    limit = MAX_TIMEOUT_S * per_second
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
        raise bad_request(f"{what} must be a number above 0, of at most an hour")
    return value / per_second


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
