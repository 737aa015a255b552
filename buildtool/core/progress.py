"""Progress of long work on standard error: one line per step, and a sign of life where a step is silent."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TextIO, TypeVar

from probes.core.quoting import log_text

Progress = Callable[[str], None]  # takes one line of progress
SILENCE_S = 10.0  # after this long without a line, print what is still running


class ProgressLog:
    """Lines with the seconds since the start. As a context it also breaks long silences."""

    def __init__(self, *, silence_s: float = SILENCE_S, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._begun = self._said = time.monotonic()
        self._last = "starting"
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._done = threading.Event()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begun

    def line(self, line: str) -> None:
        """One line of progress, from any thread."""
        with self._lock:
            self._last = line
            self._write(line)

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:  # what is being said is said before the end
            self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(self._silence_s / 4):
            with self._lock:
                silent_s = time.monotonic() - self._said
                if silent_s >= self._silence_s and not self._done.is_set():
                    self._write(f"... still at it after: {self._last[:100]}")

    def _write(self, line: str) -> None:
        self._said = time.monotonic()
        shown = log_text(line, keep="\t")
        self._stream.write(f"[{self.seconds:6.1f}s] {shown}\n")
        self._stream.flush()


T = TypeVar("T")

PATIENCE_S = 3.0  # for tasks to clean up after their programs were ended; a sweep does the rest


def run_parallel(tasks: Sequence[Callable[[], T]], *, workers: int, stop: Callable[[], None]) -> list[T]:
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
