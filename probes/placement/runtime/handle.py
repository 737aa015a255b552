"""What `place` returns: a handle that gives the model back, measures passes and reports what it takes.

Its passes are guarded: one that runs out of memory is undone, and done again with more room. The first may be
repeated to refine the plan.
"""

import re
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import nn

from probes.core.errors import PlacementError
from probes.core.units import binary_bytes, counted, duration, gb_per_s
from probes.core.unknown import Unknown
from probes.hardware.torch_build import first_line
from probes.placement.models.modules import describe_module
from probes.placement.models.tracing import skeleton_of, traced_by_call
from probes.placement.planner.machine import Constants
from probes.placement.planner.refinement import BlockTime, confirmed, refine_plan
from probes.placement.runtime.block_times import timed_blocks
from probes.placement.runtime.builder import PlannedBytes, TierUse
from probes.placement.runtime.capture import (
    EAGER_FIRST,
    MAX_COUNTED,
    Captured,
    Recorder,
    direct_tensors,
)
from probes.placement.runtime.engine import Engine
from probes.placement.runtime.expert_cache import HitRate
from probes.placement.runtime.own_thread import OwnThread, is_left, leave
from probes.placement.runtime.pass_state import PassState
from probes.placement.runtime.placed_model import PlacedModel, free_memory
from probes.placement.runtime.streams import Stopwatches, Streams
from probes.placement.runtime.weight_sources import ModelWeights
from probes.placement.types import ExpertsPlan, PassTime, Plan

TIMED_PASSES: Final = 3  # of which the shortest counts
WRITTEN: Final = (
    "it can't be done again: it has written to a tensor, or was given an object such as a cache, of which "
    "nothing is kept"
)
QUIETLY: Final = "a library was refused memory in a pass, and took another algorithm: bits may differ"
OF_ITS_OWN: Final = (
    "passes run in a thread of their own, as torch keeps for the other one what cuDNN chose without memory"
)
_REFUSED: Final = re.compile(r"Tried to allocate ([0-9.]+) ([KMGT])iB")  # torch's words


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
    events: tuple[str, ...] = ()  # what has happened since it was placed, in sentences
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
        rows += self.events
        if self.spilled and not self.events:
            rows.append(
                f"{counted(self.spilled, 'block')} of these were to stay in VRAM and stream: "
                "the weights pack worse than planned"
            )
        if self.experts is not None:
            rows.append(str(self.experts))
        return "\n".join((*rows, *self.gap()))


