"""HTTP connections, on uvicorn's and h11's private API: `Connection` adds limits to uvicorn's protocol,
`HttpServer` accepts connections and ends when it is told.

What uvicorn lacks, and this adds:

- a time limit for a head to arrive, and for an answer to be read (`header_timeout_s`). uvicorn limits only
  the idle time between requests (`timeout_keep_alive`) and the bytes of a head;
- a limit of connections that keeps health checks answered. uvicorn's `limit_concurrency` counts idle
  connections, so a client that opens enough of them locks everyone out;
- a limit of a body's chunks. Each costs some 15 us, so 1 MiB in chunks of one byte keeps the event loop for
  15 s;
- an answer in one packet. uvicorn writes head and body apart, and clients read the second packet later;
- a callback when the caller leaves. With uvicorn, each request needs a task that waits for it.

docs/service.md says which of these nginx has as well, and why the service keeps them.
"""

import asyncio
import contextlib
import errno
import json
import logging
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any, cast

import h11
import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.api.admission import ConnectionLimiter
from service.api.service import ON_DISCONNECT
from service.errors import RETRY_AFTER_S, RequestError, bad_request
from service.settings import Limits

_PEER_POLL_S = 0.1  # between two looks whether a caller that sends no more has left
_ORIGIN = re.compile(rb"https?://[^/?]*", re.IGNORECASE)  # of a request's target, as sent to proxies
_OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ACCEPT_PAUSE_S = 1.0  # after one of them, until some connection has closed

log = logging.getLogger("service")


