"""The proxy of compose/tls.yaml, run with Debian's nginx: TLS, keys, what it hides, and its limits."""

import http.client
import json
import os
import re
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.grpc as triton

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef"
HEAD = "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
BODY = json.dumps({"texts": ["Profits rose."]})
HEALTH = """import ssl, urllib.request
context = ssl._create_unverified_context()
print(urllib.request.urlopen("https://tls:8443/v2/health/live", context=context, timeout=60).status)
"""


def run(*words: str, **env: str) -> str:
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def certified(folder: Path, name: str = "localhost") -> None:
    """A certificate that signs itself, as docs/service.md makes it."""
    options = ["-nodes", "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", *options, *files)
    for path in folder.iterdir():
        os.chown(path, 10001, 10001)


@dataclass(frozen=True)
class Proxy:
    """The running proxy."""

    folder: Path
    port: int
    env: dict[str, str]

    def compose(self, *words: str) -> str:
        return run("docker", "compose", "--progress", "quiet", *words, **self.env)

    def connect(self) -> ssl.SSLSocket:
        """A connection whose other side has proven its name."""
        context = ssl.create_default_context(cafile=str(self.folder / "cert.pem"))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return context.wrap_socket(plain, server_hostname="localhost")

    def ask(self, method: str, path: str, *, key: str = KEY, fields: str = "", body: str = "") -> int:
        """The status of one request, sent as it is written here."""
        head = HEAD.format(method=method, path=path, key=key) + fields
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        with self.connect() as wire:
            wire.sendall((head + body).encode())
            return status(wire)


def status(wire: socket.socket) -> int:
    answer = http.client.HTTPResponse(wire)
    answer.begin()
    answer.read()
    return answer.status


@pytest.fixture(scope="module")
def proxy(nginx_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """The service behind its proxy."""
    folder = tmp_path_factory.mktemp("tls")
    (folder / "keys").write_text(f'"~^Bearer {KEY}$" 1;\n')
    folder.chmod(0o755)
    certified(folder)
    env = {
        "COMPOSE_PROJECT_NAME": f"t-tls-{os.getpid()}",
        "WEIR_TLS_IMAGE": nginx_image,
        "WEIR_TLS_DIR": str(folder),
        "WEIR_TLS_PORT": "0",
        **dict.fromkeys(("WEIR_PORT", "WEIR_EXTRAS_PORT", "WEIR_GRPC_PORT"), "0"),
    }
    made = Proxy(folder, 0, env)
    try:
        made.compose("up", "-d", "--wait", "tls")
        port = int(made.compose("port", "tls", "8443").rsplit(":", 1)[1])
        yield Proxy(folder, port, env)
    finally:
        made.compose("--profile", "*", "down", "-v")


def test_a_caller_with_a_key_is_answered_and_one_without_is_not(proxy: Proxy) -> None:
    assert proxy.ask("POST", "/predict", body=BODY) == 200
    assert proxy.ask("GET", "/v2/models/finbert") == 200
    for key in ("", KEY.upper(), KEY + "0", f"x {KEY}", KEY[:-1]):
        assert proxy.ask("POST", "/predict", key=key, body=BODY) == 401, key
    assert proxy.ask("GET", "/v2/health/ready", key="") == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics", "/metrics/", "//metrics", "/%6detrics", "/v2/../metrics", "/predict/../metrics"),
        *("/v2/repository/index", "/v2/models/../repository/index", "/v2/models/..%2frepository/index"),
        *("/v2//repository/index", "/v2/%72epository/index", "/v2/models/%2e%2e/repository/index"),
        *(
            "/metrics?/predict",
            "/metrics;/predict",
            "/predict/",
            "/inference.GRPCInferenceService/RepositoryIndex",
        ),
    ],
)
def test_what_is_for_this_machine_alone_is_hidden_however_it_is_written(proxy: Proxy, path: str) -> None:
    assert proxy.ask("GET", path) == 404


def test_what_two_servers_may_read_differently_is_refused(proxy: Proxy) -> None:
    assert proxy.ask("POST", "/predict", fields="Transfer-Encoding: chunked\r\n", body="0\r\n\r\n") == 400
    assert proxy.ask("POST", "/predict", fields="Content-Length: 3\r\n", body=BODY) == 400
    assert proxy.ask("POST", "/predict", fields=f"Authorization: Bearer {KEY}\r\n", body=BODY) == 400
    assert proxy.ask("POST", "/predict", body="x" * (1 << 20) + "x") == 413


def test_a_slow_caller_is_closed_and_never_reaches_the_service(proxy: Proxy) -> None:
    with proxy.connect() as wire:
        begun = time.monotonic()
        wire.sendall(
            HEAD.format(method="POST", path="/predict", key=KEY).encode() + b"Content-Length: 9\r\n\r\nx"
        )
        assert wire.recv(1) == b""
        assert time.monotonic() - begun > 5
    address = proxy.compose("port", "api", "8000").strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
        counted = re.findall(r'weir_requests_total{route="/predict",status="(\d+)"}', page.read().decode())
    assert not {"400", "408", "499"} & set(counted)


def test_a_connection_that_idled_longer_than_the_service_waits_is_answered(proxy: Proxy) -> None:
    with proxy.connect() as wire:
        for pause_s in (0, 5.0, 5.2):
            time.sleep(pause_s)
            head = HEAD.format(method="POST", path="/predict", key=KEY)
            wire.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode())
            assert status(wire) == 200


def test_half_heads_shut_out_their_own_address_alone(proxy: Proxy) -> None:
    """tests/loopback/test_service_front.py counts them, and has other ways to be half-done."""
    with ExitStack() as stack:
        with suppress(OSError):
            for _ in range(200):
                stack.enter_context(proxy.connect()).sendall(b"GET /v2/health/live HTTP/1.1\r\n")
            pytest.fail("200 connections of one address were taken")
        assert proxy.compose("exec", "-T", "api", "python3", "-c", HEALTH).strip() == "200"
    assert len(proxy.compose("logs", "--no-log-prefix", "tls").splitlines()) < 20


def test_a_renewed_certificate_is_read_on_sighup(proxy: Proxy) -> None:
    certified(proxy.folder)
    with pytest.raises(ssl.SSLCertVerificationError):
        proxy.connect()
    proxy.compose("kill", "-s", "HUP", "tls")
    ends = time.monotonic() + 60
    while True:
        try:  # the workers of before may take one connection more while the new ones start
            assert proxy.ask("POST", "/predict", body=BODY) == 200
            break
        except (ssl.SSLError, ConnectionError):
            assert time.monotonic() < ends
            time.sleep(0.1)


def test_grpc_has_the_same_key(proxy: Proxy) -> None:
    run(
        str(ROOT / ".venv/bin/python"),
        "-m",
        "buildtool",
        "build",
        "cpu-extras",
        "--reports",
        str(proxy.folder.parent),
    )
    proxy.compose("up", "-d", "--wait", "api-grpc")
    options = {"ssl": True, "root_certificates": str(proxy.folder / "cert.pem")}
    with triton.InferenceServerClient(f"localhost:{proxy.port}", **options) as client:
        headers = {"authorization": f"Bearer {KEY}"}
        assert client.is_server_ready(headers=headers)
        metadata = client.get_model_metadata("finbert", headers=headers)
        assert metadata.name == "finbert"
        with pytest.raises(triton.InferenceServerException):
            client.get_model_metadata("finbert", headers={})
        with pytest.raises(triton.InferenceServerException):
            client.get_model_repository_index(headers=headers)
