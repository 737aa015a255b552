"""HTTP answers as they may come, requests as they are sent, metadata as servers may write it."""

import json
import struct

import pytest

from probes.core.errors import ServerUnusable, UsageError
from probes.throughput.served import protocol
from probes.throughput.served.http import MOST_BODY_BYTES, MalformedResponse, ResponseParser
from probes.throughput.served.protocol import Tensor, parse_url

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: y\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nT: v\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN


@pytest.mark.parametrize("whole", [PLAIN, CHUNKED, INTERIM])
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_an_answer_is_the_same_however_its_bytes_come(whole: bytes, piece: int) -> None:
    reader = ResponseParser(keep_bytes=100)
    for at in range(0, len(whole), piece):
        assert not reader.done
        reader.feed(whole[at : at + piece])
    assert (reader.done, reader.status, bytes(reader.body), reader.keep_alive) == (True, 200, b"hello", True)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader = ResponseParser(keep_bytes=100)
    reader.feed(b"HTTP/1.0 200 OK\r\n\r\nhel")
    reader.feed(b"lo")
    assert not reader.done
    assert reader.end()
    assert (bytes(reader.body), reader.keep_alive) == (b"hello", False)
    cut = ResponseParser()
    cut.feed(PLAIN[:-1])
    assert not cut.end()


