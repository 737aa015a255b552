"""Judges what all groups' plans predicted against what was measured, and gathers their rows in one file."""

import json
import statistics
from typing import Any

LIMIT = 0.10


def summary(group: Any) -> None:
    """Every second pair of cases is held out. The constants come from a profile or a probe report."""
    errors = []
    for file in sorted(group.board.results.glob("bench-placement-*.json")):
        for row in json.loads(file.read_text())["rows"]:
            if "case" in row and "predicted" in row:
                predicted, eagerly = row["predicted"]["pass"], row["predicted_eager"]
                # a plan for eager passes says nothing of its replay as a graph, which ends with its last copy
                graph = None if predicted == eagerly else predicted
                for how, pass_time in (("captured", graph), ("eager", eagerly)):
                    measured = row[f"{how}_s"]
                    if pass_time and pass_time["middle_s"] and measured:
                        middle = pass_time["middle_s"]
                        errors.append((f"{row['case']}, {how}", middle, measured, abs(middle / measured - 1)))
    for number, (case, middle, measured, error) in enumerate(errors):
        half = "held out" if number // 2 % 2 else "first half"
        group.board.line(
            {"prediction": case, "half": half, "predicted_s": middle, "measured_s": measured, "off": error}
        )
    board = group.board
    board.bar("cases with a predicted and a measured time", len(errors), 12, "cases", at_least=True)
    held = [error for number, (_, _, _, error) in enumerate(errors) if number // 2 % 2]
    if held:
        board.bar("predicted time of the held-out half, worst", max(held), LIMIT, "share off")
        board.figure("predicted time of the held-out half, median", statistics.median(held), "share off")