class Handle(PlacedModel):
    """A placed model: `model` is called as before, `remove()` gives it back as it was."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        source: ModelWeights,
        streams: Streams,
        *,
        refine: Constants | None = None,
        **options: Any,
    ) -> None:
        self._machine = refine  # that plans are made for, until the first pass
        self._description = describe_module(model) if refine else None
        self._skeleton = skeleton_of(model) if refine and plan.rests_on in ("measured", "trace") else None
        self._measured: Measured | Unknown = Unknown("no pass has been measured")
        self._events: list[str] = []  # since it was placed, in sentences
        self._guarding = False  # a pass is under way that is done again if it runs out of memory
        self._known_sizes: set[Hashable] = set()  # of passes that have ended
        self._changing: set[Hashable] = set()  # sizes of passes that change modules or draw random numbers
        self._too_large: set[Hashable] = set()  # passes for which no room was enough
        self._thread: OwnThread | None = None  # that passes run in, if not in their caller's
        super().__init__(model, plan, source, streams, **options)
        self._refusals = streams.refused_allocations()

    def abandon(self) -> None:
        """A pass failed, or was interrupted anywhere: none of its calls is under way."""
        self._guarding = False
        super().abandon()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One pass, in this thread's turn: done again where memory runs out, the first to refine the plan."""
        if self._machine is not None and not self._guarding:
            machine, self._machine = self._machine, None
            self._refine(machine, args, kwargs)
        return self._guarded(self._pass, args, kwargs)

    def _refine(self, machine: Constants, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do a pass several times and undo it, plan with what its blocks took, and keep the better plan."""
        assert self._description
        first, planned = self.plan, self._builder.planned
        if first.experts is not None:
            self._description = self._skeleton = None
            self._events.append(
                "not refined: experts are placed one by one, and what they take follows the router; "
                "the hit rate below has the time that the plan predicts for it"
            )
            return
        try:
            first_s, seen = self._timed(args, kwargs)
        except torch.cuda.OutOfMemoryError:
            self._events.append("not refined: a pass runs out of memory")
            return
        if first_s is None:
            self._events.append("not refined: what a pass may write to is too large to be restored")
            return
        description, skeleton = self._description, self._skeleton
        self._description = self._skeleton = None
        if skeleton is not None:
            description = traced_by_call(skeleton, description, first.workload, args, kwargs)
        made = refine_plan(description, machine, first, seen, first_s)
        if made is None:
            self._events.append("not refined: there is no other plan")
            return
        predicted = f"{duration(first.time.middle_s)} predicted, {duration(first_s)} measured"
        tiers = {block.name: block.tier for block in first.blocks}
        moved = [block.name for block in made.blocks if block.tier != tiers[block.name]]
        if not moved and made.rings == first.rings:
            self.plan = replace(first, time=made.time)
            self._events.append(f"refined: {predicted}; planned again with that, no block moves")
            return
        try:
            self.place_again(made, PlannedBytes.of(made))
            made_s, _ = self._timed(args, kwargs)
        except (PlacementError, torch.cuda.OutOfMemoryError) as error:
            made_s, why = None, first_line(error)
        else:
            why = "which is no quicker"
        then = f"planned again with that, with {counted(len(moved), 'block')} elsewhere: "
        then += f"{duration(made.time.middle_s)} predicted"
        then += f", {duration(made_s)} measured" if made_s is not None else ""
        if made_s is None or made_s >= first_s:
            if self.plan is made:
                self._engine.abandon_all()
                self.place_again(replace(first, time=confirmed(first_s, first.time.bound)), planned)
            then += f"; the first is kept: {why}" if made_s is None else f", {why}: the first is kept"
        self._events.append(f"refined: first {predicted}; {then}")

    def _timed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float | None, dict[str, BlockTime]]:
        """The shortest of some passes, and what blocks took in one more; None where that can't be undone."""
        modules = tuple(self.model.modules())
        state = PassState(
            self._buffers, *args, *kwargs.values(), modules=modules, device=self._streams.device
        )
        if not state.is_whole:
            return None, {}
        walls = []
        self._guarding = True  # nothing is moved meanwhile
        try:
            for number in range(EAGER_FIRST + 1 + TIMED_PASSES):
                self.finish()
                begun = time.perf_counter()
                self._pass(args, kwargs)
                self.finish()
                if number > EAGER_FIRST:
                    walls.append(time.perf_counter() - begun)
                state.restore()
            with timed_blocks(self._engine, self._blocks) as times:
                self._forward(*args, **kwargs)
                self.finish()
                seen = times.seen()
        finally:
            self._guarding = False
            self._engine.abandon_all()
            state.restore()
        return min(walls), seen

    def _pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().run(*args, **kwargs)

    def _guarded(
        self,
        work: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do work that runs the model. Where VRAM runs out, blocks are moved, and it is done again.

        Raises torch's OutOfMemoryError where all the room that there is isn't enough, or where it can't be
        done again: the model is placed as before then.
        """
        if self._guarding:  # it is a part of such work
            return work(args, kwargs)
        self.follow_experts()
        work = partial(self._in_thread, work)
        given = (*args, *kwargs.values())
        tensors = list(direct_tensors(given))
        try:  # a mask grows with each token: shapes of about one size are one kind
            size = tuple([(tuple(map(int.bit_length, tensor.shape)), tensor.dtype) for tensor in tensors])
        except TypeError:  # torch traces this call: its sizes are tensors
            size = ()
        try:
            self._guarding = True
            state = None if size in self._changing else self._state(size, given)
            is_new = size not in self._known_sizes and size not in self._changing
            recorded = self._streams.passes_recorded
            if is_new:
                self._quietly_refused()  # of what came before
            output, error = _tried(work, args, kwargs)
            is_new = is_new or self._streams.passes_recorded > recorded
            kind = _kind(tensors) if size and (is_new or error is not None) else ()
            if error is None and is_new and kind not in self._too_large:
                error = self._quietly_refused()
            if isinstance(error, _QuietlyRefusedError) and (state is None or state.is_lost):
                self._choose_anew(error)
                self._say(QUIETLY)
                error = None
            if state is None:
                if error is not None:
                    error.add_note(
                        "It can't be done again: such passes change modules or draw random numbers."
                    )
                    raise error
            elif error is not None:
                note = partial(self._state, size, given)
                output = None  # whose memory is room
                try:
                    output = self._with_room(error, state, kind, partial(work, args, kwargs), note)
                except _QuietlyRefusedError:  # for want of room, with what the library makes of it
                    output = work(args, kwargs)
                    self._say(QUIETLY)
            elif size not in self._known_sizes and len(self._known_sizes) < MAX_COUNTED:
                (self._known_sizes if state.left_modules_alone else self._changing).add(size)
        finally:
            self._guarding = False
        return output

    def _in_thread(
        self,
        work: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._thread is None:
            if not is_left():
                return work(args, kwargs)
            self._thread = OwnThread(self._turns)
            self._events.append(OF_ITS_OWN)
        return self._thread.call(work, args, kwargs)

    def _choose_anew(self, error: torch.cuda.OutOfMemoryError) -> None:
        """Leave a thread for which torch keeps what a library took without its workspace."""
        if isinstance(error, _QuietlyRefusedError):
            if self._thread is None:
                leave()
            self._end_thread()
            self._thread = OwnThread(self._turns)

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.end()

    def _quietly_refused(self) -> torch.cuda.OutOfMemoryError | None:
        """Since this was last asked: a library was refused its workspace, and did without, as cuDNN does."""
        before, self._refusals = self._refusals, self._streams.refused_allocations()
        return _QuietlyRefusedError(QUIETLY) if self._refusals > before else None

    def _state(self, size: Hashable, given: tuple[Any, ...]) -> PassState:
        """How things are before a pass; with all values before the first of its size, likeliest to fail."""
        modules = () if size in self._known_sizes else tuple(self.model.modules())
        return PassState(self._buffers, *given, modules=modules, device=self._streams.device)

    def _with_room(
        self,
        error: torch.cuda.OutOfMemoryError,
        state: PassState,
        kind: Hashable,
        work: Callable[[], Any],
        note: Callable[[], PassState],
    ) -> Any:
        """Do work again that ran out of memory, with a quarter of our VRAM free, then with all that can be.

        `note` notes the state before it is done again. Raises the error where that isn't possible.
        """
        self._engine.abandon_all()
        planned, why = self._builder.planned, ""
        before, cached = self._builder.vram_bytes, self._builder.cached_bytes
        if kind in self._too_large:
            why = "such a pass has run out of memory before, with all blocks moved that can be"
        elif state.is_lost:
            why = WRITTEN
        for n_bytes in () if why else self._rooms(error):
            state.restore()
            self._choose_anew(error)
            try:
                if not n_bytes:
                    raise PlacementError("no block that stays in VRAM can stream instead")
                self.place_again(self.plan, self._builder.with_room(n_bytes))
            except PlacementError as refused:
                why = str(refused)
                free_memory()  # which may be enough, or for the pass without its recording
            state = note()
            self._quietly_refused()  # of what came before
            output, failed = _tried(work)
            failed = failed or self._quietly_refused()
            if failed is None:
                self._measured = Unknown("no pass has been measured since one ran out of memory")
                freed = before - self._builder.vram_bytes
                if freed > 0:
                    self._say(self._made_room(freed, cached - self._builder.cached_bytes))
                return output
            error = failed
            self._engine.abandon_all()
            why = why or (WRITTEN if state.is_lost else "")
            if why:
                break
        if not state.is_lost:
            state.restore()
            self._too_large.add(kind)
        try:
            if self._builder.planned is not planned:
                self.place_again(self.plan, planned)
        except PlacementError as refused:
            error.add_note(f"The blocks that were moved out of the way stay there: {refused}.")
        if why:
            error.add_note(f"No block was moved out of the way: {why}.")
        raise error

    def _made_room(self, freed: int, of_experts: int) -> str:
        """What the report says of `freed` bytes of VRAM, `of_experts` of them from the cache of experts."""
        moved = [f"the cache of experts is {binary_bytes(of_experts)} smaller"] * (of_experts > 0)
        if self._builder.spilled:
            blocks = counted(self._builder.spilled, "block")
            moved.append(f"{blocks} that were to stay in VRAM stream from now on")
        said = f"a pass ran out of memory: {' and '.join(moved)}, which frees {binary_bytes(freed)}"
        if self._thread is not None:
            said += f"; {OF_ITS_OWN}"
        return said

    def _rooms(self, error: torch.cuda.OutOfMemoryError) -> Iterator[int]:
        """Bytes to free, one after the other: first twice what was refused, or more. 0: none can be."""
        refused = _REFUSED.search(str(error))
        size = float(refused[1]) * 1024 ** ("KMGT".index(refused[2]) + 1) if refused else 0.0
        share = 16 if isinstance(error, _QuietlyRefusedError) else 4  # workspaces are small beside weights
        first = max(self._builder.vram_bytes // share, int(2 * size))
        if first < self._builder.movable_bytes:
            yield first
        yield self._builder.movable_bytes

    def _say(self, what: str) -> None:
        """In the report, and as a warning."""
        self._events.append(what)
        with suppress(RuntimeWarning):  # where warnings are errors: the pass has ended well
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def captured(self, work: Callable[..., Any], *example: Any) -> Captured:
        """Capture `work`, which calls the model, as a CUDA graph for inputs like `example`.

        `work(*example)` is called twice, then recorded and replayed: an example changes a KV cache three
        times. What the capture returns has fixed addresses: clone it to keep it beyond the next call.
        Without a GPU the capture calls `work`. Raises PlacementError where the work can't be captured.
        """
        self._builder.require_capturable("call it directly, or plan otherwise")
        recorder = Recorder(self._engine)
        self._recorders.append(recorder)  # the model may be placed again before the function is captured
        return Captured(recorder, self._taken, work, example)

    def _taken(
        self,
        work: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`_guarded` in a turn of this thread."""
        return self._turns.taken(partial(self._guarded, work, args, kwargs), self.abandon)

    def join(self) -> None:
        """Let the caller's stream wait until all that has been begun for the next blocks is done."""
        self._engine.turns.taken(self._engine.join)

    @contextmanager
    def watched(self) -> Iterator[Stopwatches]:
        """Time the steps of each stream meanwhile."""
        with self._engine.watched() as watches:
            yield watches

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
            events=tuple(self._events),
            experts=self._engine.turns.taken(self._experts) if self._builder.experts else None,
        )

    def _experts(self) -> ExpertsReport | None:
        placed = self._builder.experts
        if placed is None:
            return None
        rate = placed.cache.hit_rate()
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
        self._end_thread()
        self.take_down(leave_values=False)
        self._source.close()


class _QuietlyRefusedError(torch.cuda.OutOfMemoryError):  # type: ignore[misc]  # torch's has no types
    """A pass ended well, with other bits perhaps than with more memory."""


def _kind(tensors: Sequence[torch.Tensor]) -> Hashable:
    """Inputs of the same shapes and dtypes are of one kind."""
    return tuple([(tensor.shape, tensor.dtype) for tensor in tensors])


def _tried(
    work: Callable[..., Any], *args: Any
) -> tuple[Any, None] | tuple[None, torch.cuda.OutOfMemoryError]:
    """What work returns; or torch's error where memory ran out, without frames, which keep tensors alive."""
    try:
        return work(*args), None
    except torch.cuda.OutOfMemoryError as error:
        failed = error
    failed.add_note("Where memory ran out:\n" + "".join(traceback.format_tb(failed.__traceback__)[-3:]))
    failed.__traceback__ = failed.__context__ = None
    return None, failed


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
    with engine.watched() as watches:
        work()
        engine.streams.finish()
    copied, unpacked, waited = (watches.seconds(what) for what in ("copy", "unpack", "wait"))
    return Measured(walls, copied, unpacked, waited, watches.copied_bytes)
