"""An HTTP/1.1 client over real sockets, for one event loop whose timers are exact to some microseconds.

asyncio's usual selector rounds every wait up to a millisecond; `select` doesn't. A response's time is when
the selector returned with its last bytes, not when their turn came: of 64 responses that arrive together, the
last would seem slower by what the client spends on the others. The selector also adds up how long the loop
was busy, so that a client that is the bottleneck can be recognised. Responses are parsed within limits, as
their bytes arrive.
"""

import asyncio
import re
import selectors
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from probes.throughput.served.protocol import READ_BYTES, ResponseCheck

GOOD, REFUSED = "good", "refused"


class Exchange(NamedTuple):
    """What became of one request. `outcome`: GOOD, REFUSED (429), or what went wrong."""

    sent_s: float  # the loop's clock
    ended_s: float
    outcome: str


MOST_HEAD_BYTES = 64 << 10
MOST_BODY_BYTES = 64 << 20
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})(?:[ \t]*;[^\r\n]*)?")


class MalformedResponse(ValueError):
    """What came isn't an answer in HTTP/1.1, or is beyond our limits."""


class ResponseParser:
    """One answer. `feed` takes bytes until `done`; the body is counted, its first `keep_bytes` are kept."""

    def __init__(self, *, keep_bytes: int = 0) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.body_bytes = 0
        self.done = False
        self.keep_alive = True
        self._keep_bytes = keep_bytes
        self._rest = bytearray()
        self._left: int | None = None  # bytes of the body, or of a chunk; None: until the connection ends
        self._chunked = False
        self._in_chunk = False
        self._in_trailer = False

    @property
    def begun(self) -> bool:
        """Return whether any byte of the response has come."""
        return bool(self.status or self._rest)

    def feed(self, data: bytes) -> None:
        """Take some bytes. Raises MalformedResponse."""
        if self.done:
            raise MalformedResponse("more bytes came than the answer has")
        self._rest += data
        while not self.done and self._step():
            pass
        if self.done and self._rest:
            raise MalformedResponse("more bytes came than the answer has")

    def end(self) -> bool:
        """The connection has ended; whether the answer is whole."""
        if self.status and self._left is None and not self._chunked:
            self.done = True
        return self.done

    def _step(self) -> bool:
        """One step of reading; whether another may be possible with what has come."""
        if not self.status:
            return self._head()
        if self._chunked and not self._in_chunk:
            return self._chunk_line()
        return self._some_body()

    def _head(self) -> bool:
        end = self._rest.find(b"\r\n\r\n")
        if end < 0:
            if not _could_begin(bytes(self._rest[:16])):
                raise MalformedResponse(f"not HTTP: it begins with {bytes(self._rest[:16])!r}")
            if len(self._rest) > MOST_HEAD_BYTES:
                raise MalformedResponse(f"a head of more than {MOST_HEAD_BYTES >> 10} KiB")
            return False
        first, *lines = bytes(self._rest[:end]).split(b"\r\n")
        del self._rest[: end + 4]
        status_line = _STATUS.fullmatch(first)
        if not status_line:
            raise MalformedResponse(f"not HTTP: it begins with {first[:40]!r}")
        status = int(status_line[2])
        if status < 200:  # an interim answer; the real one follows
            if status == 101:
                raise MalformedResponse("the server switched protocols")
            return True
        self.status = status
        self.headers = _headers(lines)
        connection = self.headers.get(b"connection", b"").lower()
        self.keep_alive = b"close" not in connection and (
            status_line[1] == b"1" or b"keep-alive" in connection
        )
        self._framing()
        return True

    def _framing(self) -> None:
        coding = self.headers.get(b"transfer-encoding", b"").lower()
        length = self.headers.get(b"content-length")
        if self.status in (204, 304):
            self.done = True
        elif coding and length is not None:
            raise MalformedResponse("both Transfer-Encoding and Content-Length (RFC 9112, 6.3)")
        elif coding:
            if coding != b"chunked":
                raise MalformedResponse(f"transfer coding {coding[:40]!r}")
            self._chunked = True
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise MalformedResponse(f"Content-Length {length[:40]!r}")
            self._left = int(length)
            self._check_size(self._left)
            self.done = self._left == 0
        else:
            self.keep_alive = False

    def _chunk_line(self) -> bool:
        end = self._rest.find(b"\r\n")
        if end < 0:
            if len(self._rest) > MOST_HEAD_BYTES:
                raise MalformedResponse("an endless chunk line")
            return False
        line = bytes(self._rest[:end])
        del self._rest[: end + 2]
        if self._in_trailer:
            self.done = not line
            return not self.done
        if self._left == 0 and not line:  # the end of the chunk before
            self._left = None
            return True
        match = _CHUNK.fullmatch(line)
        if not match or self._left == 0:
            raise MalformedResponse(f"a chunk's length {line[:40]!r}")
        self._left = int(match[1], 16)
        self._check_size(self.body_bytes + self._left)
        self._in_trailer = self._left == 0
        self._in_chunk = self._left > 0
        return True

    def _some_body(self) -> bool:
        piece = self._rest if self._left is None else self._rest[: self._left]
        if not piece:
            return False
        self.body_bytes += len(piece)
        self._check_size(self.body_bytes)
        if len(self.body) < self._keep_bytes:
            self.body += piece[: self._keep_bytes - len(self.body)]
        if self._left is None:
            self._rest = bytearray()
            return False
        del self._rest[: len(piece)]
        self._left -= len(piece)
        if self._left == 0:
            self._in_chunk = False
            self.done = not self._chunked
        return True

    def _check_size(self, n_bytes: int) -> None:
        if n_bytes > MOST_BODY_BYTES:
            raise MalformedResponse(f"an answer of more than {MOST_BODY_BYTES >> 20} MiB")


