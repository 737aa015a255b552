"""Eager passes, predicted against measured: `run_placement.sh --only eager`.

A host's speed changes by half within seconds. So each pass is timed in turns with plain layers, and predicted
with what those took for an operation meanwhile: a row says how far the plan is off besides that.
"""

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from placing_case import Bench
from placing_measure import free
from placing_models import Model
from placing_times import LIMIT, MORE, ROOM, Case, traced

from probes.core.errors import PlanImpossible
from probes.measure.architectures import plain_layers
from probes.placement import Plan, place, plan
from probes.placement.models import modules
from probes.placement.planner.machine import PLAIN_OPERATIONS, profile
from probes.records.rows import SMALL_LAYERS

TURNS, UNIT_S, PASS_S = 7, 0.006, 0.03
ROOMY = 8 << 30  # beside the weights: everything is resident


class Host:
    """What Python takes for an operation just now."""

    def __init__(self) -> None:
        self._layers = plain_layers(SMALL_LAYERS, 256, heads=4, dtype=torch.float16, device="cuda")
        self._x = torch.randn(1, 16, 256, device="cuda", dtype=torch.float16)

    def operation_s(self) -> float:
        """By some milliseconds of plain layers."""
        return _wall(lambda: self._layers(self._x), UNIT_S) / (SMALL_LAYERS * PLAIN_OPERATIONS)

    @torch.inference_mode()
    def timed(self, one: Callable[[], Any]) -> tuple[float, float]:
        """Operations that a pass is as long as, the median over turns, and the seconds of one meanwhile."""
        one(), one(), self.operation_s()
        found, before = [], self.operation_s()
        for _ in range(TURNS):
            wall, after = _wall(one, PASS_S), self.operation_s()
            unit, before = (before + after) / 2, after
            found.append((wall / unit, unit))
        return median(count for count, _ in found), median(unit for _, unit in found)


def _wall(one: Callable[[], Any], least_s: float) -> float:
    torch.cuda.synchronize()
    begun, times = time.perf_counter(), 0
    while time.perf_counter() - begun < least_s:
        one()
        times += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times


def eager(group: Any) -> None:
    """Models resident and placed, then the bar."""
    errors: list[float] = []
    host = Host()
    for model, (case, *_) in traced():
        with group.tried(model.name):
            _model(group, host, model, case, errors)
        free()
    if errors:
        group.board.bar("eager passes, predicted time, worst", max(errors), LIMIT, "share off")
        group.board.figure("eager passes, predicted time, median", median(errors), "share off")


def _model(group: Any, host: Host, model: Model, case: Case, errors: list[float]) -> None:
    bench: Bench = group.bench(model)
    one, described = bench.one_pass(case.batch), modules.describe_module(bench.module)
    weights = sum(p.numel() * p.element_size() for p in bench.module.parameters())

    def planned(budget: int, operation_s: float) -> Plan:
        machine = dataclasses.replace(profile(bench.machine), operation_s=operation_s)
        work = {"batch": case.batch, "tokens": model.tokens, "objective": case.objective}
        return plan(described, vram=budget, machine=machine, **work)

    def judge(how: str, made: Plan, found: tuple[float, float]) -> None:
        count, operation_s = found
        again = planned(made.vram_budget, operation_s)
        off = abs(again.time.middle_s / (count * operation_s) - 1)
        errors.append(off)
        tiers = [block.tier for block in made.blocks]
        row = {
            "operations": count,
            "operation_s": operation_s,
            "predicted_s": again.time.middle_s,
            "off": off,
        }
        same = tiers == [block.tier for block in again.blocks]
        used = {tier: tiers.count(tier) for tier in dict.fromkeys(tiers)}
        group.board.line({"eager": f"{model.name}, {how}", **row, "tiers": used, "same_plan": same})

    judge("resident", planned(weights + ROOMY, host.operation_s()), host.timed(one))
    bench.module.to("cpu")
    free()
    budget = int(weights * case.share) + ROOM
    while True:
        try:
            made = planned(budget, host.operation_s())
            break
        except PlanImpossible:
            budget += MORE
    handle = place(bench.module, made)
    try:
        found = host.timed(one)
    finally:
        handle.remove()
        del handle
        free()
    judge("placed", made, found)
