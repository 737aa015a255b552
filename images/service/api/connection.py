"""One HTTP connection: uvicorn's h11 protocol with a place at the door and a limit for every wait.

uvicorn limits how long a connection may be idle between requests (`timeout_keep_alive`) and how many bytes a
head may have (`h11_max_incomplete_event_size`). It has no limit for the time that a head takes to arrive, for
a body that is no longer read, and for an answer that the peer doesn't read; and its `limit_concurrency`
counts idle connections, so a client that opens enough of them locks out everyone, health checks included. It
doesn't limit the chunks of a body either. Each costs some 15 us, so 1 MiB in chunks of one byte keeps the
event loop for 15 s. It writes an answer's head and body one after the other: two packets, of which the
client reads the second later. And whoever wants to know that a caller has left must have a task that waits
for it, for each request; here a function is called.
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

from service.api.admission import RETRY_AFTER_S, ConnectionLimiter
from service.api.service import ON_DISCONNECT
from service.errors import RequestError, bad_request

# Legitimate callers stay below this: a body of 1 MiB takes 0.3 s of the event loop at most, 60 ms at a time.
_FREE_CHUNKS = 1024
_BYTES_A_CHUNK = 64  # on average, beyond the free ones
MAX_HEADER_FIELDS = 256  # of a head
_LINGERS_S = 1.0  # after a refusal, so that the caller may send the rest and read why
_LAST_S = 0.5  # for a request that is under way when the server ends
_LOOK_S = 0.1  # between two looks whether a caller that sends no more has left
_ORIGIN = re.compile(
    rb"https?://[^/?]*", re.IGNORECASE
)  # before the path of a request's target, as proxies send it


class _Parser(h11.Connection):
    """h11's parser, which refuses bodies in many small chunks; `refusal` holds the reason, if one is known.

    An answer's head leaves together with the first piece of its body.
    """

    def __init__(self, head_bytes: int) -> None:
        super().__init__(h11.SERVER, head_bytes)
        self.refusal: RequestError | None = None
        self._chunks = self._body_bytes = 0
        self._head = b""

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # h11 has an overload for None
        """The bytes to write for an event; a head's are kept until the next event. None: close."""
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
        """What comes next. Raises h11.RemoteProtocolError, again and again once there are too many chunks."""
        in_head = self.their_state is h11.IDLE
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if in_head and error.error_status_hint == 431:
                self.refusal = RequestError(
                    431, f"the head is larger than {self._max_incomplete_event_size} bytes"
                )
            raise
        if isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
            self._check_head(event)
            return _with_its_path(event)
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > _FREE_CHUNKS + self._body_bytes // _BYTES_A_CHUNK:
                self.refusal = bad_request(
                    f"the body comes in too many chunks; send {_BYTES_A_CHUNK} bytes in each, or more"
                )
                raise h11.RemoteProtocolError(self.refusal.message)
        return event

    def _check_head(self, request: h11.Request) -> None:
        """Raise h11.RemoteProtocolError for a flood of fields, and for what a proxy may read otherwise.

        RFC 9112, 6.1 and 6.3: such a request may be refused, and its connection must be closed.
        """
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
            self.refusal = bad_request(
                "Transfer-Encoding beside Content-Length, or in HTTP/1.0, leaves the length unclear"
            )
        elif len(names) > MAX_HEADER_FIELDS:
            self.refusal = RequestError(
                431, f"the head has {len(names)} fields; at most {MAX_HEADER_FIELDS} are taken"
            )
        if self.refusal:
            raise h11.RemoteProtocolError(self.refusal.message)