def _could_begin(seen: bytes) -> bool:
    return seen.startswith(b"HTTP/1."[: len(seen)])


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not name:
        raise MalformedResponse(f"a header line {line[:40]!r}")
    return name.strip().lower(), value.strip()


_FRAMING = (b"content-length", b"transfer-encoding")


def _headers(lines: Sequence[bytes]) -> dict[bytes, bytes]:
    """The headers by name, of which the last counts; but two unlike lengths would be two answers."""
    found: dict[bytes, bytes] = {}
    for name, value in map(_header, lines):
        if name in _FRAMING and found.get(name, value) != value:
            raise MalformedResponse(f"two values of {name.decode().title()} (RFC 9112, 6.3)")
        found[name] = value
    return found


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
        """Return the value of the Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.tls else 80) else f"{name}:{self.port}"


class BusySelector(selectors.SelectSelector):
    """`select`, noting when it returned and how long the loop was busy between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.woke_s = time.monotonic()
        self.busy_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the connections that are ready."""
        self.busy_s += time.monotonic() - self.woke_s
        ready = super().select(timeout)
        self.woke_s = time.monotonic()
        return ready


def loop_with(selector: BusySelector) -> asyncio.AbstractEventLoop:
    """A new event loop on this selector."""
    return asyncio.SelectorEventLoop(selector)


def resolve(host: str, port: int, *, tls: bool) -> Endpoint:
    """The endpoint of a name, looked up once. Raises OSError.

    Of several addresses the first that takes a connection: `localhost` often has one in IPv6 first, and a
    server only that of IPv4. Where none does, the first, whose error is then shown.
    """
    addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    takes = (info for info in addresses if len(addresses) == 1 or _connects(info, port))
    return Endpoint(host, port, tls, next(takes, addresses[0]))


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


class _Connection(asyncio.Protocol):
    """One connection, which has one request at a time under way."""

    def __init__(self, selector: BusySelector) -> None:
        self._selector = selector
        self._parser: ResponseParser | None = None
        self._answered: asyncio.Future[float] | None = None
        self.transport: asyncio.Transport | None = None
        self.usable = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def begin(self, parser: ResponseParser) -> "asyncio.Future[float]":
        """Expect a response; the future gives when its last bytes were there."""
        self._parser = parser
        self._answered = asyncio.get_running_loop().create_future()
        return self._answered

    def data_received(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:  # nothing was asked
            self.usable = False
            self._close()
            return
        try:
            parser.feed(data)
        except MalformedResponse as error:
            self._fail(error)
        else:
            if parser.done:
                self._finish(parser)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        parser = self._parser
        if parser is None:
            return
        if exc is None and parser.end():
            self._finish(parser)
        else:
            when = "in the middle of" if parser.begun else "before"
            self._fail(ConnectionError(f"connection lost {when} the answer"))

    def _finish(self, parser: ResponseParser) -> None:
        answered, self._parser, self._answered = self._answered, None, None
        self.usable = self.usable and parser.keep_alive
        if answered is not None and not answered.done():
            answered.set_result(self._selector.woke_s)

    def _fail(self, error: Exception) -> None:
        answered, self._parser, self._answered = self._answered, None, None
        self.usable = False
        if answered is not None and not answered.done():
            answered.set_exception(error)
        self._close()

    def _close(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class HttpClient:
    """Asks one server with prepared requests, by turns. `keep`: the connection is used again.

    `check`: of responses with status 200, which all count as good without it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[bytes],
        selector: BusySelector,
        *,
        limit_s: float,
        keep: bool = True,
        secure: ssl.SSLContext | None = None,
        check: ResponseCheck | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._check = check
        self._requests = requests
        self._selector = selector
        self._limit_s = limit_s
        self._keep = keep
        self._secure = secure
        self._connection: _Connection | None = None

    async def ask(self, number: int) -> Exchange:
        """Send the request of a number and wait for its response, at most `limit_s`."""
        request = self._requests[number % len(self._requests)]
        exchange, response = await self.fetch(request, keep_bytes=READ_BYTES if self._check else 0)
        if exchange.outcome == GOOD and self._check and (why := self._check.outcome(response)):
            return exchange._replace(outcome=why)
        return exchange

    async def fetch(
        self, request: bytes, *, keep_bytes: int = MOST_BODY_BYTES
    ) -> tuple[Exchange, ResponseParser]:
        """Send any request, and return its response as well, of which the status alone is judged."""
        loop = asyncio.get_running_loop()
        parser = ResponseParser(keep_bytes=keep_bytes)
        sent = loop.time()
        try:
            async with asyncio.timeout(self._limit_s):
                connection = self._connection
                if connection is None or not connection.usable:
                    connection = await self._connected()
                answered = connection.begin(parser)
                assert connection.transport is not None
                connection.transport.write(request)
                ended = await answered
        except TimeoutError:
            self.close()
            return Exchange(sent, loop.time(), f"no answer within {self._limit_s:g} s"), parser
        except asyncio.CancelledError:
            self.close()
            raise
        except (OSError, MalformedResponse) as error:
            self.close()
            return Exchange(sent, loop.time(), _reason(error)), parser
        if not (self._keep and connection.usable):
            self.close()
        return Exchange(sent, max(ended, sent), _outcome(parser.status)), parser

    async def _connected(self) -> _Connection:
        self.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._selector),
            self._endpoint.address,
            self._endpoint.port,
            ssl=self._secure,
            server_hostname=self._endpoint.host if self._secure else None,
        )
        self._connection = connection
        return connection

    def close(self) -> None:
        """Drop the connection."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.transport is not None:
            connection.transport.abort()


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
    if isinstance(error, MalformedResponse):
        return f"garbled answer: {error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
