"""A model whose layers can be placed in VRAM or host memory, and the ways to run it.

Every way but the first goes through `probes.placement.runtime`, as a user's model does.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import torch

from probes.core.unknown import Unknown
from probes.measure.architectures import Built, build
from probes.measure.placement_scenarios import (
    budget_bytes,
    bytes_outside_vram,
    fixed_plan,
    layer_tiers,
    same_places,
)
from probes.measure.stacks import StackPlan
from probes.placement.models.description import ModelDescription
from probes.placement.models.modules import Block, describe_module, find_blocks
from probes.placement.planner.machine import nearest_profile, profile
from probes.placement.planner.plan import make_plan
from probes.placement.runtime.handle import Handle
from probes.placement.runtime.place import place
from probes.placement.types import Plan, Workload
from probes.records.rows import Scenario, Split

Operation = Callable[[], object]
ZeroCopy = Callable[[torch.Tensor], torch.Tensor]
LEAD_MARGIN = 2.0  # the wait before a pass outlasts handing it over by this factor
TRIED_AS = "h200"  # the profile that `placed` is planned with where there is no GPU: to try the code there


class LayerStack:
    """The workbench's `Stack`. Without `zero_copy` everything is in host memory (to try the code there)."""

    def __init__(
        self, plan: StackPlan, seed: int, *, zero_copy: ZeroCopy | None, wait: Callable[[float], None]
    ) -> None:
        self.plan = plan
        self._zero_copy = zero_copy
        self._wait = wait
        self._device = "cuda" if zero_copy else "cpu"
        self._built: Built | None = build(plan, self._device, seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._handle: Handle | None = None
        self._arranged: tuple[Scenario, int] | None = None
        self._plans: dict[tuple[Scenario, int], Plan] = {}
        self._blocks: tuple[Block, ...] = ()  # of the model, while it isn't placed
        self._description: ModelDescription | None = None
        self._inputs: dict[int, torch.Tensor] = {}
        self._reference: dict[int, torch.Tensor] = {}

    def spill(self) -> None:
        """Move all weights out of VRAM: each other way begins there."""
        self._model.module.cpu()
        self._blocks = find_blocks(self._model.module)
        self._description = describe_module(self._model.module)
        if self._zero_copy:
            torch.cuda.empty_cache()

    @property
    def _model(self) -> Built:
        assert self._built  # it isn't used after `release`
        return self._built

    def _as_seen(self, host: torch.Tensor) -> torch.Tensor:
        return self._zero_copy(host) if self._zero_copy else host

    def release(self) -> None:
        """Release every tensor."""
        self._dismiss()
        self._built, self._blocks = None, ()
        for store in (self._inputs, self._reference):
            store.clear()

    def _dismiss(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._arranged = None

    def _arrange(self, scenario: Scenario, rows: int) -> None:
        """Place the model in a scenario's way, unless it is placed so already."""
        wanted = (scenario, rows if scenario == "placed" else 0)
        if scenario == "resident" or self._arranged == wanted:
            return
        if wanted not in self._plans:
            self._plans[wanted] = self._planned(scenario, rows)
        plan = self._plans[wanted]
        if self._handle is None or not same_places(self._handle.plan, plan):
            self._dismiss()
            self._handle = place(self._model.module, plan, device=self._device)
        self._arranged = wanted

    def _planned(self, scenario: Scenario, rows: int) -> Plan:
        """The plan of a way: the planner's own for `placed`, with the same VRAM for weights and buffers."""
        if scenario != "placed":
            tiers = dict(zip(map(id, self._model.layers), layer_tiers(self.plan, scenario), strict=True))
            blocks = [
                (
                    block.name,
                    tiers.get(id(block.modules[0]), "resident") if block.called else "resident",
                    block.n_bytes,
                )
                for block in self._blocks
            ]
            return fixed_plan(self.plan.shape.model, blocks)
        machine = profile(self._profile())
        workload = Workload(rows, self.plan.shape.tokens)
        model = self._description
        assert model  # `spill` has been called
        host = 4 * model.weight_bytes + 2**34  # the host has all weights already
        use = make_plan(
            model, machine, vram=machine.vram_bytes, host=host, workload=workload, objective="exact"
        ).plan.vram
        beside = use.activations + use.workspace + use.rounding
        budget = budget_bytes(self.plan) + beside
        return make_plan(model, machine, vram=budget, host=host, workload=workload, objective="exact").plan

    def _profile(self) -> str:
        if not self._zero_copy:
            return TRIED_AS
        facts = torch.cuda.get_device_properties(0)
        return nearest_profile(facts.name, getattr(facts, "gcnArchName", f"sm_{facts.major}{facts.minor}"))

    def left_bytes(self, scenario: Scenario, rows: int) -> int:
        """Bytes of the weights, unpacked, that a way leaves in host memory."""
        if scenario == "resident":
            return 0
        self._arrange(scenario, rows)
        assert self._handle
        return bytes_outside_vram([(block.tier, block.weight_bytes) for block in self._handle.plan.blocks])

    def passes(self, scenario: Scenario, rows: int) -> Operation:
        """One forward pass, to be repeated. "resident" works before `spill`, the others after it.

        A pass ends when the copies that it has begun for the next one are done, too.
        """
        self._arrange(scenario, rows)
        host = self._input(rows)
        if scenario == "resident":
            resident = host.to(self._device)
            return partial(self._forward, lambda: resident)
        if scenario == "zero_copy_all":
            left = self._as_seen(host)
            return partial(self._forward, lambda: left)
        copied = partial(host.to, self._device, non_blocking=True)
        return partial(self._forward, copied)

    def _input(self, rows: int) -> torch.Tensor:
        if rows not in self._inputs:
            made = self._random_input(rows)
            host = torch.empty(made.shape, dtype=made.dtype, pin_memory=self._zero_copy is not None)
            self._inputs[rows] = host.copy_(made)
        return self._inputs[rows]

    def _random_input(self, rows: int) -> torch.Tensor:
        shape, draw = self.plan.shape, self._generator
        if self._model.vocabulary:
            return torch.randint(0, self._model.vocabulary, (rows, shape.tokens), generator=draw)
        size = (rows, shape.width) if shape.tokens == 1 else (rows, shape.tokens, shape.width)
        return torch.randn(size, generator=draw).to(getattr(torch, shape.dtype))

    def input_bytes(self, rows: int) -> int:
        """Bytes of one input."""
        host = self._input(rows)
        return int(host.numel() * host.element_size())

    def _forward(self, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            found = self._model.call(source())
            if self._handle is not None:
                self._handle.join()
            return found

    def difference(self, scenario: Scenario, rows: int) -> float:
        """Run once; largest absolute difference from the resident output, over the largest output."""
        output = self.passes(scenario, rows)()
        assert isinstance(output, torch.Tensor)
        found = output.float().cpu()
        if scenario == "resident":
            self._reference[rows] = found
        reference = self._reference[rows]
        return float((found - reference).abs().max() / reference.abs().max())

    def split(self, scenario: Scenario, rows: int) -> Split | Unknown:
        """How one pass spends its time, by events in a separate pass.

        Unknown where the device runs the pass while it is still being handed over: its waits for the host
        would count as waits for copies, or as computing.
        """
        if not self._zero_copy:
            return Unknown("no device clock")
        run = self.passes(scenario, rows)
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        handing_s = time.perf_counter() - began
        return self._split(scenario, rows, lead_s=LEAD_MARGIN * handing_s)

    def _split(self, scenario: Scenario, rows: int, *, lead_s: float) -> Split | Unknown:
        host = self._input(rows)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        resident = host.to(self._device)
        left = self._as_seen(host) if scenario == "zero_copy_all" else resident

        def source() -> torch.Tensor:
            copies = scenario not in ("resident", "zero_copy_all")
            taken = host.to(self._device, non_blocking=True) if copies else left
            marks[1].record()
            return taken

        watched = self._handle.watched() if self._handle is not None else nullcontext()
        torch.cuda.synchronize()
        self._wait(lead_s)  # so the time excludes handing the pass over
        marks[0].record()
        with watched as watches:
            self._forward(source)
        ahead = not marks[0].query()
        marks[2].record()
        torch.cuda.synchronize()
        if not ahead:
            return Unknown("host-bound: the device ran the pass faster than it was handed over")
        input_s, rest_s = (a.elapsed_time(b) / 1e3 for a, b in pairwise(marks))
        copy_s, wait_s = (watches.seconds("copy"), watches.seconds("wait")) if watches else (0.0, 0.0)
        return Split(input_s + copy_s, wait_s, rest_s - wait_s)
