"""The gRPC server: the same service behind it as behind HTTP. The only module that imports grpc.

It runs in the event loop of the HTTP server. A call's bytes are read and parsed here and not by grpc, which
waits for them without an end and calls unreadable ones its own failure.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import grpc
import grpc.aio

from service.errors import RequestError, ServiceError, bad_request
from service.listen import shown
from service.protocols.asks import timeout_of
from service.protocols.infer import VERSION, parameters_of, parse_infer
from service.rpc.messages import SERVICE, message, parsed
from service.rpc.translate import (
    document_of,
    index_response,
    infer_response,
    metadata_response,
    retry_details,
)
from service.web.admission import RETRY_AFTER_S
from service.web.answering import answered
from service.web.app import SERVER
from service.web.door import Door
from service.web.repository import load_model, unload_model
from service.web.service import Service
from service.web.watched import watched

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_EXTRA_BYTES = 4 << 10  # of a message around its tensors
MAX_CONNECTIONS = 8192  # however many files may be open: each takes some memory
# When all places are taken, newcomers wait for one of these. grpc can't close a connection for them.
_IDLE_S = 15  # that a connection may have no call; the next one makes another
_AGE_S = 60  # of any connection, give or take a tenth; its calls have drain_s to end
_PING_S = 10  # between two pings, and until an answer to one: else the other side is gone

log = logging.getLogger("service")

Context = Any  # grpc.aio.ServicerContext
Answering = Callable[[Service, Any, Context, float], Awaitable[Any]]


@dataclass(eq=False)
class _Call:
    """A call whose message hasn't arrived."""

    scope: anyio.CancelScope
    evicted: bool = False

    def evict(self) -> None:
        """Make room for a newer one."""
        self.evicted = True
        self.scope.cancel()


class Calls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Which method a path names, and the steps of every call."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._door: Door[_Call] = Door(service.limits.max_connections)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The method's handler; None for methods that there aren't: UNIMPLEMENTED."""
        package, _, name = handler_call_details.method.removeprefix("/").partition("/")
        if package != SERVICE or name not in METHODS:
            return None
        # On the wire a call with one message is a stream of one
        return grpc.stream_unary_rpc_method_handler(partial(self._call, name))

    async def _call(self, name: str, messages: AsyncIterator[bytes], context: Context) -> bytes:
        given = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        service = self._service
        with watched(f"grpc/{name}", given, service.metrics, service.spans) as request:
            try:
                await context.send_initial_metadata(request.headers)
                data = await self._message(messages)
                arrived = time.monotonic()
                found = await METHODS[name](service, parsed(f"{name}Request", data), context, arrived)
                made: bytes = found.SerializeToString()
                request.status = 200
                return made
            except RequestError as error:
                request.status, refusal = error.status, error
            except asyncio.CancelledError:
                request.status = 499
                raise
            except Exception as error:
                log.exception("a gRPC call failed")
                refusal = RequestError(500, f"the service failed ({type(error).__name__}); its log says more")
        return await _refuse(context, refusal)

    async def _message(self, messages: AsyncIterator[bytes]) -> bytes:
        """The message. Raises RequestError: there is none, it is too slow, or others need the place."""
        within_s = self._service.limits.body_timeout_s
        with anyio.move_on_after(within_s) as scope:
            call = _Call(scope)
            if leaver := self._door.enter(call):
                leaver.evict()
            try:
                data = await anext(messages, None)
            finally:
                self._door.leave(call)
            if data is None:
                raise bad_request("the call has no message")
            return data
        if call.evicted:
            raise RequestError(503, "all calls are in use", retry_after_s=RETRY_AFTER_S)
        raise RequestError(408, f"the message didn't arrive within {within_s} s")


async def _refuse(context: Context, error: RequestError) -> bytes:
    code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
    trailing: tuple[tuple[str, str | bytes], ...] = ()
    if error.retry_after_s is not None:
        trailing = (
            ("grpc-status-details-bin", retry_details(code.value[0], error)),
            ("retry-after", str(error.retry_after_s)),
        )
    await context.abort(code, error.message, trailing)
    return b""  # not reached: it raises


