"""The service over gRPC: Triton's own client, the channel's deadlines and cancellation, and hostile bytes."""

import asyncio
import contextlib
import http.client
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from service import server
from service.api.grpc_endpoint import _POOL, _TABLE, METHODS, SERVICE, message, start
from service.api.service import Service
from service.api.spans import Spans
from service.settings import Limits, Settings
from test_service_sockets import Fake
from test_service_stops import beside, terminate
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException
from waiting import PATIENCE_S, free_ports, until

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from service_fuzz_rpc import fuzzed

LIMITS = Limits(max_in_flight=4, max_texts=8, max_connections=16, header_timeout_s=60, body_timeout_s=60)
THEIRS = {  # our names of what is within another message there
    "Contents": "InferTensorContents",
    "RepositoryParameter": "ModelRepositoryParameter",
    "Tensor": "ModelInferRequest.InferInputTensor",
    "RequestedOutput": "ModelInferRequest.InferRequestedOutputTensor",
    "TensorMetadata": "ModelMetadataResponse.TensorMetadata",
    "ModelIndex": "RepositoryIndexResponse.ModelIndex",
}


@dataclass
class Served:
    """A running gRPC server and what is behind it."""

    port: int
    service: Service
    fake: Fake

    def channel(self, *options: tuple[str, Any]) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", (("grpc.enable_http_proxy", 0), *options))


