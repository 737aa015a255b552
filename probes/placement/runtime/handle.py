"""What `place` returns: a handle that gives the model back, measures passes and reports what it takes.

The methods of `Handle` from `take_over` to `finish` are the steps by which `place.py` and `multi_gpu.py`
place a model; users need the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes, counted, duration, gb_per_s
from probes.core.unknown import Unknown
from probes.placement.models.modules import Block, why_gpu_only
from probes.placement.runtime.buffers import StorageOptions
from probes.placement.runtime.builder import Builder, PlannedBytes, TierUse, memory_refusals
from probes.placement.runtime.capture import Captured, Recorder
from probes.placement.runtime.engine import Engine, Turns
from probes.placement.runtime.expert_cache import HitRate
from probes.placement.runtime.expert_products import ExpertsHook, can_be_multiplied
from probes.placement.runtime.hooks import (
    BlockHook,
    CpuBlockHook,
    ForwardHook,
    InputConversionHook,
    ModelHook,
)
from probes.placement.runtime.offloaded import CpuBlock, MovingBlock, PackedOperations
from probes.placement.runtime.origins import ParameterOrigins, bfloat16_target, converting_modules
from probes.placement.runtime.streams import Stopwatches, Streams
from probes.placement.runtime.weight_sources import ModelWeights
from probes.placement.types import ExpertsPlan, PassTime, Plan, Tier


@dataclass(frozen=True)
class Measured:
    """Passes by the host's clock, and the streams of one more pass by the device's.

    `waited_s`: the compute stream stood still for weights. Streams overlap: their times don't add up to the
    wall time.
    """

    wall_s: tuple[float, ...]
    copied_s: float
    unpacked_s: float
    waited_s: float
    copied_bytes: int

    @property
    def middle_s(self) -> float:
        """The median of the wall times."""
        return median(self.wall_s)


@dataclass(frozen=True)
class ExpertsReport:
    """The experts of a placed model: how many VRAM has, and how many of those that passes read it had."""

    count: int
    cached: int
    rate: HitRate
    plan: ExpertsPlan | None

    def __str__(self) -> str:
        of = f"{self.cached:,} of {counted(self.count, 'expert')} in VRAM"
        if not self.rate.chosen:
            return f"experts: {of}; passes have read none yet"
        share = self.rate.share
        measured = f"experts: {of}; passes found {share:.1%} of the {self.rate.chosen:,} that they read there"
        if self.plan is None or not self.plan.cached_s:
            return measured
        assumed, predicted = self.plan.assumed_hit_rate, duration(self.plan.seconds(share))
        return f"{measured}, {assumed:.1%} were assumed; predicted for {share:.1%}: {predicted} a pass"


@dataclass(frozen=True)
class PlacementReport:
    """Planned against taken, planned against measured. Bytes and seconds."""

    tiers: tuple[TierUse, ...]
    vram_asked: int
    vram_taken: int  # weights, staging buffers and decode buffers: one allocation
    pinned_asked: int
    pinned_taken: int
    spilled: int  # blocks that stream, though they were to stay in VRAM
    why_pageable: str  # empty where host memory is pinned
    planned: PassTime
    measured: Measured | Unknown
    surprises: int  # blocks called in another order than in the pass before
    graphs: int
    not_captured: tuple[str, ...]
    experts: ExpertsReport | None = None

    def gap(self) -> tuple[str, ...]:
        """Where the difference between the planned and the measured wall time comes from, in sentences."""
        if isinstance(self.measured, Unknown):
            return (f"the time of a pass is unknown: {self.measured.reason}",)
        measured, planned = self.measured, duration(self.planned.middle_s)
        rest = max(measured.middle_s - measured.waited_s, 0.0)
        lines = [
            f"a pass takes {duration(measured.middle_s)} (wall), {planned} were predicted",
            f"computing waits for weights for {duration(measured.waited_s)} of that, "
            f"and not for {duration(rest)}",
        ]
        if measured.copied_bytes and measured.copied_s > 0:
            rate, carried = (
                gb_per_s(measured.copied_bytes, measured.copied_s),
                binary_bytes(measured.copied_bytes),
            )
            lines.append(f"the link carries {carried} in {duration(measured.copied_s)}: {rate:.1f} GB/s")
        if measured.unpacked_s > 0:
            lines.append(f"unpacking takes {duration(measured.unpacked_s)}")
        if self.why_pageable and measured.copied_bytes:
            lines.append(f"host memory isn't pinned: {self.why_pageable}")
        if self.surprises:
            lines.append(
                f"{counted(self.surprises, 'call')} came in another order than before, and waited for weights"
            )
        lines += [f"not captured: {why}" for why in self.not_captured]
        return tuple(lines)

    def __str__(self) -> str:
        rows = [str(use) for use in self.tiers]
        rows.append(f"VRAM: {binary_bytes(self.vram_taken)} taken, {binary_bytes(self.vram_asked)} asked for")
        rows.append(
            f"pinned: {binary_bytes(self.pinned_taken)} taken, {binary_bytes(self.pinned_asked)} asked for"
        )
        if self.spilled:
            rows.append(
                f"{counted(self.spilled, 'block')} of these were to stay in VRAM and stream: "
                "the weights pack worse than planned"
            )
        if self.experts is not None:
            rows.append(str(self.experts))
        return "\n".join((*rows, *self.gap()))


class Handle:
    """A placed model: `model` is called as before, `remove()` gives it back as it was."""

    def __init__(
        self, model: nn.Module, plan: Plan, engine: Engine, origins: ParameterOrigins, builder: Builder
    ) -> None:
        self.model = model
        self.plan = plan
        self.recorder: Recorder | None = None
        self._engine = engine
        self._origins = origins
        self._builder = builder
        self._captures: list[Captured] = []
        self._measured: Measured | Unknown = Unknown("no pass has been measured")

    @property
    def device(self) -> torch.device:
        """Where blocks compute."""
        return self._engine.streams.device

    def take_over(self, blocks: Sequence[tuple[Block, Tier]]) -> None:
        """Bring blocks to their tiers and hook their calls. `remove()` undoes it, also when it failed."""
        self._builder.take_over(blocks, self._engine)
        moving = {id(block.stored.block): block for block in self._engine.moving}
        gpu_only = why_gpu_only([block for block, _ in blocks]) if self.device.type != "cpu" else {}
        for block, tier in blocks:
            make: Callable[..., ForwardHook] | None = None
            if id(block) in moving:
                make = partial(BlockHook, engine=self._engine, block=moving[id(block)])
            elif tier == "cpu":
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

    def convert_buffers(self) -> None:
        """Convert buffers to what the plan says that bfloat16 becomes."""
        dtype = bfloat16_target(self.plan)
        if dtype is not None:
            self._origins.convert_buffers(self.model, dtype)

    def convert_inputs(self, blocks: Sequence[tuple[Block, Tier]]) -> None:
        """From now on inputs are converted likewise: of blocks, too, which other methods may call."""
        dtype = bfloat16_target(self.plan)
        if dtype is not None:
            for module in converting_modules(self.model, blocks):
                self._origins.add_hook(module, partial(InputConversionHook, dtype=dtype))

    def move_buffers(self, model: nn.Module, staying: Sequence[nn.Module]) -> None:
        """Move the buffers of all modules but these to the device. Raises PlacementError for want of VRAM."""
        with memory_refusals(self.device):
            self._origins.move_buffers(model, self.device, staying)

    def record_passes(self) -> None:
        """From now on whole passes become graphs. Raises PlacementError where that can't be."""
        self._builder.require_capturable("place it without capture")
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
            before=self.follow_experts,
        )
        self._origins.add_hook(self.model, make)
        self._origins.refuse_changes(self.model)
        self._origins.save_values(self.model)
        self._origins.leave_weights_apart(self.model)

    def follow_experts(self) -> None:
        """Between passes: let the cache of experts follow what passes choose. Within one, nothing is done."""
        if self._builder.experts is not None and not self._engine.recording:
            self._builder.experts.update()

    def abandon(self) -> None:
        """A pass failed, or was interrupted anywhere: none of its calls is under way."""
        self._engine.abandon_all()

    def begin(self) -> None:
        """Everything is where it belongs: fetch ahead for a first pass."""
        self._engine.begin()

    def finish(self) -> None:
        """Wait until every stream is done."""
        self._engine.streams.finish()

    def captured(self, work: Callable[..., Any], *example: Any) -> Captured:
        """Capture `work`, which calls the model, as a CUDA graph for inputs like `example`.

        `work(*example)` is called twice, then recorded and replayed: an example changes a KV cache three
        times. What the capture returns has fixed addresses: clone it to keep it beyond the next call.
        Without a GPU the capture calls `work`. Raises PlacementError where the work can't be captured.
        """
        self._builder.require_capturable("call it directly, or plan otherwise")
        captured = Captured(self._engine, work, example, before=self.follow_experts)
        self._captures.append(captured)
        return captured

    def join(self) -> None:
        """Let the caller's stream wait until all that has been begun for the next blocks is done."""
        self._engine.turns.taken(self._engine.join)

    @contextmanager
    def watched(self) -> Iterator[Stopwatches]:
        """Time the steps of each stream meanwhile."""
        watches = self._engine.watches = Stopwatches(self._engine.streams)
        try:
            yield watches
        finally:
            self._engine.watches = None

    def measure(self, work: Callable[..., Any], *inputs: Any, passes: int = 5) -> Measured:
        """Time `work(*inputs)`, a pass through the model, for `report()`: its wall time, then its streams."""
        timed = partial(measure, self._engine, partial(work, *inputs), passes)
        self._measured = self._engine.turns.taken(timed)
        return self._measured

    def report(self) -> PlacementReport:
        """What was planned and taken, by tier; the planned and the measured time of a pass.

        Where experts are placed one by one, it waits for the device: the counts of what passes read are
        there.
        """
        return PlacementReport(
            tiers=self._builder.taken(),
            vram_asked=self._builder.vram_asked,
            vram_taken=self._builder.vram.taken if self._builder.vram else 0,
            pinned_asked=self._builder.host.asked if self._builder.host else 0,
            pinned_taken=self._builder.host.pinned_bytes if self._builder.host else 0,
            spilled=self._builder.spilled,
            why_pageable=self._builder.host.why_pageable if self._builder.host else "",
            planned=self.plan.time,
            measured=self._measured,
            surprises=self._engine.order.surprises,
            graphs=self.recorder.count if self.recorder else 0,
            not_captured=tuple(self.recorder.refused.values()) if self.recorder else (),
            experts=self._engine.turns.taken(self._experts) if self._builder.experts else None,
        )

    def _experts(self) -> ExpertsReport | None:
        placed = self._builder.experts
        if placed is None:
            return None
        rate = placed.hit_rate()
        return ExpertsReport(placed.cache.count, placed.cache.cached, rate, self.plan.experts)

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
            self._engine.drain()
            self._origins.remove_hooks()
            for recorder in (self.recorder, *(block.recorder for block in self._captures)):
                if recorder is not None:
                    recorder.clear()
            for moving in self._engine.moving:
                for place in moving.places:
                    if (written := place.written()) is not None:
                        self._origins.keep_written(place.entry, written)
                for entry, values in self._engine.taken_back(moving):
                    self._origins.bring_back(entry, values)
            blocks: list[MovingBlock | CpuBlock] = [*self._engine.moving, *self._engine.cpu_blocks]
            for block in blocks:
                for place in block.places:
                    place.give_back(self._origins.parameter(place.entry))
                    if id(place.entry) in block.wanted:
                        self._origins.wanted(place.entry, gradients=block.wanted[id(place.entry)])
            if self._builder.experts is not None:
                self._builder.experts.give_back(self._origins)
            self._origins.restore()
            self._engine.clear()
            self._builder.clear()


