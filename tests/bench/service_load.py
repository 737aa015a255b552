"""Callers for bench_service.py: one with a plain socket; many in an event loop, closed-loop or at a rate."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle

Body = Callable[[int], bytes]  # the n-th request


@dataclass
class Result:
    """What the callers got: seconds of each answer by status, and of each stage of the 200s."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    stages: dict[str, list[float]] = field(
        default_factory=dict
    )  # seconds of each 200: `timing_s`, and `rest`
    took_s: float = 0.0

    def note(self, status: int, seconds: float, answer: bytes) -> None:
        self.seconds.setdefault(status, []).append(seconds)
        if status == 200 and b"timing_s" in answer:
            timing: dict[str, float] = json.loads(answer)["timing_s"]
            for name, each in {**timing, "rest": seconds - sum(timing.values())}.items():
                self.stages.setdefault(name, []).append(each)

    @property
    def overhead(self) -> list[float]:
        """Seconds of each 200 in which nothing was computed."""
        return [a - b for a, b in zip(self.ok, self.stages.get("inference", []), strict=True)]

    @property
    def ok(self) -> list[float]:
        return self.seconds.get(200, [])

    @property
    def rate(self) -> float:
        return len(self.ok) / self.took_s

    def counts(self) -> dict[int, int]:
        return {status: len(each) for status, each in sorted(self.seconds.items())}


def quantile(values: list[float], share: float) -> float:
    """The nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def token_ids(lengths: Iterator[int] | int) -> Body:
    """Requests of one row, with so many tokens each; an iterator gives a length a request."""
    rng = random.Random(7)

    def body(_number: int) -> bytes:
        length = lengths if isinstance(lengths, int) else next(lengths)
        ids = [101, *(rng.randrange(1000, 30000) for _ in range(length - 2)), 102]
        return json.dumps({"token_ids": [ids]}).encode()

    return body


def mixed() -> Iterator[int]:
    """Lengths from 8 to 128, the same in every run."""
    rng = random.Random(11)
    while True:
        yield rng.randint(8, 128)


Answered = Callable[[int, bytes, bool], None]  # status, body, whether the other side closes; 0: it broke


class _Wire(asyncio.Protocol):
    """One connection, asked one thing at a time. It takes little CPU: the service needs that, too."""

    def __init__(self) -> None:
        self.transport: asyncio.WriteTransport | None = None
        self._answered: Answered | None = None
        self._read = b""

    def ask(self, request: bytes, answered: Answered) -> None:
        self._answered = answered
        if self.transport is None:
            self._end(0, b"", True)
        else:
            self.transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        end = self._read.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._read[:end].lower()
        length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(self._read) >= end + 4 + length:
            body, self._read = self._read[end + 4 :], b""
            self._end(int(head.split(b" ", 2)[1]), body, b"connection: close" in head)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end(0, b"", True)

    def _end(self, status: int, body: bytes, closes: bool) -> None:
        answered, self._answered = self._answered, None
        if answered:
            answered(status, body, closes)


def request_of(method: str, path: str, body: bytes) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _connected(port: int) -> _Wire:
    _, wire = await asyncio.get_running_loop().create_connection(_Wire, "127.0.0.1", port)
    return wire


class Caller:
    """One connection, opened again when the other side has closed it."""

    def __init__(self, port: int, *, keep: bool = True) -> None:
        self._port = port
        self._keep = keep
        self._wire: _Wire | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body; 0 where the connection broke."""
        request = request_of(method, path, body)
        fresh = self._wire is None or self._wire.transport is None
        status, answer = await self._ask(request)
        if not status and not fresh:  # the other side had closed an idle connection
            status, answer = await self._ask(request)
        return status, answer

    async def _ask(self, request: bytes) -> tuple[int, bytes]:
        future: asyncio.Future[tuple[int, bytes, bool]] = asyncio.get_running_loop().create_future()
        try:
            if self._wire is None or self._wire.transport is None:
                self._wire = await _connected(self._port)
        except OSError:
            return 0, b""
        self._wire.ask(request, lambda *answer: None if future.done() else future.set_result(answer))
        status, answer, closes = await future
        if closes or not self._keep:
            self.close()
        return status, answer

    def close(self) -> None:
        if self._wire and self._wire.transport:
            self._wire.transport.close()
        self._wire = None