def _with_its_path(request: h11.Request) -> h11.Request:
    """The request with a path as its target, where it came with a whole URL: RFC 9112, 3.2.2."""
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
    """Closes itself when its request's head takes longer than `timeout_s`, or when the door says so.

    One timer, armed while this side isn't working: from the connection or the last answer until a head has
    arrived, and while the peer reads nothing of an answer.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        door: "ConnectionLimiter[Connection]",
        timeout_s: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._parser = _Parser(self.conn._max_incomplete_event_size)
        self._door = door
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of an answer, when the timer was armed
        self._tell_gone: Callable[[], None] | None = None
        self._sends_no_more = False  # the peer
        self._lingers = False  # refused; only waits until the peer has read why
        self._ends = False  # after the next answer, or soon

    @property
    def _at_work(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        """Take a place at the door; when all are taken, one connection leaves, perhaps this one."""
        super().connection_made(transport)
        self._arm()
        if leaver := self._door.enter(self):
            leaver.make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._disarm()
        self._door.leave(self)
        super().connection_lost(exc)
        self._end_request()

    def data_received(self, data: bytes) -> None:
        """What comes after a refusal isn't looked at."""
        if not self._lingers:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes
        """The peer sends no more; whether the connection stays open, for an answer to a whole request."""
        if self._lingers or not self._at_work or self.cycle.more_body:
            return False
        if not self._sends_no_more:
            self._sends_no_more = True
            if self.scope["http_version"] == "1.1" and self.conn.our_state is h11.SEND_RESPONSE:
                # It may have left as well. Then this brings an error back, and every client skips it.
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._look_for_peer()
        return True

    def _look_for_peer(self) -> None:
        """End the request where its caller turns out to have left."""
        if not self._at_work or self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_S, self._look_for_peer)

    def handle_events(self) -> None:
        """The data may have completed a head, or a whole request."""
        super().handle_events()
        self._disarm_at_work()
        if self._at_work:
            self.scope["state"][ON_DISCONNECT] = self._when_gone  # before its task begins
            if not self.cycle.more_body:
                self._door.serve(self)

    def on_response_complete(self) -> None:
        """The next head, and what is left of this body before it, have `timeout_s` again."""
        self._tell_gone = None
        self.scope["state"].pop(ON_DISCONNECT, None)  # it holds this object, which holds it
        self._door.wait(self)
        self._arm()
        super().on_response_complete()  # may find the next request in what has arrived already
        if (self._sends_no_more or self._ends) and not self._at_work:
            self.transport.close()

    def pause_writing(self) -> None:
        """The peer doesn't read its answer; it has `timeout_s` to go on."""
        super().pause_writing()
        self._arm()

    def resume_writing(self) -> None:
        """The peer reads again."""
        super().resume_writing()
        self._disarm_at_work()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's words are for its log
        """What has arrived isn't HTTP, or has too many chunks; the request that it belongs to ends."""
        refusal = self._parser.refusal or bad_request("this is not an HTTP/1.1 request")
        self._turn_away(refusal.status, refusal.message, lingers=True)
        if self._at_work:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._end_request()

    def _unsupported_upgrade_warning(self) -> None:
        """A request to speak another protocol is answered in HTTP, and needs no line in the log."""

    def make_room(self) -> None:
        """Leave, because all places are taken."""
        if self._at_work or self._lingers or self.transport.get_write_buffer_size():
            # A body or an answer on its way: nothing can be said in the middle of it
            self.transport.abort()
        else:
            self._turn_away(503, "all connections are in use")

    def _when_gone(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when the caller of the request that is answered leaves, soon if it has left."""
        if self.cycle.disconnected:
            self.loop.call_soon(tell)
        else:
            self._tell_gone = tell
            self.flow.resume_reading()  # the end of what is read says that it has left

    def _end_request(self) -> None:
        tell, self._tell_gone = self._tell_gone, None
        if tell:
            tell()

    def shutdown(self) -> None:
        """The server ends: close after the answer to what has been asked, or is being asked now."""
        self._ends = True
        if self._lingers:
            self.transport.abort()
        elif self._at_work:
            super().shutdown()
        else:
            self._arm()

    def _arm(self) -> None:
        self._disarm()
        self._unread = self.transport.get_write_buffer_size()
        within_s = _LINGERS_S if self._lingers else _LAST_S if self._ends else self._timeout_s
        self._timer = self.loop.call_later(within_s, self._expired)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disarm_at_work(self) -> None:
        if self._at_work and not self.flow.write_paused:
            self._disarm()

    def _expired(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._lingers or self._ends or self.transport.is_closing() or unread:
            if unread < self._unread and not self._lingers:
                self._arm()  # it reads, slowly
                return
            self.transport.abort()  # the peer reads nothing, so a flush would never end
            return
        if self.conn.trailing_data[0]:
            self._turn_away(408, f"the request's head didn't arrive within {self._timeout_s:g} s")
        else:
            self.transport.close()  # nothing was asked, so nothing is answered
        self._arm()

    def _turn_away(self, status: int, message: str, *, lingers: bool = False) -> None:
        """Close, with the reason where no other answer has begun.

        `lingers`: the caller may still be sending; closing before it has ended would take the reason from it.
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


_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # by connections; some will close
_EXHAUSTED_S = 1.0

log = logging.getLogger("service")


class HttpServer(uvicorn.Server):
    """uvicorn, but SIGTERM is ours: its own handler closes at once and then dies by the signal (143).

    And it waits to be told to exit. uvicorn looks ten times a second, and each look takes a CPU from a pass.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(config)

    @property
    def should_exit(self) -> bool:
        """Whether it ends. May be set in any thread."""
        return self._exits

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        self._exits = exits
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections from now on."""
        self._loop = asyncio.get_running_loop()
        self.servers = []  # of asyncio: none
        for listener in sockets or []:
            listener.setblocking(False)
            listener.listen(self.config.backlog)
            self._loop.add_reader(listener, self._accept, self._loop, listener)
        self.started = True

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> bool:
        """Take one connection, if one waits. The loop calls again for the next, and hears others in between.

        asyncio's own way makes a task and a future for each, and three turns of the loop.
        """
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            log.warning("no connection is taken for %g s: %s", _EXHAUSTED_S, error.strerror)
            loop.remove_reader(listener)  # it stays readable
            loop.call_later(_EXHAUSTED_S, self._accept_again, loop, listener)
            return False
        connection.setblocking(False)
        made = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        protocol = made(self.config, self.server_state, self.lifespan.state, loop)
        loop._make_socket_transport(connection, protocol)  # type: ignore[attr-defined]
        return True

    def _accept_again(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        if not self.should_exit and listener.fileno() >= 0:
            loop.add_reader(listener, self._accept, loop, listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the connections that wait, then no more, and end all; each has a moment to be answered."""
        for listener in sockets or []:
            if self._loop and listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                for _ in range(self.config.backlog):
                    if not self._accept(self._loop, listener):
                        break
                listener.close()
        await asyncio.sleep(0)  # until those are connected
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # whose peers neither read nor close
            connection.transport.abort()
        await asyncio.sleep(0)  # until those are closed

    async def main_loop(self) -> None:
        """Serve until `should_exit` is set."""
        if not self.should_exit:
            await self._told.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `server`."""
        yield
