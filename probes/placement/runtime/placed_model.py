"""A model that is placed: brought to the tiers of a plan, placed again by another one, and given back.

The methods of `PlacedModel` from `place` to `finish` are the steps by which `place.py` and `multi_gpu.py`
place a model. `handle.py` runs it.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes
from probes.hardware.host import available_bytes
from probes.placement.models.modules import RecurrentLayers, why_gpu_only
from probes.placement.runtime.buffers import PlannedBlock
from probes.placement.runtime.builder import (
    Builder,
    PlannedBytes,
    cpu_modules,
    memory_refusals,
    planned_blocks,
)
from probes.placement.runtime.call_order import Turns
from probes.placement.runtime.capture import Recorder
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.expert_products import ExpertsHook, can_be_multiplied
from probes.placement.runtime.hooks import (
    BlockHook,
    CpuBlockHook,
    ForwardHook,
    ModelHook,
    RecurrentHook,
)
from probes.placement.runtime.offloaded import CpuBlock, MovingBlock, PackedOperations
from probes.placement.runtime.origins import Gate, ParameterOrigins, bfloat16_target
from probes.placement.runtime.streams import Streams
from probes.placement.runtime.weight_sources import ModelWeights
from probes.placement.types import Plan


class PlacedModel:
    """One model, or one card's part of it, and what places it: nothing is placed at first.

    Passes of models with the same `turns` come one after the other.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        source: ModelWeights,
        streams: Streams,
        *,
        pinned: bool,
        capture: bool = False,
        work: PackedOperations | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.model = model
        self.recorder: Recorder | None = None
        self._hook: Any = None  # of the whole model, the `ModelHook` of the last placement
        self._source, self._streams, self._pinned, self._capture = source, streams, pinned, capture
        self._work, self._turns = work or PackedOperations(), turns or Turns()
        self._recorders: list[Recorder] = []  # of functions that call the model
        self._start(plan, PlannedBytes.of(plan))

    def _start(self, plan: Plan, planned: PlannedBytes | None, gate: Gate | None = None) -> None:
        """Have nothing placed, and take no more than `planned` from now on."""
        self.plan = plan
        self._origins = ParameterOrigins(gate)
        self._engine = Engine(
            self._streams,
            ahead=plan.rings.ahead,
            fast=plan.objective == "fast",
            work=self._work,
            turns=self._turns,
            wanted=self._origins.wanted,
        )
        self._builder = Builder(
            self.model,
            self._streams,
            self._source,
            self._origins,
            plan.rings,
            self._pinned,
            plan.objective == "fast",
            planned,
            experts_bytes=planned.experts if planned else plan.experts.cache_bytes if plan.experts else 0,
        )

    def place(self) -> None:
        """Place the whole model. Raises PlacementError; `remove()` undoes what has been done by then."""
        blocks = planned_blocks(self.model, self.plan, gate=self._hook)
        self._origins.convert_buffers(self.model, bfloat16_target(self.plan))
        self.take_over(blocks)
        self.move_buffers(self.model, cpu_modules(blocks))
        if self._capture:
            self._record_passes()
        for recorder in self._recorders:
            recorder.renew(self._engine)
        self._guard_passes(any(entry.trains for block, _ in blocks for entry in block.entries))
        self._origins.convert_inputs(self.model, blocks, bfloat16_target(self.plan))
        self._blocks = [block for block, _ in blocks]
        self._buffers = [module._buffers for module in self.model.modules() if module._buffers]
        self.begin()

    def place_again(self, plan: Plan, planned: PlannedBytes | None) -> None:
        """Place the model by another plan, or in less room, while no call of it is under way.

        Raises PlacementError; the model is placed as before then.
        """
        before = self.plan, self._builder.planned
        self._require_host_memory()
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._exchange(plan, planned)
            except BaseException:
                self._exchange(*before)
                raise

    def _exchange(self, plan: Plan, planned: PlannedBytes | None) -> None:
        # other threads' calls wait at the hook for their turn, which is this thread's; layers of a recurrent
        # module are only found where it has the forward of its class
        but = None if isinstance(self.model, nn.RNNBase) else self._hook
        gate = self.take_down(leave_values=self._source.rereadable, but=but)
        self._start(plan, planned, gate)
        free_memory()
        self.place()

    def _require_host_memory(self) -> None:
        """Raise PlacementError where the weights don't fit in host memory beside what is there now."""
        placements = self._builder.placements
        needed = sum(p.block.given_bytes for p in placements if p.tier != "cpu")
        available = available_bytes(Path("/"))
        if not self._source.rereadable and isinstance(available, int) and needed > available:
            raise PlacementError(
                f"the weights take {binary_bytes(needed)} on their way to other tiers, and "
                f"{binary_bytes(available)} of host memory are free",
                "end other programs, or load the model from its checkpoint with load()",
            )

    @property
    def device(self) -> torch.device:
        """Where blocks compute."""
        return self._engine.streams.device

    def take_over(self, blocks: Sequence[PlannedBlock]) -> None:
        """Bring blocks to their tiers and hook their calls. `remove()` undoes it, also when it failed."""
        self._origins.note_shared(entry for block, _ in blocks for entry in block.entries)
        self._builder.take_over(blocks, self._engine)
        moving = {id(block.stored.block): block for block in self._engine.moving}
        gpu_only = why_gpu_only([block for block, _ in blocks]) if self.device.type != "cpu" else {}
        for block, plan in blocks:
            make: Callable[..., ForwardHook] | None = None
            if id(block) in moving:
                make = partial(BlockHook, engine=self._engine, block=moving[id(block)])
            elif plan.tier == "cpu":
                if why := gpu_only.get(block.name):
                    raise PlacementError(f"{block.name} can't compute on the CPU: {why}", "plan again")
                make = partial(CpuBlockHook, engine=self._engine, block=self._engine.add_cpu_block(block))
            if make is not None:
                for module in block.modules:
                    self._origins.add_hook(module, make)
        if self.plan.objective == "fast" and (placed := self._builder.experts) is not None:
            for group in placed.groups:
                if can_be_multiplied(placed, group):
                    self._origins.add_hook(group.module, partial(ExpertsHook, placed=placed, group=group))
        for recurrent in _called_by_layer(blocks):
            if isinstance(recurrent.whole.__dict__.get("forward"), RecurrentHook):
                continue  # another card has layers of it, too
            self._origins.add_hook(recurrent.whole, partial(RecurrentHook, recurrent=recurrent))
        self._origins.exchange_held(self.model, [entry for block, _ in blocks for entry in block.entries])

    def move_buffers(self, model: nn.Module, staying: Sequence[nn.Module]) -> None:
        """Move the buffers of all modules but these to the device. Raises PlacementError for want of VRAM."""
        with memory_refusals(self.device):
            self._origins.move_buffers(model, self.device, staying)

    def _record_passes(self) -> None:
        """From now on whole passes become graphs. Raises PlacementError where that can't be."""
        self._builder.require_capturable("place it without capture")
        if self.recorder is None:
            self.recorder = Recorder(self._engine)
        self.recorder.renew(self._engine)

    def _guard_passes(self, trainable: bool) -> None:
        """Let whole passes take turns, and refuse changes of weights."""
        make = partial(
            ModelHook,
            turns=self._turns,
            model=self.model,
            failed=self.abandon,
            trainable=trainable,
            run=self.run,
        )
        self._origins.add_hook(self.model, make)
        self._hook = self.model.__dict__["forward"]
        self._forward: Callable[..., Any] = self._hook.forward
        self._origins.refuse_changes(self.model)
        self._origins.save_values(self.model)
        self._origins.leave_weights_apart(self.model)

    def follow_experts(self) -> None:
        """Between passes: let the cache of experts follow what passes choose. Within one, nothing is done."""
        if self._builder.experts is not None and not self._engine.recording:
            self._builder.experts.cache.update()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One pass, in this thread's turn. Threads that waited for it come here, by whichever hook."""
        if self.recorder is not None:
            return self.recorder.call(self._forward, args, kwargs)
        return self._forward(*args, **kwargs)

    def abandon(self) -> None:
        """A pass failed, or was interrupted anywhere: none of its calls is under way."""
        self._engine.abandon_all()

    def begin(self) -> None:
        """Everything is where it belongs: fetch ahead for a first pass."""
        self._engine.begin()

    def finish(self) -> None:
        """Wait until every stream is done."""
        self._engine.streams.finish()

    def take_down(self, *, leave_values: bool, but: ForwardHook | None = None) -> Gate | None:
        """Give the model back. `leave_values`: without what can be read again; `but`: with this hook."""
        with torch.inference_mode(False), torch.no_grad():
            self._engine.drain()
            gate = self._origins.remove_hooks(but=but)
            for recorder in (self.recorder, *self._recorders):
                if recorder is not None:
                    recorder.clear()
            for moving in self._engine.moving:
                for place in moving.places:
                    if (written := place.written()) is not None:
                        self._origins.keep_written(place.entry, written)
                for entry, values in () if leave_values else self._engine.taken_back(moving):
                    self._origins.bring_back(entry, values)
            blocks: list[MovingBlock | CpuBlock] = [*self._engine.moving, *self._engine.cpu_blocks]
            for block in blocks:
                for place in block.places:
                    place.give_back(self._origins.parameter(place.entry))
            if self._builder.experts is not None:
                self._builder.experts.give_back(self._origins)
            if leave_values:
                self._origins.leave_values()
            self._origins.restore()
            self._engine.clear()
            self._builder.clear()
            return gate


def free_memory() -> None:
    """Give back what nobody holds, and the libraries' workspaces, which they take again."""
    gc.collect()
    if torch.cuda.is_initialized():
        getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()
        torch.cuda.empty_cache()


def _called_by_layer(blocks: Sequence[PlannedBlock]) -> list[RecurrentLayers]:
    """The recurrent modules of which layers are blocks: called whole, they would join all their weights."""
    return list({id(b.recurrent): b.recurrent for b, _ in blocks if b.recurrent is not None}.values())
