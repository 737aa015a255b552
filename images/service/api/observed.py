"""ASGI middleware."""

import time
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from typing import Any

from service.api.service import Service
from service.api.tracing import watched

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
