"""Tests that need a process, torch or a GPU; each says what it lacks and is skipped."""

import json
import sys

import pytest
from device_bars import Bar


@pytest.fixture
def bar(capsys: pytest.CaptureFixture[str]) -> Bar:
    def hold(
        name: str, value: float, *, limit: float, unit: str = "", at_least: bool = False, **more: object
    ) -> None:
        ok = value >= limit if at_least else value <= limit
        line = {"bar": name, "value": float(f"{value:.4g}"), "limit": limit, "unit": unit, "ok": ok}
        line |= {"must_be": "at least" if at_least else "at most", **more}
        with capsys.disabled():
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        assert ok, line

    return hold


@pytest.fixture
def gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
