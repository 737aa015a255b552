"""Any architecture, placed with the allocator capped at the budget: `run_placement.sh --only any`.

The cases and their rule are in placing_architectures.py: every architecture of its list, at two batches, in
two budgets, captured and eager. A budget is a share of the weights' bytes and what the plan counts besides
weights and their buffers. Where no plan fits it, the smallest that works is taken, and the row says so. All
cases are rows; one that fails is a row with its error, and misses the bars.
"""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from placing_architectures import BATCHES, SHARES, every
from placing_case import Bench
from placing_measure import captured, differing_bits, free, small_operation_s, wall_s
from placing_models import Model

from probes.core.errors import PlacementError, PlanImpossible
from probes.placement import Plan, plan
from probes.placement.models.description import ModelDescription
from probes.placement.planner.api import resolve_machine, resolve_model
from probes.placement.planner.machine import Constants
from probes.placement.types import Workload

MEASURE = os.environ.get("ANY_MEASURE", "1") == "1"  # plans with each operation's time on this card
WAYS = os.environ.get("ANY_WAYS", "captured,eager").split(",")  # a part, as a lent machine has time for
ROOMY = 16 << 30  # beside the weights: everything is resident
LIMITS = {"captured": (0.20, 0.10), "eager": (0.30, 0.15)}  # the worst, and what 90 % of cases are within
EAGER_OVER = 1.3  # x the larger of eager resident and captured placed
HELD = (0.85, 0.97)  # share of cases that intervals are to hold


def any_architecture(group: Any) -> None:
    """Every case of these models, then the bars over what has been measured so far, by this run.

    ANY_MODELS=FIRST:LAST runs a part of the list, and ANY_WAYS=captured or eager one way, as a call on a lent
    machine has time for.
    """
    first, _, last = os.environ.get("ANY_MODELS", "").partition(":")
    part = slice(int(first or 0), int(last) if last else None)
    try:
        for model in every()[part]:
            with group.tried(model.name):
                _model(group, model)
            free()
    finally:  # also of a run that was stopped
        judge(group.board, list(group.board.rows))


def judge(board: Any, rows: list[dict[str, Any]]) -> None:
    """The bars over the cases among these rows."""
    cases = [row for row in rows if "any" in row]
    for how, (worst, most) in LIMITS.items():
        title, of = f"any architecture, {how}", [row for row in cases if row["how"] == how]
        timed = [row for row in of if row["measured_s"] is not None]
        if not timed:
            continue
        off = sorted(abs(row["predicted_s"] / row["measured_s"] - 1) for row in timed)
        board.bar(f"{title}: predicted time, worst", off[-1], worst, "share off")
        at = off[max(math.ceil(0.9 * len(off)) - 1, 0)]
        board.bar(f"{title}: predicted time, 90 % of cases", at, most, "share off")
        board.figure(f"{title}: predicted time, median", median(off), "share off")
        held = sum(row["interval_s"][0] <= row["measured_s"] <= row["interval_s"][1] for row in timed)
        board.bar(f"{title}: intervals hold", held / len(timed), HELD[0], "share of cases", at_least=True)
        board.bar(f"{title}: intervals hold, at most", held / len(timed), HELD[1], "share of cases")
        ran_out = sum(row["why_not"].startswith("out of memory") for row in of)
        board.bar(f"{title}: failures besides memory", len(of) - len(timed) - ran_out, 0, "cases")
        board.bar(f"{title}: out of memory in a pass", ran_out, 0, "cases")
        over = sum(row["peak"]["reserved"] > row["vram_budget"] for row in timed)
        board.bar(f"{title}: peak above the budget", over, 0, "cases")
        board.figure(f"{title}: measured", len(timed), "cases")
        differing = sum(bool(row["differing_bits"]) for row in timed)
        board.bar(f"{title}: other bits than resident", differing, 0, "cases")
        repeats = sum(not row["resident_again_differing_bits"] for row in of)
        board.figure(f"{title}: resident twice has the same bits", repeats, "cases")
    if slow := [row["over"] for row in cases if row.get("over")]:
        board.bar("any architecture: eager placed over resident or captured", max(slow), EAGER_OVER, "x")


def _model(group: Any, model: Model) -> None:
    bench: Bench = group.bench(model)
    resident = {batch: _resident(bench, batch) for batch in BATCHES}
    before_s = {batch: found["eager_s"] for batch, found in resident.items()}
    machine = resolve_machine(group.machine, measure=MEASURE)
    bench.module.to("cpu")
    free()
    weights = sum(p.nbytes for p in bench.module.parameters())
    for batch in BATCHES:
        described, planned_by = {}, {}
        for how in WAYS:
            described[how] = _described(bench, batch, captured=how == "captured")
            planned_by[how] = small_operation_s()
        needs = {how: _needed(made, machine, weights) for how, made in described.items()}
        for share in SHARES:
            placed: dict[str, float | None] = {}
            for how in WAYS:
                begun = time.monotonic()
                asked = int(weights * share) + needs[how]
                made = _planned(described[how], machine, asked)
                row = _measured(bench, made, resident[batch], how)
                placed[how] = row["measured_s"]
                if how == "eager" and row["measured_s"] is not None:
                    row["resident_beside_s"] = beside_s = _beside_s(bench, batch)
                    around_s = (before_s[batch] + beside_s) / 2
                    before_s[batch] = beside_s
                    row["over"] = row["measured_s"] / max(around_s, placed.get("captured") or 0.0)
                    row["host_planned_s"] = planned_by[how]
                name = f"{model.name}, batch {batch}, {share} of its weights, {how}"
                row |= {"budget_asked": asked, "how": how, "took_s": round(time.monotonic() - begun, 1)}
                group.board.line({"any": name, **row, **_times(resident[batch])})


