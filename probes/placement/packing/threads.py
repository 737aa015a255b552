"""Work of several threads on one memory, which ends before its caller goes on. No torch."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def of_all(pool: ThreadPoolExecutor, work: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """What `work` returns for each item, in their order; threads do it, in any order.

    Where one fails, what hasn't begun is left out, and the error is raised once all threads have stopped. So
    what they read, and where to, may be closed or used for something else then.
    """
    begun: list[Future[Found]] = []
    try:
        for item in items:
            begun.append(pool.submit(work, item))  # an interruption finds those so far
        return [one.result() for one in begun]
    finally:
        for one in begun:
            one.cancel()
        wait(begun)