@contextmanager
def served(limits: Limits = LIMITS, *, host: str = "127.0.0.1") -> Iterator[Served]:
    fake = Fake()
    fake.gate.set()
    service = Service(limits)
    service.put(fake)
    port: list[int] = []
    started, ending = threading.Event(), threading.Event()

    async def run() -> None:
        made, found = await start(service, host, 0)
        port.append(found)
        started.set()
        while not ending.is_set():
            await asyncio.sleep(0.02)
        await made.stop(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield Served(port[0], service, fake)
    finally:
        fake.gate.set()
        ending.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def here() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.fixture
def client(here: Served) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(f"127.0.0.1:{here.port}")
    yield made
    made.close()


def texts(*values: str, name: str = "text") -> triton.InferInput:
    made = triton.InferInput(name, [len(values)], "BYTES")
    made.set_data_from_numpy(np.array([value.encode() for value in values], dtype=np.object_))
    return made


def infer_bytes(**changes: Any) -> bytes:
    """A request with its values in `contents`."""
    made = message("ModelInferRequest")(model_name="finbert")
    tensor = made.inputs.add(name="input_ids", datatype="INT64", shape=[1, 3])
    tensor.contents.int64_contents.extend([101, 7, 102])
    for name, value in changes.items():
        setattr(made, name, value)
    data: bytes = made.SerializeToString()
    return data


def ids_in(*fields: str) -> bytes:
    """A request for three INT64 in these fields."""
    made = message("ModelInferRequest")(model_name="finbert")
    tensor = made.inputs.add(name="input_ids", datatype="INT64", shape=[1, 3])
    for field in fields:
        getattr(tensor.contents, field).extend([101, 7, 102])
    data: bytes = made.SerializeToString()
    return data


def call(channel: grpc.Channel, data: bytes, method: str = "ModelInfer", **more: Any) -> Any:
    return channel.unary_unary(f"/{SERVICE}/{method}")(data, timeout=more.pop("timeout", PATIENCE_S), **more)


def refusal(channel: grpc.Channel, data: bytes, method: str = "ModelInfer", **more: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, data, method, **more)
    return caught.value


def test_our_messages_are_those_of_the_protocol() -> None:
    """By their numbers and types, beside the ones that Triton's client brings."""
    for name in _TABLE:
        path = THEIRS.get(name, name)
        if name in ("Status", "Any", "RetryInfo", "Duration"):
            continue
        ours = _POOL.FindMessageTypeByName(f"weir.inference.{name}")
        theirs = service_pb2.DESCRIPTOR.message_types_by_name[path.split(".")[0]]
        for inner in path.split(".")[1:]:
            theirs = theirs.nested_types_by_name[inner]
        fields = [[(f.number, f.name, f.type, f.is_repeated) for f in each.fields] for each in (ours, theirs)]
        assert fields[0] == fields[1], name


def test_tritonclient_with_its_defaults_sends_and_gets_raw_tensors(
    client: triton.InferenceServerClient,
) -> None:
    answer = client.infer("finbert", [texts("Profits rose.", "Müller fiel.")], request_id="7")
    assert answer.get_response().id == "7"
    assert answer.as_numpy("label").tolist() == [b"yes", b"yes"]
    assert answer.as_numpy("probabilities").tolist() == [[1.0, 0.0]] * 2
    assert len(answer.get_response().raw_output_contents) == 2
    assert answer.get_response().parameters["weights"].string_param == "random"
    wanted = [triton.InferRequestedOutput("label")]
    answer = client.infer("finbert", [texts("a"), texts("b", name="text_pair")], outputs=wanted)
    assert answer.as_numpy("label").tolist() == [b"yes"]
    assert answer.as_numpy("probabilities") is None


def test_tritonclient_sends_token_ids_with_mask_and_types(client: triton.InferenceServerClient) -> None:
    inputs = []
    for name, rows in (
        ("input_ids", [[101, 7, 102, 8, 102], [101, 9, 102, 0, 0]]),
        ("attention_mask", [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        ("token_type_ids", [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]),
    ):
        made = triton.InferInput(name, [2, 5], "INT32")
        made.set_data_from_numpy(np.array(rows, dtype=np.int32))
        inputs.append(made)
    assert client.infer("finbert", inputs).as_numpy("label").tolist() == [b"yes", b"yes"]


def test_values_in_contents_are_answered_in_contents(here: Served) -> None:
    with here.channel() as channel:
        answer = message("ModelInferResponse").FromString(call(channel, infer_bytes()))
    assert list(answer.outputs[0].contents.bytes_contents) == [b"yes"]
    assert list(answer.outputs[1].contents.fp32_contents) == [1.0, 0.0]
    assert not answer.raw_output_contents


def test_tritonclient_sees_health_models_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("finbert")
    assert client.is_model_ready("finbert", "1")
    assert not client.is_model_ready("gpt")
    assert client.get_server_metadata().name == "weir"
    metadata = client.get_model_metadata("finbert")
    assert [each.name for each in metadata.outputs] == ["label", "probabilities"]
    assert list(metadata.inputs[0].shape) == [-1]
    (model,) = client.get_model_repository_index().models
    assert (model.name, model.state) == ("finbert", "READY")
    for change in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="model_control") as caught:
            change("finbert")
        assert "PERMISSION_DENIED" in caught.value.status()


def test_models_are_loaded_and_unloaded_where_the_profile_allows_it(
    here: Served, client: triton.InferenceServerClient
) -> None:
    here.service.model_control = True
    with pytest.raises(InferenceServerException, match="nothing can load other") as caught:
        client.load_model("other")
    assert "INVALID_ARGUMENT" in caught.value.status()
    client.unload_model("finbert")
    assert not client.is_model_ready("finbert")
    with pytest.raises(InferenceServerException, match="there is no model") as caught:
        client.unload_model("finbert")
    assert "NOT_FOUND" in caught.value.status()


def test_a_call_without_a_slot_is_refused_with_the_time_to_wait(here: Served) -> None:
    here.fake.gate.clear()
    with here.channel() as channel, ThreadPoolExecutor(4) as pool:
        inside = [pool.submit(call, channel, infer_bytes()) for _ in range(LIMITS.max_in_flight)]
        until(lambda: here.service.admission.in_flight == LIMITS.max_in_flight)
        error = refusal(channel, infer_bytes())  # and not when those inside have been answered: none has
        assert message_of(call(channel, b"", "ServerReady"), "ServerReadyResponse").ready  # health answers
        here.fake.gate.set()
        assert all(each.result() for each in inside)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(error.trailing_metadata())
    assert trailing["retry-after"] == "1"
    status = message("Status").FromString(trailing["grpc-status-details-bin"])
    assert (status.code, status.message) == (8, error.details())
    assert status.details[0].type_url == "type.googleapis.com/google.rpc.RetryInfo"
    assert message("RetryInfo").FromString(status.details[0].value).retry_delay.seconds == 1


def message_of(data: bytes, name: str) -> Any:
    return message(name).FromString(data)


def test_a_deadline_is_a_deadline_whoever_says_it(here: Served, client: triton.InferenceServerClient) -> None:
    here.fake.gate.clear()
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        client.infer("finbert", [texts("a")], timeout=50_000)
    assert "DEADLINE_EXCEEDED" in caught.value.status()
    with pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        client.infer("finbert", [texts("a")], client_timeout=0.2)
    with pytest.raises(InferenceServerException, match="wasn't there before the deadline"):  # the earlier one
        client.infer("finbert", [texts("a")], timeout=50_000, client_timeout=PATIENCE_S)
    until(lambda: not here.service.admission.in_flight)
    until(lambda: here.service.worker.waiting() == (0, 0))  # the second one's rows left the queue


def test_a_cancelled_call_is_not_computed(here: Served) -> None:
    here.fake.gate.clear()
    with here.channel() as channel, ThreadPoolExecutor(1) as pool:
        first = pool.submit(call, channel, infer_bytes())
        assert here.fake.begun.wait(PATIENCE_S)  # or the second could join the first in one batch
        second = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(infer_bytes())
        until(lambda: here.service.worker.waiting()[0] == 1)
        second.cancel()
        until(lambda: here.service.worker.waiting() == (0, 0) and here.service.admission.in_flight == 1)
        here.fake.gate.set()
        assert first.result()


def test_calls_of_several_callers_share_a_batch(here: Served) -> None:
    """What waits is joined, as it is over HTTP."""
    here.fake.gate.clear()
    sizes: list[int] = []
    classify = here.fake.classify
    here.fake.classify = lambda batch: (sizes.append(len(batch)), classify(batch))[1]  # type: ignore[method-assign]
    with here.channel() as channel, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, channel, infer_bytes())]
        until(lambda: sizes == [1])
        calls += [pool.submit(call, channel, infer_bytes()) for _ in range(3)]
        until(lambda: here.service.worker.waiting()[0] == 3)
        here.fake.gate.set()
        assert all(each.result() for each in calls)
    assert sizes == [1, 3]


