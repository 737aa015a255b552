"""A placed model's handle: takes the placement away again, and reports what it takes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled, nn

from probes.core.errors import PlacementError
from probes.core.unknown import Unknown
from probes.placement.models.modules import Block
from probes.placement.runtime.builder import Builder
from probes.placement.runtime.capture import Captured, Recorder
from probes.placement.runtime.engine import Engine, refuse_graph, refuse_training
from probes.placement.runtime.hooks import CpuBlock, MovingBlock
from probes.placement.runtime.host_memory import (
    ForwardHook,
    InputConversionHook,
    active_transform,
    call_uncompiled,
    host_round_trip,
    is_compiled,
    outside_transforms,
)
from probes.placement.runtime.measuring import Measured, PlacementReport, Stopwatches, measure
from probes.placement.runtime.turns import Turns
from probes.placement.runtime.weight_sources import ParameterOrigins, bfloat16_target, converting_modules
from probes.placement.types import Plan, Tier


class BlockHook(ForwardHook):
    """The forward of a moving block's module: its weights are there meanwhile."""

    def __init__(self, forward: Callable[..., Any], engine: Engine, one: MovingBlock) -> None:
        super().__init__(forward)
        self._engine, self._one = engine, one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Bring the weights, compute, release them."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        engine, one = self._engine, self._one
        enter, leave = engine.enter, engine.leave
        if active_transform() is not None:
            enter, leave = outside_transforms(enter), outside_transforms(leave)
        mine = engine.turns.mine()
        depth = one.depth if mine else 0
        try:  # an interruption may come anywhere, and in `finally` would come before what ends the call
            enter(one, args, kwargs, mine=mine)
            output = one.kept(self.forward(*args, **kwargs))
            if is_grad_enabled():
                refuse_graph(one.name, output)
            leave(one)
            if not mine:
                engine.turns.end()
        except BaseException:
            engine.abandon(one, depth, mine=mine)
            raise
        return output


