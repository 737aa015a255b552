"""Spans for OpenTelemetry: what a request spent its time on, in the caller's trace."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from logged import Logged
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from service import server
from service.api.app import create_app
from service.api.service import Service
from service.api.spans import Spans
from service.errors import ServiceError, SettingsError
from service.inference.classifier import ModelInfo
from service.log import RepeatFilter
from service.settings import Limits, build_settings
from starlette.testclient import TestClient
from test_service_app import Fake

TRACE, PARENT = "ab" * 16, "cd" * 8
SOURCE = Path("profiles/application-x.yaml")
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def client(info: ModelInfo, exported: InMemorySpanExporter) -> Iterator[TestClient]:
    fake = Fake(info)
    fake.gate.set()
    service = Service(Limits(max_batch_tokens=4))
    service.spans = Spans(SimpleSpanProcessor(exported))
    service.put(fake)
    with TestClient(create_app(service), raise_server_exceptions=False) as opened:
        yield opened


def by_name(exported: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exported.get_finished_spans() if span.name == name]


def test_a_requests_time_is_in_spans_of_the_callers_trace(
    client: TestClient, exported: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    answer = client.post("/predict", json={"texts": ["abc", "abcd"]}, headers=headers)
    spans = exported.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    (request,) = by_name(exported, "/predict")
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT
    assert answer.headers["traceparent"] == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert dict(request.attributes or {})["http.response.status_code"] == 200
    children = {"encode": 1, "queue": 1, "batch": 2}  # a text each: 4 tokens a batch
    for name, count in children.items():
        found = by_name(exported, name)
        assert len(found) == count, name
        assert {span.parent.span_id for span in found if span.parent} == {request.context.span_id}
    batches = {span.context.span_id: span for span in by_name(exported, "batch")}
    assert {(span.attributes or {})["weir.batch.rows"] for span in batches.values()} == {1}
    assert {(span.attributes or {})["weir.batch.number"] for span in batches.values()} == {0, 1}
    for forward in by_name(exported, "forward"):
        assert forward.parent is not None
        batch = batches.pop(forward.parent.span_id)
        assert (batch.start_time or 0) <= (forward.start_time or 0) <= (forward.end_time or 0)
        assert forward.end_time == batch.end_time
    assert not batches


def test_a_request_without_a_trace_begins_one_and_a_refused_one_has_its_status(
    client: TestClient, exported: InMemorySpanExporter
) -> None:
    answer = client.post("/predict", json={"texts": []})
    (request,) = exported.get_finished_spans()
    assert request.parent is None
    assert dict(request.attributes or {})["http.response.status_code"] == answer.status_code == 400
    assert answer.headers["traceparent"].split("-")[1] == f"{request.context.trace_id:032x}"


def test_neither_a_caller_who_traces_nothing_nor_health_checks_make_spans(
    client: TestClient, exported: InMemorySpanExporter
) -> None:
    answer = client.post(
        "/predict", json={"texts": ["a"]}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}
    )
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert answer.headers["traceparent"].endswith("-00")
    assert client.get("/v2/health/ready").status_code == 200
    assert client.get("/metrics").status_code == 200
    assert not exported.get_finished_spans()


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, True),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_spans_are_off_unless_an_endpoint_is_named(env: dict[str, str], wanted: bool) -> None:
    assert build_settings(env, {"device": "cpu"}, SOURCE).spans is wanted


def test_an_image_without_opentelemetry_says_which_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "service.api.spans", raising=False)
    with pytest.raises(ServiceError, match="opentelemetry isn't installed here") as caught:
        server._add_spans(Service(Limits()))
    assert "cpu-extras" in caught.value.hint


def test_a_variable_that_opentelemetry_refuses_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(SettingsError, match="max_queue_size must be a positive integer") as caught:
        server._add_spans(Service(Limits()))
    assert "OTEL_" in caught.value.hint


def test_callers_can_not_flood_the_log_with_their_tracestate(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = Logged()
    logged.addFilter(RepeatFilter())
    monkeypatch.setattr(logging.getLogger("opentelemetry.trace.span"), "handlers", [logged])
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "no state"}
    for _ in range(3):
        assert client.post("/predict", json={"texts": ["a"]}, headers=headers).status_code == 200
    assert "\n".join(logged.lines).count("no state") == 1
