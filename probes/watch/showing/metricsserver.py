"""The latest sample as metrics for Prometheus, over HTTP with the standard library."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from probes.errors import UsageError
from probes.records.samples import CARD_GAUGES, MACHINE_GAUGES, Gauge, Look, Sample, Subject
from probes.shared.quoting import prometheus
from probes.shared.unknown import Unknown

# gauge's unit -> Prometheus' base unit in the metric's name, and the factor between them
_UNITS = {"%": ("ratio", 0.01), "MHz": ("hertz", 1e6), "C": ("celsius", 1.0), "W": ("watts", 1.0)}
_UNITS |= {"bytes": ("bytes", 1.0), "bytes/s": ("bytes_per_second", 1.0), "J": ("joules_total", 1.0)}
_SUFFIXES = ("_percent", "_mhz", "_celsius", "_w", "_bytes_per_s", "_bytes", "_j")
PATIENCE_S = 5.0  # for a caller to finish its request
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


class Endpoint:
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
                """Nothing: the terminal is somebody else's."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"can't listen on {host}:{port}: {why}", "choose another: --listen 127.0.0.1:9401"
            ) from error
        self._server.daemon_threads = True
        self.address = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
