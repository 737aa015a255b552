"""Drives load: callers in a closed loop, or requests at given times in an open loop. Any client will do."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from probes.throughput.served.http import GOOD, Exchange

WAKE_S = 0.0003  # what a virtual machine takes to wake for a timer: an arrival is awaited this long in turns
WAKES_SHARE = 0.1  # of a core at most for that
REFUSED_PAUSE_S = 0.05  # after a refusal or an error a closed loop waits, or it would flood the server


class RequestRecord(NamedTuple):
    """A request from the moment at which it was due. `queued`: it waited while every connection was busy."""

    due_s: float
    sent_s: float
    ended_s: float
    outcome: str
    queued: bool


class Client(Protocol):
    """One connection's worth of asking."""

    async def ask(self, number: int) -> Exchange:
        """Send the request of this number and wait for its answer; never raises for what a server does."""

    def close(self) -> None:
        """Drop the connection."""


MakeClient = Callable[[], Client]
Sink = Callable[[RequestRecord], None]


async def closed_loop(make: MakeClient, n_callers: int, sink: Sink, stop: asyncio.Event) -> None:
    """`n_callers` who each ask again as soon as they are answered, until `stop`; the last are dropped."""
    numbers = iter(range(1 << 62))
    clients = [make() for _ in range(n_callers)]

    async def drive(client: Client) -> None:
        due = asyncio.get_running_loop().time()
        while not stop.is_set():
            exchange = await client.ask(next(numbers))
            sink(RequestRecord(due, exchange.sent_s, exchange.ended_s, exchange.outcome, queued=False))
            due = exchange.ended_s
            if exchange.outcome != GOOD:
                await asyncio.sleep(REFUSED_PAUSE_S)
                due = asyncio.get_running_loop().time()

    tasks = [asyncio.create_task(drive(client)) for client in clients]
    try:
        await _wait_until(stop, tasks)
    finally:
        await _drop(tasks, clients)


async def open_loop(
    make: MakeClient,
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
    asking = asyncio.create_task(_send_when_due(pool, due, sink, early_s))
    try:
        await _wait_until(stop, [asking])
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if pool.under_way:
            await asyncio.wait(pool.under_way, timeout=patience_s)
    finally:
        await _drop([asking, *pool.under_way], pool.clients)


def wake_early_s(rate_per_s: float) -> float:
    """How long before each arrival to be awake: not at all at rates where that would occupy the client."""
    return WAKE_S if rate_per_s * WAKE_S <= WAKES_SHARE else 0.0


async def _send_when_due(pool: "_Pool", due: Iterator[float], sink: Sink, early_s: float) -> None:
    loop = asyncio.get_running_loop()
    for number, at in enumerate(due):
        wait = at - loop.time()
        if wait > early_s:
            await asyncio.sleep(wait - early_s)
        while early_s and loop.time() < at:
            await asyncio.sleep(0)
        task = asyncio.create_task(_send(pool, number, at, sink))
        pool.under_way.add(task)
        task.add_done_callback(pool.under_way.discard)
        if wait <= 0 and number % 64 == 63:
            await asyncio.sleep(0)  # far behind: answers must be read all the same


async def _send(pool: "_Pool", number: int, due: float, sink: Sink) -> None:
    queued = False
    sent = None
    try:
        client, queued = await pool.take()
        try:
            sent = asyncio.get_running_loop().time()
            exchange = await client.ask(number)
        finally:
            pool.give(client)
        sink(RequestRecord(due, exchange.sent_s, exchange.ended_s, exchange.outcome, queued=queued))
    except asyncio.CancelledError:  # the level is over and its patience, too
        now = asyncio.get_running_loop().time()
        sink(
            RequestRecord(
                due, now if sent is None else sent, now, "not answered before the level ended", queued=queued
            )
        )
        raise


class _Pool:
    """Connections, of which the last used is taken first: the others may idle and be closed."""

    def __init__(self, make: MakeClient, most: int) -> None:
        self._make = make
        self._most = most
        self._free: list[Client] = []
        self._waiting: deque[asyncio.Future[Client]] = deque()
        self.clients: list[Client] = []
        self.under_way: set[asyncio.Task[None]] = set()

    async def take(self) -> tuple[Client, bool]:
        """A connection, and whether it had to be waited for."""
        if self._free:
            return self._free.pop(), False
        if len(self.clients) < self._most:
            self.clients.append(self._make())
            return self.clients[-1], False
        waiting: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return await waiting, True

    def give(self, client: Client) -> None:
        """Return the client to the pool."""
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(client)
                return
        self._free.append(client)


async def _wait_until(stop: asyncio.Event, tasks: list["asyncio.Task[None]"]) -> None:
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


async def _drop(tasks: "list[asyncio.Task[None]]", clients: list[Client]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        client.close()
