"""Binary tensors, pairs and embeddings: what callers send becomes an Ask, or a 400 that says why."""

import base64
import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service.api import infer as binary
from service.api.infer import join_body, parse_infer, render_infer
from service.api.predict import parse_embeddings, parse_predict, render_embeddings
from service.api.requests import Answer, InferRequest, timeout_of
from service.errors import RequestError
from service.inference.classifier import Encoded, ModelInfo
from service.settings import Limits

LIMITS = Limits(max_texts=3, max_text_chars=20)
PINNED = ModelInfo("m", "random", "", "t", "cpu", "cpu", ("a", "b"), 1, 2000, 8, 2)


def framed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def sent(name: str, datatype: str, shape: list[int], data: bytes) -> tuple[dict[str, Any], bytes]:
    """A tensor of an infer request, and the binary part that it announces."""
    return {
        "name": name,
        "datatype": datatype,
        "shape": shape,
        "parameters": {"binary_data_size": len(data)},
    }, data


def infer(*tensors: tuple[dict[str, Any], bytes], **more: object) -> InferRequest:
    document = {"inputs": [tensor for tensor, _ in tensors], **more}
    return parse_infer(document, LIMITS, PINNED, b"".join(data for _, data in tensors))


def test_binary_texts_and_numbers_become_what_json_would() -> None:
    assert infer(sent("text", "BYTES", [2], framed(b"a", "é".encode()))).texts == ("a", "é")
    ids = sent("input_ids", "INT64", [2, 2], struct.pack("<4q", 1, 2, 3, 0))
    mask = sent("attention_mask", "INT32", [2, 2], struct.pack("<4i", 1, 1, 1, 0))
    assert infer(ids, mask).token_ids == ((1, 2), (3,))


def test_pairs_come_as_two_tensors_or_as_lists() -> None:
    pair = infer(sent("text", "BYTES", [1], framed(b"a")), sent("text_pair", "BYTES", [1], framed(b"b")))
    assert pair.texts == (("a", "b"),)
    assert parse_predict({"texts": ["a", ["b", "c"]]}, LIMITS, PINNED).texts == ("a", ("b", "c"))


def test_token_types_follow_the_mask() -> None:
    document = {
        "inputs": [
            {"name": name, "datatype": "INT64", "shape": [1, 4], "data": data}
            for name, data in (
                ("input_ids", [1, 2, 3, 0]),
                ("attention_mask", [1, 1, 1, 0]),
                ("token_type_ids", [0, 0, 1, 0]),
            )
        ]
    }
    ask = parse_infer(document, LIMITS, PINNED)
    assert ask.encoded == (Encoded((1, 2, 3), False, (0, 0, 1)),)