def test_ids_and_the_trace_are_passed_on(here: Served, caplog: pytest.LogCaptureFixture) -> None:
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    with here.channel() as channel, caplog.at_level(logging.INFO, "service"):
        found, info = channel.unary_unary(f"/{SERVICE}/ModelInfer").with_call(
            infer_bytes(), metadata=(("x-request-id", "r-1"), ("traceparent", parent))
        )
    assert found
    sent = dict(info.initial_metadata())
    assert sent["x-request-id"] == "r-1"
    assert sent["traceparent"].startswith("00-" + "ab" * 16)
    assert sent["traceparent"] != parent
    text = here.service.metrics.text().decode()
    assert 'weir_requests_total{route="grpc/ModelInfer",status="200"} 1.0' in text


def test_a_call_has_spans_too(here: Served) -> None:
    exported = InMemorySpanExporter()
    here.service.spans = Spans(SimpleSpanProcessor(exported))
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    with here.channel() as channel:
        assert call(channel, infer_bytes(), metadata=(("traceparent", parent),))
        refusal(channel, b"\xff")
    until(lambda: len(exported.get_finished_spans()) == 6)
    spans = exported.get_finished_spans()
    names = [span.name for span in spans if f"{span.context.trace_id:032x}" == "ab" * 16]
    assert sorted(names) == ["batch", "encode", "forward", "grpc/ModelInfer", "queue"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff", "the message is no ModelInferRequest"),
        (infer_bytes(id="x" * 201), "id must be a string of at most 200"),
        (b"\x3a\x01a\x3a\x01b" + infer_bytes(), "raw_input_contents has 2 elements for 1 inputs"),
        (infer_bytes(model_name="gpt"), "there is no model 'gpt'"),
        (infer_bytes(model_version="2"), "there is no version '2'"),
        (b"\x2a\x00" * 100, "more than 16 inputs"),
        (ids_in("int_contents"), "has its values in int64_contents alone"),
        (ids_in("int64_contents", "int_contents"), "has its values in int64_contents alone"),
        (b"", "inputs"),
    ],
)
def test_a_callers_mistake_is_the_callers(here: Served, data: bytes, said: str) -> None:
    with here.channel() as channel:
        error = refusal(channel, data)
        assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert said in error.details()
        assert refusal(channel, b"", "ModelStreamInfer").code() == grpc.StatusCode.UNIMPLEMENTED
        huge = refusal(channel, bytes(LIMITS.max_body_bytes + 8192))
        assert huge.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(channel, infer_bytes())


