"""Several waits at once: results in order, and a stop that neither waits nor starts what was queued."""

import threading
from collections.abc import Callable

import pytest

from buildtool.core.errors import SourceUnreachable
from buildtool.core.parallel import run_parallel


def never() -> None:
    raise AssertionError("nothing was interrupted")


def test_results_come_in_the_order_of_tasks() -> None:
    tasks: list[Callable[[], int]] = [lambda i=i: i for i in range(9)]  # type: ignore[misc]
    assert run_parallel(tasks, workers=4, stop=never) == list(range(9))


def test_the_first_failure_is_reported_and_no_queued_task_starts() -> None:
    begun: list[str] = []

    def fail() -> None:
        begun.append("fail")
        raise SourceUnreachable("no answer")

    with pytest.raises(SourceUnreachable, match="no answer"):
        run_parallel([fail, lambda: begun.append("queued")], workers=1, stop=never)
    assert begun == ["fail"]


def test_an_interrupted_caller_stops_workers_and_starts_no_queued_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, ended = threading.Event(), threading.Event()
    begun: list[str] = []

    def long() -> None:
        begun.append("long")
        running.set()
        ended.wait(60)

    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if not ended.is_set():
            running.wait(60)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_parallel([long, lambda: begun.append("queued")], workers=1, stop=ended.set)
    assert begun == ["long"]


def test_a_task_that_can_not_be_ended_delays_no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildtool.core.parallel.PATIENCE_S", 0.01)
    running, over = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def stuck() -> None:
        threads.append(threading.current_thread())
        running.set()
        over.wait(60)

    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is None:
            running.wait(60)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_parallel([stuck], workers=1, stop=lambda: None)
    assert threads[0].daemon
    over.set()
