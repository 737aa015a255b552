"""Counters, histograms and gauges for /metrics. The only module that imports prometheus_client."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from service.batching.worker import ComputedBatch

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class _Memory(Collector):
    """Bytes of memory by kind, read at each scrape. Unknown kinds are left out."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One gauge with a sample for each kind."""
        family = GaugeMetricFamily("weir_memory_bytes", "Memory of the device and the host", labels=["kind"])
        for kind, n_bytes in self._read().items():
            family.add_metric([kind], n_bytes)
        yield family


class _Counts(Collector):
    """The counts that each model keeps itself, read at each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One counter with a sample for each model and name."""
        family = CounterMetricFamily("weir_model", "Counted by the model", labels=["model", "what"])
        for model, counts in self._read().items():
            for name, count in counts.items():
                family.add_metric([model, name], count)
        yield family


class Metrics:
    """Counters and gauges of one service, in a registry of its own."""

    def __init__(
        self,
        *,
        waiting: Callable[[], tuple[int, int]],
        in_flight: Callable[[], int],
        ready: Callable[[], bool],
        memory: Callable[[], Mapping[str, int]],
        counts: Callable[[], Mapping[str, Mapping[str, int]]],
    ) -> None:
        """The arguments are called at each scrape. `waiting`: requests and tokens in the queue."""
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("weir_requests", "Answers", ["route", "status"], registry=registry)
        self._seconds = Histogram(
            "weir_request_seconds", "From head to answer", ["route"], buckets=_SECONDS, registry=registry
        )
        self._refusals = Counter(
            "weir_refusals", "Requests that were turned away", ["status"], registry=registry
        )
        self._rows = Histogram("weir_batch_rows", "Texts in a batch", buckets=_ROWS, registry=registry)
        self._requests_per_batch = Histogram(
            "weir_batch_requests", "Requests in a batch", buckets=_ROWS, registry=registry
        )
        self._compute = Histogram(
            "weir_batch_seconds", "Computing one batch", buckets=_SECONDS, registry=registry
        )
        self._tokens = Counter("weir_tokens", "Tokens computed, without padding", registry=registry)
        self._padding = Counter("weir_padding_tokens", "Padding computed", registry=registry)
        for name, description, read in (
            ("weir_queue_requests", "Requests that wait for their batch", lambda: waiting()[0]),
            ("weir_queue_tokens", "Tokens that wait for their batch", lambda: waiting()[1]),
            ("weir_in_flight", "Requests between their body and their answer", in_flight),
            ("weir_ready", "1 when the service is ready", ready),
        ):
            Gauge(name, description, registry=registry).set_function(read)
        registry.register(_Memory(memory))
        registry.register(_Counts(counts))
        ProcessCollector(registry=registry)

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        """Count a request that ended with this HTTP status after this time."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if status in (408, 429, 503, 504) and not route.startswith("/v2/health"):
            self._refusals.labels(str(status)).inc()

    def batch_computed(self, computed: ComputedBatch) -> None:
        """Count a batch that was computed."""
        batch = computed.batch
        self._rows.observe(len(batch.rows))
        self._requests_per_batch.observe(len(batch.requests))
        self._compute.observe(computed.compute_s)
        self._tokens.inc(batch.tokens)
        self._padding.inc(batch.padded - batch.tokens)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
