"""compose/nginx.conf with a real nginx on the loopback: what a caller may take, what reaches the service."""

import socket
import ssl
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from waiting import until

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("bench", "docker")]

from debian_packages import unpacked
from service_front import (
    HALF_HANDSHAKE,
    HALF_HEAD,
    KEY,
    SLOW_BODY,
    Front,
    asked_on,
    front,
    module_of_stream,
    nginx_here,
)

LIMIT = 32
ATTACKER, OTHER = "127.0.2.1", "127.0.1.1"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """One for all tests: each has addresses of its own, whose limits are untouched."""
    try:
        program = (nginx_here(), *module_of_stream())
    except FileNotFoundError:
        root = unpacked(tmp_path_factory.mktemp("packages"), "nginx", "libnginx-mod-stream")
        program = (str(root / "usr/sbin/nginx"), str(root / "usr/lib/nginx/modules/ngx_stream_module.so"))
    with front(tmp_path_factory.mktemp("front"), program, waits_s=600) as made:
        yield made


def closed(wire: socket.socket) -> bool:
    """Whether the other side has closed it by now."""
    wire.setblocking(False)
    try:
        return wire.recv(1) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


@pytest.mark.parametrize(
    ("at", "first", "tls"),
    [(1, HALF_HEAD, True), (2, HALF_HANDSHAKE, False), (3, SLOW_BODY, True), (4, b"", False)],
    ids=["half a head", "half a handshake", "a slow body", "silence"],
)
def test_one_address_holds_32_connections_whatever_it_has_sent(
    here: Front, at: int, first: bytes, tls: bool
) -> None:
    attacker = f"127.0.2.{at}"
    with ExitStack() as stack:
        held: list[socket.socket] = []
        for _ in range(LIMIT):
            wire = stack.enter_context(here.secure(attacker) if tls else here.connect(attacker))
            wire.sendall(first)
            held.append(wire)
        for _ in range(8):  # at once: those who came first are still there
            with suppress(ConnectionError):
                refused = stack.enter_context(here.connect(attacker))
                refused.settimeout(60)
                assert refused.recv(1) == b""
        assert here.ask("/predict", source=OTHER) == 200
        assert not any(map(closed, held))
    until(lambda: _answers(here, attacker))


def _answers(here: Front, source: str) -> bool:
    with suppress(OSError):
        return here.ask("/v2/health/live", key="", source=source) == 200
    return False


def test_what_callers_do_wrong_writes_no_lines(here: Front) -> None:
    before = len(here.log)
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x01\xff", b"\x00" * 100, HALF_HANDSHAKE):
        with here.connect("127.0.2.5") as wire:
            wire.sendall(first)
    too_large = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 30}\r\n\r\n".encode()
    for first in (
        too_large,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nA:" + b"x" * 99_999,
    ):
        with here.secure("127.0.2.5") as wire, suppress(OSError):
            wire.sendall(first)
            wire.recv(9)
    assert here.log[before:] == []


@pytest.mark.parametrize(
    ("path", "key"), [("/predict", "wrong"), ("/%70redict", "right"), ("/unauthorized", "wrong")]
)
def test_refused_requests_wait_for_their_turn_like_others(here: Front, path: str, key: str) -> None:
    """A burst of 100, then 50 a second; a slow machine is only slower, so no time is too long."""
    source = f"127.0.3.{len(path)}"
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        wires = [stack.enter_context(here.secure(source)) for _ in range(8)]
        begun = time.monotonic()
        asked = pool.map(lambda wire: [asked_on(wire, path, key=key) for _ in range(18)], wires)
        assert {status for found in asked for status in found} == {404 if "%" in path else 401}
        assert time.monotonic() - begun > (8 * 18 - 101) / 50 - 0.1


def test_the_service_gets_no_path_that_the_front_has_read_as_another(here: Front) -> None:
    """nginx chooses by the path without `..`, `//` and %-escapes, and passes on what was sent."""
    here.asked.clear()
    for path in (
        *("/metrics/../predict", "/v2/repository/index/../../../predict", "/v2/./models/a", "//predict"),
        *("/%70redict", "/v1/a%20b", "/v1/a%2f..%2f..%2fmetrics", "/v1//a", "/predict#/../metrics"),
        *("/v2/health/..%2f..%2fmetrics", "/v2/health/%2e%2e/health/live"),
    ):  # fmt: skip
        assert here.ask(path, source="127.0.4.1") == 404, path
    assert here.asked == []
    for path in ("/predict", "/predict?a=%20", "/v1/models", "/v2/models/my-model_1.0/infer", "/v2", "/"):
        assert here.ask(path, source="127.0.4.1") == 200
        assert here.asked.pop() == path


def test_nobody_without_a_key_has_a_body_kept(here: Front) -> None:
    here.asked.clear()
    request = b"POST /v2/health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with here.secure("127.0.4.2") as wire:
        wire.sendall(request)
        assert wire.recv(12) == b"HTTP/1.1 413"
    assert here.asked == []


def test_a_caller_of_http_1_0_needs_no_host(here: Front) -> None:
    with here.secure("127.0.4.3") as wire:
        wire.sendall(f"GET /v2 HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        assert wire.recv(12) == b"HTTP/1.1 200"