def test_two_lengths_of_an_answer_are_named_as_what_is_wrong_with_it() -> None:
    with pytest.raises(MalformedResponse, match="both Transfer-Encoding and Content-Length"):
        ResponseParser().feed(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n")
    twice = ResponseParser(keep_bytes=100)
    twice.feed(PLAIN.replace(b"X: y", b"Content-Length: 5"))  # the same length twice is one
    assert bytes(twice.body) == b"hello"


@pytest.mark.parametrize("said", [b"Connection: close", b"connection: Keep-Alive, Close"])
def test_a_server_may_close_the_connection(said: bytes) -> None:
    reader = ResponseParser()
    reader.feed(b"HTTP/1.1 204 No Content\r\n" + said + b"\r\n\r\n")
    assert (reader.done, reader.keep_alive) == (True, False)


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x16\x03\x01",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MOST_BODY_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhelX\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000,
        PLAIN + b"more",
    ],
)
def test_what_is_no_answer_is_refused(sent: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ResponseParser().feed(sent)


def test_an_endless_body_without_a_length_is_refused() -> None:
    reader = ResponseParser()
    reader.feed(b"HTTP/1.1 200 OK\r\n\r\n")
    for _ in range(64):
        reader.feed(bytes(1 << 20))
    with pytest.raises(MalformedResponse, match="64 MiB"):
        reader.feed(b"x")


def test_a_body_that_nobody_wants_takes_no_memory() -> None:
    reader = ResponseParser()
    reader.feed(PLAIN)
    assert (reader.body_bytes, bytes(reader.body)) == (5, b"")


@pytest.mark.parametrize(
    ("url", "model", "path", "name"),
    [
        ("http://h:1/v2/models/m/infer", "", "/v2/models/m/infer", "m"),
        ("http://h:1/v2/models/m/", "", "/v2/models/m/infer", "m"),
        ("http://h:1/v2/models/m/versions/3/infer", "", "/v2/models/m/versions/3/infer", "m"),
        ("http://h:1/pre/v2/models/m/infer", "", "/pre/v2/models/m/infer", "m"),
        ("http://h:1", "a b", "/v2/models/a%20b/infer", "a%20b"),
        ("http://h:1/v2/", "m", "/v2/models/m/infer", "m"),
        ("http://h:1/pre", "m", "/pre/v2/models/m/infer", "m"),
        ("http://h:1/predict", "", "/predict", ""),
    ],
)
def test_a_url_names_a_server_and_a_model(url: str, model: str, path: str, name: str) -> None:
    found = parse_url(url, model=model)
    assert (found.host, found.port, found.path, found.model) == ("h", 1, path, name)


def test_a_url_without_a_port_has_the_usual_one() -> None:
    assert parse_url("https://[::1]/v2").port == 443
    assert parse_url("http://h").url == "http://h:80"


@pytest.mark.parametrize(
    "url", ["h:1", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://u:p@h", "http://h/a b",
            "http://h/\r\nX: y", "http://h/?q", "http://[::1", "http://hé"],
)  # fmt: skip
def test_what_is_no_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        parse_url(url)


def test_two_names_for_the_model_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--served-model"):
        parse_url("http://h/v2/models/m", model="n")


def test_open_dimensions_are_filled() -> None:
    found = protocol.with_sizes(
        [Tensor("x", "FP32", (-1, 3, -1, 8)), Tensor("y", "INT64", (-1, -1))],
        rows=4,
        dim=5,
        shapes={"y": (7,)},
    )
    assert [one.shape for one in found] == [(4, 3, 5, 8), (4, 7)]


@pytest.mark.parametrize(
    ("shapes", "rows"), [({"x": (4,)}, 1), ({"x": (3, 3)}, 1), ({"z": (3,)}, 1), ({}, 2)]
)
def test_shapes_that_do_not_fit_are_usage_errors(shapes: dict[str, tuple[int, ...]], rows: int) -> None:
    with pytest.raises(UsageError):
        protocol.with_sizes([Tensor("x", "FP32", (3, 2))], rows=rows, dim=1, shapes=shapes)


def test_bodies_differ_and_hold_what_they_say() -> None:
    inputs = [Tensor("input_ids", "INT64", (2, 3)), Tensor("attention_mask", "INT64", (2, 3))]
    made = protocol.bodies(inputs, seed=1, binary=False)
    assert len({body.data for body in made}) == protocol.SAMPLES
    first = json.loads(made[0].data)["inputs"]
    assert [len(one["data"]) for one in first] == [6, 6]
    assert first[1]["data"] == [1] * 6
    assert protocol.bodies(inputs, seed=1, binary=False) == made


@pytest.mark.parametrize(
    ("datatype", "size"),
    [("FP32", 4), ("FP16", 2), ("BF16", 2), ("FP64", 8), ("INT8", 1), ("UINT64", 8), ("BOOL", 1)],
)
def test_binary_tensors_follow_the_json(datatype: str, size: int) -> None:
    body = protocol.bodies([Tensor("x", datatype, (2, 5))], seed=1, binary=True)[0]
    assert body.json_bytes is not None
    entry = json.loads(body.data[: body.json_bytes])["inputs"][0]
    assert entry["parameters"]["binary_data_size"] == len(body.data) - body.json_bytes == 10 * size
    head = protocol.request(body, path="/p", authority="h:1", keep=True).split(b"\r\n\r\n")[0]
    assert f"Inference-Header-Content-Length: {body.json_bytes}".encode() in head


def test_texts_are_sent_behind_their_lengths() -> None:
    body = protocol.bodies([Tensor("text", "BYTES", (1,))], seed=1, binary=True)[0]
    tail = body.data[body.json_bytes :]
    assert struct.unpack("<I", tail[:4])[0] == len(tail) - 4


def test_a_request_of_endless_size_is_refused() -> None:
    with pytest.raises(UsageError, match="values"):
        protocol.bodies([Tensor("x", "FP32", (10**6, 10**6))], seed=1, binary=True)


def test_texts_count_by_their_words_so_that_a_server_can_not_ask_for_gigabytes() -> None:
    with pytest.raises(UsageError, match="10,000,000 values"):
        protocol.bodies([Tensor("text", "BYTES", (10**6,))], seed=1, binary=True)


def test_of_weirs_service_only_the_ids_are_sent() -> None:
    names = ("text", "text_pair", "input_ids", "attention_mask", "token_type_ids")
    model = protocol.ModelMetadata(
        "finbert", "pytorch", tuple(Tensor(name, "INT64", (-1, -1)) for name in names)
    )
    weir = protocol.ServerMetadata("weir", "1", binary=True)
    assert [one.name for one in protocol.choose_inputs(model, weir, ())] == ["input_ids"]
    assert [one.name for one in protocol.choose_inputs(model, weir, ("text",))] == ["text"]
    assert len(protocol.choose_inputs(model, protocol.ServerMetadata("triton"), ())) == 5
    with pytest.raises(ServerUnusable, match="'x'"):
        protocol.choose_inputs(model, weir, ("x",))


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"\xff", b"{}", b'{"inputs": []}', b'{"inputs": [1]}', b"[" * 100_000,
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-2]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [true]}]}',
        b'{"inputs": [{"name": "x", "datatype": "COMPLEX", "shape": [1]}]}',
        b'{"inputs": [{"name": "", "datatype": "FP32", "shape": [1]}]}',
        b'{"inputs": [{"name": "x", "datatype": [], "shape": [1]}]}',
    ],
)  # fmt: skip
def test_a_description_that_can_not_be_used_says_what_to_give_instead(body: bytes) -> None:
    with pytest.raises(ServerUnusable) as caught:
        protocol.model_metadata(body)
    assert "--payload" in caught.value.hint


def test_the_one_ready_model_is_found() -> None:
    index = [{"name": "a", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE"}]
    assert protocol.only_model(json.dumps(index).encode()) == "a"
    with pytest.raises(ServerUnusable, match="a, b"):
        protocol.only_model(b'[{"name": "a"}, {"name": "b"}]')
    with pytest.raises(ServerUnusable) as caught:
        protocol.only_model(b"[]")
    assert "--payload FILE" in caught.value.hint


def test_what_a_server_says_of_itself_may_be_anything() -> None:
    assert protocol.server_metadata(b'{"name": 3, "extensions": 4}') == protocol.ServerMetadata()
    assert protocol.server_metadata(b"nonsense") == protocol.ServerMetadata()
    assert protocol.server_metadata(b'{"name": "triton", "extensions": ["binary_tensor_data"]}').binary
