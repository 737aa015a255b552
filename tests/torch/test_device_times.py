"""What `run_placement.sh --only times` judges."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "device")]

import placing_times  # noqa: E402
from board import Board  # noqa: E402


def test_a_case_whose_capture_fails_misses_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(_group: Any, _model: Any, placements: Any, errors: list[float]) -> None:
        errors += [0.01] * (len(placements) - 1)  # one case of each model can't be captured

    @contextmanager
    def tried(_what: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(placing_times, "_model", measured)
    monkeypatch.setattr(placing_times, "free", lambda: None)
    board = Board("placement-times", results=tmp_path)
    placing_times.times(SimpleNamespace(board=board, begun=0.0, tried=tried))
    assert board.finish() == 1
