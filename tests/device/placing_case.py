"""One case of run_placement.sh: a model all-resident, then placed by its plan under a cap, on the same
inputs.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from placing_measure import Vram, captured, device_s, differing_bits, free, host_bytes, wall_s
from placing_models import Model, filled
from torch import nn

from probes.placement import Handle, PlacementError, Plan, place, plan
from probes.placement.models.modules import find_blocks
from probes.placement.types import (
    BlockPlan,
    HostUse,
    Objective,
    PassTime,
    PrefetchPool,
    Tier,
    VramUse,
    Workload,
)

GIB = 1 << 30
BUDGET = 4 * GIB
BY_HAND = "by hand"
ROOM = 192 << 20  # of the budget, for activations and the libraries' workspace, in plans by hand


@dataclass
class Resident:
    """The reference: everything in VRAM, uncapped, in torch's own kernels."""

    output: torch.Tensor  # on the host
    eager_s: float
    captured_s: float | None
    why_not: str = ""  # it can't be captured
    # on the host; some models take another attention path while a graph is recorded, so its bits may differ
    captured_output: torch.Tensor | None = None

    @property
    def best_s(self) -> float:
        """The faster of the two: the fair baseline."""
        return min(self.eager_s, self.captured_s or self.eager_s)


@dataclass
class Found:
    """A placed model, measured."""

    plan: Plan
    eager_s: float
    captured_s: float | None
    why_not: str
    device_s: float | None  # of the eager pass
    differing: int
    worst_error: float  # of the output, over the largest of the reference
    vram: dict[str, int]
    host: dict[str, int]
    place_s: float
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def best_s(self) -> float:
        """The faster way to run it."""
        return min(self.eager_s, self.captured_s or self.eager_s)

    def row(self) -> dict[str, Any]:
        """What the JSON keeps, the plan in short."""
        tiers: dict[str, int] = {}
        for block in self.plan.blocks:
            tiers[block.tier] = tiers.get(block.tier, 0) + 1
        kept = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("plan", "more")
        }
        predicted = {
            "pass": dataclasses.asdict(self.plan.time),
            "vram": {**dataclasses.asdict(self.plan.vram), "total": self.plan.vram.total},
            "host": dataclasses.asdict(self.plan.host),
        }
        return {
            **kept,
            **self.more,
            "predicted": predicted,
            "tiers": tiers,
            "objective": self.plan.objective,
            "batch": self.plan.workload.batch,
            "tokens": self.plan.workload.tokens,
            "vram_budget": self.plan.vram_budget,
        }


