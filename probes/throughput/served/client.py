"""Connections over real sockets, in one event loop whose timers are exact to some microseconds.

asyncio's usual selector rounds every wait up to a millisecond; `select` doesn't. An answer's time is when the
selector said that its last bytes were there, not when their turn came: of 64 answers that arrive together,
the last would seem slower by what the client spends on the others. How long the loop was busy is kept, so
that a client that is the bottleneck can be recognised.
"""

import asyncio
import re
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlsplit

from probes.core.errors import UsageError
from probes.throughput.served.answers import MOST_BODY_BYTES, READ_BYTES, AnswerReader, Garbled, Wanted

WAKE_S = 0.0003  # what a virtual machine takes to wake for a timer: an arrival is awaited this long in turns
WAKES_SHARE = 0.1  # of a core at most for that
REFUSED_PAUSE_S = 0.05  # after a refusal or an error a closed loop waits, or it would flood the server
GOOD, REFUSED = "good", "refused"


class Reply(NamedTuple):
    """What became of one request. `outcome`: GOOD, REFUSED (429), or what went wrong."""

    sent_s: float  # the loop's clock
    ended_s: float
    outcome: str


class Note(NamedTuple):
    """A request from the moment at which it was due. `queued`: it waited while every connection was busy."""

    due_s: float
    sent_s: float
    ended_s: float
    outcome: str
    queued: bool


class Caller(Protocol):
    """One connection's worth of asking."""

    async def ask(self, number: int) -> Reply:
        """Send the request of this number and wait for its answer; never raises for what a server does."""

    def close(self) -> None:
        """Drop the connection."""


MakeCaller = Callable[[], Caller]
Sink = Callable[[Note], None]


async def closed_loop(make: MakeCaller, n_callers: int, sink: Sink, stop: asyncio.Event) -> None:
    """`n_callers` who each ask again as soon as they are answered, until `stop`; the last are dropped."""
    numbers = iter(range(1 << 62))
    callers = [make() for _ in range(n_callers)]

    async def one(caller: Caller) -> None:
        due = asyncio.get_running_loop().time()
        while not stop.is_set():
            reply = await caller.ask(next(numbers))
            sink(Note(due, reply.sent_s, reply.ended_s, reply.outcome, queued=False))
            due = reply.ended_s
            if reply.outcome != GOOD:
                await asyncio.sleep(REFUSED_PAUSE_S)
                due = asyncio.get_running_loop().time()

    tasks = [asyncio.create_task(one(caller)) for caller in callers]
    try:
        await _until(stop, tasks)
    finally:
        await _dropped(tasks, callers)


async def open_loop(
    make: MakeCaller,
    due: Iterator[float],
    sink: Sink,
    stop: asyncio.Event,
    *,
    most: int,
    patience_s: float,
    early_s: float = 0.0,
) -> None:
    """Requests at the times of `due` (by the loop's clock), until `stop`; then what is under way is awaited.

    At most `most` connections: a request that finds them all busy waits its turn, and that counts. What isn't
    answered `patience_s` after the stop is noted as unanswered, not left out. The timer is set `early_s`
    before a request is due, and the rest is spent in turns of the loop: timers wake late.
    """
    pool = _Pool(make, most)
    asking = asyncio.create_task(_arrive(pool, due, sink, early_s))
    try:
        await _until(stop, [asking])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if pool.under_way:
            await asyncio.wait(pool.under_way, timeout=patience_s)
    finally:
        await _dropped([asking, *pool.under_way], pool.callers)


def early(rate_per_s: float) -> float:
    """How long before each arrival to be awake: not at all at rates where that would occupy the client."""
    return WAKE_S if rate_per_s * WAKE_S <= WAKES_SHARE else 0.0


async def _arrive(pool: "_Pool", due: Iterator[float], sink: Sink, early_s: float) -> None:
    loop = asyncio.get_running_loop()
    for number, at in enumerate(due):
        wait = at - loop.time()
        if wait > early_s:
            await asyncio.sleep(wait - early_s)
        while early_s and loop.time() < at:
            await asyncio.sleep(0)
        task = asyncio.create_task(_one(pool, number, at, sink))
        pool.under_way.add(task)
        task.add_done_callback(pool.under_way.discard)
        if wait <= 0 and number % 64 == 63:
            await asyncio.sleep(0)  # far behind: answers must be read all the same


