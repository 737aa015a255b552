"""A model of a hub, from a stand-in of the hub's HTTP on the loopback: what is fetched, and what is said."""

import fcntl
import gzip
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from service.errors import HubUnreachable, ModelUnreadable, ServiceError
from service.inference.hub import DownloadGuard, fetch
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
    size: str = ""  # instead of the content's
    fields: dict[str, str] = field(default_factory=dict)  # of the weights' head, besides
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
            handler.send_header("X-Linked-Size", self.size or str(len(data)))
            for each, value in self.fields.items():
                handler.send_header(each, value)
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
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # seconds between looks at the end
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def test_a_commits_data_is_fetched_and_neither_pickles_nor_code(hub: StandIn, tmp_path: Path) -> None:
    folder = fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "vocab.txt")
    }
    assert folder.name == COMMIT
    assert not [line for line in hub.asked if "pytorch_model" in line or ".py" in line]


def test_what_is_in_the_cache_needs_no_network(hub: StandIn, tmp_path: Path) -> None:
    folder = fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    before = len(hub.asked)
    hub.error = (500, "")
    assert fetch(MODEL, endpoint=hub.url, cache=tmp_path) == folder
    assert len(hub.asked) == before  # files that the commit doesn't have aren't asked for again either


def test_the_environment_says_where_hub_and_cache_are(hub: StandIn, tmp_path: Path) -> None:
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "PYTHONPATH": sys.path[0]}
    env["PYTHONPATH"] = str(Path(__file__).parents[2] / "images")
    program = (
        "from service.inference.hub import fetch; from service.settings import Hub\n"
        f"print(fetch(Hub({MODEL.repository!r}, {COMMIT!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert (Path(done.stdout.strip()) / "config.json").read_bytes() == FILES["config.json"]
    offline = env | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "other")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=offline, capture_output=True, text=True, check=False, timeout=300
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
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert hint in caught.value.hint
    assert hub.url not in str(caught.value)


def test_without_a_network_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(HubUnreachable, match="isn't in the cache, and the hub can't be reached") as caught:
        fetch(MODEL, endpoint="http://127.0.0.1:9", cache=tmp_path)
    assert "HF_HOME" in caught.value.hint


def test_a_repository_with_pickles_alone_is_refused(hub: StandIn, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(ModelUnreadable, match=r"has no model.safetensors") as caught:
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert "pytorch_model.bin" in caught.value.hint


def test_files_of_another_commit_are_refused(hub: StandIn, tmp_path: Path) -> None:
    hub.commit = "f" * 40
    with pytest.raises(ModelUnreadable, match=f"another commit: '{'f' * 40}'"):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
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
        fetch(MODEL, endpoint=hub.url, cache=cache)
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
        "from service.inference.hub import fetch; from service.settings import Hub\n"
        f"print(fetch(Hub({MODEL.repository!r}, {COMMIT!r})))"
    )
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
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
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert not list(tmp_path.rglob("model.safetensors"))


def raw(hub: StandIn, send: Callable[[BaseHTTPRequestHandler], None]) -> None:
    """Have the hub answer the GET of the weights with whatever `send` does, and close the connection then."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "GET" and "safetensors" in handler.path:
            handler.close_connection = True
            with suppress(OSError):
                send(handler)
            return
        StandIn.answer(hub, handler)

    hub.answer = answer  # type: ignore[method-assign]


def endless(handler: BaseHTTPRequestHandler, *, status: int = 200, **fields: str) -> None:
    handler.send_response(status)
    for name, value in fields.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    for _ in range(4096):  # 256 MB: more than anything here may take
        handler.wfile.write(b"w" * (64 << 10))


def cached_bytes(cache: Path) -> int:
    return sum(path.lstat().st_size for path in cache.rglob("*") if path.is_file() and not path.is_symlink())


def test_a_body_that_does_not_end_stops_at_the_declared_size_and_leaves_nothing(
    hub: StandIn, tmp_path: Path
) -> None:
    raw(hub, endless)
    with pytest.raises(ModelUnreadable, match=r"model.safetensors .* doesn't end after the 7,000 bytes"):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert cached_bytes(tmp_path) < 10_000
    assert not list(tmp_path.rglob("*.incomplete"))


def cuts(hub: StandIn, monkeypatch: pytest.MonkeyPatch, data: bytes, *, at_most: int) -> list[str]:
    """Have the hub break off its answers; what it was asked for, by the header `Range`."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    asked: list[str] = []

    def cut(handler: BaseHTTPRequestHandler) -> None:
        ranged = handler.headers["Range"]
        asked.append(ranged or "")
        rest = data[int(ranged.removeprefix("bytes=").removesuffix("-")) :] if ranged else data
        handler.send_response(206 if ranged else 200)
        handler.send_header("Content-Length", str(len(rest)))
        handler.end_headers()
        handler.wfile.write(rest[:at_most])
        handler.close_connection = len(rest) > at_most  # a whole answer's is used again by the next question

    raw(hub, cut)
    return asked


