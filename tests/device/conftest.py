"""Tests that need a process, torch or a GPU; each says what it lacks and is skipped.

Each bar is printed as a line of JSON. With WEIR_BARS set to `DIR/bench-NAME.json`, all of them are kept
there, as the benches keep theirs (tests/bench/board.py), for the figures of the docs.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_bars import Bar

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from board import Board


@pytest.fixture(scope="session")
def board() -> Iterator[Board]:
    kept = Path(os.environ.get("WEIR_BARS", ""))
    name = kept.stem.removeprefix("bench-")
    command = os.environ.get("WEIR_COMMAND", "tests/device/run_quick.sh")
    made = Board(name or "device", command=command, whole=bool(name), results=kept.parent)
    yield made
    made.finish()


@pytest.fixture
def bar(capsys: pytest.CaptureFixture[str], board: Board) -> Bar:
    def hold(
        name: str, value: float, *, limit: float, unit: str = "", at_least: bool = False, **more: object
    ) -> None:
        with capsys.disabled():
            board.bar(name, value, limit, unit, at_least=at_least, **more)
        assert value >= limit if at_least else value <= limit, (name, value, limit)

    return hold


@pytest.fixture
def gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
