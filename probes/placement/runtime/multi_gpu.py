"""Places a model over several GPUs: each has its own part of the blocks, its own buffers and streams.

The hooks here bring inputs to the GPU of a block, and outputs back to where the code between blocks expects
them. "Card" is a GPU of the plan.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

from probes.core.errors import PlacementError
from probes.core.units import duration
from probes.placement.runtime.buffers import PlannedBlock
from probes.placement.runtime.builder import cpu_modules, planned_blocks
from probes.placement.runtime.call_order import Turns
from probes.placement.runtime.handle import Handle, PlacementReport, wall_times
from probes.placement.runtime.hooks import (
    ForwardHook,
    ModelHook,
    RoundTrip,
    call_uncompiled,
    is_compiled,
    map_tensors,
    on_device,
    tensors_in,
)
from probes.placement.runtime.offloaded import PackedOperations
from probes.placement.runtime.origins import ParameterOrigins, bfloat16_target
from probes.placement.runtime.streams import Streams, streams_of
from probes.placement.runtime.weight_sources import ModelWeights
from probes.placement.types import CardsPlan, Plan

Move = Callable[[Any, int], Any]
MAX_CALL_KINDS: Final = 64  # of calls that are remembered
_HARMLESS: Final = frozenset(
    {"size", "dim", "ndimension", "numel", "stride", "element_size", "is_floating_point", "__len__"}
)
_HARMLESS_ATTRIBUTES: Final = frozenset({"shape", "dtype", "ndim", "requires_grad", "layout"})


@dataclass(frozen=True)
class CallState:
    """How things were before a call."""

    now: int | None
    made: "dict[int, tuple[torch.Tensor, CardHook]] | None"
    staying: frozenset[int]
    device: int | None  # torch's current GPU
    watched: bool  # the watcher is torch's current mode


class CurrentCard:
    """Which card computes now. Card 0 is where the code between blocks finds its tensors."""

    def __init__(self, devices: tuple[torch.device, ...], move: Move | None = None) -> None:
        self.devices = devices
        self.move = move or self._moved
        self.now: int | None = None  # None: no block is being called
        self.made: dict[int, tuple[torch.Tensor, CardHook]] | None = None  # in a pass that is watched
        self.used: set[int] = set()  # hooks whose outputs are used between blocks, in such a pass
        self.staying: frozenset[int] = frozenset()  # hooks whose outputs stay on their card in this pass
        self._watcher: _OutputWatcher | None = None  # the last one
        self.seen: dict[Hashable, frozenset[int]] = {}  # by kind of call: hooks whose outputs stay

    def _moved(self, thing: Any, card: int) -> Any:
        return map_tensors(thing, partial(on_device, device=self.devices[card]))

    def current(self, card: int) -> AbstractContextManager[object]:
        """The card is torch's current one meanwhile: streams and kernels are its own."""
        return on_card(self.devices[card])

    @contextmanager
    def watch(self, call: Hashable) -> Iterator[None]:
        """In the first whole pass of a kind of call, see which blocks' outputs are used between blocks.

        A pass that fails forgets what was seen: the next one is watched again.
        """
        if self.made is not None:
            yield
            return
        before, known = self.staying, self.seen.pop(call, None)
        if known is not None:
            self.staying = known
            try:
                yield
                self.seen[call] = known
            finally:
                self.staying = before
            return
        self.made, self.used, self.staying = {}, set(), frozenset()
        try:
            with _OutputWatcher(self) as self._watcher:
                yield
            if len(self.seen) < MAX_CALL_KINDS:
                self.seen[call] = frozenset(id(hook) for _, hook in self.made.values()) - self.used
        finally:
            self.made, self.staying = None, before

    def unwatched(self) -> AbstractContextManager[object]:
        """Nobody watches meanwhile: where a mode is active, torch's attention takes another way."""
        if not self._is_watched():
            return nullcontext()
        access: AbstractContextManager[object] = _pop_mode_temporarily()
        return access

    def _is_watched(self) -> bool:
        return self._watcher is not None and _get_current_function_mode() is self._watcher

    def moment(self) -> CallState:
        """Return the state that `back` restores."""
        device = torch.cuda.current_device() if self.devices[0].type == "cuda" else None
        return CallState(self.now, self.made, self.staying, device, self._is_watched())

    def back(self, before: CallState) -> None:
        """Be as before a call that failed: torch's own contexts don't end where their end is interrupted."""
        self.now, self.made, self.staying = before.now, before.made, before.staying
        if before.device is not None:
            torch.cuda.set_device(before.device)
        if self._is_watched() and not before.watched:
            _pop_mode()
        elif before.watched and not self._is_watched():
            _push_mode(self._watcher)


def on_card(device: torch.device) -> AbstractContextManager[object]:
    """The device is torch's current one meanwhile, where it is a GPU."""
    if device.type != "cuda":
        return nullcontext()
    current: AbstractContextManager[object] = torch.cuda.device(device)
    return current


