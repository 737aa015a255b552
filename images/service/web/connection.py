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
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.web.admission import RETRY_AFTER_S
from service.web.door import Door
from service.web.observed import WHEN_GONE

# Legitimate callers stay below this: a body of 1 MiB takes 0.3 s of the event loop at most, 60 ms at a time.
_FREE_CHUNKS = 1024
_BYTES_A_CHUNK = 64  # on average, beyond the free ones
_MOST_FIELDS = 256  # of a head


class _Parser(h11.Connection):
    """h11's parser, which refuses bodies in many small chunks; `refusal` holds the reason, else nothing.

    An answer's head leaves together with the first piece of its body.
    """

    def __init__(self, head_bytes: int) -> None:
        super().__init__(h11.SERVER, head_bytes)
        self.refusal = ""
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
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._body_bytes = 0
            self._check_head(event)
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._body_bytes += len(event.data)
            if self._chunks > _FREE_CHUNKS + self._body_bytes // _BYTES_A_CHUNK:
                self.refusal = (
                    f"the body comes in too many chunks; send {_BYTES_A_CHUNK} bytes in each, or more"
                )
                raise h11.RemoteProtocolError(self.refusal)
        return event

    def _check_head(self, request: h11.Request) -> None:
        """Raise h11.RemoteProtocolError for a flood of fields, and for what a proxy may read otherwise.

        RFC 9112, 6.1 and 6.3: such a request may be refused, and its connection must be closed.
        """
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
            self.refusal = (
                "Transfer-Encoding beside Content-Length, or in HTTP/1.0, leaves the length unclear"
            )
        elif len(names) > _MOST_FIELDS:
            self.refusal = f"the head has {len(names)} fields; at most {_MOST_FIELDS} are taken"
        if self.refusal:
            raise h11.RemoteProtocolError(self.refusal)


class Connection(H11Protocol):
    """Closes itself when its request's head takes longer than `timeout_s`, or when the door says so.

    One timer, armed while this side isn't working: from the connection or the last answer until a head has
    arrived, and while the peer leaves an answer unread.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        door: "Door[Connection]",
        timeout_s: float,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._parser = _Parser(self.conn._max_incomplete_event_size)
        self._door = door
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._tell_gone: Callable[[], None] | None = None

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

    def handle_events(self) -> None:
        """The data may have completed a head, or a whole request."""
        super().handle_events()
        self._disarm_at_work()
        if self._at_work:
            self.scope["state"][WHEN_GONE] = self._when_gone  # before its task begins
            if not self.cycle.more_body:
                self._door.serve(self)

    def on_response_complete(self) -> None:
        """The next head, and what is left of this body before it, have `timeout_s` again."""
        self._tell_gone = None
        self.scope["state"].pop(WHEN_GONE, None)  # it holds this object, which holds it
        self._door.wait(self)
        self._arm()
        super().on_response_complete()  # may find the next request in what has arrived already

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
        self._turn_away(400, self._parser.refusal or "this is not an HTTP/1.1 request")
        if self._at_work:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._end_request()

    def _unsupported_upgrade_warning(self) -> None:
        """A request to speak another protocol is answered in HTTP, and needs no line in the log."""

    def make_room(self) -> None:
        """Leave, because all places are taken."""
        if self._at_work:  # a body on its way: nothing can be said in the middle of it
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

    def _arm(self) -> None:
        self._disarm()
        self._timer = self.loop.call_later(self._timeout_s, self._expired)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disarm_at_work(self) -> None:
        if self._at_work and not self.flow.write_paused:
            self._disarm()

    def _expired(self) -> None:
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.transport.abort()  # the peer reads nothing, so a flush would never end
            return
        if self.conn.trailing_data[0]:
            self._turn_away(408, f"the request's head didn't arrive within {self._timeout_s:g} s")
        else:
            self.transport.close()  # nothing was asked, so nothing is answered
        self._arm()

    def _turn_away(self, status: int, message: str) -> None:
        """Close, with the reason where no other answer has begun."""
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
        self.transport.close()
