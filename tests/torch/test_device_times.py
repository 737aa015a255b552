"""What `run_placement.sh` judges of times."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "device")]

import placing  # noqa: E402
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


def test_a_replay_is_compared_with_its_own_device_time_and_not_with_the_eager_passes(tmp_path: Path) -> None:
    """An eager pass's device time is the longer one, so that the bar could not be missed."""
    found = SimpleNamespace(
        captured_s=1.2, device_s=2.0, differing=0, why_not="", more={"replay_device_s": 1.0}
    )
    bench = SimpleNamespace(model=SimpleNamespace(name="BERT"), measure=lambda _plan: found)
    board = Board("placement-bert", results=tmp_path)
    group = SimpleNamespace(board=board, keep=lambda *_: None)
    placing._architecture(group, bench, 1, SimpleNamespace())
    assert board.finish() == 1
    (row,) = [row for row in board._rows if "device time" in str(row.get("bar"))]
    assert row["value"] == 1.2