class CardHook(ForwardHook):
    """The forward of a block's module on its card."""

    def __init__(self, forward: Callable[..., Any], cards: CurrentCard, card: int) -> None:
        super().__init__(forward)
        self._cards, self._card = cards, card

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Bring the inputs to the card, compute there, give the output back."""
        if is_compiled():
            return call_uncompiled(self, args, kwargs)
        cards, before = self._cards, self._cards.moment()
        caller = before.now
        try:
            cards.now = self._card
            trip = RoundTrip(
                lambda thing: cards.move(thing, self._card), lambda thing: cards.move(thing, caller or 0)
            )
            given, named = trip.go(args), trip.go(kwargs)
            with cards.current(self._card), cards.unwatched():
                output = self.forward(*given, **named)
            cards.now = caller
        except BaseException:
            cards.back(before)
            raise
        if caller is None and id(self) in cards.staying:
            trip.write()
            return output
        output = trip.come(output)
        if caller is None and cards.made is not None:
            cards.made.update((id(tensor), (tensor, self)) for tensor in tensors_in(output))
        return output


class MultiGpuHook(ForwardHook):
    """The forward of a whole model over several cards: its output is on card 0."""

    def __init__(self, forward: Callable[..., Any], cards: CurrentCard) -> None:
        super().__init__(forward)
        self._cards = cards

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward pass."""
        cards, before = self._cards, self._cards.moment()
        try:
            with cards.current(0), cards.watch(call_kind(args, kwargs)):
                return cards.move(self.forward(*args, **kwargs), 0)
        except BaseException:
            cards.back(before)
            raise


def call_kind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """What decides, as a rule, how a model goes from block to block: which arguments are given and set."""

    def kind(value: object) -> object:
        return value if value is None or isinstance(value, bool) else type(value)

    return tuple(map(kind, args)), frozenset((name, kind(value)) for name, value in kwargs.items())


class _OutputWatcher(TorchFunctionMode):  # type: ignore[misc]
    """Notes which blocks' outputs torch's operations between blocks read."""

    def __init__(self, cards: CurrentCard) -> None:
        super().__init__()
        self._cards = cards

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = self._cards.made
        if self._cards.now is None and made and not _is_harmless(func):
            for tensor in tensors_in((args, kwargs or {})):
                if id(tensor) in made:
                    self._cards.used.add(id(made[id(tensor)][1]))
        return func(*args, **(kwargs or {}))


def _is_harmless(func: Any) -> bool:
    """Whether it gives the same on any card: shapes and types."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    name = getattr(func, "__name__", "")
    return name in _HARMLESS or (name == "__get__" and attribute in _HARMLESS_ATTRIBUTES)


Devices: TypeAlias = Sequence[torch.device | str] | torch.device | str | None


class CardsHandle:
    """A model placed over several cards. `cards` are the handles of its parts, which share one lock."""

    def __init__(self, model: nn.Module, plan: CardsPlan, cards: CurrentCard) -> None:
        self.model = model
        self.plan = plan
        self.cards: list[Handle] = []
        self.at_end = ExitStack()  # what is closed when the model has been given back
        self._outer = ParameterOrigins()
        self._over = cards
        self._becomes = bfloat16_target(_merged_plan(plan))
        self._wall_s: tuple[float, ...] = ()

    def guard_all(self, parts: Sequence[list[PlannedBlock]], turns: Turns) -> None:
        """Let blocks compute on their cards, and the model's calls take turns."""
        for card, part in enumerate(parts):
            for block, _ in part:
                for module in block.modules:
                    self._outer.add_hook(module, partial(CardHook, cards=self._over, card=card))
        self._outer.add_hook(self.model, partial(MultiGpuHook, cards=self._over))
        trainable = any(entry.trains for part in parts for block, _ in part for entry in block.entries)
        self._outer.add_hook(
            self.model,
            partial(
                ModelHook,
                turns=turns,
                model=self.model,
                failed=self._abandon,
                trainable=trainable,
            ),
        )
        self._outer.refuse_changes(self.model)
        self._outer.save_values(self.model)
        self._outer.convert_inputs(self.model, [pair for part in parts for pair in part], self._becomes)

    def _abandon(self) -> None:
        for handle in self.cards:
            handle.abandon()

    def convert_buffers(self) -> None:
        """Convert buffers to what the plan says that bfloat16 becomes."""
        self._outer.convert_buffers(self.model, self._becomes)

    def join(self) -> None:
        """Let each card's current stream wait until all that has been begun for the next blocks is done."""
        for handle in self.cards:
            with on_card(handle.device):
                handle.join()

    def measure(self, work: Callable[..., Any], *inputs: Any, passes: int = 5) -> tuple[float, ...]:
        """Wall times of `work(*inputs)`, a pass through the model, after one to warm up. For `report()`."""
        self._wall_s = wall_times(self._finish, partial(work, *inputs), passes)
        return self._wall_s

    def _finish(self) -> None:
        for handle in self.cards:
            handle.finish()

    def reports(self) -> tuple[PlacementReport, ...]:
        """What was planned and taken on each card."""
        return tuple(handle.report() for handle in self.cards)

    def report(self) -> str:
        """All cards' reports as text, and a pass's wall time where it was measured."""
        parts = [f"card {number}:\n{report}" for number, report in enumerate(self.reports(), start=1)]
        planned = f"{duration(self.plan.time.middle_s)} were predicted"
        if self._wall_s:
            parts.append(f"a pass through all takes {duration(median(self._wall_s))} (wall), {planned}")
        return "\n".join(parts)

    def remove(self) -> None:
        """Give the model back: the same parameter objects with their values in host memory, and no hooks.

        Twice does no harm. Raises torch's error where a GPU can't give values back any more.
        """
        with ExitStack() as stack:  # all of them, whatever fails
            stack.callback(self.at_end.close)
            for handle in reversed(self.cards):
                stack.enter_context(on_card(handle.device))
                stack.callback(handle.remove)
            self._outer.remove_hooks()
        self._outer.restore()


