"""Thread pools whose work ends before their caller goes on, and that a forked child has anew. No torch."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Protocol, TypeVar
from weakref import WeakSet

Item = TypeVar("Item")
Found = TypeVar("Found")


class Renewed(Protocol):
    """What a forked child needs new, because it has no threads of its parent's."""

    def renew(self) -> None:
        """Forget what those threads were at."""


_RENEWED: Final[WeakSet[Renewed]] = WeakSet()


def renew_in_forks(thing: Renewed) -> None:
    """Call `renew` of this object in each forked child, as long as the object lives."""
    _RENEWED.add(thing)


def _renew_all() -> None:
    for thing in list(_RENEWED):
        thing.renew()


os.register_at_fork(after_in_child=_renew_all)


class Threads(ThreadPoolExecutor):
    """Threads that a forked child has, too: new ones, with nothing to do yet."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._again = count, name
        renew_in_forks(self)

    def renew(self) -> None:
        """Start new threads, in a process that was forked."""
        super().__init__(self._again[0], thread_name_prefix=self._again[1])


def run_all(pool: ThreadPoolExecutor, work: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """Call `work` for each item in threads, in any order; returns the results in the items' order.

    Where one fails, what hasn't begun is left out, and the error is raised once all threads have stopped. So
    what they read, and where to, may be closed or used for something else then.
    """
    begun: list[Future[Found]] = []
    try:
        for item in items:
            begun.append(pool.submit(work, item))  # an interruption finds those so far
        return [future.result() for future in begun]
    finally:
        for future in begun:
            future.cancel()
        wait(begun)
