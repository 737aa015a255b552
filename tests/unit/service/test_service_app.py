"""The HTTP side with a model that is a few lines of Python."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from logged import Logged
from service.api.admission import Admission
from service.api.app import create_app
from service.api.service import ON_DISCONNECT, Service
from service.api.tracing import start_trace
from service.batching import health
from service.errors import DeviceFault, ModelUnreadable, RequestError, ServiceError
from service.health import is_ready
from service.inference.classifier import Encoded, ModelInfo, Probabilities, Text, Vector
from service.log import JsonFormatter
from service.models import Models, folder_of, names_in
from service.settings import Limits
from starlette.testclient import TestClient

LIMITS = Limits(max_texts=3, max_body_bytes=1024, max_in_flight=2)
TEXT = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}


@dataclass
class Fake:
    """Answers by length; waits for `gate`; raises `failure` when there is one."""

    info: ModelInfo
    failure: Exception | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    begun: list[int] = field(default_factory=list)  # tokens of each batch

    def encode(self, texts: Sequence[Text]) -> tuple[Encoded, ...]:
        return tuple(Encoded(tuple(range(len(text)))) for text in texts)

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        self.begun.append(sum(len(row.ids) for row in batch))
        assert self.gate.wait(120)
        if self.failure:
            raise self.failure
        return tuple((1 / (1 + len(row.ids)), len(row.ids) / (1 + len(row.ids)), 0.0) for row in batch)

    def embed(self, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        return tuple((0.6, 0.8) for _ in batch)

    def prove(self) -> None:
        if isinstance(self.failure, DeviceFault):
            raise self.failure

    def memory(self) -> dict[str, int]:
        return {"vram_allocated": 7}

    def counts(self) -> dict[str, int]:
        return {}


def test_pinned_memory_of_several_models_is_their_sum(info: ModelInfo) -> None:
    service = Service(LIMITS)
    for name, pinned in (("a", 3), ("b", 4)):
        one = Fake(replace(info, name=name))
        one.memory = lambda pinned=pinned: {"vram_allocated": 7, "pinned_by_placement": pinned}  # type: ignore[method-assign,misc]
        service.models.put(name, one)
    text = service.metrics.text().decode()
    assert 'weir_memory_bytes{kind="pinned_by_placement"} 7.0' in text
    assert 'weir_memory_bytes{kind="vram_allocated"} 7.0' in text


@pytest.fixture
def fake(info: ModelInfo) -> Fake:
    made = Fake(info)
    made.gate.set()
    return made


@pytest.fixture
def service(fake: Fake) -> Service:
    made = Service(LIMITS)
    made.put(fake)
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


def test_every_prediction_is_logged_with_its_origin(client: TestClient, logged: Logged) -> None:
    client.post("/predict", json={"texts": ["abc", "d"]})
    assert "predicted rows=2 tokens=4 weights=random device=cpu" in "\n".join(logged.lines)


def test_while_loading_it_lives_and_is_not_ready(service: Service, client: TestClient) -> None:
    service.models.unload("finbert")
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

        async def slow() -> None:
            with pytest.raises(RequestError, match="took too long") as caught, admission.slot():
                await anyio.sleep(30)
            assert caught.value.status == 503

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(slow)
            await anyio.sleep(0)
            late = await admission.drain(0.03)
        return late, await admission.drain(0.03)

    assert anyio.run(scenario) == (False, True)


def test_a_request_that_its_own_caller_cancels_as_well_is_cancelled() -> None:
    async def scenario() -> None:
        admission = Admission(1)

        async def slow() -> None:
            with admission.slot():
                await asyncio.sleep(30)

        task = asyncio.create_task(slow())
        await asyncio.sleep(0)
        task.cancel()
        await admission.drain(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert admission.in_flight == 0

    asyncio.run(scenario())


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


# ---- deadlines and callers who leave -----------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/predict", {"texts": ["a"], "timeout_ms": 30}, {}),
        ("/predict", {"texts": ["a"]}, {"X-Timeout-Ms": "30"}),
        ("/v2/models/finbert/infer", {"inputs": [TEXT], "parameters": {"timeout_ms": 30}}, {}),
        ("/v2/models/finbert/infer", {"inputs": [TEXT], "parameters": {"timeout": 30_000}}, {}),
    ],
)
def test_an_answer_that_is_not_there_by_the_deadline_is_a_504(
    fake: Fake, client: TestClient, path: str, body: object, headers: dict[str, str]
) -> None:
    fake.gate.clear()
    answer = client.post(path, json=body, headers=headers)
    fake.gate.set()
    assert answer.status_code == 504


HUGE = int("9" * 4300)


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [["\ud800"]]},
        {"token_ids": [[HUGE]]},
        {"texts": ["a"], "timeout": 10**400},
        {"texts": ["a"], "timeout_ms": HUGE},
        {"inputs": [TEXT | {"shape": [HUGE, HUGE]}]},
        {"inputs": [TEXT | {"shape": [HUGE]}]},
        {"inputs": [TEXT], "parameters": {"timeout": HUGE}},
        {"inputs": [TEXT | {"parameters": {"binary_data_size": HUGE}}]},
        {"input": [["\ud800"]]},
        {"input": "a", "dimensions": HUGE},
        {"texts": ["a"], "\ud800" * 999: 1},
        {"texts": ["a"], "model": "\ud800" * 999},
    ],
)
@pytest.mark.parametrize("path", ["/predict", "/v1/embeddings", "/v2/models/finbert/infer"])
def test_a_callers_mistake_is_a_short_4xx_and_no_traceback(
    fake: Fake, logged: Logged, path: str, body: dict[str, object]
) -> None:
    service = Service(Limits())
    service.put(fake)
    with TestClient(create_app(service), raise_server_exceptions=False) as client:
        answer = client.post(path, content=json.dumps(body))
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 1000
    assert not [line for line in logged.lines if "Traceback" in line]


@pytest.mark.parametrize("value", [0, -1, "1", True, 10**9, None])
def test_a_deadline_that_is_none_is_a_400(client: TestClient, value: object) -> None:
    assert client.post("/predict", json={"texts": ["a"], "timeout_ms": value}).status_code == 400


def test_what_waits_past_its_deadline_is_never_computed(
    fake: Fake, client: TestClient, service: Service
) -> None:
    fake.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/predict", json={"texts": ["aaaa"]})
        while not fake.begun:
            time.sleep(0.005)
        assert client.post("/predict", json={"texts": ["b"], "timeout_ms": 20}).status_code == 504
        assert service.worker.waiting() == (0, 0)
        fake.gate.set()
        assert first.result().status_code == 200
    assert client.post("/predict", json={"texts": ["ccc"]}).status_code == 200
    assert fake.begun == [4, 3]


def test_what_a_vanished_caller_asked_is_never_computed(fake: Fake, service: Service) -> None:
    """Asked through ASGI itself, where a caller can leave."""

    async def scenario() -> list[int]:
        fake.gate.clear()
        statuses: list[int] = []
        tells: list[Callable[[], None]] = []

        async def ask(text: str, leaves: Callable[[Callable[[], None]], None]) -> None:
            body = json.dumps({"texts": [text]}).encode()

            async def receive() -> Any:
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict"}
            scope |= {"query_string": b"", "headers": [], "root_path": "", "http_version": "1.1"}
            more = {"scheme": "http", "server": None, "client": None, "state": {ON_DISCONNECT: leaves}}
            await create_app(service)(scope | more, receive, send)

        first = asyncio.create_task(ask("aaaa", lambda _tell: None))
        while not fake.begun:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(ask("b", tells.append))
        while service.worker.waiting()[0] < 1:
            await asyncio.sleep(0.005)
        tells[0]()
        await second
        assert service.worker.waiting() == (0, 0)
        fake.gate.set()
        await first
        return statuses

    assert asyncio.run(scenario()) == [499, 200]
    assert fake.begun == [4]


def test_batches_are_counted_in_the_event_loop_once_their_requests_are_answered(
    fake: Fake, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting holds the interpreter, which whoever waits for an answer needs."""
    seen: list[object] = []
    monkeypatch.setattr(service.metrics, "batch_computed", lambda _batch: seen.append(threading.get_ident()))

    async def scenario() -> None:
        job = service.worker.submit(fake.classify, [Encoded((1,))], lengths=[1], group=0)
        await job.future
        seen.append("answered")
        await asyncio.sleep(0)
        service.worker.stop()

    asyncio.run(scenario())
    assert seen == ["answered", threading.get_ident()]


