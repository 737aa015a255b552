"""compose/nginx.conf by itself: this machine's nginx on the loopback, before a stand-in of the service.

Callers come from any address in 127.0.0.0/8, so one client's limits and another's can be told apart.
"""

import asyncio
import contextlib
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef"
HALF_HEAD = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
HALF_HANDSHAKE = b"\x16\x03\x01\x02"  # the first bytes of a ClientHello
SLOW_BODY = (
    f"POST /predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\nx"
).encode()


class _Service(BaseHTTPRequestHandler):
    """Answers whatever is asked, and notes what reached it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200 if self.headers.get("Host") else 400)  # as the service: HTTP/1.1 has one
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Front:
    """A running nginx. `asked`: the paths that reached the service behind it, as they did."""

    port: int
    folder: Path
    asked: list[str] = field(default_factory=list)

    @property
    def log(self) -> list[str]:
        """What it has written since its start."""
        return (self.folder / "log").read_text().splitlines()

    def connect(self, source: str = "127.0.0.1", timeout_s: float = 60) -> socket.socket:
        """A connection from an address of the loopback, without TLS yet."""
        return socket.create_connection(
            ("127.0.0.1", self.port), timeout=timeout_s, source_address=(source, 0)
        )

    def secure(self, source: str = "127.0.0.1", timeout_s: float = 60) -> ssl.SSLSocket:
        """A connection with TLS. Raises OSError where it is closed instead."""
        plain = self.connect(source, timeout_s)
        try:
            return _tls(self.folder).wrap_socket(plain, server_hostname="localhost")
        except OSError:
            plain.close()
            raise

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        key: str = KEY,
        source: str = "127.0.0.1",
        timeout_s: float = 60,
    ) -> int:
        """The status of one request on a connection of its own; its path is sent as it is."""
        with self.secure(source, timeout_s) as wire:
            return asked_on(wire, path, method=method, key=key)


def asked_on(wire: socket.socket, path: str, *, method: str = "GET", key: str = KEY) -> int:
    """The status of one request on an open connection. Raises ConnectionError where there is no answer."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    wire.sendall(f"{head}Content-Length: 0\r\n\r\n".encode("latin-1"))
    data = b""
    while b"\r\n\r\n" not in data:
        data += (more := wire.recv(4096))
        if not more:
            raise ConnectionError("no answer")
    head, _, body = data.partition(b"\r\n\r\n")
    left = int(re.findall(rb"(?i)\ncontent-length: (\d+)", head)[0]) - len(body)
    while left > 0:
        left -= len(wire.recv(left))
    return int(head.split()[1])


def _tls(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


@contextlib.contextmanager
def front(folder: Path, program: Sequence[str] = (), *, waits_s: int = 10) -> Iterator[Front]:
    """nginx with the rules of compose/nginx.conf; all of its files are in `folder`.

    `program`: an nginx and, where `stream` isn't built into it, that module. `waits_s`: for heads and bodies.
    """
    service = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    service.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=service.serve_forever, daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    _write(folder, port, service.server_address[1], program[1:] or module_of_stream(), waits_s)
    nginx = [*(program[:1] or [nginx_here()]), "-e", str(folder / "log"), "-c", str(folder / "nginx.conf")]
    started = subprocess.Popen(nginx)
    made = Front(port, folder, service.asked)  # type: ignore[attr-defined]
    try:
        _wait(made, started)
        yield made
    finally:
        started.terminate()
        started.wait()
        service.shutdown()
        service.server_close()


def nginx_here() -> str:
    """This machine's nginx. Raises FileNotFoundError."""
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None:
        raise FileNotFoundError("no nginx here: apt-get install nginx libnginx-mod-stream")
    return found


def module_of_stream() -> tuple[str, ...]:
    """Where Debian's packages put it; nothing where it is built in."""
    debians = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
    return (str(debians),) if debians.exists() else ()


def _write(folder: Path, port: int, service: int, module: Sequence[str], waits_s: int) -> None:
    """The files of compose/tls.yaml's mounts, and the configuration with this folder for /tls and /tmp."""
    certificate = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    name = ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *name, *certificate]
    subprocess.run(made, check=True, capture_output=True)
    (folder / "keys").write_text(f'"~^Bearer {KEY}$" 1;\n')
    (folder / "to.conf").write_text(f"set $http 127.0.0.1:{service};\n")
    here = {
        "include /etc/nginx/modules-enabled/*-mod-stream.conf;": "".join(
            f"load_module {each};" for each in module
        ),
        "/dev/stderr": f"{folder}/log",
        "/tls/": f"{folder}/",
        "/tmp/": f"{folder}/",
        "listen 8443": f"listen 127.0.0.1:{port}",
        "timeout 10s": f"timeout {waits_s}s",
    }
    rules = (ROOT / "compose" / "nginx.conf").read_text()
    rules = re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], rules)
    if os.geteuid() == 0:  # workers of another user couldn't read the folder
        rules = f"user root;\n{rules}"
    (folder / "nginx.conf").write_text(rules)
    (folder / "log").touch()


def _wait(made: Front, started: "subprocess.Popen[bytes]") -> None:
    """Until it answers. Raises RuntimeError with its log where it ends instead."""
    while True:
        try:
            made.ask("/v2/health/live", source="127.0.0.250")
        except OSError:
            if started.poll() is not None:
                raise RuntimeError(f"nginx ended: {made.log}") from None
            time.sleep(0.01)
        else:
            made.asked.clear()
            return


def attack(made: Front, source: str, first: bytes, count: int, *, tls: bool, until_s: float) -> int:
    """Keep so many half-done connections from one address until a time; how many were closed meanwhile.

    Whoever is closed comes again half a second later. To be run in a process of its own.
    """
    context = _tls(made.folder) if tls else None

    closed = 0

    async def one() -> None:
        nonlocal closed
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", made.port, local_addr=(source, 0), ssl=context,
                    server_hostname="localhost" if tls else None,
                )  # fmt: skip
                writer.write(first)
                await reader.read()
                writer.transport.abort()
            closed += 1
            await asyncio.sleep(0.5)

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(one()) for _ in range(count)]
        await asyncio.sleep(until_s - time.monotonic())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    asyncio.run(all_of_them())
    return closed
