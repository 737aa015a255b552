"""The HTTP side with a model that is a few lines of Python."""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import anyio
import pytest
from service.errors import RequestError
from service.health import is_ready
from service.model.classifier import Encoded, ModelInfo, Probabilities
from service.settings import Limits
from service.web.admission import Admission
from service.web.app import Service, create_app
from starlette.testclient import TestClient

LIMITS = Limits(max_texts=3, max_body_bytes=1024, max_in_flight=2)


@dataclass
class Fake:
    """Answers by length; waits for `gate`; raises `failure` when there is one."""

    info: ModelInfo
    failure: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)

    def encode(self, texts: Sequence[str]) -> tuple[Encoded, ...]:
        return tuple(Encoded(tuple(range(len(text)))) for text in texts)

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        assert self.gate.wait(10)
        if self.failure:
            raise self.failure
        return tuple((1 / (1 + len(row.ids)), len(row.ids) / (1 + len(row.ids)), 0.0) for row in batch)


@pytest.fixture
def fake(info: ModelInfo) -> Fake:
    made = Fake(info)
    made.gate.set()
    return made


@pytest.fixture
def service(fake: Fake) -> Service:
    made = Service(LIMITS)
    made.classifier = fake
    return made


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(create_app(service), raise_server_exceptions=False) as opened:
        yield opened


def test_a_text_is_answered_with_label_and_origin(client: TestClient) -> None:
    answer = client.post("/predict", json={"texts": ["abc"]})
    assert answer.status_code == 200
    assert answer.json()["predictions"][0]["label"] == "negative"
    assert answer.json()["weights"] == "random"


def test_the_protocols_form_gives_the_same(client: TestClient) -> None:
    body = {"inputs": [{"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]}]}
    answer = client.post("/v2/models/finbert/infer", json=body)
    assert answer.status_code == 200
    assert answer.json()["outputs"][0]["data"] == ["negative"]
    assert answer.json()["parameters"]["weights"] == "random"


def test_every_prediction_is_logged_with_its_origin(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="service"):
        client.post("/predict", json={"texts": ["abc", "d"]})
    assert "predicted rows=2 tokens=4 weights=random device=cpu" in caplog.text


def test_while_loading_it_lives_and_is_not_ready(service: Service, client: TestClient) -> None:
    service.classifier = None
    assert client.get("/v2/health/live").status_code == 200
    assert client.get("/v2/health/ready").status_code == 503
    assert client.get("/v2/models/finbert/ready").status_code == 503
    assert client.get("/v2/models/finbert").status_code == 503
    refused = client.post("/predict", json={"texts": ["a"]})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_once_loaded_it_is_ready_and_describes_itself(client: TestClient) -> None:
    assert client.get("/v2/health/ready").status_code == 200
    assert client.get("/v2/models/finbert/ready").status_code == 200
    assert client.get("/v2/models/finbert").json()["parameters"]["weights"] == "random"
    assert client.get("/v2").json()["name"] == "weir"


@pytest.mark.parametrize("path", ["/predict", "/v2/models/finbert/infer"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"x": 1}', b"[" * 1000])
def test_a_malformed_body_is_a_400_with_a_message(client: TestClient, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_body_over_the_limit_is_a_413_declared_or_not(client: TestClient) -> None:
    assert client.post("/predict", content=b"x" * 1025).status_code == 413
    chunks = (b"x" * 100 for _ in range(20))  # no Content-Length
    refused = client.post("/predict", content=chunks)
    assert refused.status_code == 413
    assert refused.json()["error"] == "the body is larger than 1024 bytes"


def test_unknown_paths_and_methods_are_answered_in_json(client: TestClient) -> None:
    missing = client.get("/v2/models/other")
    assert missing.status_code == 404
    assert "/v2/models/finbert" in missing.json()["error"]
    wrong = client.get("/predict")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_no_memory_left_on_the_device_is_a_503(fake: Fake, client: TestClient) -> None:
    fake.failure = RequestError(503, "no memory left", retry_after_s=1)
    refused = client.post("/predict", json={"texts": ["a"]})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_our_own_fault_is_a_500_that_reveals_no_secrets(
    fake: Fake, client: TestClient, service: Service
) -> None:
    fake.failure = RuntimeError("secret path")
    broken = client.post("/predict", json={"texts": ["a"]})
    assert broken.status_code == 500
    assert "secret" not in broken.text
    assert service.admission.in_flight == 0


def test_overload_is_refused_at_once_while_health_answers(
    fake: Fake, client: TestClient, service: Service
) -> None:
    fake.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(client.post, "/predict", json={"texts": ["a"]}) for _ in range(2)]
        while service.admission.in_flight < 2:
            assert client.get("/v2/health/ready").status_code == 200
        refused = client.post("/predict", json={"texts": ["a"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert client.get("/v2/health/live").status_code == 200
        fake.gate.set()
        assert [each.result().status_code for each in held] == [200, 200]


def test_draining_lets_the_inner_finish_and_nobody_in() -> None:
    async def scenario() -> None:
        admission = Admission(2)
        async with anyio.create_task_group() as tasks:
            with admission.slot():
                tasks.start_soon(admission.drain, 5)
                await anyio.sleep(0)
                assert admission.draining
                with pytest.raises(RequestError, match="shutting down") as caught, admission.slot():
                    pass
                assert caught.value.status == 503
        assert admission.in_flight == 0

    anyio.run(scenario)


def test_a_drain_that_takes_too_long_says_so() -> None:
    async def scenario() -> tuple[bool, bool]:
        admission = Admission(1)
        with admission.slot():
            late = await admission.drain(0.03)
        return late, await admission.drain(0.03)

    assert anyio.run(scenario) == (False, True)


def test_a_draining_service_is_not_ready(service: Service, client: TestClient) -> None:
    service.admission.draining = True
    assert client.get("/v2/health/ready").status_code == 503
    assert client.get("/v2/health/live").status_code == 200
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 503


@pytest.mark.parametrize(
    ("line", "ready"),
    [
        ("HTTP/1.1 200 OK", True),
        ("HTTP/1.1 503 Service Unavailable", False),
        ("", False),
        ("SSH-2.0", False),
        ("no answer: refused", False),
    ],
)
def test_the_health_check_believes_a_200_alone(line: str, ready: bool) -> None:
    assert is_ready(line) is ready
