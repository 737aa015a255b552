"""One model on one machine with one workload: its kinds of blocks, what budgets leave for weights. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from probes.placement.models.description import ModelDescription
from probes.placement.planner.costs.constants import ASSUMED_HOST, Constants
from probes.placement.planner.costs.option import Pass
from probes.placement.planner.footprint import Surroundings, surroundings
from probes.placement.planner.searching.blockkinds import Kind, kinds, together
from probes.placement.planner.searching.placed import Limits
from probes.placement.values import Objective, Workload


class Task:
    """What is planned, and what around the weights takes memory."""

    def __init__(
        self,
        model: ModelDescription,
        machine: Constants,
        workload: Workload,
        objective: Objective,
        captured: bool,
    ) -> None:
        # a tied embedding is looked up first, which takes no time, and multiplied last
        ordered = sorted(model.blocks, key=lambda block: block.looked_up)
        self.model, self.machine, self.workload = replace(model, blocks=tuple(ordered)), machine, workload
        generating = workload.context_tokens > 0
        rows = workload.batch * (1 if generating else workload.tokens)
        context = workload.context_tokens if generating else workload.tokens
        self.work = Pass(rows, workload.batch, context, objective, captured, generating)
        self.kinds: Sequence[Kind] = kinds(self.model, machine, self.work)
        self.counted: Sequence[Kind] = together(self.kinds)
        self.weight_bytes = sum(kind.block.weight_bytes * len(kind.places) for kind in self.kinds)
        one_of_each = [kind.block for kind in self.kinds]
        self.around: Surroundings = surroundings(one_of_each, machine, workload, captured=captured)

    def limits(self, vram: int, host: int | None) -> Limits:
        """What is left for weights; in host memory, beside what loading takes."""
        machine, host_bytes = self.machine, self.host_bytes(host)
        pinned = int(machine.pinned_share * min(host_bytes, machine.host_bytes or host_bytes))
        left = self.around.left(vram, machine) if machine.has_gpu else 0
        return Limits(left, host_bytes - self.model.loading_bytes, pinned, replayed=self.work.captured)

    def host_bytes(self, host: int | None) -> int:
        """Bytes of host memory that may be used; None: as much as the machine has, or is assumed to have."""
        if host is not None:
            return host
        has = self.machine.host_bytes
        return has if has is not None else ASSUMED_HOST
