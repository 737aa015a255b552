"""SIGTERM ends the service in time, whatever its threads are busy with."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from service import server
from service.batching import pulse
from service.errors import DeviceFault, DeviceLost
from service.model.classifier import Encoded, ModelInfo, Probabilities, Text, Vector
from service.model.tokenizer import load_tokenizer
from service.settings import Limits, Settings

INFO = ModelInfo("finbert", "random", "seed 0", "hashing-stand-in", "cpu", "cpu", ("yes", "no"), 1, 2000, 8)
WITHIN_S = 10  # the busy thread would take BUSY_S
BUSY_S = 40


class Busy:
    """Answers once `gate` is open."""

    info = INFO

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def encode(self, texts: Sequence[Text]) -> tuple[Encoded, ...]:
        return tuple(Encoded((1, 2)) for _ in texts)

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        self.gate.wait(BUSY_S)
        return tuple((1.0, 0.0) for _ in batch)

    def embed(self, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        return tuple((0.6, 0.8) for _ in batch)

    def prove(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return {}

    def counts(self) -> dict[str, int]:
        return {}


def settings() -> Settings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Settings("test", "cpu", Path("/models"), "random", "127.0.0.1", port, Limits(drain_s=0))


def until(there: Callable[[], bool]) -> None:
    """Wait for it, and not for ever: what comes next fails then."""
    ends = time.monotonic() + 30
    while not there() and time.monotonic() < ends:
        time.sleep(0.02)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_while_the_model_is_loading_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, loading = threading.Event(), threading.Event()

    def load(_settings: Settings, _name: str) -> Busy:
        loading.set()
        gate.wait(BUSY_S)
        return Busy(gate)

    def stop() -> None:
        assert loading.wait(30)
        until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        terminate()

    monkeypatch.setattr(server, "_load", load)
    stopper = threading.Thread(target=stop)
    begun = time.monotonic()
    stopper.start()
    try:
        asyncio.run(server.serve(settings()))
        assert time.monotonic() - begun < WITHIN_S
    finally:
        gate.set()
        stopper.join()


def test_who_is_still_inside_at_the_end_of_a_drain_gets_503_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, here = threading.Event(), settings()
    monkeypatch.setattr(server, "_load", lambda _settings, _name: Busy(gate))
    statuses: list[int] = []

    def ask(status_for: str, path: str) -> int:
        connection = http.client.HTTPConnection(here.host, here.port, timeout=30)
        try:
            connection.request(
                status_for, path, json.dumps({"texts": ["a"]}) if status_for == "POST" else None
            )
            return connection.getresponse().status
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()

    def callers() -> None:
        while ask("GET", "/v2/health/ready") != 200:
            time.sleep(0.05)
        asking = [threading.Thread(target=lambda: statuses.append(ask("POST", "/predict"))) for _ in range(3)]
        for thread in asking:
            thread.start()
        until(lambda: b"weir_in_flight 3.0" in request(here, "GET", "/metrics")[1])
        terminate()
        for thread in asking:
            thread.join(30)

    caller = threading.Thread(target=callers)
    begun = time.monotonic()
    caller.start()
    try:
        asyncio.run(server.serve(here))
        assert time.monotonic() - begun < WITHIN_S
    finally:
        gate.set()
        caller.join()
    assert statuses == [503] * 3
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


# ---- models that change, devices that fail -----------------------------------------------------------


class Named:
    """Answers at once with its own number; `failure` is raised while there is one."""

    def __init__(self, number: int) -> None:
        self.info = replace(INFO, weights_source=str(number))
        self.failure: Exception | None = None

    def encode(self, texts: Sequence[Text]) -> tuple[Encoded, ...]:
        return tuple(Encoded((1, 2)) for _ in texts)

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        time.sleep(0.002)
        if self.failure:
            raise self.failure
        return tuple((1.0, 0.0) for _ in batch)

    def embed(self, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        return tuple((0.6, 0.8) for _ in batch)

    def prove(self) -> None:
        self.classify([Encoded((1, 2))])

    def memory(self) -> dict[str, int]:
        return {}

    def counts(self) -> dict[str, int]:
        return {}


def request(here: Settings, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(here.host, here.port, timeout=30)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except ConnectionRefusedError:
        return 0, b""
    finally:
        connection.close()


def ready(here: Settings) -> None:
    while request(here, "GET", "/v2/health/ready")[0] != 200:
        time.sleep(0.02)


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread while the server has this one; what it raises is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            terminate()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(60)
    if failures:
        raise failures[0]


def test_a_hangup_loads_the_models_again_and_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Named] = []

    def load(_settings: Settings, _name: str) -> Named:
        made.append(Named(len(made)))
        time.sleep(0.1)
        return made[-1]

    monkeypatch.setattr(server, "_load", load)
    here = settings()
    statuses: list[int] = []

    def source() -> str:
        return str(json.loads(request(here, "GET", "/v2/models/finbert")[1])["parameters"]["weights_source"])

    def work() -> None:
        ready(here)
        for number in (1, 2, 3):
            os.kill(os.getpid(), signal.SIGHUP)
            while source() != str(number):
                statuses.append(request(here, "POST", "/predict", '{"texts": ["a"]}')[0])
        terminate()

    with beside(work):
        asyncio.run(server.serve(here))
    assert len(statuses) > 6  # asked while models were swapped
    assert set(statuses) == {200}


def test_a_device_that_does_not_recover_is_unready_within_two_seconds_and_ends_with_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Named(0)
    monkeypatch.setattr(server, "_load", lambda _settings, _name: model)
    monkeypatch.setattr(pulse, "_PAUSES_S", (0.0, 0.1, 0.1))
    here = settings()
    seen: list[tuple[str, int]] = []

    def work() -> None:
        ready(here)
        model.failure = DeviceFault("HIP error: unspecified launch failure")
        seen.append(("refused", request(here, "POST", "/predict", '{"texts": ["a"]}')[0]))
        seen.append(("ready", request(here, "GET", "/v2/health/ready")[0]))
        begun = time.monotonic()
        while (alive := request(here, "GET", "/v2/health/live")[0]) == 200:
            assert time.monotonic() - begun < 10
            time.sleep(0.02)
        seen.append(("live", alive))

    with beside(work), pytest.raises(DeviceLost, match="unspecified launch failure") as caught:
        asyncio.run(server.serve(here))
    assert caught.value.exit_code == 3
    assert seen == [("refused", 503), ("ready", 503), ("live", 503)]


def test_a_device_that_hangs_is_noticed_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(server, "_load", lambda _settings, _name: Busy(gate))
    monkeypatch.setattr(server, "_WATCH_S", 0.05)
    here = replace(settings(), limits=Limits(stall_s=1))
    statuses: list[int] = []

    def work() -> None:
        while request(here, "GET", "/v2/health/ready")[0] != 200:
            time.sleep(0.02)
        statuses.append(request(here, "POST", "/predict", '{"texts": ["a"]}')[0])

    begun = time.monotonic()
    try:
        with beside(work), pytest.raises(DeviceLost, match="hasn't ended"):
            asyncio.run(server.serve(here))
        assert time.monotonic() - begun < BUSY_S
    finally:
        gate.set()
    assert statuses == [503]


# ---- stops with requests inside ----------------------------------------------------------------------

PROCESS = """
import asyncio, sys, time
sys.path[:0] = sys.argv[2:]
from test_service_stops import INFO, Named
from pathlib import Path
from service import server
from service.model.tokenizer import load_tokenizer
from service.settings import Limits, Settings

