"""The service's own server over real sockets, with a made-up classifier: slow, silent and greedy callers."""

import asyncio
import errno
import http.client
import itertools
import json
import logging
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import partial

import pytest
import uvicorn
from service.api.admission import ConnectionLimiter
from service.api.connection import Connection, HttpServer
from service.api.metrics import Metrics
from service.api.service import Service
from service.inference.classifier import Encoded, ModelInfo, Probabilities, Text, Vector
from service.server import listen, make_server
from service.settings import Limits
from waiting import PATIENCE_S, until

HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
VANISHED = b'weir_requests_total{route="/predict",status="499"} 1.0'
LIMITS = Limits(max_in_flight=4, max_connections=32, header_timeout_s=60, body_timeout_s=60)
HASTY = replace(LIMITS, header_timeout_s=3, body_timeout_s=3)  # for tests that wait for it
INFO = ModelInfo("finbert", "random", "seed 0", "hashing-stand-in", "cpu", "cpu", ("yes", "no"), 1, 2000, 8)


@dataclass
class Fake:
    """Says yes, once `gate` is open."""

    info: ModelInfo = INFO
    gate: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)  # a request has been taken

    def encode(self, texts: Sequence[Text]) -> tuple[Encoded, ...]:
        return tuple(Encoded((1, 2)) for _ in texts)

    def classify(self, batch: Sequence[Encoded]) -> tuple[Probabilities, ...]:
        self.begun.set()
        assert self.gate.wait(2 * PATIENCE_S)
        return tuple((1.0, 0.0) for _ in batch)

    def embed(self, batch: Sequence[Encoded]) -> tuple[Vector, ...]:
        return tuple((0.6, 0.8) for _ in batch)

    def prove(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return {}

    def counts(self) -> dict[str, int]:
        return {}


@dataclass
class Served:
    """A running server and how to reach it."""

    port: int
    server: uvicorn.Server
    service: Service
    fake: Fake
    thread: threading.Thread  # of the server's event loop

    def ask(self, method: str, path: str, body: bytes | None = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body)
            return connection.getresponse().status
        finally:
            connection.close()

    def predict(self) -> int:
        return self.ask("POST", "/predict", json.dumps({"texts": ["a"]}).encode())

    def open(self, stack: ExitStack, *sent: bytes) -> socket.socket:
        made = stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S))
        for data in sent:
            made.sendall(data)
        return made


@contextmanager
def served(limits: Limits = LIMITS, *, host: str = "127.0.0.1") -> Iterator[Served]:
    fake = Fake()
    fake.gate.set()
    service = Service(limits)
    service.put(fake)
    with listen(host, 0) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # full soon, when a caller doesn't read
        server = make_server(service)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        try:
            yield Served(sock.getsockname()[1], server, service, fake, thread)
        finally:
            fake.gate.set()
            with suppress(RuntimeError):  # the test has ended it
                server.force_exit = server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def here() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.fixture
def hasty() -> Iterator[Served]:
    """One that gives up on slow callers within seconds."""
    with served(HASTY) as made:
        yield made


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def is_cut_off(connection: socket.socket, data: bytes, *, pause_s: float) -> bool:
    """Send `data` again and again, reading nothing; whether the server closes the connection in time."""
    sent, ends = 0, time.monotonic() + PATIENCE_S
    connection.settimeout(0.2)
    while time.monotonic() < ends:
        try:
            sent += connection.send(data[sent % len(data) :])
        except TimeoutError:
            continue
        except OSError:
            return True
        time.sleep(pause_s)
    return False


def test_what_a_caller_asked_who_hung_up_is_never_computed(here: Served) -> None:
    here.fake.gate.clear()
    request = HEAD % 16 + json.dumps({"texts": ["a"]}).encode()
    with ExitStack() as stack:
        here.open(stack, request)
        assert here.fake.begun.wait(PATIENCE_S)
        second = here.open(stack, request)
        until(lambda: here.service.worker.waiting()[0] == 1)
        second.close()
        until(lambda: here.service.worker.waiting() == (0, 0))
        until(
            lambda: b'weir_requests_total{route="/predict",status="499"} 1.0' in here.service.metrics.text()
        )
        here.fake.gate.set()
        assert here.predict() == 200


