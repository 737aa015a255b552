"""Tasks that wait for the outside world, at the same time; stopping them doesn't wait for them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 3.0  # for tasks to clean up after their programs were ended; a sweep does the rest


def at_once(tasks: Sequence[Callable[[], T]], *, workers: int, stop: Callable[[], None]) -> list[T]:
    """The results in order, at most `workers` tasks running at a time.

    When a task fails, no further one is started; those that run are waited for, and the first failure (in
    the order of tasks) is raised. When the caller is interrupted, `stop` is called to end what the tasks wait
    for, and the interruption is raised within PATIENCE_S after that. The threads never delay the exit.
    """
    waiting = deque(enumerate(tasks))
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def work() -> None:
        while waiting:
            try:
                index, task = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                results[index] = task()
            except BaseException as error:
                failures[index] = error
                waiting.clear()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(tasks)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        waiting.clear()
        stop()
        deadline = time.monotonic() + PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    if failures:
        raise failures[min(failures)]
    return [results[index] for index in range(len(tasks))]
