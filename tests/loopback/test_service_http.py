"""What HTTP's standards ask of the service's own server: expectations, framing, fields, pipelining."""

import json
import re
import socket
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from service.errors import ServiceError, SettingsError
from service.listen import parse_listen
from service.server import listen
from test_service_sockets import ASK, CHUNKED, HASTY, HEAD, LIMITS, Served, received, served
from waiting import PATIENCE_S, until

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
EXPECTS = HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")


@pytest.fixture
def here():
    with served() as made:
        yield made


def statuses(told: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d{3}) ", told)


def answers(connection: socket.socket, count: int) -> bytes:
    """What comes until so many answers have begun, on a connection that stays open."""
    told = b""
    while len(statuses(told)) < count:
        piece = connection.recv(65536)
        assert piece, told
        told += piece
    return told


def fill(here: Served, stack: ExitStack) -> None:
    here.fake.gate.clear()
    for _ in range(LIMITS.max_in_flight):
        here.open(stack, HEAD % len(ASK), ASK)
    until(lambda: here.service.admission.in_flight == LIMITS.max_in_flight)


def test_a_refusal_instead_of_100_continue_closes_the_connection() -> None:
    """The caller may leave its body out now: what follows is that or the next request (RFC 9110, 10.1.1)."""
    slow = replace(LIMITS, header_timeout_s=600, body_timeout_s=600, keep_alive_s=int(10 * PATIENCE_S))
    with served(slow) as here, ExitStack() as stack:
        fill(here, stack)
        told = received(here.open(stack, EXPECTS % len(ASK)))  # closed at once, not when it has been idle
        head = told.partition(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 429 ")
        assert head.count(b"\r\nconnection: close") == 1
        here.fake.gate.set()


@pytest.mark.parametrize(("path", "status"), [(b"/nowhere", b"404"), (b"/v2/models/gpt/infer", b"404")])
def test_every_other_refusal_instead_of_100_continue_closes_it_too(
    here: Served, path: bytes, status: bytes
) -> None:
    with ExitStack() as stack:
        told = received(here.open(stack, EXPECTS.replace(b"/predict", path) % len(ASK)))
        assert told.startswith(b"HTTP/1.1 %b " % status)
        assert b"\r\nconnection: close" in told.lower()


def test_a_request_that_is_let_in_is_told_to_go_on_and_its_connection_stays(here: Served) -> None:
    with ExitStack() as stack:
        caller = here.open(stack, EXPECTS % len(ASK))
        assert statuses(caller.recv(100)) == [b"100"]
        caller.sendall(ASK)
        assert caller.recv(65536).startswith(b"HTTP/1.1 200")
        caller.sendall(LIVE)
        assert caller.recv(65536).startswith(b"HTTP/1.1 200")


def test_an_expectation_whose_body_came_along_needs_no_close(here: Served) -> None:
    with ExitStack() as stack:
        fill(here, stack)
        caller = here.open(stack, EXPECTS % len(ASK) + ASK)
        told = caller.recv(65536)
        assert told.startswith(b"HTTP/1.1 429")
        assert b"connection: close" not in told.lower()
        caller.sendall(LIVE)
        assert caller.recv(65536).startswith(b"HTTP/1.1 200")
        here.fake.gate.set()


@pytest.mark.parametrize(
    "head",
    [
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        b"POST /predict HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 4\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: \xb2\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length : 3\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nContent-Length: 3\r\n\r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nHost: y\r\nContent-Length: 3\r\n\r\n",
    ],
)
def test_a_request_whose_end_two_servers_may_see_in_two_places_is_refused_and_closed(
    here: Served, head: bytes
) -> None:
    """What follows it must not be read as another request: a proxy before us may have seen one alone."""
    with ExitStack() as stack:
        told = received(here.open(stack, head + b"0\r\n\r\n" + LIVE))
        assert told.startswith(b"HTTP/1.1 400 ")
        assert statuses(told) == [b"400"]
        assert b"\r\nconnection: close" in told.lower()
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]


def test_a_length_that_is_said_twice_alike_is_one_length(here: Served) -> None:
    with ExitStack() as stack:
        twice = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: %d\r\n\r\n") % (len(ASK), len(ASK))
        caller = here.open(stack, twice + ASK + LIVE)
        assert statuses(answers(caller, 2)) == [b"200"] * 2