def test_a_message_that_does_not_arrive_is_not_waited_for_without_an_end() -> None:
    stop = threading.Event()

    def silent() -> Iterator[bytes]:
        stop.wait(PATIENCE_S)
        yield from ()

    with served(replace(LIMITS, body_timeout_s=1)) as here, here.channel() as channel:
        waiting = channel.stream_unary(f"/{SERVICE}/ModelInfer").future(silent())
        assert waiting.exception(PATIENCE_S).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        stop.set()


def test_messages_that_do_not_arrive_make_room_for_others() -> None:
    def silent() -> Iterator[bytes]:
        stop.wait(PATIENCE_S)
        yield from ()

    stop = threading.Event()
    own = ("grpc.use_local_subchannel_pool", 1)
    with (
        served(replace(LIMITS, body_timeout_s=600, max_in_flight=8)) as here,
        here.channel() as channel,
        here.channel(own) as one,
        here.channel(own) as other,
    ):
        opened = [each.stream_unary(f"/{SERVICE}/ModelInfer") for each in (one, other)]
        waiting = [each.future(silent()) for each in opened for _ in range(LIMITS.max_connections // 2 + 4)]
        until(lambda: sum(each.done() for each in waiting) >= 8)
        assert call(channel, infer_bytes())
        stop.set()
        codes = [each.exception(PATIENCE_S).code() for each in waiting]
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT}
    assert codes.count(grpc.StatusCode.UNAVAILABLE) in (8, 9)


def test_no_hostile_message_is_an_internal_error_or_left_unanswered() -> None:
    """A thousand; `make bench-service` sends ten thousand."""
    with served(replace(LIMITS, max_in_flight=64)) as here:
        found = fuzzed(here.port, 1000, seed=5)
        with here.channel() as channel:
            assert call(channel, infer_bytes())
    assert set(found) <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    assert found["INVALID_ARGUMENT"] > 200
    assert found["OK"] > 20


def test_a_server_over_http_and_grpc_drains_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM with a call in flight: it is answered, the next one is not, and the process ends with 0."""
    fake = Fake()
    monkeypatch.setattr(server, "_load", lambda _settings, _name: fake)
    codes: list[Any] = []

    def act(settings: Settings) -> None:
        with channel_of(settings) as channel, ThreadPoolExecutor(2) as pool:
            until(lambda: is_ready(settings.port))
            inside = pool.submit(call, channel, infer_bytes())
            until(lambda: b"weir_in_flight 1.0" in metrics(settings.port))
            terminate()
            until(lambda: not is_ready(settings.port))
            codes.append(refusal(channel, infer_bytes()).code())
            codes.append(message_of(call(channel, b"", "ServerReady"), "ServerReadyResponse").ready)
            fake.gate.set()
            codes.append(bool(inside.result(PATIENCE_S)))

    with both(Limits(drain_s=300)) as settings, beside(lambda: act(settings)):
        asyncio.run(server.serve(settings))
    assert codes == [grpc.StatusCode.UNAVAILABLE, False, True]


def test_a_second_stop_does_not_wait_for_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr(server, "_load", lambda _settings, _name: fake)
    codes: list[Any] = []

    def act(settings: Settings) -> None:
        with channel_of(settings) as channel, ThreadPoolExecutor(1) as pool:
            until(lambda: is_ready(settings.port))
            inside = pool.submit(refusal, channel, infer_bytes(), timeout=600)
            until(lambda: b"weir_in_flight 1.0" in metrics(settings.port))
            terminate()
            until(lambda: not is_ready(settings.port))
            terminate()
            codes.append(inside.result(PATIENCE_S).code())

    with both(Limits(drain_s=600, close_s=600)) as settings, beside(lambda: act(settings)):
        asyncio.run(server.serve(settings))
        fake.gate.set()
    assert codes[0] in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


@contextmanager
def both(limits: Limits) -> Iterator[Settings]:
    """Settings of a server over HTTP and gRPC, on ports that nobody else takes."""
    here = "127.0.0.1"
    with free_ports(2) as (port, grpc_port):
        yield Settings("test", "cpu", Path("/models"), "random", here, port, limits, grpc=(here, grpc_port))


def channel_of(settings: Settings) -> grpc.Channel:
    assert settings.grpc
    return grpc.insecure_channel(f"127.0.0.1:{settings.grpc[1]}", (("grpc.enable_http_proxy", 0),))


def metrics(port: int) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    with contextlib.closing(connection):
        return connection.getresponse().read()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def test_idle_connections_can_not_take_all_files() -> None:
    """Further ones are closed, and there is a place again as soon as one of those inside leaves."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

    def is_let_in(connection: socket.socket) -> bool:
        connection.settimeout(PATIENCE_S)
        try:
            connection.sendall(preface)
            return bool(connection.recv(1))
        except ConnectionError:
            return False

    with served(replace(LIMITS, grpc_max_connections=3)) as here, contextlib.ExitStack() as stack:

        def newcomer() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", here.port)))

        inside = [newcomer() for _ in range(3)]
        assert [is_let_in(each) for each in inside] == [True] * 3
        assert not is_let_in(newcomer())
        inside[0].close()
        until(lambda: is_let_in(newcomer()))


KEPT_S = 2  # that a connection keeps its place in the tests below


def in_time(here: Served, within_s: float) -> bool:
    """Whether a newcomer who tries again and again is answered in time."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        channel = here.channel(("grpc.use_local_subchannel_pool", 1))
        with channel, contextlib.suppress(grpc.RpcError):
            return bool(call(channel, b"", "ServerReady", timeout=2))
        time.sleep(0.1)
    return False


def held(here: Served, stack: contextlib.ExitStack) -> list[grpc.Channel]:
    """All places of three, each taken by a connection that has had a call."""
    own = ("grpc.use_local_subchannel_pool", 1)
    made = [stack.enter_context(here.channel(own)) for _ in range(3)]
    begun = time.monotonic()
    assert all(call(each, b"", "ServerLive") for each in made)
    # who is let in at once came late: this process stood still until a connection's time was up
    assert not in_time(here, 0.5) or time.monotonic() - begun > KEPT_S
    return made


def test_idle_callers_who_have_all_places_keep_newcomers_out_for_a_short_time() -> None:
    assert Limits.grpc_idle_s <= 15
    with (
        served(replace(LIMITS, grpc_idle_s=KEPT_S, grpc_max_connections=3)) as here,
        contextlib.ExitStack() as stack,
    ):
        inside = held(here, stack)
        assert in_time(here, PATIENCE_S)
        # a caller who was idle connects again, and waits for a place if there is none yet
        assert call(inside[0], b"", "ServerLive", wait_for_ready=True)


def test_slow_callers_who_have_all_places_keep_newcomers_out_for_a_bounded_time() -> None:
    """Their calls never end: the model doesn't, and they have no deadline."""
    assert Limits.grpc_age_s <= 60
    limits = replace(LIMITS, drain_s=1, grpc_age_s=KEPT_S, grpc_max_connections=3)
    with served(limits) as here, contextlib.ExitStack() as stack:
        here.fake.gate.clear()
        method = f"/{SERVICE}/ModelInfer"
        calls = [each.unary_unary(method).future(infer_bytes()) for each in held(here, stack)]
        until(lambda: here.service.admission.in_flight == 3)
        assert in_time(here, PATIENCE_S)
        assert calls[0].exception(PATIENCE_S).code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        )
        until(lambda: not here.service.admission.in_flight)  # and they leave their slots


