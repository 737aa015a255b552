"""Who may come in: a bounded number of requests, none while draining. Health checks never ask here."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from service.errors import RequestError

RETRY_AFTER_S = 1  # a slot frees within about one forward pass
_POLL_S = 0.02


class Admission:
    """Counts requests in flight. Used from the event loop's thread alone, so it needs no lock."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0
        self.draining = False

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold one of the slots; raises RequestError (429 when all are held, 503 when draining) at once."""
        if self.draining:
            raise RequestError(503, "shutting down", retry_after_s=RETRY_AFTER_S)
        if self.in_flight >= self._limit:
            raise RequestError(
                429, f"busy: {self._limit} requests are in flight already", retry_after_s=RETRY_AFTER_S
            )
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def drain(self, timeout_s: float) -> bool:
        """Let nobody in any more and wait for those inside; False when some were left after `timeout_s`."""
        self.draining = True
        with anyio.move_on_after(timeout_s):
            while self.in_flight:
                await anyio.sleep(_POLL_S)
        return not self.in_flight
