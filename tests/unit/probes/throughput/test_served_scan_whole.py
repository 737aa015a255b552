"""A served scan from the first look at the server to the last level, in virtual time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from simulated import Loop, Queue

from probes.core.errors import ServerUnusable
from probes.core.unknown import Unknown
from probes.throughput.served import results, scan
from probes.throughput.served.http import GOOD, Endpoint, Exchange, ResponseParser
from probes.throughput.served.protocol import parse_url
from probes.throughput.served.results import ServedScan, ServedSettings

SETTINGS = ServedSettings(
    rows=2, slo_s=None, window_s=2.0, windows=3, most_windows=10, tolerance=0.1, limit_s=30.0,
    most_callers=8, most_connections=512, keep_alive=True, rates_per_s=(20.0, 130.0, 500.0), seed=1,
)  # fmt: skip
SERVER = {"name": "stand-in", "version": "7", "extensions": ["binary_tensor_data"]}
MODEL = {
    "name": "m",
    "platform": "queue",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [],
    "parameters": {"kind": "test"},
}
ANSWER = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 1], "data": [0.5, 0.25]}]}
URL = "http://server.example:8000/v2/models/m/infer"


@dataclass
class Server:
    """Answers by path: a status, a body and headers. What is asked under load takes 10 ms, one at a time."""

    answers: dict[str, tuple[int, Any, str]]
    queue: Queue = field(default_factory=lambda: Queue(0.01))
    asked: list[str] = field(default_factory=list)
    open_clients: int = 0
    options: list[dict[str, Any]] = field(default_factory=list)
    requests: set[tuple[bytes, ...]] = field(default_factory=set)

    def client(
        self, _endpoint: Endpoint, requests: tuple[bytes, ...], _selector: object, **options: Any
    ) -> Any:
        self.open_clients += 1
        self.options.append(options)
        if requests:
            self.requests.add(requests)
        return Client(self)


@dataclass
class Client:
    server: Server

    async def fetch(self, sent: bytes) -> tuple[Exchange, ResponseParser]:
        path = sent.split(b" ", 2)[1].decode()
        self.server.asked.append(path)
        response = ResponseParser(keep_bytes=1 << 20)
        if path not in self.server.answers:
            return Exchange(0.0, 0.0, "the connection was refused"), response
        status, body, more = self.server.answers[path]
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        response.feed(f"HTTP/1.1 {status} S\r\n{more}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return Exchange(0.0, 0.0, GOOD if status == 200 else f"status {status}"), response

    async def ask(self, number: int) -> Exchange:
        return await self.server.queue.ask(number)

    def close(self) -> None:
        self.server.open_clients -= 1


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch, **changes: tuple[int, Any, str]) -> Iterator[Server]:
    usual = {
        "/v2": (200, SERVER, ""),
        "/v2/models/m": (200, MODEL, ""),
        "/v2/models/m/infer": (200, ANSWER, ""),
        "/v2/repository/index": (200, [{"name": "m", "state": "READY"}], ""),
        "/metrics": (200, b"process_cpu_seconds_total 1.5\n", ""),
    }
    server = Server({path: found for path, found in {**usual, **changes}.items() if found})
    with monkeypatch.context() as patched:
        patched.setattr(scan, "HttpClient", server.client)
        patched.setattr(scan, "loop_with", lambda _selector: Loop())
        patched.setattr(scan, "wake_early_s", lambda _rate: 0.0)  # virtual time stands still meanwhile
        patched.setattr(scan, "resolve", lambda host, port, tls: Endpoint(host, port, tls, "192.0.2.1"))
        patched.setattr(scan, "is_own_address", lambda address: address != "192.0.2.1")
        patched.setattr(scan, "snapshot", lambda _root, reported, port: (reported, port))
        patched.setattr(scan, "between", lambda before, after, cpus: Unknown(f"{before} {after} {cpus > 0}"))
        yield server


def scanned(
    url: str = URL, options: scan.RequestOptions | None = None, **settings: Any
) -> tuple[ServedScan, list[ServedScan]]:
    heard: list[ServedScan] = []
    how = ServedSettings(**{**vars(SETTINGS), **settings})
    return scan.scan(parse_url(url), options or scan.RequestOptions(), how, heard.append), heard


@pytest.mark.thorough
def test_callers_are_doubled_to_the_most_and_rates_follow_until_one_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(monkeypatch) as server:
        found, heard = scanned()
    assert [level.callers for level in found.of("closed")] == [1, 2, 4]
    assert [level.rate_per_s for level in found.of("open")] == [20.0, 130.0]
    assert results.throughput(found.levels[0]).value == pytest.approx(100, rel=0.05)
    first, second = found.ended.split("; ")
    assert "grow" in first or "more" in first
    assert "130" in second
    assert found.complete
    assert len(heard) == 1 + len(found.levels) + 1
    assert [len(each.levels) for each in heard] == [*range(len(found.levels) + 1), len(found.levels)]
    assert heard[0].ended == heard[1].ended == scan.UNFINISHED
    assert not heard[0].complete
    assert heard[-1] == found
    assert found.saturated != heard[-2].saturated
    assert {level.callers for level in found.of("open")} == {SETTINGS.most_connections}
    assert server.asked[:3] == ["/v2", "/v2/models/m", "/v2/models/m/infer"]
    assert set(server.asked[3:]) == {"/metrics"}
    assert {level.conditions.reason for level in found.levels if isinstance(level.conditions, Unknown)} == {
        "(1.5, None) (1.5, None) True"
    }
    assert server.open_clients == 1  # the one for /metrics, whose connections end with their answers


def test_what_is_asked_and_of_whom_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch) as server:
        found, _ = scanned(most_callers=1, rates_per_s=(10.0,))
    by = found.by
    assert (by.url, by.model, by.server, by.platform) == (URL, "m", "stand-in 7", "queue")
    assert by.request == "x FP32[2, 3], as binary tensors"
    assert dict(by.facts) == {"kind": "test"}
    assert by.same_machine is False
    (requests,) = server.requests
    assert len(set(requests)) == len(requests) > 1
    assert {request.split(b"\r\n", 1)[0] for request in requests} == {b"POST /v2/models/m/infer HTTP/1.1"}
    assert all(b"Host: server.example:8000\r\n" in request for request in requests)
    assert by.request_bytes == len(requests[0].split(b"\r\n\r\n", 1)[1])
    asking = server.options[-1]
    assert (asking["limit_s"], asking["keep"], asking["secure"]) == (30.0, True, None)
    assert (asking["check"].rows, asking["check"].protocol) == (2, True)
    assert asking["check"].first_bytes == len(json.dumps(ANSWER))
    assert found.ended.endswith("every rate was measured")
    with served(monkeypatch) as server:
        scanned(most_callers=1, rates_per_s=(10.0,), seed=2)
    assert server.requests != {requests}


def test_a_server_that_lists_one_model_need_not_be_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch) as server:
        found, _ = scanned("http://server.example:8000", most_callers=1, rates_per_s=(10.0,))
    assert found.by.model == "m"
    assert server.asked[:2] == ["/v2", "/v2/repository/index"]
    assert found.by.url == URL
    with (
        served(monkeypatch, **{"/v2/repository/index": (404, {}, "")}),
        pytest.raises(ServerUnusable, match="doesn't list its models"),
    ):
        scanned("http://server.example:8000")


def test_a_given_body_is_sent_as_it_is_and_judged_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, **{"/score": (200, b"0.5", "")}) as server:
        options = scan.RequestOptions(payload=b"given")
        found, _ = scanned("http://server.example:8000/score", options, most_callers=1, rates_per_s=(10.0,))
    assert server.asked[0] == "/score"
    (requests,) = server.requests
    assert [request.rpartition(b"\r\n\r\n")[2] for request in requests] == [b"given"]
    assert found.by.request == "a given body, whose answers are judged by status and length alone"
    assert found.by.request_bytes == 5
    assert not server.options[-1]["check"].protocol


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/v2", None, "can't ask server.example:8000: the connection was refused"),
        ("/v2/models/m", (404, {}, ""), "describes no model"),
        (
            "/v2/models/m",
            (302, b"", "Location: http://elsewhere/\r\n"),
            r"redirects .status 302. to http://else",
        ),
        ("/v2/models/m/infer", (503, b"no memory", ""), "doesn't answer a request: status 503: no memory"),
        ("/v2/models/m/infer", (301, b"", ""), r"redirects .status 301. to no address"),
        ("/v2/models/m/infer", (300, b"", ""), r"redirects .status 300. to no address"),
        ("/v2/models/m/infer", (200, {"outputs": []}, ""), "doesn't answer a request: .*without outputs"),
    ],
)
def test_a_server_that_can_not_be_asked_is_refused_before_any_level(
    path: str, answer: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[ServedScan] = []
    with (
        served(monkeypatch, **{path: answer}) as server,
        pytest.raises(ServerUnusable, match=words) as caught,
    ):
        scan.scan(parse_url(URL), scan.RequestOptions(), SETTINGS, heard.append)
    assert not heard
    assert server.open_clients == 0
    assert caught.value.hint


def test_metrics_that_are_not_there_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch, **{"/metrics": None}) as server:
        found, _ = scanned(most_callers=2, rates_per_s=(10.0,))
    assert server.asked.count("/metrics") == 1
    assert "its /metrics: the connection was refused" in str(found.levels[0].conditions)


def test_the_port_of_a_server_on_this_machine_tells_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch):
        monkeypatch.setattr(scan, "is_own_address", lambda _address: True)
        found, _ = scanned(most_callers=1, rates_per_s=(10.0,))
    assert found.by.same_machine is True
    assert "(1.5, 8000)" in str(found.levels[0].conditions)


def test_a_level_of_which_nothing_was_answered_leaves_the_scan_unfinished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with served(monkeypatch) as server:
        server.queue = Queue(0.01, refuse_beyond=0)
        found, heard = scanned()
    assert not found.complete
    assert not found.of("open")
    assert len(found.levels) == 1
    assert heard[-1] == found
