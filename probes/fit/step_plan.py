"""A training step on a machine: the bytes that it takes, by rules, and its time, by its traced operations."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from probes.core.errors import UsageError
from probes.fit import step
from probes.fit.report import FitReport
from probes.placement.models.transformers_config import silently
from probes.placement.planner.machine import Constants
from probes.placement.training.step_time import Begins, StepTime, step_time, traced_step


@dataclass(frozen=True)
class StepPlan:
    """What `plan --train` says. `measured`: the device on which operations were timed, or empty."""

    memory: FitReport
    time: StepTime
    measured: str

    @property
    def samples_per_s(self) -> float:
        """Of all micro-batches of a step."""
        return self.memory.question.batch * self.memory.question.accumulate / self.time.step_s


def plan_step(
    config: Mapping[str, Any],
    memory: FitReport,
    machine: Constants,
    *,
    measure: torch.device | None = None,
) -> StepPlan:
    """The step of a question that was answered for its bytes. Needs torch and transformers, and no GPU.

    `measure`: this machine's GPU, on which each distinct operation is timed. Raises UsageError for a machine
    without a GPU, PlacementError for a model that can't be traced, and what `step.make` raises.
    """
    if not machine.has_gpu:
        raise UsageError("a CPU's time for a training step isn't predicted", "name a card: --machine h200")
    question = memory.question
    one = replace(question, accumulate=1)
    made = step.make(config, one, "meta")
    device = "cpu" if measure is None else measure.type

    def two_steps(begins: Begins) -> None:
        ready = step.ready(made, one, device, foreach=True)
        step.run(ready, one, lambda name: begins(name.partition(": ")[2].partition(",")[0]))

    with silently():
        work = traced_step(made.module, two_steps, device, measure=measure)
    return StepPlan(memory, step_time(work, machine, accumulate=question.accumulate), str(measure or ""))