def test_what_a_caller_asked_who_hung_up_while_it_was_tokenised_is_never_computed(
    here: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text is tokenised in a thread, and the caller leaves before anything waits for its answer."""
    begun, goes_on = threading.Event(), threading.Event()

    def encode(texts: Sequence[Text]) -> tuple[Encoded, ...]:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return tuple(Encoded((1, 2)) for _ in texts)

    monkeypatch.setattr(here.fake, "encode", encode)
    here.fake.gate.clear()
    body = json.dumps({"texts": ["a" * 5000]}).encode()
    with ExitStack() as stack:
        here.open(stack, (HEAD % 22) + json.dumps({"token_ids": [[1]]}).encode().ljust(22))
        assert here.fake.begun.wait(PATIENCE_S)
        late = here.open(stack, HEAD % len(body) + body)
        assert begun.wait(PATIENCE_S)
        late.close()
        until(lambda: len(here.server.server_state.connections) == 1)
        goes_on.set()
        until(
            lambda: b'weir_requests_total{route="/predict",status="499"} 1.0' in here.service.metrics.text()
        )
        assert here.service.worker.waiting() == (0, 0)
        here.fake.gate.set()


def test_callers_with_slow_bodies_hold_no_slot(here: Served) -> None:
    with ExitStack() as stack:
        for _ in range(4 * LIMITS.max_in_flight):
            here.open(stack, HEAD % 100, b"{")
        assert [here.predict() for _ in range(3)] == [200] * 3


def test_slots_still_limit_requests_whose_body_has_arrived(here: Served) -> None:
    here.fake.gate.clear()
    body = json.dumps({"texts": ["a"]}).encode()
    with ExitStack() as stack:
        for _ in range(LIMITS.max_in_flight):
            here.open(stack, HEAD % len(body), body)
        until(lambda: here.service.admission.in_flight == LIMITS.max_in_flight)
        assert here.predict() == 429
        assert here.ask("GET", "/v2/health/ready") == 200
        here.fake.gate.set()


def test_a_request_that_finds_no_slot_is_refused_before_its_body_has_come(here: Served) -> None:
    here.fake.gate.clear()
    body = json.dumps({"texts": ["a"]}).encode()
    with ExitStack() as stack:
        for _ in range(LIMITS.max_in_flight):
            here.open(stack, HEAD % len(body), body)
        until(lambda: here.service.admission.in_flight == LIMITS.max_in_flight)
        late = here.open(stack, HEAD % len(body))
        assert late.recv(65536).startswith(b"HTTP/1.1 429")
        here.fake.gate.set()
        until(lambda: not here.service.admission.in_flight)
        late.sendall(body + HEAD % len(body) + body)  # what is left of it, and the next request
        assert late.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_body_that_never_ends_is_answered_with_408(hasty: Served) -> None:
    with ExitStack() as stack:
        assert hasty.open(stack, HEAD % 100, b"{").recv(12) == b"HTTP/1.1 408"


def test_a_body_that_still_drips_after_its_answer_is_cut_off(hasty: Served) -> None:
    with ExitStack() as stack:
        dripping = hasty.open(stack, HEAD % 99_999_999)
        assert dripping.recv(12) == b"HTTP/1.1 413"
        assert is_cut_off(dripping, b"x", pause_s=0.02)


def test_half_open_connections_do_not_lock_others_out(here: Served) -> None:
    with ExitStack() as stack:
        for _ in range(3 * LIMITS.max_connections):
            here.open(stack, b"GET / HTTP/1.1\r\nHost:")
        assert here.ask("GET", "/v2/health/ready") == 200
        assert here.predict() == 200
        until(lambda: len(here.server.server_state.connections) <= LIMITS.max_connections)


def test_a_half_open_connection_is_reported_and_closed_in_time(hasty: Served) -> None:
    with ExitStack() as stack:
        half = hasty.open(stack, b"GET / HTTP/1.1\r\nHost:")
        silent = hasty.open(stack)
        told = received(half)
        assert told.startswith(b"HTTP/1.1 408 ")
        assert b"head didn't arrive within 3 s" in told
        assert received(silent) == b""


def test_a_caller_that_reads_no_answer_is_cut_off(hasty: Served) -> None:
    with ExitStack() as stack:
        greedy = hasty.open(stack)
        ask = b"GET /v2/models/finbert HTTP/1.1\r\nHost: x\r\n\r\n" * 100
        assert is_cut_off(greedy, ask, pause_s=0)
        assert hasty.ask("GET", "/v2/health/ready") == 200


@pytest.mark.parametrize("ends", [False, True], ids=["", "while the service ends"])
def test_a_caller_that_reads_slowly_gets_all_of_its_answer(here: Served, ends: bool) -> None:
    """It is closed only where it has read nothing since the last look, not because all takes long."""
    here.fake.embed = lambda batch: tuple((0.5,) * 500_000 for _ in batch)  # type: ignore[method-assign]
    body = json.dumps({"input": "a"}).encode()
    with ExitStack() as stack:
        slow = here.open(stack, HEAD.replace(b"predict", b"v1/embeddings") % len(body), body)
        data = slow.recv(1024)
        (connection,) = here.server.server_state.connections
        assert isinstance(connection, Connection)
        until(lambda: connection.transport.get_write_buffer_size() > 0 and not connection._is_answering)
        loop, looked = connection.loop, threading.Event()
        if ends:
            loop.call_soon_threadsafe(setattr, connection, "_is_ending", True)
        loop.call_soon_threadsafe(connection._arm)
        loop.call_soon_threadsafe(looked.set)
        assert looked.wait(PATIENCE_S)
        unread = connection.transport.get_write_buffer_size()
        while connection.transport.get_write_buffer_size() == unread:
            data += slow.recv(1024)
        loop.call_soon_threadsafe(connection._expired)
        while not data.endswith(b"}"):
            piece = slow.recv(1 << 20)
            assert piece, f"cut off after {len(data)} bytes"
            data += piece
        assert len(json.loads(data.partition(b"\r\n\r\n")[2])["data"][0]["embedding"]) == 500_000


def test_a_newcomer_gets_the_place_of_a_caller_that_leaves_its_answer_unread() -> None:
    """And nothing is written into that answer. A close would wait for its reader, beyond the limit."""
    with served(replace(LIMITS, max_in_flight=1, max_connections=1)) as here, ExitStack() as stack:
        here.fake.embed = lambda batch: tuple((0.5,) * 500_000 for _ in batch)  # type: ignore[method-assign]
        body = json.dumps({"input": "a"}).encode()
        unread = here.open(stack, HEAD.replace(b"predict", b"v1/embeddings") % len(body), body)
        data = unread.recv(1024)
        (connection,) = here.server.server_state.connections
        until(lambda: connection.transport.get_write_buffer_size() > 0 and not connection._is_answering)
        assert here.ask("GET", "/v2/health/ready") == 200
        data += received(unread)
        assert data.count(b"HTTP/1.1 ") == 1


def test_the_newcomer_is_refused_when_every_place_is_at_work() -> None:
    with served(Limits(max_in_flight=1, max_connections=1)) as here, ExitStack() as stack:
        here.fake.gate.clear()
        body = json.dumps({"texts": ["a"]}).encode()
        inside = here.open(stack, HEAD % len(body), body)
        until(lambda: here.service.admission.in_flight == 1)
        refused = received(here.open(stack))
        assert refused.startswith(b"HTTP/1.1 503 ")
        here.fake.gate.set()
        assert inside.recv(12) == b"HTTP/1.1 200"


def test_answers_are_not_held_back_for_an_acknowledgement(here: Served) -> None:
    with ExitStack() as stack:
        connection = here.open(stack, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        (protocol,) = here.server.server_state.connections
        accepted = protocol.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_answers_head_and_body_leave_in_one_write(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writes are two packets, and a client that waits for both waits for two."""
    written: list[bytes] = []

    class Noting(Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            write = transport.write

            def noting(data: bytes) -> None:
                if data:
                    written.append(bytes(data))
                write(data)

            monkeypatch.setattr(transport, "write", noting)
            super().connection_made(transport)

    assert here.ask("GET", "/v2") == 200  # a server that starts sets the class by itself
    here.server.config.http_protocol_class = partial(  # type: ignore[assignment]
        Noting, limiter=ConnectionLimiter(9), limits=LIMITS
    )
    for ask in (lambda: here.ask("GET", "/v2"), here.predict, lambda: here.ask("HEAD", "/v2")):
        written.clear()
        assert ask() == 200
        assert len(written) == 1


CHUNKED = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ASK = json.dumps({"texts": ["a"]}).encode()


def in_chunks(body: bytes, n_bytes: int) -> bytes:
    pieces = (body[at : at + n_bytes] for at in range(0, len(body), n_bytes))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_body_in_tiny_chunks_does_not_keep_the_event_loop_from_others(here: Served) -> None:
    """A million of them took 15 s, in pieces of a second, in which nobody else was answered."""
    with ExitStack() as stack:
        greedy = here.open(stack, CHUNKED, in_chunks(ASK.ljust(20_000), 1))
        told = received(greedy)
        assert told.startswith(b"HTTP/1.1 400 ")
        assert b"too many chunks; send 64 bytes in each" in told
        assert here.predict() == 200


@pytest.mark.parametrize(("n_bytes", "chunk_bytes"), [(1000, 1), (900_000, 64), (900_000, 50_000)])
def test_a_body_in_chunks_that_an_honest_caller_sends_is_taken(
    here: Served, n_bytes: int, chunk_bytes: int
) -> None:
    with ExitStack() as stack:
        caller = here.open(stack, CHUNKED, in_chunks(ASK.ljust(n_bytes), chunk_bytes))
        assert caller.recv(12) == b"HTTP/1.1 200"


def test_tiny_chunks_of_a_body_that_nobody_reads_are_cut_off() -> None:
    with served(Limits(header_timeout_s=60)) as here, ExitStack() as stack:
        greedy = here.open(stack, CHUNKED.replace(b"/predict", b"/nowhere"))
        assert greedy.recv(12) == b"HTTP/1.1 404"
        assert is_cut_off(greedy, b"1\r\nx\r\n" * 1000, pause_s=0.01)


def test_what_is_no_http_is_reported_in_json(here: Served) -> None:
    with ExitStack() as stack:
        told = received(here.open(stack, b"\x16\x03\x01\x02\r\n\r\n"))
    assert told.startswith(b"HTTP/1.1 400 ")
    assert json.loads(told.partition(b"\r\n\r\n")[2]) == {"error": "this is not an HTTP/1.1 request"}


def answers(told: bytes) -> list[bytes]:
    """The status lines of final answers."""
    return [line for line in re.findall(rb"HTTP/1.1 [^\r]+", told) if b" 100 " not in line]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_whole_request_whose_caller_sends_no_more_is_answered(here: Served, version: bytes) -> None:
    """As `nc -N` sends it. What is computed by then, and what waits for its batch."""
    ask = (HEAD % len(ASK)).replace(b"1.1", version) + ASK
    here.fake.gate.clear()
    with ExitStack() as stack:
        held = [here.open(stack, ask), here.open(stack, ask)]
        for each in held:
            each.shutdown(socket.SHUT_WR)
        health = here.open(stack, b"GET /v2/health/live HTTP/%s\r\nHost: x\r\n\r\n" % version)
        health.shutdown(socket.SHUT_WR)
        assert answers(received(health)) == [b"HTTP/1.1 200 OK"]
        until(lambda: here.service.admission.in_flight == 2)
        here.fake.gate.set()
        for each in held:
            assert answers(received(each)) == [b"HTTP/1.1 200 OK"]


def test_requests_that_were_sent_together_are_all_answered_after_a_half_close(here: Served) -> None:
    with ExitStack() as stack:
        caller = here.open(stack, 3 * (HEAD % len(ASK) + ASK))
        caller.shutdown(socket.SHUT_WR)
        assert answers(received(caller)) == [b"HTTP/1.1 200 OK"] * 3


def test_half_a_request_before_a_half_close_is_not_waited_for(here: Served) -> None:
    with ExitStack() as stack:
        caller = here.open(stack, HEAD % 100 + b"{")
        caller.shutdown(socket.SHUT_WR)
        assert answers(received(caller)) == []


@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://x/v2/health/live", 200),
        (b"HTTPS://x:1/v2/health/live?a", 200),
        (b"http://x", 200),
        (b"http://x?a", 200),
        (b"http://x/none", 404),
        (b"*", 404),
        (b"ftp://x/v2", 404),
    ],
)
def test_a_target_with_a_scheme_and_a_host_is_its_path(here: Served, target: bytes, status: int) -> None:
    with ExitStack() as stack:
        caller = here.open(stack, b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        assert received(caller).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    "fields",
    [b"A: " + b"x" * (1 << 20), b"A: b\r\n" * 300, b"A: b\r\n" * 200_000],
    ids=["long", "many", "both"],
)
def test_a_head_that_is_too_large_is_a_431_that_its_caller_can_read(here: Served, fields: bytes) -> None:
    """The whole of it can be sent: a connection that is closed meanwhile takes the answer from its caller."""
    with ExitStack() as stack:
        caller = here.open(stack, b"GET /v2 HTTP/1.1\r\nHost: x\r\n", fields, b"\r\n\r\n")
        caller.shutdown(socket.SHUT_WR)
        told = received(caller)
    assert told.startswith(b"HTTP/1.1 431 ")
    assert b"the head " in told
    assert len(answers(told)) == 1


