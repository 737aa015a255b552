"""What run_placement.sh judges of its own rows."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "bench"))
sys.path.append(str(ROOT / "tests" / "device"))

from board import Board  # noqa: E402
from placing_summary import summary  # noqa: E402


def _row(
    case: str, planned_s: float, eager_planned_s: float | None, **measured: float | None
) -> dict[str, Any]:
    eager = None if eager_planned_s is None else {"middle_s": eager_planned_s}
    return {
        "case": case,
        "predicted": {"pass": {"middle_s": planned_s}},
        "predicted_eager": eager,
        **measured,
    }


def test_no_missed_row_is_left_out_of_the_summary(tmp_path: Path) -> None:
    rows = [
        _row("captured plan", 1.0, None, captured_s=1.0, eager_s=3.0),
        _row("eager plan", 1.69, 1.69, captured_s=2.0, eager_s=1.8),  # its replay is 15.5 % off
    ]
    (tmp_path / "bench-placement-square.json").write_text(json.dumps({"rows": rows}))
    board = Board("placement-summary", results=tmp_path)
    summary(SimpleNamespace(board=board))
    assert board.finish() == 1
    kept = json.loads((tmp_path / "bench-placement-summary.json").read_text())["rows"]
    judged = {row["prediction"]: round(row["off"], 3) for row in kept if "prediction" in row}
    assert judged == {
        "captured plan, captured": 0.0,
        "eager plan, captured": 0.155,
        "eager plan, eager": 0.061,
    }
    (worst,) = [row for row in kept if row.get("bar", "").endswith("worst")]
    assert not worst["ok"]
    assert not any("held" in json.dumps(row) for row in kept)
