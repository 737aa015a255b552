"""Small stand-ins for what no network here reaches: a registry on loopback, a package index, torch itself.

They stand for the real things' protocols, not for their content: a stand-in torch is 40 lines of Python.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from debian_packages import unpacked
from free_ports import free_port

ROOT = Path(__file__).parents[2]

STANDIN_TORCH = """
__version__ = "{version}"
float32 = None
class version:
    hip = {hip!r}
    cuda = {cuda!r}
class Tensor:
    def __init__(self, rows): self.rows = rows
    def reshape(self, m, n): return Tensor([self.rows[i * n:(i + 1) * n] for i in range(m)])
    @property
    def T(self): return Tensor([list(column) for column in zip(*self.rows)])
    def __matmul__(self, other):
        return Tensor([[sum(a * b for a, b in zip(r, c)) for c in zip(*other.rows)] for r in self.rows])
    def tolist(self): return self.rows
def arange(n, dtype=None): return Tensor([float(i) for i in range(n)])
"""


def make_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A pure-Python wheel with the given files."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    content = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: standin\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in content) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, text in (content | {f"{info}/RECORD": record}).items():
            archive.writestr(zipfile.ZipInfo(file, (2026, 1, 1, 0, 0, 0)), text)
    return path


def make_torch(folder: Path, version: str, *, hip: str | None = None, cuda: str | None = None) -> Path:
    """A stand-in torch that says of itself what it is told to."""
    source = STANDIN_TORCH.format(version=version, hip=hip, cuda=cuda)
    return make_wheel(folder, "torch", version, {"torch/__init__.py": source})


@dataclass(frozen=True)
class Index:
    """A simple package index (PEP 503) on loopback; `files` is the folder it serves wheels from."""

    url: str
    files: Path

    def refresh(self) -> None:
        """Write the pages again from the wheels that are there."""
        pages = self.files.parent / "simple"
        shutil.rmtree(pages, ignore_errors=True)
        for wheel in self.files.glob("*.whl"):
            page = pages / wheel.name.split("-")[0].replace("_", "-") / "index.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            link = f'<a href="/files/{wheel.name}#sha256={digest}">{wheel.name}</a>\n'
            page.write_text((page.read_text() if page.exists() else "") + link)


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def package_index(folder: Path) -> Iterator[Index]:
    """An index over what the caller puts into `files`."""
    (folder / "files").mkdir(parents=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Index(f"http://127.0.0.1:{server.server_port}/simple/", folder / "files")
    finally:
        server.shutdown()
        server.server_close()


class _Refusing(BaseHTTPRequestHandler):
    status = 401
    default_request_version = "HTTP/1.0"  # what isn't HTTP gets a status line, too: engines try TLS first

    def log_message(self, *args: object) -> None:
        pass

    def refuse(self) -> None:
        self.send_response(self.status)
        if self.status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="standin"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = refuse


@contextlib.contextmanager
def refusing_registry(status: int) -> Iterator[str]:
    """A registry on loopback that answers everything with one status; yields its host:port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Refusing", (_Refusing,), {"status": status}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Referring(BaseHTTPRequestHandler):
    """A registry of OCI distribution 1.1 in memory: it lists what refers to a manifest itself."""

    protocol_version = "HTTP/1.1"
    blobs: dict[str, bytes]
    referrers: dict[str, list[dict[str, object]]]

    def do_POST(self) -> None:
        self.answer(202, Location=f"{self.path}upload")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blobs[digest] = content
        if "/manifests/" not in self.path:
            self.answer(201)
            return
        self.blobs[self.path.rpartition("/")[2]] = content
        manifest = json.loads(content)
        subject = manifest.get("subject", {}).get("digest")
        if subject:
            row = {"mediaType": manifest["mediaType"], "digest": digest, "size": len(content)}
            row |= {key: manifest[key] for key in ("artifactType", "annotations") if key in manifest}
            self.referrers.setdefault(subject, []).append(row)
        self.answer(201, **({"OCI-Subject": subject} if subject else {}))

    def do_GET(self) -> None:
        kind, name = self.path.split("/")[-2:]
        content = self.blobs.get(name)
        if kind == "referrers":
            content = json.dumps({"schemaVersion": 2, "manifests": self.referrers.get(name, [])}).encode()
        self.answer(200 if content is not None else 404, content or b"")

    do_HEAD = do_GET

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def referring_registry() -> Iterator[str]:
    """A registry on loopback that has the referrers API; yields its host:port."""
    own = type("Own", (_Referring,), {"blobs": {}, "referrers": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), own)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def registry_program(folder: Path) -> Path:
    """Debian's `docker-registry`, unpacked from its package and not installed."""
    if found := shutil.which("docker-registry"):
        return Path(found)
    return unpacked(folder, "docker-registry") / "usr/bin/docker-registry"


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """An image registry on loopback; yields its host:port."""
    address = f"127.0.0.1:{free_port()}"
    program = registry_program(folder / "program")
    settings = folder / "config.json"
    storage = {"filesystem": {"rootdirectory": str(folder / "storage")}}
    settings.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": address}}))
    log = (folder / "log").open("wb")
    process = subprocess.Popen([program, "serve", settings], stdout=log, stderr=log)
    try:
        wait_for_port(address)
        yield address
    finally:
        process.terminate()
        process.wait()
        log.close()


def wait_for_port(address: str, timeout_s: float = 120) -> None:
    """Return once something listens there."""
    host, port = address.split(":")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


@contextlib.contextmanager
def silent_registry() -> Iterator[str]:
    """A registry on loopback that takes connections and says nothing; yields its host:port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@dataclass(frozen=True)
class Shop:
    """A user's own catalog, cache and lock in a scratch folder, and buildtool run on them."""

    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def lock(self) -> dict[str, object]:
        data: dict[str, object] = json.loads((self.folder / "lock.json").read_text())
        return data

    def environment(self, **changes: str) -> dict[str, str]:
        own = {"WEIR_STATE": str(self.state), "WEIR_LOCK": str(self.folder / "lock.json")}
        return {**os.environ, **own, **changes}

    def command(self, *args: str) -> list[str]:
        catalog = ["--catalog", str(self.folder / "variants.yaml"), "--reports", str(self.folder / "reports")]
        return [sys.executable, "-m", "buildtool", "build", *catalog, *args]

    def build(self, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a build to its end; never a traceback, whatever went wrong."""
        done = subprocess.run(
            self.command(*args),
            cwd=ROOT,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def write(self, variants: str) -> None:
        """The catalog: the given YAML below `variants:`."""
        head = "schema_version: 1\nsource_date_epoch: 1767225600\nvariants:\n"
        (self.folder / "variants.yaml").write_text(head + variants)

    def leftovers(self) -> list[Path]:
        """Whatever is half-written."""
        return [p for p in self.state.rglob(".*") if "partial" in p.name or "mmdebstrap" in p.name]