TEXT, _ = sent("text", "BYTES", [1], framed(b"a"))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (sent("text", "BYTES", [2], framed(b"a")), "doesn't hold 2 elements"),
        (sent("text", "BYTES", [1], framed(b"a", b"b")), "doesn't hold 1 elements"),
        (sent("text", "BYTES", [1], framed(b"\xff")), "no UTF-8"),
        (sent("text", "BYTES", [1], b"\xff\xff\xff\xffa"), "doesn't hold 1"),
        (sent("text", "BYTES", [1 << 40], framed(b"a")), "at most 3"),
        (sent("input_ids", "INT64", [1 << 40], b"a"), "needs another number"),
        (sent("input_ids", "INT64", [1, 2], b"a" * 8), "has 8 bytes"),
        (({"parameters": {"binary_data_size": 9}}, b"a"), "must be named"),
        ((TEXT, framed(b"a") + b"rest"), "the inputs say 5"),
        ((TEXT, b""), "ends before"),
        ((TEXT | {"data": ["a"]}, b""), "one of the two"),
        ((TEXT | {"parameters": {"binary_data_size": -1}}, b""), "0 or more"),
        (
            ({**sent("text", "BYTES", [1], b"")[0], "parameters": {"binary_data_size": True}}, b""),
            "0 or more",
        ),
        ((TEXT | {"parameters": []}, b""), "must be an object"),
    ],
)
def test_a_wrong_binary_tensor_says_why(tensor: tuple[dict[str, Any], bytes], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        infer(tensor)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"texts": [["a"]]}, "has 1 parts"),
        ({"texts": [["a", "b", "c"]]}, "has 3 parts"),
        ({"texts": [["a", 1]]}, "a part of text 0 is a number"),
        ({"texts": [["a", " "]]}, "a part of text 0 is empty"),
    ],
)
def test_a_wrong_pair_says_why(document: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_predict(document, LIMITS, PINNED)


@pytest.mark.parametrize("declared", ["x", "-1", "", "5", "9" * 40, "²"])
def test_a_header_length_that_can_not_be_is_a_400(declared: str) -> None:
    with pytest.raises(RequestError, match="Inference-Header-Content-Length"):
        binary.split_body(b"{}12"[:4], declared)
    assert binary.split_body(b"{}12", "2") == (b"{}", b"12")
    assert binary.split_body(b"{}12", None) == (b"{}12", b"")


def wanted(name: str, in_binary: bool) -> dict[str, Any]:
    return {"name": name, "parameters": {"binary_data": in_binary}}


ANSWER = Answer((Encoded((1, 2, 3)),), ((0.25, 0.75),), wait_s=0.1, encode_s=0.2, inference_s=0.3)


@pytest.mark.parametrize(
    ("more", "in_binary"),
    [
        ({}, set()),
        ({"parameters": {"binary_data_output": True}}, {"label", "probabilities"}),
        (
            {"outputs": [{"name": "label", "parameters": {"binary_data": True}}, {"name": "probabilities"}]},
            {"label"},
        ),
        (
            {
                "parameters": {"binary_data_output": True},
                "outputs": [
                    {"name": "label", "parameters": {"binary_data": False}},
                    {"name": "probabilities"},
                ],
            },
            {"probabilities"},
        ),
    ],
)
def test_outputs_are_binary_where_the_caller_says_so(more: dict[str, Any], in_binary: set[str]) -> None:
    ask = infer(sent("text", "BYTES", [1], framed(b"a")), **more)
    assert ask.binary == in_binary
    body, headers = join_body(*render_infer(PINNED, ask, ANSWER))
    length = int(headers.get("Inference-Header-Content-Length", len(body)))
    head, tail = json.loads(body[:length]), body[length:]
    expected = {"label": framed(b"b"), "probabilities": struct.pack("<2f", 0.25, 0.75)}
    for output in head["outputs"]:
        if output["name"] in in_binary:
            n_bytes = output["parameters"]["binary_data_size"]
            assert tail[:n_bytes] == expected[output["name"]]
            assert "data" not in output
            tail = tail[n_bytes:]
    assert tail == b""


@pytest.mark.parametrize(
    ("document", "texts", "ids"),
    [
        ({"input": "a"}, ("a",), ()),
        ({"input": ["a", "b"], "model": "m", "user": "me"}, ("a", "b"), ()),
        ({"input": [1, 2], "dimensions": 2}, (), ((1, 2),)),
        ({"input": [[1], [2, 3]]}, (), ((1,), (2, 3))),
    ],
)
def test_embeddings_are_asked_in_openais_four_ways(
    document: dict[str, Any], texts: tuple[str, ...], ids: tuple[tuple[int, ...], ...]
) -> None:
    ask = parse_embeddings(document, LIMITS, PINNED)
    assert (ask.texts, ask.token_ids, ask.task) == (texts, ids, "embed")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "input must be a list, not null"),
        ({"input": []}, "input is empty"),
        ({"input": ["a", 1]}, "input 1 must be a string"),
        ({"input": [["a"]]}, "holds a"),
        ({"input": [None]}, "input 0 must be a string"),
        ({"input": "a", "encoding_format": "int8"}, "float or base64"),
        ({"input": "a", "dimensions": 1}, "dimensions must be 2"),
        ({"input": "a", "stream": True}, "no key 'stream'"),
    ],
)
def test_a_wrong_embeddings_request_says_why(document: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_embeddings(document, LIMITS, PINNED)


def test_base64_holds_the_same_numbers() -> None:
    (plain,) = render_embeddings(PINNED, InferRequest(task="embed"), ANSWER)["data"]
    (packed,) = render_embeddings(PINNED, InferRequest(task="embed", base64=True), ANSWER)["data"]
    assert list(struct.unpack("<2f", base64.b64decode(packed["embedding"]))) == plain["embedding"]


def test_deadlines_come_in_three_ways() -> None:
    assert timeout_of({"timeout_ms": 1500}, None) == 1.5
    assert timeout_of({"timeout": 1_500_000}, "9") == 1.5
    assert timeout_of({}, "1500") == 1.5
    assert timeout_of({}, None) is None
    for wrong in ("x", "-1", "0", "1.5", "9" * 12):
        with pytest.raises(RequestError, match="X-Timeout-Ms"):
            timeout_of({}, wrong)


@pytest.mark.thorough
@given(st.binary(max_size=60), st.integers(0, 40), st.sampled_from(("BYTES", "INT64", "INT32")))
def test_no_binary_data_does_worse_than_a_400(data: bytes, count: int, datatype: str) -> None:
    with suppress(RequestError):  # anything else fails the test
        assert len(binary.decode_tensor(data, datatype, count, "x")) == count