def streams_of_cards(count: int, device: Devices) -> list[Streams]:
    """The streams of each card: the GPUs that are named, else the first ones, else the CPU for all."""
    if isinstance(device, list | tuple):
        if len(device) != count:
            raise PlacementError(f"the plan is for {count} cards, {len(device)} devices are named")
        return [streams_of(name) for name in device]
    if device is not None:
        streams = streams_of(device)
        if streams.device.type != "cpu":
            raise PlacementError(
                f"the plan is for {count} cards, one device is named: {streams.device}",
                "name each of them, device=['cuda:0', 'cuda:1'], or none",
            )
        return [Streams() for _ in range(count)]
    if not torch.cuda.is_available():
        return [Streams() for _ in range(count)]
    if torch.cuda.device_count() < count:
        raise PlacementError(
            f"the plan is for {count} cards, torch sees {torch.cuda.device_count()} GPUs",
            "plan for as many as there are: --cards N",
        )
    return [streams_of(f"cuda:{number}") for number in range(count)]


def place_on_cards(
    model: nn.Module,
    plan: CardsPlan,
    sources: Sequence[ModelWeights],
    streams: Sequence[Streams],
    *,
    pinned: bool = True,
    work: PackedOperations | None = None,
    move: Move | None = None,
) -> CardsHandle:
    """Place each card's blocks, with values from its source. Raises PlacementError, and undoes all then."""
    parts = blocks_of_cards(model, plan)
    handle = CardsHandle(model, plan, CurrentCard(tuple(stream.device for stream in streams), move))
    turns = Turns()
    try:
        handle.convert_buffers()
        for card, part, source, stream in zip(plan.cards, parts, sources, streams, strict=True):
            part_handle = Handle(model, card, source, stream, pinned=pinned, work=work, turns=turns)
            handle.cards.append(part_handle)
            with on_card(stream.device):
                part_handle.take_over(part)
        _move_buffers(model, handle.cards, parts)
        handle.guard_all(parts, turns)
        for part_handle in handle.cards:
            with on_card(part_handle.device):
                part_handle.begin()
    except BaseException:
        handle.remove()
        raise
    return handle


def blocks_of_cards(model: nn.Module, plan: CardsPlan) -> list[list[PlannedBlock]]:
    """Each card's blocks. What is used between blocks is on the first card, wherever it was planned."""
    if not plan.cards:
        raise PlacementError("the plan is for no card", "make it again: --cards N")
    for facts in ({card.objective for card in plan.cards}, _conversions(plan)):
        if len(facts) > 1:
            raise PlacementError(
                f"the cards' plans differ: {', '.join(sorted(facts))}", "make the plan again"
            )
    blocks = planned_blocks(model, _merged_plan(plan), plan.cards)
    parts: list[list[PlannedBlock]] = []
    begin = 0
    for card in plan.cards:
        parts.append(blocks[begin : begin + len(card.blocks)])
        begin += len(card.blocks)
    for part in parts[1:]:
        between = [pair for pair in part if not pair[0].called]
        parts[0] += between
        part[:] = [pair for pair in part if pair[0].called]
    return parts


def _conversions(plan: CardsPlan) -> set[str]:
    """What bfloat16 becomes on those cards that have such weights."""
    return {card.bfloat16_becomes for card in plan.cards if card.bfloat16_becomes}


def _merged_plan(plan: CardsPlan) -> Plan:
    """One plan with all blocks, without budgets."""
    becoming = next((card for card in plan.cards if card.bfloat16_becomes), plan.cards[0]).bfloat16_becomes
    blocks = tuple(block for card in plan.cards for block in card.blocks)
    return replace(plan.cards[0], blocks=blocks, vram_budget=0, host_budget=0, bfloat16_becomes=becoming)


def _move_buffers(model: nn.Module, handles: Sequence[Handle], parts: Sequence[list[PlannedBlock]]) -> None:
    """Buffers follow their blocks; all others are on the first card."""
    modules = list(model.modules())
    elsewhere: set[int] = set()
    for handle, part in list(zip(handles, parts, strict=True))[1:]:
        inside = {id(module) for block, _ in part for top in block.modules for module in top.modules()}
        elsewhere |= inside
        handle.move_buffers(
            model, [module for module in modules if id(module) not in inside] + cpu_modules(part)
        )
    others = [module for module in modules if id(module) in elsewhere]
    handles[0].move_buffers(model, others + cpu_modules(parts[0]))
