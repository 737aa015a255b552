"""The latest sample as metrics for Prometheus, over HTTP with the standard library."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import ClassVar, TypeAlias, cast

from probes.core.errors import UsageError
from probes.core.quoting import prometheus
from probes.core.unknown import Unknown
from probes.records.watch import CARD_GAUGES, MACHINE_GAUGES, Gauge, Look, Sample, Subject

# gauge's unit -> Prometheus' base unit in the metric's name, and the factor between them
_UNITS = {"%": ("ratio", 0.01), "MHz": ("hertz", 1e6), "C": ("celsius", 1.0), "W": ("watts", 1.0)}
_UNITS |= {"bytes": ("bytes", 1.0), "bytes/s": ("bytes_per_second", 1.0), "J": ("joules_total", 1.0)}
_SUFFIXES = ("_percent", "_mhz", "_celsius", "_w", "_bytes_per_s", "_bytes", "_j")
PATIENCE_S = 5.0  # for a caller, from the connection to the end
MOST_CALLERS = 16  # at a time; Prometheus is one
Request: TypeAlias = "socket.socket | tuple[bytes, socket.socket]"  # socketserver's
TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metric_name(gauge: Gauge, place: str) -> str:
    """`weir_watch_card_power_watts` for power_w."""
    stem = next(gauge.name.removesuffix(s) for s in _SUFFIXES if gauge.name.endswith(s))
    return f"weir_watch_{place}_{stem}_{_UNITS[gauge.unit][0]}"


def exposition(subject: Subject, sample: Sample | None) -> str:
    """Metrics in the text format, version 0.0.4. Unknown ones are left out. Pure."""
    return "".join(f"{line}\n" for line in _lines(subject, sample))


def _lines(subject: Subject, sample: Sample | None) -> Iterator[str]:
    if sample is None:
        return
    for gauge in MACHINE_GAUGES:
        yield from _metric(gauge, "machine", [("", sample.machine)])
    labels = [f'{{card="{at}",pci="{prometheus(c.pci_id)}"}}' for at, c in enumerate(subject.cards)]
    looks = [(label, card.look) for label, card in zip(labels, sample.cards, strict=True)]
    for gauge in CARD_GAUGES:
        if gauge.name != "energy_j":  # it isn't in every sample; Prometheus integrates power itself
            yield from _metric(gauge, "card", looks)
    slow = [
        (label, card.slowdowns)
        for label, card in zip(labels, sample.cards, strict=True)
        if not isinstance(card.slowdowns, Unknown)
    ]
    if slow:
        yield "# HELP weir_watch_card_slowed Whether it runs slower than it could, 1 or 0."
        yield "# TYPE weir_watch_card_slowed gauge"
        yield from (f"weir_watch_card_slowed{label} {int(bool(reasons))}" for label, reasons in slow)


def _metric(gauge: Gauge, place: str, looks: list[tuple[str, Look]]) -> Iterator[str]:
    name, (_, factor) = metric_name(gauge, place), _UNITS[gauge.unit]
    known = [(label, look.values[gauge.name]) for label, look in looks if gauge.name in look.values]
    if known:
        yield f"# HELP {name} {gauge.words}: {gauge.meaning}."
        yield f"# TYPE {name} {'counter' if gauge.unit == 'J' else 'gauge'}"
        yield from (f"{name}{label} {value * factor:.9g}" for label, value in known)


class _Server(ThreadingHTTPServer):
    """A thread for each caller, of whom there are few at a time, and each has a few seconds in all."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._begun: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Without asking a name server for the name of the address, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Request, client_address: object) -> bool:
        """Whether there is room for another caller."""
        del client_address
        with self._lock:
            if len(self._begun) >= MOST_CALLERS or not isinstance(request, socket.socket):
                return False
            self._begun[request] = time.monotonic()
            return True

    def service_actions(self) -> None:
        """Hang up on callers who take too long: a timeout for each read doesn't end one who trickles."""
        now = time.monotonic()
        with self._lock:
            for request, begun_s in self._begun.items():
                if now - begun_s > PATIENCE_S:
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Request) -> None:
        """The end of every caller."""
        with self._lock:
            self._begun.pop(cast(socket.socket, request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Request, client_address: object) -> None:
        """Nothing: the terminal isn't the place to report callers who hang up."""


class MetricsServer:
    """Serves the latest sample at /metrics until it is closed."""

    def __init__(self, subject: Subject, host: str, port: int) -> None:
        self.latest: Sample | None = None
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout: ClassVar[float] = PATIENCE_S

            def do_GET(self) -> None:
                found = self.path.partition("?")[0] == "/metrics"
                text = exposition(subject, endpoint.latest) if found else "the metrics are at /metrics\n"
                body = text.encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", TYPE if found else "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: the watched command owns the terminal."""

        shown = f"[{host}]" if ":" in host else host
        try:
            self._server = _Server(host, port, Handler)
        except (OSError, OverflowError, UnicodeError, TypeError) as error:  # TypeError: not an IDNA name
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"can't listen on {shown}:{port}: {why}", "choose another: --listen 127.0.0.1:9401"
            ) from error
        self.address = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