def test_a_body_that_is_cut_and_continued_for_ever_stops_at_the_declared_size(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cuts(hub, monkeypatch, b"w" * 1_000_000, at_most=2500)
    with pytest.raises(ModelUnreadable, match=r"doesn't end after the 7,000 bytes"):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert asked == ["", "bytes=2000-", "bytes=4000-", "bytes=6000-"]
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_body_that_breaks_off_is_continued(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cuts(hub, monkeypatch, FILES["model.safetensors"], at_most=2500)
    folder = fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len(asked) > 1


def test_a_model_larger_than_the_profile_allows_is_not_asked_for(hub: StandIn, tmp_path: Path) -> None:
    small = replace(MODEL, max_bytes=6000)
    with pytest.raises(ModelUnreadable, match=r"has 7,000 bytes, and at most 5,978 are taken") as caught:
        fetch(small, endpoint=hub.url, cache=tmp_path)
    assert "max_size" in caught.value.hint
    assert not [line for line in hub.asked if line.startswith("GET") and "safetensors" in line]


def test_a_size_that_is_not_declared_is_bounded_by_the_profile(hub: StandIn, tmp_path: Path) -> None:
    def unsaid(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("X-Repo-Commit", COMMIT)
        handler.send_header("ETag", '"abc"')
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        if handler.command == "GET":
            with suppress(OSError):
                handler.wfile.write(b"w" * 1_000_000)

    hub.answer = unsaid  # type: ignore[method-assign]
    with pytest.raises(ModelUnreadable, match=r"config.json .* doesn't end after the 100,000 bytes"):
        fetch(replace(MODEL, max_bytes=100_000), endpoint=hub.url, cache=tmp_path)
    assert cached_bytes(tmp_path) < 10_000


def test_a_compressed_body_is_refused_since_a_few_bytes_may_stand_for_any_number(
    hub: StandIn, tmp_path: Path
) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)

    def squeezed(handler: BaseHTTPRequestHandler) -> None:
        assert handler.headers["Accept-Encoding"] == "identity"
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(bomb)))
        handler.end_headers()
        handler.wfile.write(bomb)

    raw(hub, squeezed)
    with pytest.raises(ModelUnreadable, match="was sent as 'gzip', which wasn't asked for"):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert cached_bytes(tmp_path) < 10_000


@pytest.mark.parametrize(("status", "fields"), [(500, {}), (302, {"Location": "/elsewhere"})])
def test_a_refusal_that_does_not_end_is_not_read_into_memory(
    hub: StandIn, tmp_path: Path, status: int, fields: dict[str, str]
) -> None:
    sent: list[int] = []

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in fields.items():
            handler.send_header(name, value)
        handler.end_headers()
        for _ in range(4096):
            handler.wfile.write(b"w" * (64 << 10))
            sent.append(64 << 10)

    raw(hub, refuse)
    with pytest.raises(ServiceError):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert sum(sent) < 100_000_000  # what the sockets took before they were closed


def test_weights_that_are_not_what_their_hash_names_are_not_kept(hub: StandIn, tmp_path: Path) -> None:
    def others(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "7000")
        handler.end_headers()
        handler.wfile.write(b"W" * 7000)

    raw(hub, others)
    with pytest.raises(ModelUnreadable, match="isn't what its SHA-256 says; it was removed"):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert not list(tmp_path.rglob("model.safetensors"))
    assert cached_bytes(tmp_path) < 10_000
    del hub.answer  # the class's own again
    assert (fetch(MODEL, endpoint=hub.url, cache=tmp_path) / "model.safetensors").stat().st_size == 7000


def test_a_disk_without_room_is_said_before_it_is_full(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 5000

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)
    with pytest.raises(HubUnreachable, match=r"has 7,000 bytes, and the cache's disk has room for 5,000"):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert not [line for line in hub.asked if line.startswith("GET") and "safetensors" in line]


@pytest.mark.parametrize("said", ["-1", "1e9", "9" * 30, "\xb3"])
def test_a_size_that_is_none_is_refused(hub: StandIn, tmp_path: Path, said: str) -> None:
    hub.size = said
    with pytest.raises(ModelUnreadable, match=r"has no size"):
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)


def test_another_way_to_the_file_is_not_taken(hub: StandIn, tmp_path: Path) -> None:
    """A library of the hub's own reads from the network by itself there, and counts nothing."""
    hub.fields = {"X-Xet-Hash": "f" * 64, "X-Xet-Refresh-Route": f"{hub.url}/xet"}
    folder = fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not [line for line in hub.asked if "xet" in line]


def test_what_killed_processes_left_is_removed_unless_somebody_writes_it(
    hub: StandIn, tmp_path: Path
) -> None:
    blobs = tmp_path / "models--someone--tiny-bert" / "blobs"
    locks = tmp_path / ".locks" / "models--someone--tiny-bert"
    for folder in (blobs, locks):
        folder.mkdir(parents=True)
    left, held = blobs / f"{'a' * 64}.0badcafe.incomplete", blobs / f"{'b' * 64}.0badcafe.incomplete"
    for path in (left, held):
        path.write_bytes(b"half of a file")
    with (locks / f"{'b' * 64}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch(MODEL, endpoint=hub.url, cache=tmp_path)
    assert held.exists()
    assert not left.exists()


def test_a_body_that_dribbles_is_given_up() -> None:
    clock = iter(range(0, 1000, 40))
    guard = DownloadGuard(MODEL, "model.safetensors", 10**9, lambda: 10**12, now=lambda: float(next(clock)))
    response = SimpleNamespace(
        request=SimpleNamespace(method="GET", headers={}),
        headers={},
        status_code=200,
        iter_raw=lambda: iter([b"x"] * 100),
    )
    guard.on_response(response)
    with pytest.raises(HubUnreachable, match="comes too slowly: 2 bytes in 80 s"):
        list(response.iter_raw())
