"""Who is admitted when there are more than the limits allow: `ConnectionLimiter` chooses which connections
stay open, `Admission` which requests are answered (429 to the others; 503 while the service drains).

Both are used from the event loop's thread alone, so neither needs a lock. Health checks need a connection,
but no slot of `Admission`. The limits themselves are in `service.settings.Limits`.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from service.errors import RETRY_AFTER_S, RequestError

C = TypeVar("C", bound=Hashable)
_POLL_S = 0.02  # between two looks whether a drain is over


class Admission:
    """Counts the requests in flight, and refuses those beyond the limit."""

    def __init__(
        self,
        limit: int,
        on_refused: Callable[[], int] = lambda: RETRY_AFTER_S,
        *,
        load_share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Admit at most `load_share()` times `limit` requests.

        `on_refused` is called for each refused request and returns its Retry-After, in seconds.
        """
        self._limit = limit
        self._on_refused = on_refused
        self._load_share = load_share
        self.in_flight = 0
        self.draining = False
        self._admitted: set[asyncio.Task[Any]] = set()
        self._ended_by_drain: set[asyncio.Task[Any]] = set()

    def refusal(self) -> RequestError | None:
        """Return why a request would be refused now (429: all slots are taken, 503: draining), or None."""
        if self.draining:
            return RequestError(503, "shutting down", retry_after_s=RETRY_AFTER_S)
        if self.in_flight >= max(1, round(self._load_share() * self._limit)):
            message = f"busy: {self.in_flight} requests are in flight already (limit: max_in_flight)"
            return RequestError(429, message, retry_after_s=self._on_refused())
        return None

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a slot while the current task is in the block.

        Raises RequestError at once where `refusal` gives one, and 503 when a drain ends that didn't wait for
        the block any longer.
        """
        if refusal := self.refusal():
            raise refusal
        task = asyncio.current_task()
        assert task
        self.in_flight += 1
        self._admitted.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended_by_drain or task.uncancel() > 0:  # also cancelled by somebody else
                raise
            message = "shutting down; the answer took too long"
            raise RequestError(503, message, retry_after_s=RETRY_AFTER_S) from None
        finally:
            self._admitted.discard(task)
            self._ended_by_drain.discard(task)
            self.in_flight -= 1

    async def drain(self, timeout_s: float) -> bool:
        """Admit no more requests and wait for those in flight. Return whether all ended within `timeout_s`.

        Those that didn't are cancelled: their `slot` raises RequestError (503).
        """
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.in_flight:
                    await asyncio.sleep(_POLL_S)
        in_time = not self.in_flight
        self._ended_by_drain |= self._admitted
        for task in self._admitted:
            task.cancel()
        return in_time


class ConnectionLimiter(Generic[C]):
    """Keeps at most `limit` connections open, and says which one to close for a new one.

    A connection whose request is whole is never closed. One without costs its owner nothing, so someone who
    opens many must not keep others out: at the limit, one of those is closed. Some of them were never
    answered, others are idle after an answer; of the more numerous kind, the one that has waited longest is
    closed. So a flood of silent connections can't close a caller who was answered a moment ago, nor can idle
    callers keep new ones out.

    A connection is any hashable value: HTTP has its connections here, gRPC its calls without a message.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: dict[C, None] = {}  # never answered, in the order in which they came
        self._idle: dict[C, None] = {}  # answered before, in the order in which they became idle
        self._serving: set[C] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._idle) + len(self._serving)

    def add(self, connection: C) -> C | None:
        """Add a connection. Return the one to close: None, an older one, or `connection` itself."""
        to_close = None
        if len(self) >= self._limit:
            candidates = self._new if len(self._new) >= len(self._idle) else self._idle
            to_close = next(iter(candidates), connection)
            self.remove(to_close)
        if to_close != connection:
            self._new[connection] = None
        return to_close

    def mark_idle(self, connection: C) -> None:
        """The connection was answered, and waits for its next request. Unknown ones are ignored."""
        if connection in self._serving or connection in self._new or connection in self._idle:
            self.remove(connection)
            self._idle[connection] = None

    def mark_serving(self, connection: C) -> None:
        """The connection's request is whole. Unknown ones are ignored."""
        if connection in self._new or connection in self._idle:
            self.remove(connection)
            self._serving.add(connection)

    def remove(self, connection: C) -> None:
        """Forget a connection. Unknown ones are ignored."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        self._serving.discard(connection)
