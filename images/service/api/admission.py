"""Admits a bounded number of requests, and none while draining. Health checks don't pass through here."""

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from service.errors import RequestError

RETRY_AFTER_S = 1  # where nothing is known about how long it will take
_POLL_S = 0.02


class Admission:
    """Counts requests in flight. Used from the event loop's thread alone, so it needs no lock."""

    def __init__(
        self,
        limit: int,
        refused: Callable[[], int] = lambda: RETRY_AFTER_S,
        *,
        room: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """At most the share `room` of `limit` requests; `refused` hears of each and gives Retry-After."""
        self._limit = limit
        self._refused = refused
        self._room = room
        self.in_flight = 0
        self.draining = False
        self._inside: set[asyncio.Task[Any]] = set()
        self._turned_away: set[asyncio.Task[Any]] = set()

    def refusal(self) -> RequestError | None:
        """Why a request that came now would get no slot (429: all are held, 503: draining), or None."""
        if self.draining:
            return RequestError(503, "shutting down", retry_after_s=RETRY_AFTER_S)
        if self.in_flight >= max(1, round(self._room() * self._limit)):
            why = f"busy: {self.in_flight} requests are in flight already"
            return RequestError(429, why, retry_after_s=self._refused())
        return None

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the slots in a task; raises RequestError at once where `refusal` gives one.

        Raises RequestError (503) at the end of a drain that didn't wait for the block any longer.
        """
        if refusal := self.refusal():
            raise refusal
        task = asyncio.current_task()
        assert task
        self.in_flight += 1
        self._inside.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._turned_away or task.uncancel() > 0:  # somebody else cancelled it (as well)
                raise
            why = "shutting down; the answer took too long"
            raise RequestError(503, why, retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._inside.discard(task)
            self._turned_away.discard(task)
            self.in_flight -= 1

    async def drain(self, timeout_s: float) -> bool:
        """Admit no more requests and wait for those inside; False when some were left after `timeout_s`.

        Those are turned away then: their `slot` raises RequestError (503).
        """
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.in_flight:
                    await asyncio.sleep(_POLL_S)
        in_time = not self.in_flight
        self._turned_away |= self._inside
        for task in self._inside:
            task.cancel()
        return in_time


C = TypeVar("C", bound=Hashable)

_OWN_FILES = 64  # of torch, the model, the log and the event loop, generously


def places(wanted: int, open_files: int, *, burst: int) -> tuple[int, int]:
    """How many connections there may be, and how many may be accepted at once, with so many open files.

    The new ones of a burst are open before older ones are closed for them. At least one of each.
    """
    free = max(2, open_files - _OWN_FILES)
    burst = min(burst, free // 2)
    return min(wanted, free - burst), burst


class ConnectionLimiter(Generic[C]):
    """At most `limit` connections; those that have sent a whole request are never closed for a newcomer.

    Connections without a whole request cost their owner nothing, so someone who opens many must not keep
    others out: at the limit, one that waits for its request makes room. Those that were never answered and
    those that were each give way to newcomers of their own kind: of the more numerous kind, the one
    that has waited longest leaves. So a flood of silent connections can't close a caller who was answered a
    moment ago, nor can idle callers keep newcomers out. Used from the event loop's thread alone, so it needs
    no lock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: dict[C, None] = {}  # never answered, in the order in which they came
        self._idle: dict[C, None] = {}  # answered before, in the order in which they began to wait again
        self._served: set[C] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._idle) + len(self._served)

    def enter(self, connection: C) -> C | None:
        """Let `connection` in. Returns the one to close: none, an older one, or `connection` itself."""
        leaver = None
        if len(self) >= self._limit:
            many = self._new if len(self._new) >= len(self._idle) else self._idle
            leaver = next(iter(many), connection)
            self.leave(leaver)
        if leaver != connection:
            self._new[connection] = None
        return leaver

    def wait(self, connection: C) -> None:
        """A connection that is inside was answered; it waits for its next request from now on."""
        if connection in self._served or connection in self._new or connection in self._idle:
            self.leave(connection)
            self._idle[connection] = None

    def serve(self, connection: C) -> None:
        """A connection that is inside has sent a whole request."""
        if connection in self._new or connection in self._idle:
            self.leave(connection)
            self._served.add(connection)

    def leave(self, connection: C) -> None:
        """Forget a connection. Does nothing for one that isn't inside."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        self._served.discard(connection)