def test_pipelined_requests_are_answered_one_by_one_in_their_order(here: Served) -> None:
    asks = [LIVE, b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", HEAD % len(ASK) + ASK] * 40
    wanted = [b"200", b"404", b"200"] * 40
    last = LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with ExitStack() as stack:
        told = received(here.open(stack, b"".join(asks) + last))
    assert statuses(told) == [*wanted, b"200"]


def test_trailers_are_no_head_and_have_the_heads_limit(here: Served) -> None:
    body = b"%x\r\n%b\r\n0\r\n" % (len(ASK), ASK)
    with ExitStack() as stack:
        caller = here.open(stack, CHUNKED, body, b"X-Request-Id: evil\r\nContent-Length: 9\r\n\r\n" + LIVE)
        told = answers(caller, 2)
        assert statuses(told) == [b"200"] * 2
        assert b"evil" not in told
        flood = received(here.open(stack, CHUNKED, body, b"a: b\r\n" * 100_000))
        assert not flood.startswith(b"HTTP/1.1 200")
        assert here.predict() == 200


def test_a_slow_reader_of_large_answers_holds_no_slot_and_is_cut_off() -> None:
    ask = json.dumps({"input": ["a"] * 8, "model": "finbert"}).encode()
    with served(HASTY) as here, ExitStack() as stack:
        slow = here.open(stack)
        slow.setblocking(False)
        head = HEAD.replace(b"/predict", b"/v1/embeddings")
        try:
            for _ in range(3000):
                slow.send(head % len(ask) + ask)
        except BlockingIOError:
            pass
        ends = time.monotonic() + PATIENCE_S
        while here.server.server_state.connections and time.monotonic() < ends:
            assert here.service.admission.in_flight <= 1
            time.sleep(0.05)
        assert not here.server.server_state.connections
        assert here.predict() == 200


HOSTILE = [
    "..",
    "%2e%2e",
    "..%2f..%2fetc",
    "a%00b",
    "%0a",
    "a%22%0aweir_ready%200",
    "x" * 5000,
    "%ff",
    "a%5cb",
    "-x",
    "~",
]


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_names_that_callers_make_up_load_nothing_and_appear_in_no_metric(here: Served, verb: str) -> None:
    here.service.model_control = True
    for name in HOSTILE:
        for base in ("repository/models", "models"):
            status = here.ask("POST", f"/v2/{base}/{name}/{verb if base != 'models' else 'infer'}", b"{}")
            assert status in (400, 404, 405), (name, status)
    assert set(here.service.models.index()) == {"finbert"}
    text = here.service.metrics.text().decode()
    assert "weir_ready 1.0" in text
    assert not [line for line in text.splitlines() if "etc" in line or "xxx" in line]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[::]:8000", ("::", 8000)),
        ("[0:0::0]:1", ("::", 1)),
        ("[::1]:8000", ("::1", 8000)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_an_address_of_ipv6_is_in_brackets(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize(
    "text", ["::1:8000", ":::8000", "[::1:8000", "[127.0.0.1]:80", "[]:80", "[[::1]]:80", "[::1]x:8"]
)
def test_an_address_of_ipv6_without_brackets_says_how_it_is_written(text: str) -> None:
    with pytest.raises(SettingsError, match="no IPv6 address in brackets") as caught:
        parse_listen(text)
    assert "[::]:8000" in caught.value.hint


def test_all_addresses_of_ipv6_take_ipv4_as_well_and_the_health_check_finds_them() -> None:
    from service.health import is_ready, status

    with served(host="::") as here:
        for host in ("::1", "127.0.0.1"):
            with closing(socket.create_connection((host, here.port), timeout=PATIENCE_S)) as caller:
                caller.sendall(LIVE)
                assert caller.recv(100).startswith(b"HTTP/1.1 200")
        assert is_ready(status("::", here.port))


def test_one_address_of_ipv6_is_that_address_alone() -> None:
    with listen("::1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


@pytest.mark.parametrize("host", ["2001:db8::1", "no.such.host.invalid", "a" * 70 + ".example", "127.0.0.1"])
def test_an_address_that_is_not_here_is_a_clear_message(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match="can't listen on ") as caught:
            listen(host, port)
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert shown in str(caught.value)
    assert "WEIR_LISTEN" in caught.value.hint
