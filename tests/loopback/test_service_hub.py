"""A model of a hub, from a stand-in of the hub's HTTP on the loopback: what is fetched, and what is said."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from service.errors import HubUnreachable, ModelUnreadable, ServiceError
from service.model.hub import fetched
from service.settings import Hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = Hub("someone/tiny-bert", COMMIT)
FILES = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": b"weights" * 1000,
    "vocab.txt": b"[PAD]\n[UNK]\n",
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit('remote code')",
}


@dataclass
class StandIn:
    """What the hub has and was asked for. `error`: the status and code that it answers with instead."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    commit: str = COMMIT
    etag: str = ""  # instead of the content's hash
    error: tuple[int, str] | None = None
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """`/owner/name/resolve/COMMIT/FILE`; weights come from elsewhere, as large files do."""
        path = handler.path.partition("?")[0]
        self.asked.append(f"{handler.command} {path}")
        base = f"/{MODEL.repository}/resolve/{COMMIT}/"
        name = path.removeprefix("/cdn/").removeprefix(base)
        data = self.files.get(name)
        if self.error or data is None:
            status, code = self.error or (404, "EntryNotFound")
            handler.send_response(status)
            handler.send_header("X-Error-Code", code)
            handler.send_header("X-Repo-Commit", self.commit)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        digest = self.etag or hashlib.sha256(data).hexdigest()
        elsewhere = path.startswith(base) and name.endswith(".safetensors")
        handler.send_response(302 if elsewhere else 200)
        handler.send_header("X-Repo-Commit", self.commit)
        handler.send_header("ETag", f'"{digest}"')
        if elsewhere:
            handler.send_header("X-Linked-Etag", f'"{digest}"')
            handler.send_header("X-Linked-Size", str(len(data)))
            handler.send_header("Location", f"{self.url}/cdn/{name}")
            data = b""
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(data)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library waits 20 s in all between its attempts."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)


@pytest.fixture
def hub() -> Iterator[StandIn]:
    made = StandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_a_commits_data_is_fetched_and_neither_pickles_nor_code(hub: StandIn, tmp_path: Path) -> None:
    folder = fetched(MODEL, endpoint=hub.url, cache=tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "vocab.txt")
    }
    assert folder.name == COMMIT
    assert not [line for line in hub.asked if "pytorch_model" in line or ".py" in line]


def test_what_is_in_the_cache_needs_no_network(hub: StandIn, tmp_path: Path) -> None:
    folder = fetched(MODEL, endpoint=hub.url, cache=tmp_path)
    before = len(hub.asked)
    hub.error = (500, "")
    assert fetched(MODEL, endpoint=hub.url, cache=tmp_path) == folder
    assert len(hub.asked) == before  # files that the commit doesn't have aren't asked for again either


def test_the_environment_says_where_hub_and_cache_are(hub: StandIn, tmp_path: Path) -> None:
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "PYTHONPATH": sys.path[0]}
    env["PYTHONPATH"] = str(Path(__file__).parents[2] / "images")
    program = (
        "from service.model.hub import fetched; from service.settings import Hub\n"
        f"print(fetched(Hub({MODEL.repository!r}, {COMMIT!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert (Path(done.stdout.strip()) / "config.json").read_bytes() == FILES["config.json"]
    offline = env | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "other")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=offline, capture_output=True, text=True, check=False, timeout=60
    )
    assert "isn't in the cache, and the hub can't be reached" in done.stderr


@pytest.mark.parametrize(
    ("error", "said", "hint"),
    [
        ((401, "RepoNotFound"), "the hub has no someone/tiny-bert, or doesn't show it", "HF_TOKEN"),
        ((403, "GatedRepo"), "only for those who were given access", "HF_TOKEN"),
        ((404, "RevisionNotFound"), f"someone/tiny-bert has no commit {COMMIT}", "commits"),
        ((503, ""), f"someone/tiny-bert at {COMMIT}", ""),
    ],
)
def test_what_the_hub_refuses_is_said(
    hub: StandIn, tmp_path: Path, error: tuple[int, str], said: str, hint: str
) -> None:
    hub.error = error
    with pytest.raises(HubUnreachable, match=said) as caught:
        fetched(MODEL, endpoint=hub.url, cache=tmp_path)
    assert hint in caught.value.hint
    assert hub.url not in str(caught.value)


def test_without_a_network_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match="isn't in the cache, and the hub can't be reached") as caught:
        fetched(MODEL, endpoint="http://127.0.0.1:9", cache=tmp_path)
    assert "HF_HOME" in caught.value.hint


def test_a_repository_with_pickles_alone_is_refused(hub: StandIn, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelUnreadable, match=r"has no model.safetensors") as caught:
        fetched(MODEL, endpoint=hub.url, cache=tmp_path)
    assert "pytorch_model.bin" in caught.value.hint


def test_files_of_another_commit_are_refused(hub: StandIn, tmp_path: Path) -> None:
    hub.commit = "f" * 40
    with pytest.raises(ModelUnreadable, match=f"another commit: '{'f' * 40}'"):
        fetched(MODEL, endpoint=hub.url, cache=tmp_path)
    assert not [line for line in hub.asked if line.startswith("GET")]


@pytest.mark.parametrize(
    "given",
    [
        {"etag": "../../../../evil"},
        {"etag": "/evil"},
        {"etag": ".."},
        {"etag": "a" * 200},
        {"commit": "../../../evil"},
        {"commit": "../../../evil", "files": {}},  # the library keeps in mind what isn't there, too
        {"commit": f"{COMMIT}/../../../evil"},
    ],
)
def test_a_hub_cannot_choose_where_files_are_written(
    hub: StandIn, tmp_path: Path, given: dict[str, Any]
) -> None:
    cache = tmp_path / "deep" / "er" / "cache"
    for name, value in given.items():
        setattr(hub, name, value)
    with pytest.raises(ModelUnreadable, match=r"another commit|is no hash"):
        fetched(MODEL, endpoint=hub.url, cache=cache)
    assert not [line for line in hub.asked if line.startswith("GET")]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or path.name == "evil"]


def test_an_empty_variable_is_none_and_the_cache_is_not_in_the_current_directory(
    hub: StandIn, tmp_path: Path
) -> None:
    """Compose sets HF_HOME to nothing where the host has none."""
    empty = dict.fromkeys(("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"), "")
    env = os.environ | empty | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": hub.url}
    env["PYTHONPATH"] = str(Path(__file__).parents[2] / "images")
    program = (
        "from service.model.hub import fetched; from service.settings import Hub\n"
        f"print(fetched(Hub({MODEL.repository!r}, {COMMIT!r})))"
    )
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "cache" / "huggingface")
    assert not list((tmp_path / "here").iterdir())


def test_a_file_that_ends_too_soon_is_not_kept(hub: StandIn, tmp_path: Path) -> None:
    def cut(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "GET" and "safetensors" in handler.path:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(FILES["model.safetensors"])))
            handler.end_headers()
            handler.wfile.write(b"weights")
            handler.close_connection = True
            return
        StandIn.answer(hub, handler)

    hub.answer = cut  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="can't be fetched"):
        fetched(MODEL, endpoint=hub.url, cache=tmp_path)
    assert not list(tmp_path.rglob("model.safetensors"))
