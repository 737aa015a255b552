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
    refusals = 0  # how many questions are refused first
    refused_with = 404

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
        self.send_response(self.refused_with if refused else 200)
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


REFUSED: dict[str, tuple[Callable[[Engine], object], object, object]] = {
    "tags": (lambda engine: engine.tags(), [{"Id": "x", "RepoTags": ["x:1"]}], ("x:1",)),
    "labelled": (lambda engine: len(engine.images(label="l")), [{"Id": "x"}], 1),
    "cache": (lambda engine: engine.build_cache_bytes(), {"BuildCache": [{"Size": 7}]}, 7),
    "containers": (lambda engine: engine.left_containers(), [{"Id": "x", "Labels": {}}], ()),
    "inspect": (lambda engine: engine.has("x"), {"Id": "x"}, True),
    "tag": (lambda engine: engine.tag("x", Reference("y", "z")), {"Id": "x"}, "x"),
    "remove": (lambda engine: engine.remove_tag("x"), [], None),
}


@pytest.mark.parametrize("status", [404, 500])
@pytest.mark.parametrize("asked", REFUSED)
def test_what_is_refused_while_other_processes_remove_images_is_asked_for_again(
    odd: type[Odd], asked: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With containerd's store an engine says "content digest sha256:... not found", or that it failed."""
    ask, answer, result = REFUSED[asked]
    monkeypatch.setattr(odd, "shape", answer)
    monkeypatch.setattr(odd, "refused_with", status)
    engine = Engine()
    monkeypatch.setattr(odd, "refusals", 3)
    assert ask(engine) == result
    monkeypatch.setattr(odd, "refusals", 1000)
    with pytest.raises(ToolError, match="content digest not found"):
        ask(engine)


def test_a_name_that_another_process_gives_away_meanwhile_is_given_again(
    odd: type[Odd], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(("x", "other", "x", "x"))  # of the image and of what has the name, in turn
    engine = Engine()
    monkeypatch.setattr(engine, "inspect", lambda _ref: {"Id": next(ids)})
    assert engine.tag("x", Reference("y", "z")) == "x"
    assert next(ids, None) is None
