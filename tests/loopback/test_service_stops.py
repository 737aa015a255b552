"""SIGTERM ends the service in time, whatever its threads are busy with."""

import asyncio
import http.client
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from service import cli, server
from service.batching import health
from service.errors import DeviceFault, DeviceLost, ServiceError
from service.inference.classifier import Encoded, ModelInfo, Probabilities, Text, Vector
from service.inference.tokenizer import load_tokenizer
from service.settings import Limits, Settings
from waiting import PATIENCE_S, free_ports, until

INFO = ModelInfo("finbert", "random", "seed 0", "hashing-stand-in", "cpu", "cpu", ("yes", "no"), 1, 2000, 8)
BUSY_S = 4 * PATIENCE_S  # which nothing here waits for


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


@pytest.fixture
def here() -> Iterator[Settings]:
    """Settings with a port that nobody else takes."""
    with free_ports(1) as (port,):
        yield Settings("test", "cpu", Path("/models"), "random", "127.0.0.1", port, Limits(drain_s=0))


def terminate() -> None:
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "no server is here any more"
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_while_the_model_is_loading_does_not_wait_for_it(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, loading = threading.Event(), threading.Event()

    def load(_settings: Settings, _name: str) -> Busy:
        loading.set()
        gate.wait(BUSY_S)
        return Busy(gate)

    def stop() -> None:
        assert loading.wait(PATIENCE_S)
        until(lambda: signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        terminate()

    monkeypatch.setattr(server, "_load", load)
    begun = time.monotonic()
    try:
        with beside(stop):
            asyncio.run(server.serve(here))
        assert time.monotonic() - begun < BUSY_S
    finally:
        gate.set()


def test_a_signal_after_the_end_does_not_change_the_exit_code(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second SIGTERM or a late SIGHUP killed the process on its last steps: 143 or 129, not 0."""
    gate = threading.Event()
    monkeypatch.setattr(server, "_load", lambda _settings, _name: Busy(gate))

    def stop() -> None:
        ready(here)
        terminate()

    with beside(stop):
        asyncio.run(server.serve(here))
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert signal.getsignal(each) is signal.SIG_IGN


def test_a_hangup_before_there_is_a_model_does_not_end_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(cli, "main", lambda *_: seen.append(signal.getsignal(signal.SIGHUP)) or 0)
    monkeypatch.setattr(os, "_exit", seen.append)
    runpy.run_module("service", run_name="__main__")
    assert seen == [signal.SIG_IGN, 0]


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_limit_of_processes_that_leaves_no_thread_is_an_error_that_says_so(
    here: Settings, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """Neither for the device nor, then, to load the model. It was a traceback."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ServiceError, match="can't start new thread") as caught:
        asyncio.run(server.serve(here))
    assert "pids_limit" in caught.value.hint


def test_who_is_still_inside_at_the_end_of_a_drain_gets_503_and_no_traceback(
    here: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(server, "_load", lambda _settings, _name: Busy(gate))
    statuses: list[int] = []

    def callers() -> None:
        ready(here)
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(predict, here) for _ in range(3)]
            until(lambda: b"weir_in_flight 3.0" in request(here, "GET", "/metrics")[1])
            terminate()
            statuses.extend(each.result() for each in asked)

    begun = time.monotonic()
    try:
        with beside(callers):
            asyncio.run(server.serve(here))
        assert time.monotonic() - begun < BUSY_S
    finally:
        gate.set()
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
    """An answer's status and body; 0 where there is no server, or none any more."""
    connection = http.client.HTTPConnection(here.host, here.port, timeout=2 * PATIENCE_S)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except ConnectionError:
        return 0, b""
    finally:
        connection.close()


def predict(here: Settings) -> int:
    return request(here, "POST", "/predict", '{"texts": ["a"]}')[0]


def is_ready(here: Settings) -> bool:
    return request(here, "GET", "/v2/health/ready")[0] == 200


def ready(here: Settings) -> None:
    until(lambda: is_ready(here))


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` in a thread while the server has this one; what it raises is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            with suppress(AssertionError):
                terminate()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(2 * PATIENCE_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_a_hangup_loads_the_models_again_and_loses_no_request(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Named] = []
    statuses: list[int] = []

    def load(_settings: Settings, _name: str) -> Named:
        made.append(Named(len(made)))
        before = len(statuses)
        until(lambda: made[-1] is made[0] or len(statuses) > before + 2)  # asked while models are swapped
        return made[-1]

    monkeypatch.setattr(server, "_load", load)

    def source() -> str:
        return str(json.loads(request(here, "GET", "/v2/models/finbert")[1])["parameters"]["weights_source"])

    def work() -> None:
        ready(here)
        for number in (1, 2, 3):
            os.kill(os.getpid(), signal.SIGHUP)
            while source() != str(number):
                statuses.append(predict(here))
        terminate()

    with beside(work):
        asyncio.run(server.serve(here))
    assert set(statuses) == {200}


def test_a_device_that_does_not_recover_is_unready_at_once_and_ends_the_service_with_its_code(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Named(0)
    monkeypatch.setattr(server, "_load", lambda _settings, _name: model)
    monkeypatch.setattr(health, "_PAUSES_S", (0.0, 0.1, 0.1))
    seen: list[tuple[str, int]] = []
    heard = threading.Event()

    async def sleep(seconds: float) -> None:
        """The server's, whose wait before it ends lasts until health was asked."""
        await asyncio.sleep(seconds)
        while seconds == server._DEVICE_LOST_S and not heard.is_set():
            await asyncio.sleep(0.02)

    monkeypatch.setattr(server.anyio, "sleep", sleep)

    def live() -> int:
        return request(here, "GET", "/v2/health/live")[0]

    def work() -> None:
        ready(here)
        model.failure = DeviceFault("HIP error: unspecified launch failure")
        seen.append(("refused", predict(here)))
        seen.append(("ready", request(here, "GET", "/v2/health/ready")[0]))
        until(lambda: live() != 200)
        seen.append(("live", live()))
        heard.set()

    with beside(work), pytest.raises(DeviceLost, match="unspecified launch failure") as caught:
        asyncio.run(server.serve(here))
    assert caught.value.exit_code == 3
    assert seen == [("refused", 503), ("ready", 503), ("live", 503)]


def test_a_device_that_hangs_is_noticed_and_the_process_ends(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(server, "_load", lambda _settings, _name: Busy(gate))
    monkeypatch.setattr(server, "_WATCH_S", 0.05)
    here = replace(here, limits=Limits(stall_s=1))
    statuses: list[int] = []

    def work() -> None:
        ready(here)
        statuses.append(predict(here))

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
import asyncio, sys, threading
sys.path[:0] = sys.argv[2:]
from test_service_stops import INFO, Named
from pathlib import Path
from service import cli, server
from service.inference.tokenizer import load_tokenizer
from service.settings import Limits, Settings

gate = threading.Event()  # open once standard input ends
threading.Thread(target=lambda: (sys.stdin.read(), gate.set()), daemon=True).start()

class Slow(Named):
    def classify(self, batch):
        gate.wait()
        return tuple((1.0, 0.0) for _ in batch)

server._load = lambda _settings, _name: Slow(0)
here = Settings("t", "cpu", Path("/models"), "random", "127.0.0.1", int(sys.argv[1]), Limits(drain_s=300))
asyncio.run(server.serve(here))
"""
HERE = Path(__file__).parent
N_INSIDE = 64


def cycle(here: Settings) -> tuple[list[int], int]:
    """Start, 64 requests inside, SIGTERM: the statuses of the 64, and the exit code."""
    command = [sys.executable, "-c", PROCESS, str(here.port), str(HERE), str(HERE.parents[1] / "images")]
    inside = f"weir_in_flight {N_INSIDE}.0".encode()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin
        try:
            ready(here)
            with ThreadPoolExecutor(N_INSIDE) as pool:
                asked = [pool.submit(predict, here) for _ in range(N_INSIDE)]
                until(lambda: inside in request(here, "GET", "/metrics")[1])
                process.terminate()
                until(lambda: not is_ready(here))
                process.stdin.close()
                statuses = [each.result() for each in asked]
            return statuses, process.wait(PATIENCE_S)
        finally:
            process.kill()


def test_a_stop_answers_each_of_64_requests_inside(here: Settings) -> None:
    """`make bench-service` does it a hundred times, with the image."""
    for _ in range(2):
        assert cycle(here) == ([200] * N_INSIDE, 0)


def test_a_collector_that_does_not_answer_does_not_hold_up_a_stop(
    here: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    here = replace(here, spans=True)

    def work() -> None:
        ready(here)
        assert predict(here) == 200
        terminate()

    begun = time.monotonic()
    try:
        with beside(work):
            asyncio.run(server.serve(here))
        assert time.monotonic() - begun < BUSY_S
        assert asked.wait(PATIENCE_S)  # it had begun to send
    finally:
        exported.set()
        collector.shutdown()
        collector.server_close()


def test_a_storm_of_sighups_loads_the_models_once_more_and_callers_do_not_notice(
    here: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    gate.set()
    loads: list[float] = []
    last_signal_s: list[float] = []

    def load(_settings: Settings, _name: str) -> Busy:
        loads.append(time.monotonic())
        time.sleep(0.3)
        return Busy(gate)

    def again() -> int:
        return [record.getMessage() for record in caplog.records].count("models loaded again")

    def storm() -> None:
        ready(here)
        for number in range(400):
            last_signal_s[:] = [time.monotonic()]
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.001)
            assert number % 20 or is_ready(here)
        until(lambda: loads[-1] > last_signal_s[0] and again() == len(loads) - 1)
        time.sleep(0.5)  # for loads that nobody wished for
        terminate()

    monkeypatch.setattr(server, "_load", load)
    with caplog.at_level("INFO", "service"), beside(storm):
        asyncio.run(server.serve(here))
    lasted_s = loads[-1] - loads[0]
    assert 2 <= len(loads) <= lasted_s / 0.3 + 2  # one at a time, and the last one after the last signal
    assert again() == len(loads) - 1


def test_a_model_whose_tokenizer_panics_leaves_the_one_from_before(
    here: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    gate = threading.Event()
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

    def act() -> None:
        ready(here)
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: "the models stay as they were" in caplog.text)
        statuses.append(request(here, "GET", "/v2/health/ready")[0])
        terminate()

    monkeypatch.setattr(server, "_load", load)
    with beside(act):
        asyncio.run(server.serve(here))
    assert (statuses, len(loads)) == ([200], 2)