def test_a_caller_whose_connection_grows_old_loses_no_call() -> None:
    with served(replace(LIMITS, max_in_flight=16, grpc_age_s=1)) as here, here.channel() as channel:
        ends, n_calls = time.monotonic() + 2.5, 0  # twice as old, and older
        with ThreadPoolExecutor(4) as pool:
            while time.monotonic() < ends or n_calls < 40:
                assert all(pool.map(lambda _: call(channel, infer_bytes()), range(4)))
                n_calls += 4


def test_a_peer_that_is_gone_leaves_its_place_though_its_call_is_open() -> None:
    """Nothing comes from it any more, not even the answer to a ping."""
    with (
        served(replace(LIMITS, body_timeout_s=600, grpc_ping_s=1)) as here,
        socket.create_connection(("127.0.0.1", here.port), timeout=PATIENCE_S) as silent,
    ):
        settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        block = b"\x83\x86" + b"".join(
            b"\x40" + bytes((len(name),)) + name + bytes((len(value),)) + value
            for name, value in (
                (b":path", f"/{SERVICE}/ModelInfer".encode()),
                (b":authority", b"x"),
                (b"content-type", b"application/grpc"),
                (b"te", b"trailers"),
            )
        )
        head = len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big")
        silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + head + block)
        heard = b""
        with contextlib.suppress(ConnectionError):
            while data := silent.recv(65536):
                heard += data
        assert heard