class CpuBlockHook(ForwardHook):
    """The forward of a module that computes on the CPU, of a model whose other blocks compute elsewhere."""

    def __init__(self, forward: Callable[..., Any], engine: Engine, one: CpuBlock) -> None:
        super().__init__(forward)
        self._engine, self._one = engine, one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute there. Waits for what the caller's stream computes, not for copies of other blocks.

        Those are begun before: nothing else would begin them while this thread computes.
        """
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        engine, one = self._engine, self._one
        mine = engine.turns.mine()
        depth = one.depth if mine else 0
        try:
            engine.enter_at_home(one, mine=mine)
            engine.advance()
            trip = host_round_trip(engine.lanes.device)
            given, named = trip.go(args), trip.go(kwargs)
            engine.advance()  # what was read from disk meanwhile can be copied now
            output = trip.come(self.forward(*given, **named))
            engine.leave_at_home(one)
            if not mine:
                engine.turns.end()
        except BaseException:
            engine.abandon_at_home(one, depth, mine=mine)
            raise
        return output


class ModelHook(ForwardHook):
    """The forward of a placed model. Threads take turns."""

    def __init__(
        self,
        forward: Callable[..., Any],
        turns: Turns,
        model: nn.Module,
        failed: Callable[[], None],
        *,
        trainable: bool,
        recorder: Recorder | None,
    ) -> None:
        super().__init__(forward)
        self._turns, self._model, self._trainable = turns, model, trainable
        self._failed, self._recorder = failed, recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One pass."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        return self._turns.taken(partial(self._pass, args, kwargs), self._failed)

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            refuse_training("", (self._model,), args, kwargs, trainable=self._trainable)
        if self._recorder is not None:
            return self._recorder.call(self.forward, args, kwargs)
        return self.forward(*args, **kwargs)


class Handle:
    """A placed model: `model` is called as before, `remove()` gives it back as it was."""

    def __init__(
        self, model: nn.Module, plan: Plan, engine: Engine, homes: ParameterOrigins, settling: Builder
    ) -> None:
        self.model = model
        self.plan = plan
        self.recorder: Recorder | None = None
        self._engine = engine
        self._homes = homes
        self._settling = settling
        self._captures: list[Captured] = []
        self._measured: Measured | Unknown = Unknown("no pass has been measured")

    @property
    def device(self) -> torch.device:
        """Where blocks compute."""
        return self._engine.lanes.device

    def take_over(self, blocks: Sequence[tuple[Block, Tier]]) -> None:
        """Bring blocks to their tiers and guard their calls. `remove()` undoes it, also when it failed."""
        self._settling.take_over(blocks, self._engine)
        moving = {id(one.stored.block): one for one in self._engine.moving}
        for block, tier in blocks:
            make: Callable[..., ForwardHook] | None = None
            if id(block) in moving:
                make = partial(BlockHook, engine=self._engine, one=moving[id(block)])
            elif tier == "cpu":
                make = partial(CpuBlockHook, engine=self._engine, one=self._engine.keep_at_home(block))
            if make is not None:
                for module in block.modules:
                    self._homes.guard(module, make)

    def convert_buffers(self) -> None:
        """Convert buffers to what the plan says that bfloat16 becomes."""
        dtype = bfloat16_target(self.plan)
        if dtype is not None:
            self._homes.convert_buffers(self.model, dtype)

    def convert_inputs(self, blocks: Sequence[tuple[Block, Tier]]) -> None:
        """From now on inputs are converted likewise: of blocks, too, which other methods may call."""
        dtype = bfloat16_target(self.plan)
        if dtype is not None:
            for module in converting_modules(self.model, blocks):
                self._homes.guard(module, partial(InputConversionHook, dtype=dtype))

    def move_buffers(self, model: nn.Module, staying: Sequence[nn.Module]) -> None:
        """Move the buffers of all modules but these to the device."""
        self._homes.move_buffers(model, self.device, staying)

    def record_passes(self) -> None:
        """From now on whole passes become graphs. Raises PlacementError where that can't be."""
        self._settling.require_capturable("place it without capture")
        self.recorder = Recorder(self._engine)

    def guard_passes(self, trainable: bool) -> None:
        """Let whole passes take turns, and refuse changes of weights."""
        make = partial(
            ModelHook,
            turns=self._engine.turns,
            model=self.model,
            failed=self.abandon,
            trainable=trainable,
            recorder=self.recorder,
        )
        self._homes.guard(self.model, make)
        self._homes.refuse_changes(self.model)
        self._homes.save_values(self.model)
        self._homes.leave_weights_apart(self.model)

    def abandon(self) -> None:
        """A pass failed, or was interrupted anywhere: none of its calls is under way."""
        self._engine.abandon_all()

    def begin(self) -> None:
        """Everything is where it belongs: fetch ahead for a first pass."""
        self._engine.begin()

    def finish(self) -> None:
        """Wait until every lane is done."""
        self._engine.lanes.finish()

    def captured(self, work: Callable[..., Any], *example: Any) -> Captured:
        """Capture `work`, which calls the model, as a CUDA graph for inputs like `example`.

        `work(*example)` is called twice, then recorded and replayed: an example changes a KV cache three
        times. What the capture returns has fixed addresses: clone it to keep it beyond the next call.
        Without a GPU the capture calls `work`. Raises PlacementError where the work can't be captured.
        """
        self._settling.require_capturable("call it directly, or plan otherwise")
        made = Captured(self._engine, work, example)
        self._captures.append(made)
        return made

    def join(self) -> None:
        """Let the caller's stream wait until all that has been begun for the next blocks is done."""
        self._engine.turns.taken(self._engine.join)

    @contextmanager
    def watched(self) -> Iterator[Stopwatches]:
        """Time the steps of each lane meanwhile."""
        watches = self._engine.watches = Stopwatches(self._engine.lanes)
        try:
            yield watches
        finally:
            self._engine.watches = None

    def measure(self, work: Callable[..., Any], *inputs: Any, passes: int = 5) -> Measured:
        """Time `work(*inputs)`, a pass through the model, for `report()`: its wall time, then its lanes."""
        timed = partial(measure, self._engine, partial(work, *inputs), passes)
        self._measured = self._engine.turns.taken(timed)
        return self._measured

    def report(self) -> PlacementReport:
        """What was planned and taken, by tier; the planned and the measured time of a pass."""
        return PlacementReport(
            tiers=self._settling.taken(),
            vram_asked=self._settling.vram_asked,
            vram_taken=self._settling.vram.taken if self._settling.vram else 0,
            pinned_asked=self._settling.host.asked if self._settling.host else 0,
            pinned_taken=self._settling.host.pinned_bytes if self._settling.host else 0,
            spilled=self._settling.spilled,
            why_pageable=self._settling.host.why_pageable if self._settling.host else "",
            planned=self.plan.time,
            measured=self._measured,
            surprises=self._engine.order.surprises,
            graphs=self.recorder.count if self.recorder else 0,
            not_captured=tuple(self.recorder.refused.values()) if self.recorder else (),
        )

    def remove(self) -> None:
        """Give the model back: the same parameter objects with their values in host memory, and no hooks.

        Twice does no harm. Raises torch's error where the GPU can't give values back any more, and
        CheckpointUnreadable where a file with values of the tier `disk` was changed. All others are back
        then. Raises PlacementError within a call of the model.
        """
        if self._engine.turns.mine():
            raise PlacementError(
                "the model can't be given back while this thread runs it", "call remove() after the call"
            )
        self._engine.turns.taken(self._remove)

    def _remove(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._engine.settle()
            self._homes.unguard()
            for recorder in (self.recorder, *(one.recorder for one in self._captures)):
                if recorder is not None:
                    recorder.clear()
            for moving in self._engine.moving:
                for place in moving.places:
                    if (written := place.written()) is not None:
                        self._homes.keep_written(place.entry, written)
                for entry, values in self._engine.taken_back(moving):
                    self._homes.bring_back(entry, values)
            taken: list[MovingBlock | CpuBlock] = [*self._engine.moving, *self._engine.at_home]
            for one in taken:
                for place in one.places:
                    place.give_back(self._homes.parameter(place.entry))
                    if id(place.entry) in one.wanted:
                        self._homes.wanted(place.entry, gradients=one.wanted[id(place.entry)])
            self._homes.restore()
            self._engine.clear()
            self._settling.clear()
