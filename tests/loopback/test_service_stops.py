"""SIGTERM ends the service in time, whatever its threads are busy with."""

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from service import server
from service.model.classifier import Encoded, ModelInfo, Probabilities
from service.settings import Limits, Settings

INFO = ModelInfo("finbert", "random", "seed 0", "hashing-stand-in", "cpu", "cpu", ("yes", "no"), 1, 2000, 8)
WITHIN_S = 10  # the busy thread would take BUSY_S
BUSY_S = 40


class Busy:
    """Answers once `gate` is open."""

    info = INFO

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate

    def encode(self, texts: Sequence[str]) -> tuple[Encoded, ...]:
        return tuple(Encoded((1, 2)) for _ in texts)

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        self.gate.wait(BUSY_S)
        return tuple((1.0, 0.0) for _ in batch)


def settings() -> Settings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Settings("test", "cpu", Path("/models"), "random", "127.0.0.1", port, Limits(drain_s=0))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_while_the_model_is_loading_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, loading = threading.Event(), threading.Event()

    def load(_settings: Settings) -> Busy:
        loading.set()
        gate.wait(BUSY_S)
        return Busy(gate)

    def stop() -> None:
        assert loading.wait(30)
        time.sleep(0.3)  # its signal handler is there before the loader starts, or at the latest by now
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
    monkeypatch.setattr(server, "_load", lambda _settings: Busy(gate))
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
        time.sleep(0.5)  # for all three to be inside
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
