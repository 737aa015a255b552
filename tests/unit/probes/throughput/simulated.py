"""An event loop whose clock only moves when nothing is left to do, and servers that live in it."""

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from probes.throughput.served.http import GOOD, Exchange

T = TypeVar("T")


class _Instant(selectors.SelectSelector):
    """Waits no time at all."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits, and nothing is going to happen"
        self.now += max(timeout, 0.0)
        return []


class Loop(asyncio.SelectorEventLoop):
    """Virtual time."""

    def __init__(self) -> None:
        self.instant = _Instant()
        super().__init__(self.instant)

    def time(self) -> float:
        return self.instant.now


def simulate(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, in virtual time."""
    gc.freeze()  # a level begins with a collection, which need not go through what other tests left
    loop = Loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@dataclass
class Queue:
    """One request at a time, each for `service_s`; in `pauses`, (begin, end), it stands still."""

    service_s: float
    pauses: tuple[tuple[float, float], ...] = ()
    refuse_beyond: int = 10**9  # inside
    free_at: float = 0.0
    inside: int = 0
    most_inside: int = 0
    arrivals: list[float] = field(default_factory=list)

    async def ask(self, _number: int = 0) -> Exchange:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        if self.inside >= self.refuse_beyond:
            await asyncio.sleep(0.0001)
            return Exchange(sent, loop.time(), "refused")
        self.inside += 1
        self.most_inside = max(self.inside, self.most_inside)
        self.arrivals.append(sent)
        try:
            self.free_at = max(sent, self.free_at) + self.service_s
            for begin, end in self.pauses:
                if begin <= self.free_at < end:
                    self.free_at = end
            await asyncio.sleep(self.free_at - loop.time())
            return Exchange(sent, loop.time(), GOOD)
        finally:
            self.inside -= 1

    def close(self) -> None:
        pass


@dataclass
class Doing:
    """A caller that does what a function says."""

    what: Callable[[float], Exchange]
    takes_s: float = 0.01

    async def ask(self, _number: int) -> Exchange:
        sent = asyncio.get_running_loop().time()
        await asyncio.sleep(self.takes_s)
        return self.what(sent)

    def close(self) -> None:
        pass