async def _one(pool: "_Pool", number: int, due: float, sink: Sink) -> None:
    queued = False
    sent = None
    try:
        caller, queued = await pool.take()
        try:
            sent = asyncio.get_running_loop().time()
            reply = await caller.ask(number)
        finally:
            pool.give(caller)
        sink(Note(due, reply.sent_s, reply.ended_s, reply.outcome, queued=queued))
    except asyncio.CancelledError:  # the level is over and its patience, too
        now = asyncio.get_running_loop().time()
        sink(
            Note(
                due, now if sent is None else sent, now, "not answered before the level ended", queued=queued
            )
        )
        raise


class _Pool:
    """Connections, of which the last used is taken first: the others may idle and be closed."""

    def __init__(self, make: MakeCaller, most: int) -> None:
        self._make = make
        self._most = most
        self._free: list[Caller] = []
        self._waiting: deque[asyncio.Future[Caller]] = deque()
        self.callers: list[Caller] = []
        self.under_way: set[asyncio.Task[None]] = set()

    async def take(self) -> tuple[Caller, bool]:
        """A connection, and whether it had to be waited for."""
        if self._free:
            return self._free.pop(), False
        if len(self.callers) < self._most:
            self.callers.append(self._make())
            return self.callers[-1], False
        waiting: asyncio.Future[Caller] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return await waiting, True

    def give(self, caller: Caller) -> None:
        """Back for others."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(caller)
                return
        self._free.append(caller)


async def _until(stop: asyncio.Event, tasks: list["asyncio.Task[None]"]) -> None:
    """Until `stop`, or until a task breaks, whose exception is raised."""
    stopped = asyncio.create_task(stop.wait())
    pending: set[asyncio.Task[Any]] = {stopped, *tasks}
    try:
        while not stopped.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        stopped.cancel()


async def _dropped(tasks: "list[asyncio.Task[None]]", callers: list[Caller]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for caller in callers:
        caller.close()


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


_MODEL = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/infer)?/?")
_WRITE = "write it as http://127.0.0.1:8000, or http://127.0.0.1:8000/v2/models/NAME/infer"


@dataclass(frozen=True)
class Target:
    """A server, and of it a model of the Open Inference Protocol, or any path that takes a POST.

    `model` is empty where the URL and the command line name none; `path` is then the URL's own.
    """

    host: str
    port: int
    tls: bool
    path: str
    model: str
    prefix: str = ""  # of the path, before /v2

    @property
    def url(self) -> str:
        """Without anything secret: a user name in it isn't taken in the first place."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.path}"


def parse_url(text: str, *, model: str = "") -> Target:
    """The target of a URL. Raises UsageError."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--url {text[:200]!r}: {error}", _WRITE) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url {text[:200]!r} is not an http or https URL", _WRITE)
    if port == 0:
        raise UsageError("--url has port 0, on which nothing listens", _WRITE)
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError("--url takes no user name, query or fragment", _WRITE)
    if not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(f"--url {text[:200]!r} holds characters that no URL has", _WRITE)
    tls = parts.scheme == "https"
    prefix, found = _model_in(parts.path)
    if found and model and found["model"] != quote(model, safe=""):
        raise UsageError(
            f"--url names the model {found['model']!r}, --served-model {model!r}", "give one of the two"
        )
    path = parts.path.rstrip("/")
    if found or model:
        path = found[0].rstrip("/").removesuffix("/infer") if found else f"/v2/models/{quote(model, safe='')}"
        path = f"{prefix if found else path_prefix(parts.path)}{path}/infer"
        name = found["model"] if found else quote(model, safe="")
        return Target(parts.hostname, port or _usual(tls), tls, path, name, prefix)
    return Target(parts.hostname, port or _usual(tls), tls, path, "", path_prefix(parts.path))


def path_prefix(path: str) -> str:
    """What stands before /v2 in a server's paths."""
    return path.rstrip("/").removesuffix("/v2")


def _model_in(path: str) -> tuple[str, re.Match[str] | None]:
    at = path.find("/v2/models/")
    return (path[:at], _MODEL.fullmatch(path[at:])) if at >= 0 else ("", None)


def _usual(tls: bool) -> int:
    return 443 if tls else 80