async def _server_live(service: Service, _request: Any, _context: Context, _arrived: float) -> Any:
    return message("ServerLiveResponse")(live=service.live)


async def _server_ready(service: Service, _request: Any, _context: Context, _arrived: float) -> Any:
    return message("ServerReadyResponse")(ready=service.ready)


async def _model_ready(service: Service, request: Any, _context: Context, _arrived: float) -> Any:
    ready = service.ready and service.models.is_ready(request.name) and request.version in ("", VERSION)
    return message("ModelReadyResponse")(ready=ready)


async def _server_metadata(_service: Service, _request: Any, _context: Context, _arrived: float) -> Any:
    return message("ServerMetadataResponse")(**SERVER)


async def _model_metadata(service: Service, request: Any, _context: Context, _arrived: float) -> Any:
    _check_version(request.version)
    return metadata_response(service.models.require(request.name).info)


async def _model_infer(service: Service, request: Any, context: Context, arrived: float) -> Any:
    """The steps of HTTP's `app`, with a message instead of a body."""
    _check_version(request.model_version)
    classifier = service.require(request.model_name)
    with service.admission.slot():
        document, raw = document_of(request, service.limits)
        ask = parse_infer(document, service.limits, classifier.info, raw)
        asked_s, left_s = timeout_of(parameters_of(document), None), context.time_remaining()
        timeout_s = min((each for each in (asked_s, left_s) if each is not None), default=None)
        answer = await answered(service, classifier, ask, arrived=arrived, timeout_s=timeout_s)
    return infer_response(classifier.info, ask, answer)


async def _index(service: Service, request: Any, _context: Context, _arrived: float) -> Any:
    return index_response(service.models.index(), ready_only=request.ready)


async def _load(service: Service, request: Any, _context: Context, _arrived: float) -> Any:
    await load_model(service, request.model_name)
    return message("RepositoryModelLoadResponse")()


async def _unload(service: Service, request: Any, _context: Context, _arrived: float) -> Any:
    unload_model(service, request.model_name)
    return message("RepositoryModelUnloadResponse")()


METHODS: dict[str, Answering] = {
    "ServerLive": _server_live,
    "ServerReady": _server_ready,
    "ModelReady": _model_ready,
    "ServerMetadata": _server_metadata,
    "ModelMetadata": _model_metadata,
    "ModelInfer": _model_infer,
    "RepositoryIndex": _index,
    "RepositoryModelLoad": _load,
    "RepositoryModelUnload": _unload,
}


def _check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise RequestError(404, f"there is no version {version[:64]!r}; there is {VERSION}")


async def start(
    service: Service, host: str, port: int, *, connections: int = MAX_CONNECTIONS
) -> tuple[grpc.aio.Server, int]:
    """A server that answers, and its port (one that is free for 0). Raises ServiceError.

    To be called in the event loop of the service. Further `connections` than that are closed at once.
    """
    limits = service.limits
    server = grpc.aio.server(
        handlers=(Calls(service),),
        options=(
            ("grpc.so_reuseport", 0),  # a port that is taken is an error, not shared
            ("grpc.max_receive_message_length", limits.max_body_bytes + _EXTRA_BYTES),
            ("grpc.max_concurrent_streams", 2 * limits.max_in_flight),  # a client's own queue has the rest
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.max_connection_idle_ms", 1000 * _IDLE_S),
            ("grpc.max_connection_age_ms", 1000 * _AGE_S),
            ("grpc.max_connection_age_grace_ms", 1000 * limits.drain_s),
            ("grpc.keepalive_time_ms", 1000 * _PING_S),
            ("grpc.keepalive_timeout_ms", 1000 * _PING_S),
            ("grpc.http2.ping_timeout_ms", 1000 * _PING_S),
            ("grpc.server_handshake_timeout_ms", 1000 * limits.header_timeout_s),
        ),
    )
    try:
        found = server.add_insecure_port(shown(host, port))
    except RuntimeError as error:
        raise ServiceError(
            f"can't listen on {shown(host, port)} for gRPC", "set WEIR_GRPC_LISTEN to another host:port"
        ) from error
    await server.start()
    return server, found
