"""Which connections stay when all places are taken. Values only: a connection is any hashable value."""

from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_OWN_FILES = 64  # of torch, the model, the log and the event loop, generously


def places(wanted: int, open_files: int, *, burst: int) -> tuple[int, int]:
    """How many connections there may be, and how many may be accepted at once, with so many open files.

    The new ones of a burst are open before older ones are closed for them. At least one of each.
    """
    free = max(2, open_files - _OWN_FILES)
    burst = min(burst, free // 2)
    return min(wanted, free - burst), burst


class Door(Generic[C]):
    """At most `limit` connections; those that have sent a whole request are never closed for a newcomer.

    Connections without a whole request cost their owner nothing, so someone who opens many must not keep
    others out: at the limit, the one that has waited longest for its request makes room. Used from the event
    loop's thread alone, so it needs no lock.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[C, None] = {}  # in the order in which they began to wait
        self._served: set[C] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._served)

    def enter(self, connection: C) -> C | None:
        """Let `connection` in. Returns the one to close: none, an older one, or `connection` itself."""
        leaver = None
        if len(self) >= self._limit:
            leaver = next(iter(self._waiting), connection)
            self.leave(leaver)
        if leaver != connection:
            self._waiting[connection] = None
        return leaver

    def wait(self, connection: C) -> None:
        """A connection that is inside was answered; it waits for its next request from now on."""
        if connection in self._served or connection in self._waiting:
            self.leave(connection)
            self._waiting[connection] = None

    def serve(self, connection: C) -> None:
        """A connection that is inside has sent a whole request."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._served.add(connection)

    def leave(self, connection: C) -> None:
        """Forget a connection. Does nothing for one that isn't inside."""
        self._waiting.pop(connection, None)
        self._served.discard(connection)
