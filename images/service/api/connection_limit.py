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
