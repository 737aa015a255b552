"""Around the application: every request gets its ids, and is counted and timed when it ends."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from service.web.metrics import Metrics
from service.web.tracing import CURRENT, begin

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_ROUTES = ("/predict", "/v1/embeddings", "/metrics", "/v2/health", "/v2/repository")


def route_of(path: str) -> str:
    """A path without what callers choose in it, so that metrics stay few."""
    for route in _ROUTES:
        if path == route or path.startswith(f"{route}/"):
            return route
    if path.startswith("/v2/models/"):
        return "/v2/models/infer" if path.endswith("/infer") else "/v2/models"
    return "/" if path == "/" else "other"


def observed(app: App, metrics: Metrics) -> App:
    """The application with ids in its log and answers, and counted."""

    async def around(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        given = dict(scope["headers"])
        trace = begin(_text(given, b"x-request-id"), _text(given, b"traceparent"))
        added = [(b"x-request-id", trace.request_id.encode()), (b"traceparent", trace.traceparent.encode())]
        started, status = time.perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        token = CURRENT.set(trace)
        try:
            await app(scope, receive, noting)
        finally:
            CURRENT.reset(token)
            metrics.answered(route_of(scope["path"]), status, time.perf_counter() - started)

    return around


def _text(headers: dict[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")