def test_one_connection_has_no_more_calls_than_can_be_answered(here: Served) -> None:
    here.fake.gate.clear()
    with here.channel() as channel:
        method = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        calls = [method.future(infer_bytes()) for _ in range(4 * LIMITS.max_in_flight)]
        until(lambda: here.service.admission.in_flight == LIMITS.max_in_flight)
        here.fake.gate.set()
        found = [each.exception(PATIENCE_S) for each in calls]
        ends = [(each.code(), each.details()) if each else None for each in found]
    # a stream that comes while the server still counts one that has just ended is refused by HTTP/2 itself
    refused = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
    assert {end[0] for end in ends if end} <= refused, ends
    assert ends.count(None) >= LIMITS.max_in_flight


@pytest.mark.parametrize(("host", "addresses"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])])
def test_an_ipv6_address_can_be_listened_on(host: str, addresses: list[str]) -> None:
    with served(host=host) as here:
        for address in addresses:
            to = f"{address}:{here.port}"
            with grpc.insecure_channel(to, (("grpc.enable_http_proxy", 0),)) as channel:
                assert message_of(call(channel, b"", "ServerLive"), "ServerLiveResponse").live


def test_a_port_that_is_taken_is_a_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(server.ServiceError, match=rf"can.t listen on 127\.0\.0\.1:{port} for gRPC"):
            asyncio.run(start(Service(LIMITS), "127.0.0.1", port))


def test_every_method_has_its_messages() -> None:
    for name in METHODS:
        assert message(f"{name}Request")
        assert message(f"{name}Response")