def test_many_readers_of_the_metrics_share_a_page_that_is_no_older_than_their_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page costs milliseconds of the event loop: 300 callers who want one delayed health by ten seconds."""
    made, text = [], Metrics.text

    def slow(metrics: Metrics) -> bytes:
        time.sleep(0.02)
        made.append(time.monotonic())
        return text(metrics)

    monkeypatch.setattr(Metrics, "text", slow)
    with served() as here, ExitStack() as stack:
        callers = [http.client.HTTPConnection("127.0.0.1", here.port) for _ in range(6)]
        for each in callers:
            stack.callback(each.close)
        for count in (1, 2, 3):
            assert here.predict() == 200
            for each in callers:
                each.request("GET", "/metrics")
            for each in callers:
                assert b'"/predict",status="200"} %d.0' % count in each.getresponse().read()
    assert len(made) < 3 * len(callers)
    assert all(after - before > 9 * 0.02 for before, after in itertools.pairwise(made))


def test_while_it_drains_every_answer_ends_its_connection(here: Served) -> None:
    """A request that came after such an answer would meet a closed connection, and have none."""
    here.fake.gate.clear()
    with ExitStack() as stack:
        inside = here.open(stack, HEAD % len(ASK) + ASK)
        until(lambda: here.service.admission.in_flight == 1)
        kept = [here.open(stack, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(3)]
        for each in kept:
            assert each.recv(65536).startswith(b"HTTP/1.1 200")
        here.service.admission.draining = True
        for each, ask in zip(
            kept,
            (HEAD % len(ASK) + ASK, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n", HEAD % 3 + b"{}x"),
            strict=True,
        ):
            each.sendall(ask)
            told = received(each)
            assert told.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close\r\n" in told.lower()
        here.fake.gate.set()
        told = received(inside)
        assert told.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in told.lower()


def test_a_stop_answers_whoever_had_connected_or_asked_before_it() -> None:
    """A new connection that waits to be taken, and kept ones whose request is there or still under way."""
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    blocked, goes_on = threading.Event(), threading.Event()
    with served(replace(LIMITS, last_request_s=PATIENCE_S)) as here, ExitStack() as stack:
        kept, late = (here.open(stack, live) for _ in range(2))
        assert all(each.recv(65536).startswith(b"HTTP/1.1 200") for each in (kept, late))
        assert isinstance(here.server, HttpServer)
        assert here.server._loop
        here.server._loop.call_soon_threadsafe(lambda: (blocked.set(), goes_on.wait(PATIENCE_S)))
        assert blocked.wait(PATIENCE_S)
        kept.sendall(live)
        new = here.open(stack, HEAD % len(ASK) + ASK)
        here.service.admission.draining = True
        here.server.should_exit = True
        goes_on.set()
        assert received(kept).startswith(b"HTTP/1.1 200")
        assert received(new).startswith(b"HTTP/1.1 503")
        until(lambda: is_refused(here.port))
        late.sendall(live)
        assert received(late).startswith(b"HTTP/1.1 200")
    here.thread.join(PATIENCE_S)
    assert not here.thread.is_alive()


def is_refused(port: int) -> bool:
    """Whether nobody listens any more."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
    except ConnectionError:
        return True
    return False


