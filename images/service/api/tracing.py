"""A request's identity: its id and W3C trace (`Trace`), which the log adds to each line, and `track_request`,
which both protocols put around a request to count it, time it and give it a span.

Light: the log imports this before the settings are read. `service.api.spans` has OpenTelemetry.
"""

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from service.api.metrics import Metrics
    from service.api.spans import Spans

_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(frozen=True)
class Trace:
    """The ids of one request. `parent` is the caller's span id, if it sent one."""

    request_id: str
    trace_id: str
    span_id: str
    parent: str = ""
    flags: str = "00"

    @property
    def traceparent(self) -> str:
        """The header that continues the trace, with this service's span as the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def fields(self) -> dict[str, str]:
        """The keys of a log line."""
        parent = {"parent_span_id": self.parent} if self.parent else {}
        return {"request_id": self.request_id, "trace_id": self.trace_id, "span_id": self.span_id, **parent}


CURRENT_TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)


def start_trace(request_id: str, traceparent: str) -> Trace:
    """Return the trace of a request with these headers (empty where absent); malformed ids are replaced."""
    match = _PARENT.fullmatch(traceparent.strip())
    span_id = secrets.token_hex(8)
    own_id = request_id if _ID.fullmatch(request_id) else secrets.token_hex(8)
    if match is None or set(match[1]) == {"0"} or set(match[2]) == {"0"}:
        return Trace(own_id, secrets.token_hex(16), span_id)
    return Trace(own_id, match[1], span_id, parent=match[2], flags=match[3])


_WITHOUT_SPANS = (
    "/v2/health",
    "/metrics",
    "grpc/ServerLive",
    "grpc/ServerReady",
    "grpc/ModelReady",
)


@dataclass
class TrackedRequest:
    """A request on its way. Set `status`, as in HTTP, before the block of `track_request` ends."""

    trace: Trace
    status: int = 500

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of the answer."""
        return (("x-request-id", self.trace.request_id), ("traceparent", self.trace.traceparent))


@contextmanager
def track_request(
    route: str, headers: Mapping[str, str], metrics: "Metrics", spans: "Spans | None"
) -> Iterator[TrackedRequest]:
    """Track the block as a request: its ids, its status and duration, and its span.

    `headers`: x-request-id, traceparent and tracestate are read, where they are there.
    """
    trace = start_trace(headers.get("x-request-id", ""), headers.get("traceparent", ""))
    started_s = time.perf_counter()
    request = TrackedRequest(trace)
    try:
        if spans is None or route in _WITHOUT_SPANS:
            with _as_current(request):
                yield request
            return
        with spans.request(route, trace, headers) as (request.trace, span):
            try:
                with _as_current(request):
                    yield request
            finally:
                spans.ended(span, request.status)
    finally:
        metrics.request_ended(route, request.status, time.perf_counter() - started_s)


@contextmanager
def _as_current(request: TrackedRequest) -> Iterator[None]:
    token = CURRENT_TRACE.set(request.trace)
    try:
        yield
    finally:
        CURRENT_TRACE.reset(token)
