"""An engine that isn't Docker's own (a proxy, podman): an odd answer is refused, not a traceback."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildtool.core.errors import ToolError
from buildtool.engine.client import Engine
from buildtool.engine.reference import Reference

ODD = ([], {}, "text", 7, None, [[]], [7], [{}], {"Id": 7}, {"Id": "x", "Config": []})
SHAPES = (*ODD, {"Id": "x", "Labels": 1})
ASKED: dict[str, Callable[[Engine], object]] = {
    "info": lambda engine: engine.info(),
    "inspect": lambda engine: engine.inspect("x"),
    "registry": lambda engine: engine.registry_digest("x"),
    "bytes": lambda engine: engine.unpacked_bytes("x"),
    "tags": lambda engine: engine.tags("x"),
    "tag": lambda engine: engine.tag("x", Reference("y", "z")),
    "load": lambda engine: engine.load(iter([b"x"])),
    "run": lambda engine: engine.run("x", ["true"]),
    "export": lambda engine: list(engine.export("x")),
}
STRICT = ("inspect", "registry", "bytes", "tag", "run", "export")  # need more than an empty object


class Odd(http.server.BaseHTTPRequestHandler):
    """Answers every question but those that open a connection with one JSON value."""

    shape: object = None
    refusals = 0  # how many questions are answered with 404 first

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length)
        if self.headers.get("Transfer-Encoding") == "chunked":
            while (size := int(self.rfile.readline(), 16)) or self.rfile.readline() != b"\r\n":
                self.rfile.read(size + 2)
        opens = self.path.endswith(("/version", "/_ping"))
        refused = not opens and Odd.refusals > 0
        Odd.refusals -= refused
        answer = {"message": "content digest not found"} if refused else self.shape
        body = json.dumps({"ApiVersion": "1.43"} if opens else answer).encode()
        self.send_response(404 if refused else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, *_words: object) -> None:
        """Nothing."""


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Odd]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("WEIR_STATE", str(tmp_path))
    yield Odd
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("asked", ASKED)
def test_an_answer_of_another_shape_is_refused_without_a_traceback(odd: type[Odd], asked: str) -> None:
    engine = Engine()
    for odd.shape in SHAPES:
        try:
            ASKED[asked](engine)
        except ToolError:
            continue
        assert asked not in STRICT or odd.shape == {"Id": "x", "Labels": 1}, odd.shape


@pytest.mark.parametrize("asked", ["tags", "labelled", "cache"])
def test_a_listing_is_asked_for_again_while_other_processes_remove_images(
    odd: type[Odd], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With containerd's store the engine refuses it: "content digest sha256:... not found"."""
    row = {"Id": "x", "RepoTags": ["x:1"]}
    monkeypatch.setattr(odd, "shape", {"BuildCache": [{"Size": 7}]} if asked == "cache" else [row])
    listings: dict[str, Callable[[Engine], object]] = {
        "tags": lambda engine: engine.tags(),
        "labelled": lambda engine: [image.Id for image in engine.images(label="l")],
        "cache": lambda engine: engine.build_cache_bytes(),
    }
    engine = Engine()
    monkeypatch.setattr(odd, "refusals", 3)
    assert listings[asked](engine) == {"tags": ("x:1",), "labelled": ["x"], "cache": 7}[asked]
    monkeypatch.setattr(odd, "refusals", 1000)
    with pytest.raises(ToolError, match="content digest not found"):
        listings[asked](engine)
