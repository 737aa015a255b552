"""Which request a log line belongs to: its id, and the W3C trace that a caller passes on."""

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
    """One request's ids. `parent` is the caller's span, if it sent one."""

    request_id: str
    trace_id: str
    span_id: str
    parent: str = ""
    flags: str = "00"

    @property
    def traceparent(self) -> str:
        """The header that passes the trace on, with this service's span as the parent."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def fields(self) -> dict[str, str]:
        """What a log line holds of it."""
        parent = {"parent_span_id": self.parent} if self.parent else {}
        return {"request_id": self.request_id, "trace_id": self.trace_id, "span_id": self.span_id, **parent}


CURRENT_TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)


def start_trace(request_id: str, traceparent: str) -> Trace:
    """The trace of a request with these headers (empty where absent). What isn't well-formed is made new."""
    found = _PARENT.fullmatch(traceparent.strip())
    span_id = secrets.token_hex(8)
    name = request_id if _ID.fullmatch(request_id) else secrets.token_hex(8)
    if found is None or set(found[1]) == {"0"} or set(found[2]) == {"0"}:
        return Trace(name, secrets.token_hex(16), span_id)
    return Trace(name, found[1], span_id, parent=found[2], flags=found[3])


_WITHOUT_SPANS = (
    "/v2/health",
    "/metrics",
    "grpc/ServerLive",
    "grpc/ServerReady",
    "grpc/ModelReady",
)  # no spans


@dataclass
class TrackedRequest:
    """One request. `status`: of its answer, in HTTP's numbers; to be set before the end."""

    trace: Trace
    status: int = 500

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What the answer passes on."""
        return (("x-request-id", self.trace.request_id), ("traceparent", self.trace.traceparent))


@contextmanager
def track_request(
    route: str, headers: Mapping[str, str], metrics: "Metrics", spans: "Spans | None"
) -> Iterator[TrackedRequest]:
    """Watch the block as a request; `headers` may have x-request-id, traceparent and tracestate."""
    trace = start_trace(headers.get("x-request-id", ""), headers.get("traceparent", ""))
    started = time.perf_counter()
    made = TrackedRequest(trace)
    try:
        if spans is None or route in _WITHOUT_SPANS:
            with _as_current(made):
                yield made
            return
        with spans.request(route, trace, headers) as (made.trace, span):
            try:
                with _as_current(made):
                    yield made
            finally:
                spans.ended(span, made.status)
    finally:
        metrics.answered(route, made.status, time.perf_counter() - started)


@contextmanager
def _as_current(made: TrackedRequest) -> Iterator[None]:
    token = CURRENT_TRACE.set(made.trace)
    try:
        yield
    finally:
        CURRENT_TRACE.reset(token)
