"""Around every request, whatever its protocol: its ids in the log, its span, and what is counted."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.web.metrics import Metrics
from service.web.tracing import CURRENT, Trace, begin

if TYPE_CHECKING:
    from service.web.spans import Spans

_QUIET = ("/v2/health", "/metrics", "grpc/ServerLive", "grpc/ServerReady", "grpc/ModelReady")  # no spans


@dataclass
class Watched:
    """One request. `status`: of its answer, in HTTP's numbers; to be set before the end."""

    trace: Trace
    status: int = 500

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What the answer passes on."""
        return (("x-request-id", self.trace.request_id), ("traceparent", self.trace.traceparent))


@contextmanager
def watched(
    route: str, headers: Mapping[str, str], metrics: Metrics, spans: "Spans | None"
) -> Iterator[Watched]:
    """Watch the block as a request; `headers` may have x-request-id, traceparent and tracestate."""
    trace = begin(headers.get("x-request-id", ""), headers.get("traceparent", ""))
    started = time.perf_counter()
    made = Watched(trace)
    try:
        if spans is None or route in _QUIET:
            with _current(made):
                yield made
            return
        with spans.request(route, trace, headers) as (made.trace, span):
            try:
                with _current(made):
                    yield made
            finally:
                spans.ended(span, made.status)
    finally:
        metrics.answered(route, made.status, time.perf_counter() - started)


@contextmanager
def _current(made: Watched) -> Iterator[None]:
    token = CURRENT.set(made.trace)
    try:
        yield
    finally:
        CURRENT.reset(token)
