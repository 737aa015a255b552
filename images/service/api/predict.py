"""Two JSON formats: `POST /predict`, and `POST /v1/embeddings` as OpenAI's clients send it. Values only."""

import base64
import struct
from typing import Any

from service.api.requests import (
    Answer,
    InferRequest,
    check_texts,
    check_token_ids,
    label_of,
    list_of,
    provenance,
    refuse_unknown,
    timing,
)
from service.errors import bad_request
from service.inference.classifier import ModelInfo
from service.settings import Limits

_PREDICT_KEYS = ("texts", "token_ids", "timeout_ms", "model")
_EMBEDDINGS_KEYS = ("input", "model", "encoding_format", "dimensions", "user", "timeout_ms")


def parse_predict(document: dict[str, Any], limits: Limits, info: ModelInfo) -> InferRequest:
    """Parse `{"texts": [...]}` or `{"token_ids": [[...]]}`; a text may be a pair. Raises RequestError."""
    refuse_unknown(document, _PREDICT_KEYS, "the request")
    if ("texts" in document) == ("token_ids" in document):
        raise bad_request("give `texts` or `token_ids`, one of the two")
    if "texts" in document:
        return InferRequest(texts=check_texts(list_of(document["texts"], "texts"), limits))
    rows = list_of(document["token_ids"], "token_ids")
    return InferRequest(token_ids=check_token_ids(rows, limits, info))


def render_predict(info: ModelInfo, answer: Answer) -> dict[str, Any]:
    """Return a label and all scores for each text, and which model, weights and device answered."""
    predictions = [
        {
            "label": label_of(info, row),
            "scores": dict(zip(info.labels, row, strict=True)),
            "tokens": len(encoded.ids),
            "truncated": encoded.truncated,
        }
        for encoded, row in zip(answer.rows, answer.vectors, strict=True)
    ]
    return {"model": info.name, **provenance(info), "predictions": predictions, "timing_s": timing(answer)}


def parse_embeddings(document: dict[str, Any], limits: Limits, info: ModelInfo) -> InferRequest:
    """Parse `input`: a text, texts, token ids, or lists of token ids. Raises RequestError (400)."""
    refuse_unknown(document, _EMBEDDINGS_KEYS, "the request")
    encoding = document.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise bad_request("encoding_format must be float or base64")
    if document.get("dimensions", info.hidden_size) != info.hidden_size:
        raise bad_request(f"dimensions must be {info.hidden_size}: this model gives no shorter embeddings")
    given = document.get("input")
    inputs = [given] if isinstance(given, str) else list_of(given, "input")
    if isinstance(inputs[0], int):
        inputs = [inputs]
    if isinstance(inputs[0], list):
        ids = check_token_ids(inputs, limits, info)
        return InferRequest(token_ids=ids, task="embed", base64=encoding == "base64")
    for at, text in enumerate(inputs):
        if not isinstance(text, str):
            raise bad_request(f"input {at} must be a string, as the first one is")
    return InferRequest(texts=check_texts(inputs, limits), task="embed", base64=encoding == "base64")


def render_embeddings(info: ModelInfo, request: InferRequest, answer: Answer) -> dict[str, Any]:
    """Return the answer in OpenAI's form; base64 holds little-endian float32."""
    tokens = sum(len(row.ids) for row in answer.rows)
    data = [
        {
            "object": "embedding",
            "index": at,
            "embedding": _to_base64(vector) if request.base64 else list(vector),
        }
        for at, vector in enumerate(answer.vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": info.name, "usage": usage, "weights": info.weights}


def _to_base64(vector: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