def lone(port: int, seconds: float, body: Body, *, keep: bool) -> Result:
    """One caller who asks again as soon as it is answered, over one connection or a new one for each request.

    It waits in the socket itself. An event loop would add 0.1 ms to an answer on a kept connection and 0.4 ms
    on a new one, by turns in one run, and the service would seem to have spent them.
    """
    result = Result()
    connection: socket.socket | None = None
    started = time.perf_counter()
    for number in count():
        if time.perf_counter() >= started + seconds:
            break
        request = request_of("POST", "/predict", body(number))
        asked = time.perf_counter()
        if connection is None:
            connection = socket.socket()
            connection.settimeout(60)
            connection.connect(("127.0.0.1", port))
        connection.sendall(request)
        status, answer = _answer(connection)
        result.note(status, time.perf_counter() - asked, answer)
        if not keep or not status:
            connection.close()
            connection = None
    if connection:
        connection.close()
    result.took_s = time.perf_counter() - started
    return result


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body; 0 where the connection broke."""
    read = b""
    while piece := connection.recv(65536):
        read += piece
        head, ended, body = read.partition(b"\r\n\r\n")
        if ended and len(body) >= int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]):
            return int(head.split(b" ", 2)[1]), body
    return 0, b""


async def closed_loop(port: int, n_callers: int, seconds: float, body: Body) -> Result:
    """Callers who each ask again as soon as they are answered, for so long; then the last answers come.

    The rate counts until the last answer: batches end many requests at once, and a window would cut one.
    """
    result = Result()
    numbers = count()
    started = time.perf_counter()

    async def one() -> None:
        caller = Caller(port)
        while time.perf_counter() < started + seconds:
            asks = body(next(numbers))
            asked = time.perf_counter()
            status, answer = await caller.ask("POST", "/predict", asks)
            result.note(status, time.perf_counter() - asked, answer)
            if status == 429:
                await asyncio.sleep(0.05)
        caller.close()

    await asyncio.gather(*(one() for _ in range(n_callers)))
    result.took_s = time.perf_counter() - started
    return result


async def at_rate(port: int, rate: float, seconds: float, body: Body, *, n_callers: int) -> Result:
    """Requests that come at random times, `rate` a second, whether or not earlier ones were answered.

    Latency counts from when a request was due, so that a late caller's wait isn't left out.
    """
    crowd = _Crowd(port, [request_of("POST", "/predict", body(number)) for number in range(64)])
    await crowd.come(n_callers)
    rng = random.Random(5)
    started = at = time.perf_counter()
    while at < started + seconds:
        at += rng.expovariate(rate)
        if (wait := at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        crowd.due(at)
    await crowd.go()
    crowd.result.took_s = seconds
    return crowd.result


class _Crowd:
    """Kept connections, of which whichever is free asks next. No task for each: see `_Wire`."""

    def __init__(self, port: int, requests: list[bytes]) -> None:
        self.result = Result()
        self._port = port
        self._requests = cycle(requests)
        self._free: deque[_Wire] = deque()  # the one that has been free for longest asks next
        self._coming: set[asyncio.Task[None]] = set()
        self._late: deque[float] = deque()  # when those were due that wait for a free connection
        self._n_busy = 0
        self._empty = asyncio.Event()

    async def come(self, n_callers: int) -> None:
        self._free.extend([await _connected(self._port) for _ in range(n_callers)])

    def due(self, at: float) -> None:
        self._late.append(at)
        if self._free:
            self._ask(self._free.popleft())

    def _ask(self, wire: _Wire) -> None:
        at = self._late.popleft()
        self._n_busy += 1
        wire.ask(next(self._requests), partial(self._note, wire, at))

    def _note(self, wire: _Wire, at: float, status: int, answer: bytes, closes: bool) -> None:
        self.result.note(status, time.perf_counter() - at, answer)
        self._n_busy -= 1
        if closes:
            self._coming.add(asyncio.create_task(self._come_again()))
        else:
            self._return(wire)

    async def _come_again(self) -> None:
        with contextlib.suppress(OSError):
            self._return(await _connected(self._port))

    def _return(self, wire: _Wire) -> None:
        if self._late:
            self._ask(wire)
            return
        self._free.append(wire)
        if not self._n_busy:
            self._empty.set()

    async def go(self) -> None:
        """Wait for those who ask, and close."""
        self._empty.clear()
        while self._n_busy or self._late:
            await asyncio.wait_for(self._empty.wait(), 60)
        for wire in self._free:
            if wire.transport:
                wire.transport.close()


@dataclass
class Watched:
    """What was asked beside the load: statuses of the readiness, and bytes of memory over time."""

    statuses: set[int] = field(default_factory=set)
    resident: list[float] = field(default_factory=list)


async def beside(work: Awaitable[Result], port: int, *, every_s: float = 0.5) -> tuple[Result, Watched]:
    """`work`, and what the readiness and every fourth time the metrics said all the while."""
    seen = Watched()
    task = asyncio.ensure_future(work)
    for turn in count():
        caller = Caller(port, keep=False)
        seen.statuses.add((await caller.ask("GET", "/v2/health/ready"))[0])
        if turn % 4 == 0:
            page = (await caller.ask("GET", "/metrics"))[1].decode()
            found = page.partition("\nprocess_resident_memory_bytes ")[2].partition("\n")[0]
            seen.resident += [float(found)] if found else []
        if task.done():
            break
        await asyncio.wait({task}, timeout=every_s)
    return task.result(), seen
