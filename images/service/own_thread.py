"""A piece of work in a thread of its own, which ends with the work."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from service.errors import ServiceError

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T], *, name: str) -> T:
    """What `work` returns or raises. When the caller is cancelled, the thread goes on and nobody hears of it.

    For work that uses torch. OpenMP keeps a team of threads for each thread that ever computed in parallel,
    until that thread ends. While there are more of them than CPUs, each waits asleep instead of awake, and
    a pass of the device's own thread is slower by the time that it takes to wake its team 200 times. A
    thread of a pool lives on when its work is done, and so does its team.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, work())
        except BaseException as error:  # whatever it is, the caller has to hear of it
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    start(run, name=name)
    return await future


def start(work: Callable[[], None], *, name: str) -> None:
    """Start a thread that doesn't keep the process from ending. Raises ServiceError where none can be."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise ServiceError(
            f"the thread `{name}` can't be started: {error}",
            "allow more processes: compose's pids_limit, docker run --pids-limit, or ulimit -u",
        ) from error
