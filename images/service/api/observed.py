"""Around the application: every request gets its ids, and is counted and timed when it ends."""

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from service.api.metrics import Metrics
from service.api.service import Service
from service.api.tracing import CURRENT, Trace, begin

if TYPE_CHECKING:
    from service.api.spans import Spans


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


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
WhenGone = Callable[[Callable[[], None]], None]  # has a function called when a request's caller leaves

WHEN_GONE = "weir.when_gone"  # a WhenGone, in the `state` of each request's scope

_ROUTES = ("/predict", "/v1/embeddings", "/metrics", "/v2/health", "/v2/repository")


def route_of(path: str) -> str:
    """A path without what callers choose in it, so that metrics stay few."""
    for route in _ROUTES:
        if path == route or path.startswith(f"{route}/"):
            return route
    if path.startswith("/v2/models/"):
        return "/v2/models/infer" if path.endswith("/infer") else "/v2/models"
    return "/" if path == "/" else "other"


@lru_cache(maxsize=1)
def _date(second: int) -> tuple[bytes, bytes]:
    return b"date", formatdate(second, usegmt=True).encode()


def observed(app: App, service: Service) -> App:
    """The application with ids in its log and answers, and counted."""

    async def around(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        with watched(route_of(scope["path"]), given, service.metrics, service.spans) as request:
            added = [(key.encode(), value.encode()) for key, value in request.headers]

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    request.status = message["status"]
                    message["headers"] = [_date(int(time.time())), *message["headers"], *added]
                    if service.admission.draining:  # else the next request would meet a closed connection
                        message["headers"].append((b"connection", b"close"))
                await send(message)

            await app(scope, receive, noting)

    return around
