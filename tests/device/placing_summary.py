"""Judges what all groups' plans predicted against what was measured, and gathers their rows in one file.

Every row is judged. A plan for eager passes predicts nothing for their replay as a graph, which ends with its
last copy; such a row is judged all the same, and says so.
"""

import json
import statistics
from typing import Any

LIMIT = 0.10


def summary(group: Any) -> None:
    """The constants come from a profile or a probe report, and were fitted on some of these models."""
    errors = []
    for file in sorted(group.board.results.glob("bench-placement-*.json")):
        for row in json.loads(file.read_text())["rows"]:
            if "case" in row and "predicted" in row:
                errors += _judged(group, row)
    board = group.board
    board.bar("cases with a predicted and a measured time", len(errors), 12, "cases", at_least=True)
    if errors:
        board.bar("predicted time, all rows, worst", max(errors), LIMIT, "share off")
        board.figure("predicted time, all rows, median", statistics.median(errors), "share off")
        board.figure("rows within 10 %", sum(error <= LIMIT for error in errors), "cases")


def _judged(group: Any, row: dict[str, Any]) -> list[float]:
    """How far each of the row's predictions is off."""
    errors = []
    planned, eager = row["predicted"]["pass"], row["predicted_eager"]
    for how, predicted in (("captured", planned), ("eager", eager)):
        measured_s = row[f"{how}_s"]
        if predicted and predicted["middle_s"] and measured_s:
            errors.append(abs(predicted["middle_s"] / measured_s - 1))
            group.board.line(
                {
                    "prediction": f"{row['case']}, {how}",
                    "planned_for_eager_passes": planned == eager,
                    "predicted_s": predicted["middle_s"],
                    "measured_s": measured_s,
                    "off": errors[-1],
                }
            )
    return errors
