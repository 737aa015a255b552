"""An answer counts only where it holds what was asked for."""

import json

import pytest

from probes.throughput.served.http import ResponseParser
from probes.throughput.served.protocol import READ_BYTES, ResponseCheck

GOOD = {"name": "y", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}


def read(document: object, tail: bytes = b"", *, binary: bool = False) -> ResponseParser:
    """An answer with status 200."""
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    extra = b"Inference-Header-Content-Length: %d\r\n" % len(head) if binary else b""
    reader = ResponseParser(keep_bytes=READ_BYTES)
    length = len(head) + len(tail)
    reader.feed(b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b%b" % (extra, length, head, tail))
    return reader


def in_binary(datatype: str, shape: list[int], size: int) -> dict[str, object]:
    return {"name": "y", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


@pytest.mark.parametrize(
    "answer",
    [
        read({"outputs": [GOOD]}),
        read({"outputs": [GOOD | {"data": [[1, 2, 3], [4, 5, 6]]}]}),
        read({"outputs": [{"name": "loss", "datatype": "FP32", "shape": [], "data": [1]}, GOOD]}),
        read({"outputs": [{"name": "y", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}]}),
        read({"outputs": [in_binary("FP16", [2, 3], 12)]}, b"\0" * 12, binary=True),
        read({"outputs": [in_binary("BYTES", [2], 10)]}, b"\1\0\0\0a\1\0\0\0b", binary=True),
    ],
)
def test_an_answer_with_what_was_asked_for_is_good(answer: ResponseParser) -> None:
    assert ResponseCheck(protocol=True, rows=2).outcome(answer) == ""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (read({"outputs": []}), "without outputs"),
        (read({}), "without outputs"),
        (read(b"ok"), "not in JSON"),
        (read(b""), "not in JSON"),
        (read({"error": "no such model"}), "without outputs"),
        (read({"outputs": [{}]}), "no name, datatype or shape"),
        (read({"outputs": [None]}), "no name, datatype or shape"),
        (read({"outputs": [GOOD | {"shape": [2, -3]}]}), "no name, datatype or shape"),
        (read({"outputs": [GOOD | {"data": []}]}), "other values than an output's shape says"),
        (read({"outputs": [GOOD | {"data": None}]}), "other values"),
        (read({"outputs": [in_binary("FP32", [2, 3], 24)]}, b"\0" * 23, binary=True), "other values"),
        (read({"outputs": [in_binary("FP32", [2, 3], 12)]}, b"\0" * 12, binary=True), "other values"),
        (read({"outputs": [GOOD | {"shape": [1, 6]}]}), "no output that has a row for each input"),
    ],
)
def test_status_200_alone_is_no_answer(answer: ResponseParser, why: str) -> None:
    assert why in ResponseCheck(protocol=True, rows=2).outcome(answer)


def test_long_answers_are_judged_by_their_length_once_one_has_been_read() -> None:
    long = GOOD | {"data": [0.123456789] * READ_BYTES, "shape": [2, READ_BYTES // 2]}
    answer = read({"outputs": [long]})
    wanted = ResponseCheck(protocol=True, rows=2, first_bytes=answer.body_bytes)
    assert wanted.outcome(answer) == ""
    assert "much shorter than the first answer" in wanted.outcome(read({"outputs": [GOOD]}))


def test_of_a_path_outside_the_protocol_only_the_length_is_known() -> None:
    wanted = ResponseCheck(protocol=False, first_bytes=20)
    assert wanted.outcome(read(b"x" * 12)) == ""
    assert "much shorter" in wanted.outcome(read(b"x" * 9))
