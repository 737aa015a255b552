"""Whatever a caller sends becomes an Ask within the limits, or a 400 that says why."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service.api.infer import parse_infer, render_infer, render_model
from service.api.predict import parse_predict, render_predict
from service.api.requests import Answer, InferRequest, read_json
from service.errors import RequestError
from service.inference.classifier import Encoded, ModelInfo
from service.settings import Limits

LIMITS = Limits(max_texts=3, max_text_chars=20)
ANSWER = Answer(
    (Encoded((1, 2, 3)), Encoded((1, 3), truncated=True)),
    ((0.2, 0.5, 0.3), (0.6, 0.2, 0.2)),
    wait_s=0.1,
    encode_s=0.2,
    inference_s=0.3,
)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        (b'{"texts": [NaN]}', "NaN"),
        (b'{"texts": -Infinity}', "-Infinity"),
        (b"9" * 5000, "no JSON"),
        (b"[" * 100_000, "too deeply"),
        (b"[]", "a list"),
        (b"null", "null"),
        (b"1.5", "a number"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        read_json(body)
    assert caught.value.status == 400


def test_texts_are_taken_as_they_are(info: ModelInfo) -> None:
    assert parse_predict({"texts": ["a", " b "]}, LIMITS, info) == InferRequest(texts=("a", " b "))


def test_token_ids_are_taken_in_place_of_texts(info: ModelInfo) -> None:
    assert parse_predict({"token_ids": [[1, 2], [1999]]}, LIMITS, info).token_ids == ((1, 2), (1999,))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "one of the two"),
        ({"texts": ["a"], "token_ids": [[1]]}, "one of the two"),
        ({"text": "a"}, "no key 'text'; it takes texts, token_ids"),
        ({"texts": "a"}, "texts must be a list, not a string"),
        ({"texts": []}, "texts is empty"),
        ({"texts": ["a"] * 4}, "4 texts; at most 3"),
        ({"texts": ["a", 1]}, "text 1 is a number"),
        ({"texts": [None]}, "text 0 is null"),
        ({"texts": [" \n"]}, "text 0 is empty"),
        ({"texts": ["a" * 21]}, "21 characters; at most 20"),
        ({"texts": ["\ud800"]}, "half a surrogate pair"),
        ({"token_ids": [[]]}, "row 0 is empty"),
        ({"token_ids": [1]}, "row 0 must be a list"),
        ({"token_ids": [[1], [2000]]}, "row 1 holds 2000; token ids are 0 to 1999"),
        ({"token_ids": [[-1]]}, "holds -1"),
        ({"token_ids": [[True]]}, "holds a boolean"),
        ({"token_ids": [[1.0]]}, "holds 1.0"),
        ({"token_ids": [[1] * 9]}, "9 tokens; at most 8"),
        ({"token_ids": [[1]] * 4}, "4 rows of token ids; at most 3"),
    ],
)
def test_a_wrong_plain_request_says_why(info: ModelInfo, document: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        parse_predict(document, LIMITS, info)
    assert caught.value.status == 400


def tensor(name: str, shape: object, data: object, datatype: str = "") -> dict[str, Any]:
    kind = datatype or ("BYTES" if name == "text" else "INT64")
    return {"name": name, "shape": shape, "datatype": kind, "data": data}


def infer(*inputs: object, **more: object) -> dict[str, Any]:
    return {"inputs": list(inputs), **more}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (infer(tensor("text", [2], ["a", "b"])), InferRequest(texts=("a", "b"))),
        (infer(tensor("text", [2, 1], [["a"], ["b"]])), InferRequest(texts=("a", "b"))),
        (infer(tensor("text", [1], ["a"]), id="7"), InferRequest(texts=("a",), request_id="7")),
        (infer(tensor("input_ids", [3], [1, 2, 3])), InferRequest(token_ids=((1, 2, 3),))),
        (infer(tensor("input_ids", [2, 2], [1, 2, 3, 4], "INT32")), InferRequest(token_ids=((1, 2), (3, 4)))),
        (
            infer(
                tensor("input_ids", [2, 2], [[1, 2], [3, 0]]), tensor("attention_mask", [2, 2], [1, 1, 1, 0])
            ),
            InferRequest(token_ids=((1, 2), (3,))),
        ),
        (
            infer(tensor("text", [1], ["a"]), outputs=[{"name": "probabilities"}]),
            InferRequest(texts=("a",), outputs=("probabilities",)),
        ),
    ],
)
def test_an_infer_request_becomes_an_ask(
    info: ModelInfo, document: dict[str, Any], expected: InferRequest
) -> None:
    assert parse_infer(document, LIMITS, info) == expected


TEXT = tensor("text", [1], ["a"])
IDS = tensor("input_ids", [1, 2], [1, 2])


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "inputs must be a list, not null"),
        (infer(), "inputs is empty"),
        (infer("a"), "input 0 must be an object"),
        (infer(TEXT, extra=1), "no key 'extra'"),
        (infer(TEXT, id=7), "id must be a string"),
        (infer(TEXT, id="x" * 201), "at most 200"),
        (infer(TEXT, outputs=[{"name": "logits"}]), "no such output"),
        (infer(TEXT, outputs=["label"]), "no such output"),
        (infer(TEXT, outputs=[{"name": ["label"]}]), "no such output"),
        (infer(TEXT | {"name": "image"}), "must be named one of"),
        (infer(TEXT | {"name": ["text"]}), "must be named one of"),
        (infer(TEXT, TEXT), "each once"),
        (infer(TEXT, IDS), "inputs must be `text`"),
        (infer(tensor("attention_mask", [1], [1])), "inputs must be"),
        (infer(tensor("text", [1], ["a"], "FP32")), "datatype BYTES"),
        (infer(TEXT | {"datatype": ["BYTES"]}), "datatype BYTES"),
        (infer(tensor("text", [], ["a"])), "shape of text is empty"),
        (infer(tensor("text", [0], ["a"])), "above 0"),
        (infer(tensor("text", [1.0], ["a"])), "above 0"),
        (infer(tensor("text", [True], ["a"])), "above 0"),
        (infer(tensor("text", [1, 1, 1], ["a"])), "above 0"),
        (infer(tensor("text", [2], ["a"])), "has 1 values"),
        (infer(tensor("text", [1, 2], ["a", "b"])), r"\[n, 1\]"),
        (infer(tensor("text", [1 << 62], ["a"])), "at most 3"),
        (infer(tensor("input_ids", [1 << 20, 1], [1])), "rows of token ids; at most 3"),  # none is made
        (infer(tensor("input_ids", [2, 2], [[1, 2], [3]])), "doesn't have the shape"),
        (infer(tensor("input_ids", [2, 2], [[1, 2], 3, 4])), "has 3 values"),
        (infer(IDS, tensor("attention_mask", [2], [1, 1])), "the shape of input_ids"),
        (infer(IDS, tensor("attention_mask", [1, 2], [0, 1])), "ones followed by zeros"),
        (infer(IDS, tensor("attention_mask", [1, 2], [0, 0])), "row 0 is empty"),
        (infer(IDS, tensor("attention_mask", [1, 2], [1, None])), "ones followed by zeros"),
    ],
)
def test_a_wrong_infer_request_says_why(info: ModelInfo, document: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        parse_infer(document, LIMITS, info)
    assert caught.value.status == 400


KEYS = ("id", "inputs", "outputs", "texts", "token_ids", "name", "shape", "datatype", "data", "parameters")
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3000),
    st.sampled_from((2**63, 10**400, int("9" * 4300))),
    st.floats(allow_nan=False),
    st.sampled_from(("text", "input_ids", "attention_mask", "BYTES", "INT64", "label", "\ud800", "")),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=12,
)
PINNED = ModelInfo("m", "random", "", "t", "cpu", "cpu", ("a", "b"), 1, 2000, 8)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_no_json_object_does_worse_than_a_400(document: dict[str, Any]) -> None:
    for parse in (parse_predict, parse_infer):
        with suppress(RequestError):  # anything else fails the test
            ask = parse(document, LIMITS, PINNED)
            assert bool(ask.texts) != bool(ask.token_ids)


def test_the_plain_answer_names_label_scores_and_origin(info: ModelInfo) -> None:
    rendered = render_predict(info, ANSWER)
    assert [each["label"] for each in rendered["predictions"]] == ["negative", "positive"]
    assert rendered["predictions"][0]["scores"] == {"positive": 0.2, "negative": 0.5, "neutral": 0.3}
    assert [each["truncated"] for each in rendered["predictions"]] == [False, True]
    assert (rendered["weights"], rendered["device"]) == ("random", "cpu")
    assert rendered["timing_s"] == {"wait": 0.1, "encode": 0.2, "inference": 0.3}


def test_the_protocols_answer_is_flat_and_names_its_origin(info: ModelInfo) -> None:
    rendered, tail = render_infer(info, InferRequest(texts=("a", "b"), request_id="7"), ANSWER)
    assert tail == b""
    assert (rendered["id"], rendered["model_name"], rendered["model_version"]) == ("7", "finbert", "1")
    label, probabilities = rendered["outputs"]
    assert label == {"name": "label", "shape": [2], "datatype": "BYTES", "data": ["negative", "positive"]}
    assert probabilities["shape"] == [2, 3]
    assert probabilities["data"] == [0.2, 0.5, 0.3, 0.6, 0.2, 0.2]
    assert rendered["parameters"]["weights"] == "random"
    assert rendered["parameters"]["truncated_rows"] == 1


def test_token_ids_of_one_dimension_are_one_row(info: ModelInfo) -> None:
    ask = parse_infer(infer(tensor("input_ids", [5], [1, 2, 3, 4, 5])), LIMITS, info)
    assert ask.token_ids == ((1, 2, 3, 4, 5),)


def test_only_the_asked_outputs_are_given_and_no_id_unless_asked(info: ModelInfo) -> None:
    rendered, _ = render_infer(info, InferRequest(texts=("a",), outputs=("label",)), ANSWER)
    assert [each["name"] for each in rendered["outputs"]] == ["label"]
    assert "id" not in rendered


def test_the_models_description_is_json(info: ModelInfo) -> None:
    described = json.loads(json.dumps(render_model(info)))
    assert described["name"] == "finbert"
    assert described["outputs"][1]["shape"] == [-1, 3]
    assert described["parameters"]["weights"] == "random"


def test_an_id_that_can_not_be_sent_back_is_refused(info: ModelInfo) -> None:
    document = infer({"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}, id="\ud800")
    with pytest.raises(RequestError, match="half a surrogate pair") as caught:
        parse_infer(document, LIMITS, info)
    assert caught.value.status == 400
