"""Long work is never silent for long, and quick work prints only what it was given."""

import io
import time
from types import SimpleNamespace

import pytest

from buildtool.core import progress
from buildtool.core.progress import ProgressLog


def test_a_line_carries_the_seconds_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    out = io.StringIO()
    steps = ProgressLog(stream=out)
    steps.line("one step")
    now[0] += 61.25
    steps.line("another")
    assert out.getvalue() == "[   0.0s] one step\n[  61.2s] another\n"


def test_a_silent_step_gets_signs_of_life_that_name_it() -> None:
    out = io.StringIO()
    with ProgressLog(silence_s=0.02, stream=out) as steps:
        steps.line("a long step")
        deadline = time.monotonic() + 60
        while "still at it after: a long step" not in out.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_after_the_end_nothing_more_is_said() -> None:
    out = io.StringIO()
    with ProgressLog(silence_s=0.01, stream=out):
        pass
    said = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == said