def test_requests_that_wait_together_are_computed_together(
    fake: Fake, client: TestClient, service: Service
) -> None:
    fake.gate.clear()
    service.admission = Admission(9)
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(client.post, "/predict", json={"texts": ["abc"]})]
        while not fake.begun:
            time.sleep(0.005)
        asked += [pool.submit(client.post, "/predict", json={"texts": ["abc"]}) for _ in range(5)]
        while service.worker.waiting()[0] < 5:
            time.sleep(0.005)
        fake.gate.set()
        assert {each.result().status_code for each in asked} == {200}
    assert fake.begun == [3, 3 * 5]


def test_a_queue_that_is_full_of_tokens_is_a_429(fake: Fake) -> None:
    service = Service(Limits(max_queue_tokens=512, max_in_flight=9))
    service.put(fake)
    fake.gate.clear()
    with TestClient(create_app(service)) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/predict", json={"texts": ["a" * 500]})
        while not fake.begun:
            time.sleep(0.005)
        refused = client.post("/predict", json={"texts": ["a" * 20]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        fake.gate.set()
        assert first.result().status_code == 200


# ---- faults ------------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.thorough
def test_a_fault_of_the_device_makes_it_unready_until_a_canary_passes(
    fake: Fake, client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PAUSES_S", (0.0, *[0.05] * 2000))  # it may be asked slowly, and isn't lost
    fake.failure = DeviceFault("HIP error: unspecified launch failure")
    refused = client.post("/predict", json={"texts": ["a"]})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert client.get("/v2/health/ready").status_code == 503
    assert client.get("/v2/health/live").status_code == 200
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 503
    fake.failure = None
    wait_for(lambda: service.ready)
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 200


def test_a_device_that_does_not_recover_makes_it_dead(
    fake: Fake, client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_PAUSES_S", (0.0, 0.01))
    fake.failure = DeviceFault("HIP error")
    client.post("/predict", json={"texts": ["a"]})
    wait_for(lambda: not service.live)
    assert client.get("/v2/health/live").status_code == 503
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 503


@pytest.mark.thorough
def test_an_idle_device_that_stopped_working_is_noticed(fake: Fake) -> None:
    service = Service(LIMITS)
    service.health.canary_s = 0.05
    service.put(fake)
    with TestClient(create_app(service)) as client:
        assert client.post("/predict", json={"texts": ["a"]}).status_code == 200
        fake.failure = DeviceFault("fell off the bus")
        wait_for(lambda: client.get("/v2/health/ready").status_code == 503)
        service.worker.stop()


def test_our_own_fault_in_one_batch_does_not_end_the_worker(fake: Fake, client: TestClient) -> None:
    fake.failure = RuntimeError("a bug")
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 500
    fake.failure = None
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 200


# ---- other forms -------------------------------------------------------------------------------------


def test_embeddings_are_answered_as_openai_does(client: TestClient) -> None:
    answer = client.post("/v1/embeddings", json={"model": "finbert", "input": ["ab", "c"]})
    assert answer.status_code == 200
    assert [each["embedding"] for each in answer.json()["data"]] == [[0.6, 0.8]] * 2
    assert answer.json()["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    refused = client.post("/v1/embeddings", json={"model": "gpt", "input": "a"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "invalid_request_error")


def test_a_pair_of_texts_is_taken(client: TestClient) -> None:
    answer = client.post("/predict", json={"texts": [["ab", "c"]]})
    assert answer.json()["predictions"][0]["tokens"] == 2


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("</", "")


def test_metrics_count_what_happened(client: TestClient) -> None:
    client.post("/predict", json={"texts": ["abc", "d"]})
    client.post("/predict", content=b"{")
    text = client.get("/metrics").text
    for line in (
        'weir_requests_total{route="/predict",status="200"} 1.0',
        'weir_requests_total{route="/predict",status="400"} 1.0',
        "weir_tokens_total 4.0",
        "weir_padding_tokens_total 0.0",
        "weir_batch_rows_count 2.0",
        "weir_queue_requests 0.0",
        "weir_ready 1.0",
        'weir_memory_bytes{kind="vram_allocated"} 7.0',
    ):
        assert line in text


def test_only_requests_that_are_turned_away_count_as_refusals(client: TestClient, service: Service) -> None:
    """A probe that hears `not ready` was answered."""
    service.admission.draining = True
    client.get("/v2/health/ready")
    assert "weir_refusals_total{" not in client.get("/metrics").text
    client.post("/predict", json={"texts": ["a"]})
    assert 'weir_refusals_total{status="503"} 1.0' in client.get("/metrics").text


def test_what_callers_choose_does_not_become_a_metric(client: TestClient) -> None:
    for path in ("/x/1", "/x/2", "/v2/models/one", "/v2/models/two/infer"):
        client.get(path)
    text = client.get("/metrics").text
    assert not [path for path in ("/x/", "models/one", "models/two") if path in text]
    assert 'route="other",status="404"} 2.0' in text


def test_a_request_keeps_its_id_and_its_trace(client: TestClient, logged: Logged) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    given = {"X-Request-Id": "abc-1", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    logged.setFormatter(JsonFormatter())
    answer = client.post("/predict", json={"texts": ["a"]}, headers=given)
    assert answer.headers["x-request-id"] == "abc-1"
    version, same, span, flags = answer.headers["traceparent"].split("-")
    assert (version, same, flags) == ("00", trace, "01")
    line = json.loads(next(one for one in logged.lines if "predicted" in one))
    assert (line["request_id"], line["trace_id"], line["span_id"]) == ("abc-1", trace, span)
    assert line["parent_span_id"] == "b7ad6b7169203331"
    assert line["model"] == "finbert"


@pytest.mark.parametrize(
    "sent", ["", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "00-xyz", "ff" * 30, "a\x7fb"]
)
def test_a_trace_that_is_none_is_made_new(sent: str) -> None:
    made = start_trace(sent, sent)
    assert len(made.trace_id) == 32
    assert made.parent == ""
    assert made.request_id.isprintable()


# ---- several models ----------------------------------------------------------------------------------


@pytest.fixture
def loading(info: ModelInfo) -> Iterator[tuple[Service, TestClient, list[Fake]]]:
    """A service whose loader makes a new model each time, and refuses one named `broken`."""
    made: list[Fake] = []

    async def load(name: str) -> Fake:
        if name == "broken":
            raise ModelUnreadable("it holds no model", "mount one")
        fake = Fake(replace(info, name=name))
        fake.gate.set()
        made.append(fake)
        return fake

    service = Service(LIMITS, load=load, model_control=True)
    with TestClient(create_app(service)) as client:
        assert client.post("/v2/repository/models/finbert/load").status_code == 200
        yield service, client, made


def test_models_are_loaded_listed_and_unloaded(loading: tuple[Service, TestClient, list[Fake]]) -> None:
    _, client, _ = loading
    assert client.post("/v2/repository/models/other/load").status_code == 200
    index = client.post("/v2/repository/index").json()
    assert [(each["name"], each["state"]) for each in index] == [("finbert", "READY"), ("other", "READY")]
    assert client.post("/predict", json={"texts": ["a"], "model": "other"}).json()["model"] == "other"
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["finbert", "other"]
    assert client.post("/v2/repository/models/other/unload").status_code == 200
    assert client.post("/predict", json={"texts": ["a"], "model": "other"}).status_code == 404
    assert client.post("/v2/repository/models/other/unload").status_code == 404


def test_a_model_that_can_not_be_loaded_again_goes_on_answering(
    loading: tuple[Service, TestClient, list[Fake]], info: ModelInfo
) -> None:
    service, client, _ = loading
    service.models.put("broken", service.models.require("finbert"))
    refused = client.post("/v2/repository/models/broken/load")
    assert refused.status_code == 400
    assert "it holds no model" in refused.json()["error"]
    assert client.post("/v2/models/broken/infer", json={"inputs": [TEXT]}).status_code == 200
    assert client.get("/v2/health/ready").status_code == 200


def test_a_name_that_a_caller_makes_up_does_not_make_the_service_unready(
    loading: tuple[Service, TestClient, list[Fake]],
) -> None:
    service, client, _ = loading
    refused = client.post("/v2/repository/models/broken/load")
    assert (refused.status_code, client.get("/v2/health/ready").status_code) == (400, 200)
    assert list(service.models.index()) == ["finbert"]


def test_a_caller_who_leaves_while_a_model_loads_starts_no_second_load_beside_it(info: ModelInfo) -> None:
    at_once, most, begun, gate = 0, 0, 0, asyncio.Event()

    async def load(_name: str) -> Fake:
        nonlocal at_once, most, begun
        begun, at_once = begun + 1, at_once + 1
        most = max(most, at_once)
        await gate.wait()
        at_once -= 1
        return Fake(info)

    async def scenario() -> None:
        models = Models(load)
        for _ in range(20):
            caller = asyncio.create_task(models.load("finbert"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            caller.cancel()
        gate.set()
        await models.load("finbert")
        assert models.index()["finbert"].state == "READY"

    asyncio.run(scenario())
    assert (most, begun) == (1, 2)  # the one that had begun, and one for all who waited


def test_a_reload_with_a_new_broken_model_leaves_the_others_ready(info: ModelInfo) -> None:
    async def load(name: str) -> Fake:
        if name == "new":
            raise OSError("of a kind that nobody expected")
        return Fake(info)

    async def scenario() -> None:
        models = Models(load)
        await models.load_all(("finbert",))
        with pytest.raises(ServiceError, match="new can't be loaded: OSError"):
            await models.load_all(("finbert", "new"))
        assert models.ready
        assert models.index()["new"].state == "UNAVAILABLE"

    asyncio.run(scenario())


def test_a_model_is_swapped_without_a_lost_request(
    loading: tuple[Service, TestClient, list[Fake]],
) -> None:
    service, client, made = loading
    made[0].gate.clear()
    with ThreadPoolExecutor(2) as pool:
        inside = [pool.submit(client.post, "/predict", json={"texts": ["a"]}) for _ in range(2)]
        wait_for(lambda: service.admission.in_flight == 2)
        assert client.post("/v2/repository/models/finbert/load").status_code == 200
        made[0].gate.set()
        assert [each.result().status_code for each in inside] == [200, 200]
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 200
    assert (sum(made[0].begun), made[1].begun) == (2, [1])


@pytest.mark.parametrize("name", ["..", "a b", ".hidden", "x" * 65, "%2e%2e%2fetc"])
def test_a_name_can_not_leave_the_directory(
    loading: tuple[Service, TestClient, list[Fake]], name: str
) -> None:
    assert loading[1].post(f"/v2/repository/models/{name}/load").status_code in (400, 404)
    assert len(loading[2]) == 1


def test_callers_may_not_load_models_unless_the_profile_says_so(client: TestClient) -> None:
    for verb in ("load", "unload"):
        refused = client.post(f"/v2/repository/models/finbert/{verb}")
        assert refused.status_code == 403
        assert "model_control: true" in refused.json()["error"]
    assert client.get("/v2/models/finbert").status_code == 200


def test_a_directory_holds_one_model_or_several(tmp_path: Path) -> None:
    assert names_in(tmp_path / "none") == names_in(tmp_path) == ("finbert",)
    for name in ("b", "a", "not a name"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert names_in(tmp_path) == ("a", "b")
    assert folder_of(tmp_path, "a") == tmp_path / "a"
    assert folder_of(tmp_path, "finbert") == tmp_path
    (tmp_path / "config.json").touch()
    assert names_in(tmp_path) == ("finbert",)
