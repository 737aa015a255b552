"""Any architecture, placed with the allocator capped at the budget: `run_placement.sh --only any`.

The cases and their rule are in placing_architectures.py: every architecture of its list, at two batches, in
two budgets, captured and eager. A budget is a share of the weights' bytes and what the plan counts besides
weights and their buffers. Where no plan fits it, the smallest that works is taken, and the row says so. All
cases are rows; one that fails is a row with its error, and misses the bars.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from placing_architectures import BATCHES, SHARES, every
from placing_case import Bench
from placing_measure import captured, differing_bits, free, wall_s
from placing_models import Model

from probes.core.errors import PlacementError, PlanImpossible
from probes.placement import Plan, plan

ROOMY = 16 << 30  # beside the weights: everything is resident
LIMITS = {"captured": (0.20, 0.10), "eager": (0.30, 0.15)}  # the worst, and what 90 % of cases are within
EAGER_OVER = 1.3  # x the larger of eager resident and captured placed
HELD = (0.85, 0.97)  # share of cases that intervals are to hold


@dataclass
class Judged:
    """What all cases of one way showed."""

    off: list[float] = field(default_factory=list)
    held: int = 0
    failed: int = 0
    ran_out: int = 0
    over_budget: int = 0
    slow: list[float] = field(default_factory=list)


def any_architecture(group: Any) -> None:
    """Every case, then the bars."""
    judged = {how: Judged() for how in LIMITS}
    for model in every():
        with group.tried(model.name):
            _model(group, model, judged)
        free()
    for how, (worst, most) in LIMITS.items():
        found, board = judged[how], group.board
        if not found.off:
            continue
        ordered = sorted(found.off)
        board.bar(f"any architecture, {how}: predicted time, worst", ordered[-1], worst, "share off")
        at = ordered[max(int(0.9 * len(ordered)) - 1, 0)]
        board.bar(f"any architecture, {how}: predicted time, 90 % of cases", at, most, "share off")
        board.figure(f"any architecture, {how}: predicted time, median", median(ordered), "share off")
        share = found.held / len(ordered)
        board.bar(f"any architecture, {how}: intervals hold", share, HELD[0], "share of cases", at_least=True)
        board.bar(f"any architecture, {how}: intervals hold, at most", share, HELD[1], "share of cases")
        board.bar(f"any architecture, {how}: failures besides memory", found.failed, 0, "cases")
        board.bar(f"any architecture, {how}: out of memory in a pass", found.ran_out, 0, "cases")
        board.bar(f"any architecture, {how}: peak above the budget", found.over_budget, 0, "cases")
    if slow := judged["eager"].slow:
        board = group.board
        board.bar("any architecture: eager placed over resident or captured", max(slow), EAGER_OVER, "x")


def _model(group: Any, model: Model, judged: dict[str, Judged]) -> None:
    bench: Bench = group.bench(model)
    resident = {batch: _resident(bench, batch) for batch in BATCHES}
    bench.module.to("cpu")
    free()
    weights = sum(p.nbytes for p in bench.module.parameters())
    for batch in BATCHES:
        for share in SHARES:
            placed: dict[str, float | None] = {}
            for how in LIMITS:
                name = f"{model.name}, batch {batch}, {share} of its weights, {how}"
                made, asked = _planned(bench, batch, int(weights * share), captured=how == "captured")
                row = _measured(bench, made, resident[batch]["output"], how)
                placed[how] = row["measured_s"]
                group.board.line({"any": name, "budget_asked": asked, **row, **_times(resident[batch])})
                _judge(judged[how], made, row)
            _judge_eager(judged["eager"], resident[batch]["eager_s"], placed)


def _times(resident: dict[str, Any]) -> dict[str, Any]:
    return {f"resident_{name}": resident[name] for name in ("eager_s", "captured_s")}


def _resident(bench: Bench, batch: int) -> dict[str, Any]:
    one = bench.one_pass(batch)
    output = bench.model.output(one()).cpu()
    found: dict[str, Any] = {
        "output": output,
        "eager_s": wall_s(one, least_s=0.05, samples=5),
        "captured_s": None,
    }
    try:
        replay, kept = captured(one)
        found["captured_s"] = wall_s(replay, least_s=0.05, samples=5)
        del replay, kept
    except RuntimeError:
        torch.cuda.synchronize()
    free()
    return found


def _planned(bench: Bench, batch: int, weights: int, *, captured: bool) -> tuple[Plan, int]:
    """The plan, and the budget that the rule asks for."""
    given = bench.model.inputs(batch, torch.device("cpu"))

    def planned(budget: int) -> Plan:
        return plan(
            bench.module, vram=budget, machine=bench.machine, inputs=given, batch=batch, captured=captured
        )

    roomy = planned(weights + ROOMY).vram
    asked = weights + roomy.activations + roomy.workspace + roomy.rounding
    try:
        return planned(asked), asked
    except PlanImpossible as error:
        smallest = re.search(r"--vram (\d+)MiB", error.hint)
        if smallest is None:
            raise
        return planned(int(smallest[1]) << 20), asked


def _measured(bench: Bench, made: Plan, reference: torch.Tensor, how: str) -> dict[str, Any]:
    """One placed case under the budget as a cap."""
    row: dict[str, Any] = {
        "predicted_s": made.time.middle_s,
        "interval_s": [made.time.low_s, made.time.high_s],
        "rests_on": made.rests_on,
        "bound": made.time.bound,
        "vram_budget": made.vram_budget,
        "measured_s": None,
        "why_not": "",
    }
    one: Callable[[], Any] = bench.one_pass(made.workload.batch)
    try:
        with bench.placed(made) as handle:
            output = bench.model.output(one()).cpu()
            row["differing_bits"] = differing_bits(output, reference)
            run = handle.captured(one) if how == "captured" else one
            row["measured_s"] = wall_s(run, least_s=0.06, samples=7)
            row["peak"] = bench.vram.peak()
    except torch.cuda.OutOfMemoryError as error:
        row["why_not"] = f"out of memory: {str(error)[:200]}"
    except (PlacementError, RuntimeError) as error:
        row["why_not"] = f"{type(error).__name__}: {str(error)[:200]}"
    free()
    return row


def _judge(judged: Judged, made: Plan, row: dict[str, Any]) -> None:
    if row["measured_s"] is None:
        ran_out = row["why_not"].startswith("out of memory")
        judged.ran_out += ran_out
        judged.failed += not ran_out
        return
    judged.off.append(abs(made.time.middle_s / row["measured_s"] - 1))
    judged.held += made.time.low_s <= row["measured_s"] <= made.time.high_s
    judged.over_budget += row["peak"]["reserved"] > made.vram_budget


def _judge_eager(judged: Judged, resident_s: float, placed: dict[str, float | None]) -> None:
    if placed["eager"] is not None:
        judged.slow.append(placed["eager"] / max(resident_s, placed["captured"] or 0.0))
