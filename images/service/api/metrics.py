"""What /metrics says, for Prometheus. The only module that imports prometheus_client."""

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
    """Bytes of memory by kind, asked at each scrape: what isn't known here isn't there."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One gauge with a sample for each kind."""
        family = GaugeMetricFamily("weir_memory_bytes", "Memory of the device and the host", labels=["kind"])
        for kind, n_bytes in self._read().items():
            family.add_metric([kind], n_bytes)
        yield family


class _Counts(Collector):
    """What each model has counted itself, asked at each scrape."""

    def __init__(self, read: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One counter with a sample for each model and name."""
        family = CounterMetricFamily("weir_model", "Counted by the model", labels=["model", "what"])
        for model, counts in self._read().items():
            for what, count in counts.items():
                family.add_metric([model, what], count)
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
        """The arguments are asked at each scrape."""
        self._registry = here = CollectorRegistry()
        self._requests = Counter("weir_requests", "Answers", ["route", "status"], registry=here)
        self._seconds = Histogram(
            "weir_request_seconds", "From head to answer", ["route"], buckets=_SECONDS, registry=here
        )
        self._refusals = Counter("weir_refusals", "Requests that were turned away", ["status"], registry=here)
        self._rows = Histogram("weir_batch_rows", "Texts in a batch", buckets=_ROWS, registry=here)
        self._joined = Histogram("weir_batch_requests", "Requests in a batch", buckets=_ROWS, registry=here)
        self._compute = Histogram(
            "weir_batch_seconds", "Computing one batch", buckets=_SECONDS, registry=here
        )
        self._tokens = Counter("weir_tokens", "Tokens computed, without padding", registry=here)
        self._padding = Counter("weir_padding_tokens", "Padding computed", registry=here)
        for name, what, read in (
            ("weir_queue_requests", "Requests that wait for their batch", lambda: waiting()[0]),
            ("weir_queue_tokens", "Tokens that wait for their batch", lambda: waiting()[1]),
            ("weir_in_flight", "Requests between their body and their answer", in_flight),
            ("weir_ready", "1 when the service is ready", ready),
        ):
            Gauge(name, what, registry=here).set_function(read)
        here.register(_Memory(memory))
        here.register(_Counts(counts))
        ProcessCollector(registry=here)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """One request ended."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if status in (408, 429, 503, 504) and not route.startswith("/v2/health"):
            self._refusals.labels(str(status)).inc()

    def batch(self, done: ComputedBatch) -> None:
        """One batch was computed."""
        self._rows.observe(len(done.batch.rows))
        self._joined.observe(len(done.batch.requests))
        self._compute.observe(done.compute_s)
        self._tokens.inc(done.batch.tokens)
        self._padding.inc(done.batch.padded - done.batch.tokens)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)
