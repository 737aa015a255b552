"""What a registry answers is read within bounds, and gets no credentials that aren't its own."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from buildtool.core.errors import DataError, EnvironmentMissing
from buildtool.engine.reference import parse_new_name
from buildtool.engine.registry_api import Registry
from buildtool.image.errors import LIMITS

BLOB = b"layer"
DIGEST = f"sha256:{hashlib.sha256(BLOB).hexdigest()}"
MOST_SENT = 64 << 20  # of an answer without an end


class Hostile(BaseHTTPRequestHandler):
    """A registry whose manifests and long blobs don't end, and whose other blobs are elsewhere."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, HostileServer)
        if self.path.startswith("/elsewhere"):
            server.headers_elsewhere.append(dict(self.headers))
            self._answer(200, BLOB)
        elif "/manifests/" in self.path or self.path.endswith(":long"):
            self.send_response(200)
            self.end_headers()
            try:
                while server.n_sent < MOST_SENT:
                    self.wfile.write(bytes(1 << 20))
                    server.n_sent += 1 << 20
            except OSError:
                return
        elif "/blobs/" in self.path:
            self.send_response(307)
            self.send_header("Location", f"http://localhost:{server.server_port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self._answer(404, b"")

    def do_HEAD(self) -> None:
        """Ask for a token, which a server gives that sends its callers elsewhere."""
        assert isinstance(self.server, HostileServer)
        self.send_response(401)
        realm = f"http://127.0.0.1:{self.server.server_port}/token"
        self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="x"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, HostileServer)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/elsewhere"):
            server.headers_elsewhere.append({"body": body.decode()})
            self._answer(200, b"{}")
            return
        self.send_response(307)
        self.send_header("Location", f"http://localhost:{server.server_port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class HostileServer(ThreadingHTTPServer):
    """Counts what it sends, and keeps the headers of requests for what is elsewhere."""

    n_sent = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hostile)
        self.headers_elsewhere: list[dict[str, str]] = []


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with HostileServer() as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


@pytest.fixture
def registry(server: HostileServer) -> Iterator[Registry]:
    with closing(Registry(parse_new_name(f"127.0.0.1:{server.server_port}/team/tiny:1"))) as found:
        yield found


def test_a_document_without_an_end_is_an_error_and_not_read_to_its_limit_as_if_it_were_whole(
    server: HostileServer, registry: Registry
) -> None:
    with pytest.raises(DataError, match=r"more than 4\.19 MB, where a document was asked for"):
        registry.manifest("1")
    assert server.n_sent < MOST_SENT
    assert LIMITS.document_bytes < MOST_SENT / 4


def test_no_more_of_a_layer_is_read_than_its_manifest_says(server: HostileServer, registry: Registry) -> None:
    read = list[int]()
    pieces = registry.blob("sha256:long", 3 << 20)
    with pytest.raises(DataError, match="gives something else"):
        read.extend(map(len, pieces))
    assert sum(read) <= 3 << 20
    assert server.n_sent < MOST_SENT


def test_what_a_redirect_leads_to_gets_no_password_of_netrc(
    server: HostileServer, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login me password secret\ndefault login me password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert b"".join(registry.blob(DIGEST, len(BLOB))) == BLOB
    assert [headers.get("Authorization") for headers in server.headers_elsewhere] == [None]


def test_a_token_server_that_sends_its_callers_elsewhere_sends_no_identity_token_there(
    server: HostileServer, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "_login", lambda _: {"IdentityToken": "secret"})
    with pytest.raises(EnvironmentMissing, match="docker login"):
        registry.has_blob(DIGEST)
    assert server.headers_elsewhere == []