def test_requests_to_upgrade_do_not_flood_the_log(here: Served, caplog: pytest.LogCaptureFixture) -> None:
    ask = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        connection = here.open(stack)
        for _ in range(5):
            connection.sendall(ask)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert [record.getMessage() for record in caplog.records] == []


def test_when_no_more_files_may_be_open_it_takes_connections_a_second_later(
    here: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, refused = socket.socket.accept, list[float]()

    def exhausted(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener.getsockname()[1:2] == (here.port,) and not refused:
            refused.append(time.monotonic())
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    assert here.predict() == 200
    assert time.monotonic() - refused[0] > 0.9
    assert here.predict() == 200


def test_a_connection_that_ends_before_it_is_taken_disturbs_nobody(
    here: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, ended = socket.socket.accept, [ConnectionAbortedError(), BlockingIOError(), InterruptedError()]

    def aborted(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener.getsockname()[1:2] == (here.port,) and ended:
            raise ended.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", aborted)
    assert here.predict() == 200
    assert not ended


def test_an_idle_service_wakes_for_nothing(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each turn of the loop takes a CPU from a pass that is computed. One second of ten must be idle."""
    assert here.predict() == 200
    turns: list[float] = []
    select = selectors.EpollSelector.select

    def counted(self: selectors.EpollSelector, timeout: float | None = None) -> object:
        if threading.get_ident() == here.thread.ident:
            turns.append(time.monotonic())
        return select(self, timeout)

    monkeypatch.setattr(selectors.EpollSelector, "select", counted)
    for _ in range(10):
        time.sleep(0.1)  # what the request began may end in it
        turns.clear()
        time.sleep(1)
        if len(turns) <= 2:
            return
    assert len(turns) <= 2


def test_answers_have_todays_date(here: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", here.port, timeout=PATIENCE_S)
    connection.request("GET", "/v2")
    date = connection.getresponse().headers.get_all("Date") or []
    connection.close()
    assert len(date) == 1
    assert abs(parsedate_to_datetime(date[0]).timestamp() - time.time()) < PATIENCE_S


@pytest.mark.parametrize("path", ["/predict/", "/v2/models/finbert/", "/v2/"])
def test_no_redirect_tells_what_a_proxy_hides(here: Served, path: str) -> None:
    """It named http, and whatever host the caller wrote."""
    assert here.ask("GET", path) == 404