class _Parser(h11.Connection):
    """h11's parser with limits on header fields and chunks. Sends a head with the first piece of its body.

    `refusal`: why the parser raised h11.RemoteProtocolError, where it is one of these limits.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self.refusal: RequestError | None = None
        self._limits = limits
        self._chunks = self._body_bytes = 0
        self._head = b""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # h11 has an overload for None
        """Return the bytes to write for an event (a head's come with the next event), or None to close."""
        if isinstance(event, h11.Response) and self.they_are_waiting_for_100_continue:
            # The caller may send its body now or leave it out, and the next request can't be told from it
            event = h11.Response(
                status_code=event.status_code,
                headers=[*event.headers.raw_items(), (b"Connection", b"close")],
                http_version=event.http_version,
                reason=event.reason,
            )
        data = super().send(event)
        if isinstance(event, h11.Response):
            self._head = data or b""
            return b""
        if data is None:
            return None
        data, self._head = self._head + data, b""
        return data

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event. Raises h11.RemoteProtocolError, at each call after too many chunks."""
        in_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if in_head and error.error_status_hint == 431:
                self.refusal = RequestError(431, f"the head is larger than {self._limits.head_bytes} bytes")
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
            self._check_head(event)
            return _with_path(event)
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            bytes_per_chunk = self._limits.body_bytes_per_chunk
            if self._chunks > self._limits.body_free_chunks + self._body_bytes // bytes_per_chunk:
                self.refusal = bad_request(
                    f"the body comes in too many chunks; send {bytes_per_chunk} bytes in each, or more"
                )
                raise h11.RemoteProtocolError(self.refusal.message)
        return event

    def _check_head(self, request: h11.Request) -> None:
        """Raise h11.RemoteProtocolError for too many fields, and for a length that a proxy may read
        otherwise.

        RFC 9112, 6.1 and 6.3: such a request may be refused, and its connection must be closed.
        """
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
            self.refusal = bad_request(
                "Transfer-Encoding beside Content-Length, or in HTTP/1.0, leaves the length unclear"
            )
        elif len(names) > self._limits.head_fields:
            self.refusal = RequestError(
                431, f"the head has {len(names)} fields; at most {self._limits.head_fields} are taken"
            )
        if self.refusal:
            raise h11.RemoteProtocolError(self.refusal.message)


def _with_path(request: h11.Request) -> h11.Request:
    """Return the request with a path as its target, where it came with a whole URL (RFC 9112, 3.2.2)."""
    path = _ORIGIN.sub(b"", request.target, count=1)
    if path == request.target:
        return request
    return h11.Request(
        method=request.method,
        headers=request.headers,
        target=path if path.startswith(b"/") else b"/" + path,
        http_version=request.http_version,
    )


class Connection(H11Protocol):
    """Closes itself when its peer takes longer than `header_timeout_s`, or when the limiter says so.

    One timer, which runs while no request is being answered: from the connection or the last answer until a
    head has arrived. It also runs while the peer reads nothing of an answer.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limiter: "ConnectionLimiter[Connection]",
        limits: Limits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._parser = _Parser(limits)
        self._limiter = limiter
        self._limits = limits
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of an answer, when the timer was armed
        self._on_disconnect: Callable[[], None] | None = None
        self._peer_is_done = False  # it sends no more
        self._lingers = False  # refused; only waits until the peer has read why
        self._is_ending = False  # closes after the next answer, or after `last_request_s`

    @property
    def _is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Register with the limiter, which may have a connection closed, perhaps this one."""
        super().connection_made(transport)
        self._arm()
        if to_close := self._limiter.add(self):
            to_close.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after either side closed."""
        self._disarm()
        self._limiter.remove(self)
        super().connection_lost(exc)
        self._report_disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse what arrives, unless the connection only lingers after a refusal."""
        if not self._lingers:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes
        """Return whether to stay open though the peer sends no more: to answer a whole request."""
        if self._lingers or not self._is_answering or self.cycle.more_body:
            return False
        if not self._peer_is_done:
            self._peer_is_done = True
            if self.scope["http_version"] == "1.1" and self.conn.our_state is h11.SEND_RESPONSE:
                # The peer may have left. Then this write causes an error; clients that are there skip it.
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._poll_peer()
        return True

    def _poll_peer(self) -> None:
        """Abort when the socket shows that the caller has left; else look again later."""
        if not self._is_answering or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_PEER_POLL_S, self._poll_peer)

    def handle_events(self) -> None:
        """Handle parsed events, which may have completed a head or a request."""
        super().handle_events()
        self._disarm_while_answering()
        if self._is_answering:
            self.scope["state"][ON_DISCONNECT] = self._call_on_disconnect  # before its task begins
            if not self.cycle.more_body:
                self._limiter.mark_serving(self)

    def on_response_complete(self) -> None:
        """Wait for the next request: its head, and the rest of this body before it."""
        self._on_disconnect = None
        self.scope["state"].pop(ON_DISCONNECT, None)  # a reference cycle
        self._limiter.mark_idle(self)
        self._arm()
        super().on_response_complete()  # the next request may have arrived already
        if (self._peer_is_done or self._is_ending) and not self._is_answering:
            self.transport.close()

    def pause_writing(self) -> None:
        """Start the timer: the peer doesn't read its answer."""
        super().pause_writing()
        self._arm()

    def resume_writing(self) -> None:
        """Stop the timer: the peer reads again."""
        super().resume_writing()
        self._disarm_while_answering()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # for uvicorn's log
        """Refuse what isn't HTTP or exceeds a limit of the parser, and end the request that it belongs to."""
        refusal = self._parser.refusal or bad_request("this is not an HTTP/1.1 request")
        self._refuse(refusal.status, refusal.message, lingers=True)
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._report_disconnect()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request to upgrade the connection is answered in HTTP."""

    def make_room(self) -> None:
        """Close for a new connection: the limit is reached."""
        if self._is_answering or self._lingers or self.transport.get_write_buffer_size():
            # A body or an answer is on its way, and no refusal can be sent in the middle of it
            self.transport.abort()
        else:
            self._refuse(503, "all connections are in use")

    def _call_on_disconnect(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the caller leaves before its answer; soon, if it has left."""
        if self.cycle.disconnected:
            self.loop.call_soon(callback)
        else:
            self._on_disconnect = callback
            self.flow.resume_reading()  # the end of the stream tells

    def _report_disconnect(self) -> None:
        callback, self._on_disconnect = self._on_disconnect, None
        if callback:
            callback()

    def shutdown(self) -> None:
        """The server ends: close after answering the current request, or one that arrives right now."""
        self._is_ending = True
        if self._lingers:
            self.transport.abort()
        elif self._is_answering:
            super().shutdown()
        else:
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        self._unread = self.transport.get_write_buffer_size()
        limits = self._limits
        timeout_s = limits.header_timeout_s if not self._is_ending else limits.last_request_s
        self._timer = self.loop.call_later(limits.linger_s if self._lingers else timeout_s, self._expired)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disarm_while_answering(self) -> None:
        if self._is_answering and not self.flow.write_paused:
            self._disarm()

    def _expired(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._lingers or self._is_ending or self.transport.is_closing() or unread:
            if unread < self._unread and not self._lingers:
                self._arm()  # the peer reads, slowly
                return
            self.transport.abort()  # the peer reads nothing, so a flush would never end
            return
        if self.conn.trailing_data[0]:
            self._refuse(408, f"the request's head didn't arrive within {self._limits.header_timeout_s:g} s")
        else:
            self.transport.close()  # no request has begun
        self._arm()

    def _refuse(self, status: int, message: str, *, lingers: bool = False) -> None:
        """Close, with an error as the answer if no answer has begun.

        `lingers`: the caller may still be sending; if the connection closed meanwhile, the caller's TCP would
        discard the answer. So wait until the caller has closed, for `linger_s` at most.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": message}).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            if status == 503:
                headers.append(("Retry-After", str(RETRY_AFTER_S)))
            answer = (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in answer))
        if not lingers:
            self.transport.close()
            return
        self._lingers = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._arm()


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, its accept loop and its polling.

    uvicorn's own SIGTERM handler closes at once and then dies by the signal (143); the service drains first.
    uvicorn polls ten times a second whether to exit, and each time takes a CPU from a pass; this waits for an
    event.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether the server is to end. May be set in any thread."""
        return self._exits

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        self._exits = exits
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections from now on."""
        self._loop = asyncio.get_running_loop()
        self.servers = []  # no asyncio.Server: `_accept` does it
        for listener in sockets or []:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._loop.add_reader(listener, self._accept, self._loop, listener)
        self.started = True

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> bool:
        """Accept one connection and return whether there was one. The loop calls again for the next.

        asyncio's own server makes a task and a future for each connection, and takes three turns of the loop.
        """
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _OUT_OF_FILES:
                raise
            log.warning("no connection is taken for %g s: %s", _ACCEPT_PAUSE_S, error.strerror)
            loop.remove_reader(listener)  # which stays readable
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again, loop, listener)
            return False
        connection.setblocking(False)
        make_protocol = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        protocol = make_protocol(self.config, self.server_state, self.lifespan.state, loop)
        loop._make_socket_transport(connection, protocol)  # type: ignore[attr-defined]
        return True

    def _accept_again(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        if not self.should_exit and listener.fileno() >= 0:
            loop.add_reader(listener, self._accept, loop, listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections that wait, then no more, and end all after their current requests."""
        for listener in sockets or []:
            if self._loop and listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                for _ in range(self.config.backlog):
                    if not self._accept(self._loop, listener):
                        break
                listener.close()
        await asyncio.sleep(0)  # their connection_made runs
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # whose peers neither read nor close
            connection.transport.abort()
        await asyncio.sleep(0)  # their connection_lost runs

    async def main_loop(self) -> None:
        """Serve until `should_exit` is set."""
        if not self.should_exit:
            await self._told.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: `service.server` has its own."""
        yield
