"""Lines of the log: one by one where they are rare, together where they are many, and none lost."""

import asyncio
import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from service import cli
from service import log as service_log
from service.log import BufferedHandler


class Writes(io.StringIO):
    """Keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def write(self, text: str) -> int:
        self.seen.append(text)
        return len(text)


@pytest.fixture
def writes() -> Writes:
    return Writes()


@pytest.fixture
def log(writes: Writes, monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    monkeypatch.setattr(service_log, "MAX_DELAY_S", 0.01)
    made = logging.Logger("gathered", logging.INFO)
    made.addHandler(BufferedHandler(writes, now=lambda: 0.0))  # no time passes but the event loop's
    return made


def test_a_line_that_comes_alone_is_written_at_once(log: logging.Logger, writes: Writes) -> None:
    async def scenario() -> None:
        log.info("a")
        assert writes.seen == ["a\n"]

    asyncio.run(scenario())


def test_lines_that_come_soon_after_another_are_written_together_by_themselves(
    log: logging.Logger, writes: Writes
) -> None:
    async def scenario() -> None:
        for each in "abc":
            log.info(each)
        assert writes.seen == ["a\n"]
        while len(writes.seen) < 2:
            await asyncio.sleep(0.002)
        for each in "de":
            log.info(each)
        while len(writes.seen) < 3:
            await asyncio.sleep(0.002)

    asyncio.run(scenario())
    assert writes.seen == ["a\n", "b\nc\n", "d\ne\n"]


def test_a_warning_is_written_at_once_after_the_lines_before_it(log: logging.Logger, writes: Writes) -> None:
    async def scenario() -> None:
        for each in "ab":
            log.info(each)
        log.warning("w")

    asyncio.run(scenario())
    assert writes.seen == ["a\n", "b\nw\n"]


def test_what_no_event_loop_would_write_is_written_at_once_and_the_rest_at_the_end(
    log: logging.Logger, writes: Writes
) -> None:
    log.info("a")
    log.info("b")
    assert writes.seen == ["a\n", "b\n"]

    async def scenario() -> None:
        log.info("c")

    asyncio.run(scenario())
    log.handlers[0].flush()
    assert writes.seen == ["a\n", "b\n", "c\n"]


def test_a_log_that_nobody_reads_any_more_ends_nothing(
    log: logging.Logger, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_text: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(logging, "raiseExceptions", False)
    failures: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
        log.info("a")
        monkeypatch.setattr(writes, "write", broken)
        log.info("b")
        await asyncio.sleep(0.02)
        log.warning("c")

    asyncio.run(scenario())
    assert (writes.seen, failures) == (["a\n"], [])


def test_the_last_lines_are_written_when_the_service_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(_settings: object) -> None:
        for each in ("listening", "loading", "stopped"):
            logging.getLogger("service").info(each)

    monkeypatch.setitem(sys.modules, "service.server", SimpleNamespace(serve=serve))
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    monkeypatch.setattr(logging.getLogger("service"), "level", logging.INFO)
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "filters", [])
    profiles = Path(cli.__file__).parents[1] / "profiles"
    assert cli.main({"WEIR_PROFILES_DIR": str(profiles)}) == 0
    said = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert said == ["listening", "loading", "stopped"]
