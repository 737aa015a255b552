"""Models are loaded in threads that end: one that stayed would slow the device's thread down."""

import asyncio
import threading
from pathlib import Path

import pytest
from service import server
from service.batching.worker import run_in_thread
from service.errors import ModelUnreadable, ServiceError
from service.settings import Limits, Settings
from service.threads import require_threads

SETTINGS = Settings("t", "cpu", Path("/models"), "random", "127.0.0.1", 1, Limits())


def test_the_thread_that_loads_a_model_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def load(_settings: Settings, name: str) -> str:
        threads.append(threading.current_thread())
        return name

    async def scenario() -> None:
        await server.make_service(SETTINGS).models.load("finbert")
        for thread in threads:
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()

    monkeypatch.setattr(server, "_load", load)
    asyncio.run(scenario())
    assert len(threads) == 1


def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise ModelUnreadable("the file is damaged")

    with pytest.raises(ModelUnreadable, match="damaged"):
        asyncio.run(run_in_thread(work, name="load"))


def test_work_that_nobody_waits_for_any_more_ends_without_a_sound() -> None:
    gate, threads = threading.Event(), []

    def work() -> None:
        threads.append(threading.current_thread())
        gate.wait(60)

    async def scenario() -> None:
        task = asyncio.create_task(run_in_thread(work, name="load"))
        await asyncio.sleep(0)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_limit_of_processes_is_reported_before_openmp_ends_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ServiceError, match="`torch` can't be started: can't start new thread") as caught:
        require_threads(3, name="torch")
    assert "pids_limit" in caught.value.hint
    started.clear()
    require_threads(2, name="torch")
    assert len(started) == 2, "they weren't asked for together"
    assert threading.active_count() == before, "a thread that only asked stays"
