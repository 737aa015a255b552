"""The plain form: `POST /predict`. Values only."""

from typing import Any

from service.api.requests import (
    Answer,
    Ask,
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

_KEYS = ("texts", "token_ids", "timeout_ms", "model")


def parse_predict(document: dict[str, Any], limits: Limits, info: ModelInfo) -> Ask:
    """`{"texts": [...]}` or `{"token_ids": [[...]]}`; a text may be a pair. Raises RequestError (400)."""
    refuse_unknown(document, _KEYS, "the request")
    if ("texts" in document) == ("token_ids" in document):
        raise bad_request("give `texts` or `token_ids`, one of the two")
    if "texts" in document:
        return Ask(texts=check_texts(list_of(document["texts"], "texts"), limits))
    rows = list_of(document["token_ids"], "token_ids")
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
        for encoded, row in zip(answer.rows, answer.vectors, strict=True)
    ]
    return {"model": info.name, **provenance(info), "predictions": predictions, "timing_s": timing(answer)}
