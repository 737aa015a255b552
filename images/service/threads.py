"""Starting threads where the system may allow no more of them."""

import threading
from collections.abc import Callable

from service.errors import ServiceError


def start_thread(work: Callable[[], object], *, name: str) -> threading.Thread:
    """Start a daemon thread. Raises ServiceError where the system allows no more of them."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ServiceError(
            f"the thread `{name}` can't be started: {error}",
            "allow more processes: compose's pids_limit, docker run --pids-limit, or ulimit -u",
        ) from error
    return thread


def require_threads(number: int, *, name: str) -> None:
    """Raise ServiceError where fewer than `number` more threads may run. They run for this moment alone.

    OpenMP ends the process with a line of its own where it can't start one.
    """
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(number):
            started.append(start_thread(over.wait, name=name))
    finally:
        over.set()
        for thread in started:
            thread.join()
