"""Callers for bench_service.py: kept-alive HTTP connections in one event loop, closed-loop or at a rate."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

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


class _Wire(asyncio.Protocol):
    """One connection, asked one thing at a time. It takes little CPU: the service needs that, too."""

    def __init__(self) -> None:
        self.transport: asyncio.WriteTransport | None = None
        self.answer: asyncio.Future[tuple[int, bytes, bool]] | None = None  # status, body, closes
        self._read = b""

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
        if len(self._read) < end + 4 + length or self.answer is None or self.answer.done():
            return
        body, self._read = self._read[end + 4 :], b""
        self.answer.set_result((int(head.split(b" ", 2)[1]), body, b"connection: close" in head))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.answer and not self.answer.done():
            self.answer.set_exception(exc or ConnectionResetError())
        self.transport = None


class Caller:
    """One connection, opened again when the other side has closed it."""

    def __init__(self, port: int, *, keep: bool = True) -> None:
        self._port = port
        self._keep = keep
        self._wire: _Wire | None = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """The status and the body; 0 where the connection broke."""
        fresh = self._wire is None or self._wire.transport is None
        for last in (fresh, True):  # a kept connection may have been closed by the other side
            try:
                return await self._ask(method, path, body)
            except (OSError, ValueError, IndexError):
                self.close()
                if last:
                    break
        return 0, b""

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._wire is None or self._wire.transport is None:
            _, self._wire = await loop.create_connection(_Wire, "127.0.0.1", self._port)
        wire, wire.answer = self._wire, loop.create_future()
        assert wire.transport
        wire.transport.write(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        status, answer, closes = await wire.answer
        if closes or not self._keep:
            self.close()
        return status, answer

    def close(self) -> None:
        if self._wire and self._wire.transport:
            self._wire.transport.close()
        self._wire = None


async def closed_loop(port: int, n_callers: int, seconds: float, body: Body, *, keep: bool = True) -> Result:
    """Callers who each ask again as soon as they are answered, for so long; then the last answers come.

    The rate counts until the last answer: batches end many requests at once, and a window would cut one.
    """
    result = Result()
    numbers = count()
    started = time.perf_counter()

    async def one() -> None:
        caller = Caller(port, keep=keep)
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
    result = Result()
    due: asyncio.Queue[float | None] = asyncio.Queue()
    rng = random.Random(5)
    numbers = count()

    async def one() -> None:
        caller = Caller(port)
        while (at := await due.get()) is not None:
            status, answer = await caller.ask("POST", "/predict", body(next(numbers)))
            result.note(status, time.perf_counter() - at, answer)
        caller.close()

    callers = [asyncio.create_task(one()) for _ in range(n_callers)]
    started = at = time.perf_counter()
    while at < started + seconds:
        at += rng.expovariate(rate)
        if (wait := at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        due.put_nowait(at)
    for _ in callers:
        due.put_nowait(None)
    await asyncio.gather(*callers)
    result.took_s = seconds
    return result


async def beside(work: Awaitable[Result], port: int, *, every_s: float = 0.5) -> tuple[Result, set[int]]:
    """`work`, and the statuses of the readiness that was asked all the while."""
    seen: set[int] = set()
    task = asyncio.ensure_future(work)
    while not task.done():
        caller = Caller(port, keep=False)
        seen.add((await caller.ask("GET", "/v2/health/ready"))[0])
        await asyncio.wait({task}, timeout=every_s)
    return task.result(), seen