def new_handle(
    model: nn.Module,
    plan: Plan,
    source: ModelWeights,
    streams: Streams,
    *,
    pinned: bool,
    work: PackedOperations | None,
    turns: Turns | None = None,
) -> Handle:
    """The handle of a model, or of one card's part, of which nothing has been placed yet.

    Passes of handles with the same `turns` come one after the other.
    """
    fast = plan.objective == "fast"
    engine = Engine(
        streams, ahead=plan.rings.ahead, fast=fast, work=work or PackedOperations(), turns=turns or Turns()
    )
    origins = ParameterOrigins()
    builder = Builder(
        model, streams, source, origins, plan.rings, pinned, StorageOptions.of(plan), PlannedBytes.of(plan)
    )
    builder.experts_bytes = plan.experts.cache_bytes if plan.experts else 0
    return Handle(model, plan, engine, origins, builder)


def wall_times(finish: Callable[[], None], work: Callable[[], object], passes: int) -> tuple[float, ...]:
    """Seconds of each pass by the host's clock, after one to warm up. `finish` waits for the device."""
    work()
    walls = []
    for _ in range(passes):
        finish()
        began = time.perf_counter()
        work()
        finish()
        walls.append(time.perf_counter() - began)
    return tuple(walls)


def measure(engine: Engine, work: Callable[[], object], passes: int) -> Measured:
    """Time passes by the host's clock, after one to warm up, then the steps of one more on their streams."""
    walls = wall_times(engine.streams.finish, work, passes)
    watches = engine.watches = Stopwatches(engine.streams)
    try:
        work()
        engine.streams.finish()
    finally:
        engine.watches = None
    copied, unpacked, waited = (watches.seconds(what) for what in ("copy", "unpack", "wait"))
    return Measured(walls, copied, unpacked, waited, watches.copied_bytes)