class Slow(Named):
    def classify(self, batch):
        time.sleep(1.5)  # for all to arrive
        return tuple((1.0, 0.0) for _ in batch)

server._load = lambda _settings, _name: Slow(0)
here = Settings("t", "cpu", Path("/models"), "random", "127.0.0.1", int(sys.argv[1]), Limits())
asyncio.run(server.serve(here))
"""
HERE = Path(__file__).parent
N_INSIDE = 64


def cycle(here: Settings) -> tuple[list[int], int]:
    """Start, 64 requests inside, SIGTERM: the statuses of the 64, and the exit code."""
    command = [sys.executable, "-c", PROCESS, str(here.port), str(HERE), str(HERE.parents[1] / "images")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        ready(here)
        with ThreadPoolExecutor(N_INSIDE) as pool:
            asked = [
                pool.submit(request, here, "POST", "/predict", '{"texts": ["a"]}') for _ in range(N_INSIDE)
            ]
            while f"weir_in_flight {N_INSIDE}.0".encode() not in request(here, "GET", "/metrics")[1]:
                assert not all(each.done() for each in asked), "they were never inside together"
            process.terminate()
            statuses = [each.result()[0] for each in asked]
        return statuses, process.wait(30)
    finally:
        process.kill()


def test_a_stop_answers_each_of_64_requests_inside() -> None:
    """`make bench-service` does it a hundred times, with the image."""
    for _ in range(2):
        assert cycle(settings()) == ([200] * N_INSIDE, 0)


def test_a_collector_that_does_not_answer_does_not_hold_up_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, asked, exported = threading.Event(), threading.Event(), threading.Event()
    gate.set()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the library's name
            asked.set()
            exported.wait(BUSY_S)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(BUSY_S))
    monkeypatch.setattr(server, "_load", lambda _settings, _name: Busy(gate))
    here = replace(settings(), spans=True)

    def work() -> None:
        ready(here)
        assert request(here, "POST", "/predict", '{"texts": ["a"]}')[0] == 200
        terminate()

    try:
        with beside(work):
            asyncio.run(server.serve(here))
        assert asked.wait(BUSY_S)  # it had begun to send
        assert not exported.is_set()
    finally:
        exported.set()
        collector.shutdown()
        collector.server_close()


def test_a_storm_of_sighups_loads_the_models_once_more_and_callers_do_not_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, here = threading.Event(), settings()
    gate.set()
    loads: list[float] = []
    slowest: list[float] = []

    def load(_settings: Settings, _name: str) -> Busy:
        loads.append(time.monotonic())
        time.sleep(0.3)
        return Busy(gate)

    def ask(path: str) -> int:
        connection = http.client.HTTPConnection(here.host, here.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()

    def storm() -> None:
        try:
            while ask("/v2/health/ready") != 200:
                time.sleep(0.05)
            for number in range(400):
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.001)
                if number % 20 == 0:
                    begun = time.monotonic()
                    assert ask("/v2/health/ready") == 200
                    slowest.append(time.monotonic() - begun)
            ends = time.monotonic() + 30
            while time.monotonic() < ends and time.monotonic() - loads[-1] < 1.5:
                time.sleep(0.1)
        finally:
            terminate()

    monkeypatch.setattr(server, "_load", load)
    thread = threading.Thread(target=storm)
    thread.start()
    with caplog.at_level("INFO", "service"):
        asyncio.run(server.serve(here))
    thread.join(30)
    again = [record for record in caplog.records if record.getMessage() == "models loaded again"]
    lasted_s = loads[-1] - loads[0]
    assert len(slowest) == 20
    assert 2 <= len(loads) <= lasted_s / 0.3 + 2  # one at a time, and the last one after the last signal
    assert len(again) <= len(loads)


def test_a_model_whose_tokenizer_panics_leaves_the_one_from_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, here = threading.Event(), settings()
    gate.set()
    loads: list[str] = []
    statuses: list[int] = []
    broken = {"type": "Precompiled", "precompiled_charsmap": ""}
    model = {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "normalizer": broken, "model": model})
    )

    def load(_settings: Settings, name: str) -> Busy:
        loads.append(name)
        if len(loads) > 1:
            load_tokenizer(tmp_path, 2000, 8)
        return Busy(gate)

    def ready() -> int:
        connection = http.client.HTTPConnection(here.host, here.port, timeout=30)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status
        except ConnectionRefusedError:
            return 0
        finally:
            connection.close()

    def act() -> None:
        try:
            while ready() != 200:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGHUP)
            while len(loads) < 2:
                time.sleep(0.05)
            time.sleep(0.5)
            statuses.append(ready())
        finally:
            terminate()

    monkeypatch.setattr(server, "_load", load)
    thread = threading.Thread(target=act)
    thread.start()
    asyncio.run(server.serve(here))
    thread.join(30)
    assert statuses == [200]
