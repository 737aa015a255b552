"""Runs tasks in threads: results in order, the first failure raised, an interrupt passed on."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 3.0  # for tasks to clean up after `stop`; the next run removes what is left


def run_parallel(tasks: Sequence[Callable[[], T]], *, workers: int, stop: Callable[[], None]) -> list[T]:
    """The results of tasks in order; at most `workers` run at a time.

    When a task fails, no further one is started, the running ones are waited for, and the first failure in
    the order of tasks is raised. When the caller is interrupted, `stop` is called to end what the tasks wait
    for, and the interrupt is raised within PATIENCE_S after that. The threads never delay the exit.
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