class Bench:
    """One model through all its cases: built once, measured resident for each batch, then placed again and
    again.
    """

    def __init__(self, model: Model, machine: str, vram: Vram) -> None:
        self.model, self.machine, self.vram = model, machine, vram
        self.device = torch.device("cuda")
        self.module: nn.Module = filled(model, self.device)
        self._resident: dict[int, Resident] = {}

    def resident(self, *batches: int) -> None:
        """Measure the reference, then move the model to the host."""
        for batch in batches:
            one = self.one_pass(batch)
            with torch.inference_mode():
                output = self.model.output(one()).cpu()
                eager_s, (captured_s, why, replayed) = wall_s(one), self._recorded(one)
            self._resident[batch] = Resident(output, eager_s, captured_s, why, replayed)
        self.module.to("cpu")
        free()

    def reference(self, batch: int) -> Resident:
        """What `resident` measured."""
        return self._resident[batch]

    def one_pass(self, batch: int) -> Any:
        """A pass with fixed inputs in VRAM."""
        inputs = self.model.inputs(batch, self.device)
        return torch.inference_mode()(lambda: self._call(inputs))

    def _call(self, inputs: dict[str, Any]) -> Any:
        return self.module(**inputs)

    def plan(
        self,
        batch: int,
        objective: Objective,
        *,
        budget: int = BUDGET,
        context: int = 0,
        captured: bool = True,
    ) -> Plan:
        """The plan for this machine. `budget` is what torch's allocator may take."""
        return plan(
            self.module,
            vram=budget,
            machine=self.machine,
            batch=batch,
            tokens=self.model.tokens,
            context=context,
            objective=objective,
            captured=captured,
        )

    def quicker_plan(self, batch: int, objective: Objective) -> Plan:
        """Of the plans for captured and for eager passes the one that promises to be quicker."""
        plans = [self.plan(batch, objective, captured=captured) for captured in (True, False)]
        return min(plans, key=lambda made: made.time.middle_s)

    def eager_time(self, made: Plan) -> PassTime | None:
        """What is predicted for passes that aren't captured, if the plan for them has the same tiers."""
        if made.machine == BY_HAND:
            return None
        work = made.workload
        other = self.plan(
            work.batch, made.objective, budget=made.vram_budget, context=work.context_tokens, captured=False
        )
        same = [b.tier for b in other.blocks] == [b.tier for b in made.blocks]
        return other.time if same else None

    def spread(self, tier: Tier, *, batch: int = 1, budget: int = BUDGET) -> Plan:
        """A plan by hand: what doesn't fit has this tier, evenly spread; nothing in it is predicted."""
        blocks = find_blocks(self.module)
        slot = max(block.n_bytes for block in blocks)
        rings = PrefetchPool(
            slots=2, slot_bytes=slot, scratches=2, scratch_bytes=slot if "packed" in tier else 0
        )
        room = budget - ROOM - 2 * rings.slot_bytes - 2 * rings.scratch_bytes
        fitting = int(room // slot)
        moving = len(blocks) - fitting
        places = [(i + 1) * moving // len(blocks) > i * moving // len(blocks) for i in range(len(blocks))]
        made = tuple(
            BlockPlan(
                block.name,
                tier if moves else "resident",
                block.n_bytes,
                vram_bytes=block.n_bytes * (not moves),
                host_bytes=block.n_bytes * moves,
                wire_bytes=block.n_bytes * moves,
                predicted_s=0.0,
            )
            for block, moves in zip(blocks, places, strict=True)
        )
        buffers = rings.slots * rings.slot_bytes, rings.scratches * rings.scratch_bytes
        moved = sum(block.host_bytes for block in made)
        return Plan(
            model=self.model.name,
            machine=BY_HAND,
            constants="none",
            objective="exact",
            workload=Workload(batch=batch),
            vram_budget=budget,
            host_budget=moved,
            blocks=made,
            rings=rings,
            vram=VramUse(budget - sum(buffers), *buffers, 0, 0, 0, 0, 0),
            host=HostUse(moved, 0, 0),
            time=PassTime(0.0, 0.0, 0.0, "link"),
        )

    @contextmanager
    def placed(self, made: Plan) -> Iterator[Handle]:
        """The model placed by a plan, under the plan's budget as a cap; as it was afterwards."""
        handle = None
        try:
            with self.vram.capped(made.vram_budget):
                handle = place(self.module, made)
                yield handle
        finally:
            if handle is not None:
                handle.remove()
            del handle
            free()

    def measure(self, made: Plan, *, with_device: bool = True) -> Found:
        """Everything about one placed case."""
        batch = made.workload.batch
        reference = self.reference(batch)
        before = host_bytes()
        begun = time.perf_counter()
        with self.placed(made) as handle:
            torch.cuda.synchronize()
            place_s = time.perf_counter() - begun
            one = self.one_pass(batch)
            with torch.inference_mode():
                output = self.model.output(one()).cpu()
                eager_s = wall_s(one)
                busy = device_s(one) if with_device else None
                self.captured_bits: int | None = None
                captured_s, replay_device_s, why = self._replayed(
                    handle, one, reference, with_device=with_device
                )
            peak, after = self.vram.peak(), host_bytes()
            report = handle.report()
        largest = float(reference.output.double().abs().max()) or 1.0
        worst = float((output.double() - reference.output.double()).abs().max()) / largest
        grown = {name: after[name] - before.get(name, 0) for name in after}
        bits = differing_bits(output, reference.output)
        more = {
            "replay_device_s": replay_device_s,
            "captured_differing": self.captured_bits,
            "predicted_eager": _time(self.eager_time(made)),
            "taken": {
                "vram_asked": report.vram_asked,
                "vram_taken": report.vram_taken,
                "pinned_asked": report.pinned_asked,
                "pinned_taken": report.pinned_taken,
            },
            "why_pageable": report.why_pageable,
            "why_unbundled": handle._engine.lanes.why_unbundled,
            "why_memsets": handle._engine.lanes.why_memsets,
            "dense": sum(block.dense for block in made.blocks),
            "buffers": [made.rings.slots, made.rings.scratches],
        }
        return Found(made, eager_s, captured_s, why, busy, bits, worst, peak, grown, place_s, more)

    def _replayed(
        self, handle: Handle, one: Any, reference: Resident, *, with_device: bool
    ) -> tuple[float | None, float | None, str]:
        """Wall and device time of the placed pass replayed as a graph, or why it can't be.

        Its output is compared with that of the unplaced model's graph, where there is one.
        """
        try:
            graph = handle.captured(one)
        except PlacementError as error:
            return None, None, str(error)[:300]
        output = self.model.output(graph()).cpu()
        expected = reference.output if reference.captured_output is None else reference.captured_output
        self.captured_bits = differing_bits(output, expected)
        return wall_s(graph), device_s(graph) if with_device else None, ""

    def _recorded(self, one: Any) -> tuple[float | None, str, torch.Tensor | None]:
        """The wall time of the unplaced pass replayed as a graph and its output, or why it can't be."""
        try:
            replay, output = captured(one)
        except RuntimeError as error:  # capture refuses what synchronises
            torch.cuda.synchronize()
            return None, f"{type(error).__name__}: {error}".splitlines()[0][:200], None
        found = wall_s(replay)
        kept = self.model.output(output).cpu()
        del replay, output
        free()
        return found, "", kept


def _time(found: PassTime | None) -> dict[str, Any] | None:
    return dataclasses.asdict(found) if found else None
