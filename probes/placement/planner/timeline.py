"""When each block is copied, unpacked and computed: a simulation of the lanes with rings between them. Pure.

The predicted time of a pass is the simulation's: of the third pass of a row, when copies for its first blocks
were begun during the one before. Lanes: the link copies in call order; the GPU unpacks and computes in call
order; the disk reads ahead; Python hands each block over before it can begin. A pass ends with a
synchronisation.

A pass that is replayed as a graph is a closed piece of work: the copies for the next one's first blocks are
a part of it, and nothing of the next one begins before it has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from probes.placement.planner.costs import Option
from probes.placement.values import Rings

Lane = Literal["disk", "copy", "unpack", "compute", "cpu"]
PASSES: Final = 3
Raw = tuple[int, Lane, float, float]  # a span whose times count from the beginning of the first pass


@dataclass(frozen=True)
class Span:
    """A block on a lane, seconds from the beginning of the pass. Copies for it may begin before."""

    block: int
    lane: Lane
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One pass in a row of passes."""

    seconds: float
    begun_s: float
    raw: tuple[Raw, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What each block does on which lane."""
        begun = self.begun_s
        return tuple(Span(block, lane, begin - begun, end - begun) for block, lane, begin, end in self.raw)


@dataclass(slots=True)
class _Card:
    """When the link and the buffers of one card are free."""

    slots: list[float]
    called: list[float]  # when the block that last used the slot was handed over
    scratches: list[float]
    copy: float = 0.0
    moved: int = 0  # blocks in this pass: each has its slot and scratch buffer by its place among them
    unpacked: int = 0
    ahead: set[int] = field(default_factory=set)  # blocks whose copies are in the pass before


@dataclass(slots=True)
class _Lanes:
    """When everything that the cards share is free: they compute in turn, and one Python feeds them."""

    card: _Card  # whose blocks are called now
    disk: float = 0.0
    device: float = 0.0
    python: float = 0.0
    spans: list[Raw] = field(default_factory=list)


def simulate(chosen: Sequence[Option], rings: Rings, *, replayed: bool = False) -> Timeline:
    """The last of a few passes through blocks in call order, each in its tier. `replayed`: as graphs."""
    return simulate_cards([(chosen, rings)], replayed=replayed)


def simulate_cards(stages: Sequence[tuple[Sequence[Option], Rings]], *, replayed: bool = False) -> Timeline:
    """The same over several cards, each of which has the blocks that follow those of the card before."""
    cards = [
        _Card([0.0] * max(rings.slots, 1), [0.0] * max(rings.slots, 1), [0.0] * max(rings.scratches, 1))
        for _, rings in stages
    ]
    lanes = _Lanes(cards[0])
    begun = 0.0
    for _ in range(PASSES):
        begun = lanes.python
        lanes.spans = []
        index = 0
        for card, (chosen, _) in zip(cards, stages, strict=True):
            lanes.card = card
            card.moved = card.unpacked = 0
            _blocks(lanes, index, chosen)
            if replayed:
                _copy_ahead(lanes, index, chosen)
            index += len(chosen)
        lanes.python = max(lanes.python, lanes.device)
        if replayed:
            lanes.python = lanes.device = max(lanes.python, *(card.copy for card in cards))
    return Timeline(lanes.python - begun, begun, tuple(lanes.spans))


def _blocks(lanes: _Lanes, first: int, chosen: Sequence[Option]) -> None:
    """One pass through the blocks of a card. Most of a large model stays where it is: it only computes."""
    spans = lanes.spans
    for index, option in enumerate(chosen, first):
        if option.copy_s or option.unpack_s or option.cpu_s or option.shared_s:
            _block(lanes, index, option)
            continue
        lanes.python += option.launch_s
        if option.compute_s:
            begin = max(lanes.device, lanes.python)
            lanes.device = end = begin + option.compute_s
            spans.append((index, "compute", begin, end))


def _block(lanes: _Lanes, index: int, option: Option) -> None:
    lanes.python += option.launch_s
    ready = 0.0
    slot = lanes.card.moved % len(lanes.card.slots) if option.copy_s else None
    if slot is not None:
        if index in lanes.card.ahead:
            lanes.card.ahead.remove(index)
        else:
            ready = _copy(lanes, index, option, slot)
        lanes.card.called[slot] = lanes.python
        lanes.card.moved += 1
    if option.cpu_s:
        begin = max(lanes.python, lanes.device)
        lanes.python = lanes.device = begin + option.cpu_s
        lanes.card.copy += option.shared_s  # both read the host's memory
        lanes.spans.append((index, "cpu", begin, lanes.device))
    if option.unpack_s:
        ready = _unpack(lanes, index, option, ready)
        if slot is not None:
            lanes.card.slots[slot] = ready
    if option.compute_s:
        begin = max(lanes.device, lanes.python, ready)
        lanes.device = begin + option.compute_s
        if option.shared_s:  # the link serves copies too
            start = max(begin, lanes.card.copy)
            lanes.card.copy = start + option.shared_s
            lanes.spans.append((index, "copy", start, lanes.card.copy))
        lanes.spans.append((index, "compute", begin, lanes.device))
    if option.unpack_s:
        lanes.card.scratches[(lanes.card.unpacked - 1) % len(lanes.card.scratches)] = lanes.device
    elif slot is not None:
        lanes.card.slots[slot] = lanes.device


def _copy_ahead(lanes: _Lanes, first: int, chosen: Sequence[Option]) -> None:
    """Fill all slots with the first blocks of the next pass."""
    moving = [(first + i, option) for i, option in enumerate(chosen) if option.copy_s]
    for slot, (index, option) in zip(range(len(lanes.card.slots)), moving, strict=False):
        _copy(lanes, index, option, slot)
        lanes.card.ahead.add(index)


def _copy(lanes: _Lanes, index: int, option: Option, slot: int) -> float:
    ready = 0.0
    if option.disk_s:
        begin = max(lanes.disk, lanes.card.called[slot])
        ready = lanes.disk = begin + option.disk_s
        lanes.spans.append((index, "disk", begin, ready))
    begin = max(lanes.card.copy, lanes.card.slots[slot], lanes.card.called[slot], ready)
    lanes.card.copy = begin + option.copy_s
    lanes.spans.append((index, "copy", begin, lanes.card.copy))
    return lanes.card.copy


def _unpack(lanes: _Lanes, index: int, option: Option, ready: float) -> float:
    scratch = lanes.card.unpacked % len(lanes.card.scratches)
    lanes.card.unpacked += 1
    begin = max(lanes.device, ready, lanes.python, lanes.card.scratches[scratch])
    lanes.device = begin + option.unpack_s
    lanes.spans.append((index, "unpack", begin, lanes.device))
    return lanes.device
