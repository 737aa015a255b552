"""Places a model over several cards by a plan for them: each card has its blocks, arena, slots and lanes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import nn

from probes.errors import PlacementError
from probes.placement.models.modules import Block
from probes.placement.runtime.blocks.cardside import Across, Cards, Move, OnCard, on_card
from probes.placement.runtime.blocks.homes import Homes
from probes.placement.runtime.blocks.hostside import Inputs
from probes.placement.runtime.blocks.lanes import HostLanes, Lanes
from probes.placement.runtime.blocks.moving import Arithmetic
from probes.placement.runtime.converting import becomes, entrances
from probes.placement.runtime.handle import Handle, WholePass
from probes.placement.runtime.measuring import PlacementReport, wall_times
from probes.placement.runtime.preparing import lanes_of, on_host, planned_blocks, staged
from probes.placement.runtime.storage.valuesource import Source
from probes.placement.runtime.turns import Turns
from probes.placement.values import CardsPlan, Plan, Tier
from probes.shared.units import duration

Devices: TypeAlias = Sequence[torch.device | str] | torch.device | str | None
Placed: TypeAlias = list[tuple[Block, Tier]]


class CardsHandle:
    """A model placed over several cards. `cards` are the handles of its parts, which share one lock."""

    def __init__(self, model: nn.Module, plan: CardsPlan, cards: Cards) -> None:
        self.model = model
        self.plan = plan
        self.cards: list[Handle] = []
        self.at_end = ExitStack()  # what is closed when the model has been given back
        self._outer = Homes()
        self._over = cards
        self._wall_s: tuple[float, ...] = ()

    def guard_all(self, parts: Sequence[Placed], turns: Turns) -> None:
        """Let blocks compute on their cards, and the model's calls take turns."""
        for card, part in enumerate(parts):
            for block, _ in part:
                for module in block.modules:
                    self._outer.guard(module, partial(OnCard, cards=self._over, card=card))
        self._outer.guard(self.model, partial(Across, cards=self._over))
        trainable = any(entry.trains for part in parts for block, _ in part for entry in block.entries)
        self._outer.guard(
            self.model,
            partial(
                WholePass,
                turns=turns,
                model=self.model,
                failed=self._abandon,
                trainable=trainable,
                recorder=None,
            ),
        )
        self._outer.refuse_changes(self.model)
        self._outer.save_values(self.model)

    def _abandon(self) -> None:
        for handle in self.cards:
            handle.abandon()

    def convert_buffers(self) -> None:
        """Convert buffers to what the plan says that bfloat16 becomes."""
        dtype = becomes(_joined(self.plan))
        if dtype is not None:
            self._outer.convert_buffers(self.model, dtype)

    def convert_inputs(self, blocks: Placed) -> None:
        """From now on inputs are converted likewise: of blocks, too, which other methods may call."""
        dtype = becomes(_joined(self.plan))
        if dtype is not None:
            for module in entrances(self.model, blocks):
                self._outer.guard(module, partial(Inputs, dtype=dtype))

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
        """The same as text, and a pass's wall time where it was measured."""
        parts = [f"card {number}:\n{one}" for number, one in enumerate(self.reports(), start=1)]
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
            self._outer.unguard()
        self._outer.restore()


def lanes_of_cards(count: int, device: Devices) -> list[Lanes]:
    """The lanes of each card: the GPUs that are named, else the first ones, else the CPU for all."""
    if isinstance(device, list | tuple):
        if len(device) != count:
            raise PlacementError(f"the plan is for {count} cards, {len(device)} devices are named")
        return [lanes_of(one) for one in device]
    if device is not None:
        wanted = lanes_of(device)
        if wanted.device.type != "cpu":
            raise PlacementError(
                f"the plan is for {count} cards, one device is named: {wanted.device}",
                "name each of them, device=['cuda:0', 'cuda:1'], or none",
            )
        return [HostLanes() for _ in range(count)]
    if not torch.cuda.is_available():
        return [HostLanes() for _ in range(count)]
    if torch.cuda.device_count() < count:
        raise PlacementError(
            f"the plan is for {count} cards, torch sees {torch.cuda.device_count()} GPUs",
            "plan for as many as there are: --cards N",
        )
    return [lanes_of(f"cuda:{number}") for number in range(count)]


def settle_cards(
    model: nn.Module,
    plan: CardsPlan,
    sources: Sequence[Source],
    lanes: Sequence[Lanes],
    *,
    pinned: bool = True,
    work: Arithmetic | None = None,
    move: Move | None = None,
) -> CardsHandle:
    """Place each card's blocks, with values from its source. Raises PlacementError, and undoes all then."""
    parts = parts_of(model, plan)
    handle = CardsHandle(model, plan, Cards(tuple(one.device for one in lanes), move))
    turns = Turns()
    try:
        handle.convert_buffers()
        for card, part, source, lane in zip(plan.cards, parts, sources, lanes, strict=True):
            made = staged(model, card, source, lane, pinned=pinned, work=work, turns=turns)
            handle.cards.append(made)
            with on_card(lane.device):
                made.take_over(part)
        _move_buffers(model, handle.cards, parts)
        handle.guard_all(parts, turns)
        handle.convert_inputs([one for part in parts for one in part])
        for made in handle.cards:
            with on_card(made.device):
                made.begin()
    except BaseException:
        handle.remove()
        raise
    return handle


def parts_of(model: nn.Module, plan: CardsPlan) -> list[Placed]:
    """Each card's blocks. What is used between blocks is on the first card, wherever it was planned."""
    if not plan.cards:
        raise PlacementError("the plan is for no card", "make it again: --cards N")
    for facts in ({card.objective for card in plan.cards}, _conversions(plan)):
        if len(facts) > 1:
            raise PlacementError(
                f"the cards' plans differ: {', '.join(sorted(facts))}", "make the plan again"
            )
    found = planned_blocks(model, _joined(plan), plan.cards)
    parts: list[Placed] = []
    begin = 0
    for card in plan.cards:
        parts.append(found[begin : begin + len(card.blocks)])
        begin += len(card.blocks)
    for part in parts[1:]:
        between = [one for one in part if not one[0].called]
        parts[0] += between
        part[:] = [one for one in part if one[0].called]
    return parts


def _conversions(plan: CardsPlan) -> set[str]:
    """What bfloat16 becomes on those cards that have such weights."""
    return {card.bfloat16_becomes for card in plan.cards if card.bfloat16_becomes}


def _joined(plan: CardsPlan) -> Plan:
    """One plan with all blocks, without budgets."""
    becoming = next((card for card in plan.cards if card.bfloat16_becomes), plan.cards[0]).bfloat16_becomes
    blocks = tuple(block for card in plan.cards for block in card.blocks)
    return replace(plan.cards[0], blocks=blocks, vram_budget=0, host_budget=0, bfloat16_becomes=becoming)


def _move_buffers(model: nn.Module, handles: Sequence[Handle], parts: Sequence[Placed]) -> None:
    """Buffers follow their blocks; all others are on the first card."""
    modules = list(model.modules())
    elsewhere: set[int] = set()
    for handle, part in list(zip(handles, parts, strict=True))[1:]:
        mine = {id(one) for block, _ in part for top in block.modules for one in top.modules()}
        elsewhere |= mine
        handle.move_buffers(model, [one for one in modules if id(one) not in mine] + on_host(part))
    others = [one for one in modules if id(one) in elsewhere]
    handles[0].move_buffers(model, others + on_host(parts[0]))
