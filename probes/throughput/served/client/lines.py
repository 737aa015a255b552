"""Connections over real sockets, in one event loop whose timers are exact to some microseconds.

asyncio's usual selector rounds every wait up to a millisecond; `select` doesn't. An answer's time is when the
selector said that its last bytes were there, not when their turn came: of 64 answers that arrive together,
the last would seem slower by what the client spends on the others. How long the loop was busy is kept, so
that a client that is the bottleneck can be recognised.
"""

import asyncio
import selectors
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

from probes.throughput.served.client.driving import GOOD, REFUSED, Reply
from probes.throughput.served.client.goodanswer import READ_BYTES, Wanted
from probes.throughput.served.client.httpanswer import MOST_BODY_BYTES, AnswerReader, Garbled

CONNECT_S = 3.0  # to find out which address of a name takes connections
MOST_CONNECTIONS = 900  # `select` takes descriptors below 1,024


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens: its resolved address, and the name that it is asked under."""

    host: str
    port: int
    tls: bool
    address: str

    @property
    def authority(self) -> str:
        """For the Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.tls else 80) else f"{name}:{self.port}"


class Watch(selectors.SelectSelector):
    """`select`, noting when it returned and how long the loop was busy between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.woke_s = time.monotonic()
        self.busy_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready."""
        self.busy_s += time.monotonic() - self.woke_s
        ready = super().select(timeout)
        self.woke_s = time.monotonic()
        return ready


def loop_with(watch: Watch) -> asyncio.AbstractEventLoop:
    """A new event loop on this selector."""
    return asyncio.SelectorEventLoop(watch)


def resolve(host: str, port: int, *, tls: bool) -> Endpoint:
    """The endpoint of a name, looked up once. Raises OSError.

    Of several addresses the first that takes a connection: `localhost` often has one in IPv6 first, and a
    server only that of IPv4. Where none does, the first, whose error is then shown.
    """
    found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    takes = (one for one in found if len(found) == 1 or _connects(one, port))
    return Endpoint(host, port, tls, next(takes, found[0]))


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


class _Line(asyncio.Protocol):
    """One connection, which has one request at a time under way."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._reader: AnswerReader | None = None
        self._answered: asyncio.Future[float] | None = None
        self.transport: asyncio.Transport | None = None
        self.usable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def begin(self, reader: AnswerReader) -> "asyncio.Future[float]":
        """Expect an answer; the future gives when its last bytes were there."""
        self._reader = reader
        self._answered = asyncio.get_running_loop().create_future()
        return self._answered

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:  # nothing was asked
            self.usable = False
            self._close()
            return
        try:
            reader.feed(data)
        except Garbled as error:
            self._fail(error)
        else:
            if reader.done:
                self._finish(reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        reader = self._reader
        if reader is None:
            return
        if exc is None and reader.end():
            self._finish(reader)
        else:
            when = "in the middle of" if reader.begun else "before"
            self._fail(ConnectionError(f"connection lost {when} the answer"))

    def _finish(self, reader: AnswerReader) -> None:
        answered, self._reader, self._answered = self._answered, None, None
        self.usable = self.usable and reader.keep_alive
        if answered is not None and not answered.done():
            answered.set_result(self._watch.woke_s)

    def _fail(self, error: Exception) -> None:
        answered, self._reader, self._answered = self._answered, None, None
        self.usable = False
        if answered is not None and not answered.done():
            answered.set_exception(error)
        self._close()

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class HttpCaller:
    """Asks one server with prepared requests, by turns. `keep`: the connection is used again.

    `wanted`: what an answer must hold to count as one; None takes whatever has status 200.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes],
        watch: Watch,
        *,
        limit_s: float,
        keep: bool = True,
        secure: ssl.SSLContext | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._wanted = wanted
        self._requests = requests
        self._watch = watch
        self._limit_s = limit_s
        self._keep = keep
        self._secure = secure
        self._line: _Line | None = None

    async def ask(self, number: int) -> Reply:
        """Send a request and wait for its answer, at most `limit_s`."""
        request = self._requests[number % len(self._requests)]
        reply, answer = await self.fetch(request, keep_bytes=READ_BYTES if self._wanted else 0)
        if reply.outcome == GOOD and self._wanted and (why := self._wanted.outcome(answer)):
            return reply._replace(outcome=why)
        return reply

    async def fetch(self, request: bytes, *, keep_bytes: int = MOST_BODY_BYTES) -> tuple[Reply, AnswerReader]:
        """The same for any request, with the answer, whose status alone is judged."""
        loop = asyncio.get_running_loop()
        reader = AnswerReader(keep_bytes=keep_bytes)
        sent = loop.time()
        try:
            async with asyncio.timeout(self._limit_s):
                line = self._line
                if line is None or not line.usable:
                    line = await self._connected()
                answered = line.begin(reader)
                assert line.transport is not None
                line.transport.write(request)
                ended = await answered
        except TimeoutError:
            self.close()
            return Reply(sent, loop.time(), f"no answer within {self._limit_s:g} s"), reader
        except asyncio.CancelledError:
            self.close()
            raise
        except (OSError, Garbled) as error:
            self.close()
            return Reply(sent, loop.time(), _reason(error)), reader
        if not (self._keep and line.usable):
            self.close()
        return Reply(sent, max(ended, sent), _outcome(reader.status)), reader

    async def _connected(self) -> _Line:
        self.close()
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(
            lambda: _Line(self._watch),
            self._endpoint.address,
            self._endpoint.port,
            ssl=self._secure,
            server_hostname=self._endpoint.host if self._secure else None,
        )
        self._line = line
        return line

    def close(self) -> None:
        """Drop the connection."""
        line, self._line = self._line, None
        if line is not None and line.transport is not None:
            line.transport.abort()


def _outcome(status: int) -> str:
    if status == 200:
        return GOOD
    return REFUSED if status == 429 else f"status {status}"


def _reason(error: Exception) -> str:
    """Alike for every request that fails alike: reasons are counted."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return "connection reset"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, Garbled):
        return f"garbled answer: {error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
