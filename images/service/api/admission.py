"""Admits a bounded number of requests, and none while draining. Health checks don't pass through here."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

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