def _times(resident: dict[str, Any]) -> dict[str, Any]:
    names = ("eager_s", "captured_s", "again_differing_bits")
    return {f"resident_{name}": resident[name] for name in names}


def _resident(bench: Bench, batch: int) -> dict[str, Any]:
    one = bench.one_pass(batch)
    output = bench.model.output(one()).cpu()
    found: dict[str, Any] = {
        "output": output,
        "again_differing_bits": differing_bits(bench.model.output(one()).cpu(), output),
        "eager_s": wall_s(one, least_s=0.05, samples=5),
        "captured_s": None,
        "captured_output": None,
    }
    try:
        replay, kept = captured(one)
        replay()
        found["captured_output"] = bench.model.output(kept).cpu()
        found["captured_s"] = wall_s(replay, least_s=0.05, samples=5)
        del replay, kept
    except RuntimeError:
        torch.cuda.synchronize()
    free()
    return found


@dataclass(frozen=True)
class Described:
    """A model with its traced operations, measured on this card, and the batch of the pass."""

    model: ModelDescription
    batch: int
    captured: bool


def _described(bench: Bench, batch: int, *, captured: bool) -> Described:
    given = bench.model.inputs(batch, torch.device("cpu"))
    begun = time.monotonic()
    made = resolve_model(bench.module, Workload(batch), given, measure=MEASURE, captured=captured)
    host_s = made.traced.host_s if made.traced else None
    took = f"described in {time.monotonic() - begun:.1f} s"
    print(f"{bench.model.name}, batch {batch}: {took}, a pass takes the host {host_s} s", flush=True)
    return Described(made, batch, captured)


def _needed(described: Described, machine: Constants, weights: int) -> int:
    """Bytes that a plan counts besides weights and their buffers."""
    roomy = _plan(described, machine, weights + ROOMY).vram
    return roomy.activations + roomy.workspace + roomy.rounding


def _planned(described: Described, machine: Constants, asked: int) -> Plan:
    """The plan in this budget, or in the smallest that works."""
    try:
        return _plan(described, machine, asked)
    except PlanImpossible as error:
        smallest = re.search(r"--vram (\d+)MiB", error.hint)
        if smallest is None:
            raise
        return _plan(described, machine, int(smallest[1]) << 20)


def _plan(described: Described, machine: Constants, budget: int) -> Plan:
    return plan(
        described.model,
        vram=budget,
        machine=machine,
        batch=described.batch,
        captured=described.captured,
    )


def _beside_s(bench: Bench, batch: int) -> float:
    """An eager pass with everything resident, now: a host's speed differs from one second to another."""
    bench.module.to(bench.device)
    seconds = wall_s(bench.one_pass(batch), least_s=0.05, samples=5)
    bench.module.to("cpu")
    free()
    return seconds


def _measured(bench: Bench, made: Plan, resident: dict[str, Any], how: str) -> dict[str, Any]:
    """One placed case under the budget as a cap; captured, it has a resident capture's bits."""
    row: dict[str, Any] = {
        "predicted_s": made.time.middle_s,
        "interval_s": [made.time.low_s, made.time.high_s],
        "rests_on": made.rests_on,
        "bound": made.time.bound,
        "tiers": dict(Counter(block.tier for block in made.blocks)),
        "predicted_block_s": sum(block.predicted_s for block in made.blocks),
        "vram_budget": made.vram_budget,
        "measured_s": None,
        "why_not": "",
    }
    one: Callable[[], Any] = bench.one_pass(made.workload.batch)
    try:
        with bench.placed(made) as handle:
            output = bench.model.output(one()).cpu()
            row["differing_bits"] = differing_bits(output, resident["output"])
            run = handle.captured(one) if how == "captured" else one
            if resident["captured_output"] is not None and how == "captured":
                output = bench.model.output(run()).cpu()
                row["differing_bits"] += differing_bits(output, resident["captured_output"])
            row["retries"] = -torch.cuda.memory_stats().get("num_alloc_retries", 0)
            row["host_s"] = [small_operation_s()]
            row["measured_s"] = wall_s(run, least_s=0.06, samples=7)
            row["host_s"].append(small_operation_s())
            row["retries"] += torch.cuda.memory_stats().get("num_alloc_retries", 0)
            row["peak"] = bench.vram.peak()
    except torch.cuda.OutOfMemoryError as error:
        row["why_not"] = f"out of memory: {str(error)[:200]}"
    except (PlacementError, RuntimeError) as error:
        row["why_not"] = f"{type(error).__name__}: {str(error)[:200]}"
    free()
    return row
