"""When each block is copied, unpacked and computed: a simulation of the lanes with rings between them. Pure.

The predicted time of a pass is the simulation's: of the third pass of a row, when copies for its first blocks
were begun during the one before. Lanes: the link copies in call order; the GPU unpacks and computes in call
order; the disk reads ahead; Python hands each block over before it can begin. A pass ends with a
synchronisation.

A pass that is replayed as a graph is a closed piece of work: what it fetches ahead for the next one's first
blocks is a part of it, and nothing of the next one begins before it has ended. The runtime's order for that:
scratch buffers first, then slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from probes.placement.planner.costs import Option
from probes.placement.values import Rings

Lane = Literal["disk", "copy", "unpack", "compute", "cpu"]
PASSES: Final = 3
# Between lanes, beyond what each takes: a kernel that waits for a copy begins so much later, even if the copy
# has ended long ago; a copy so much after the kernel that it waits for. Graphs on an H100: 4 to 6 and 1.7 us.
ARRIVAL_S: Final = 5e-6
RELEASE_S: Final = 2e-6
# What a copy takes longer while kernels use the memory that it writes to: 16 passes on an H100 and five on an
# H200 took 1 % more for all their copies. (Where a graph's kernels change streams at each block, 12 %.)
BUSY: Final = 0.01
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
    stretch: float  # of copies, by kernels that run meanwhile
    copy: float = 0.0
    moved: int = 0  # pieces in this pass: each has its slot by its place among them
    unpacked: int = 0  # blocks, likewise with scratch buffers
    copied_ahead: set[int] = field(default_factory=set)  # pieces whose copies are in the pass before
    unpacked_ahead: set[int] = field(default_factory=set)  # likewise unpacked


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
        _Card(
            [0.0] * max(rings.slots, 1),
            [0.0] * max(rings.slots, 1),
            [0.0] * max(rings.scratches, 1),
            _stretch(chosen),
        )
        for chosen, rings in stages
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
                _fetch_ahead(lanes, index, chosen)
            index += len(chosen)
        lanes.python = max(lanes.python, lanes.device)
        if replayed:
            lanes.python = lanes.device = max(lanes.python, *(card.copy for card in cards))
    return Timeline(lanes.python - begun, begun, tuple(lanes.spans))


def _stretch(chosen: Sequence[Option]) -> float:
    """How much longer copies take: by the share of their time in which kernels run, if spread evenly."""
    copied = sum(option.copy_s for option in chosen)
    if not copied:
        return 1.0
    return 1.0 + BUSY * min(sum(option.compute_s + option.unpack_s for option in chosen) / copied, 1.0)


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
    card = lanes.card
    lanes.python += option.launch_s
    ready = wait = 0.0
    unpacks = option.unpack_s > 0 and index not in card.unpacked_ahead
    slot = None
    for nth in range(option.pieces if option.copy_s else 0):
        slot = card.moved % len(card.slots)
        ready = wait = 0.0
        if card.moved not in card.copied_ahead:
            ready, wait = _copy(lanes, index, option, slot, nth=nth), ARRIVAL_S
        if index not in card.unpacked_ahead:
            card.called[slot] = lanes.python
        card.copied_ahead.discard(card.moved)
        card.moved += 1
        if unpacks:
            ready, wait = _unpack(lanes, index, option, ready=ready, wait=wait, nth=nth), 0.0
            card.slots[slot] = ready + RELEASE_S
    if option.cpu_s:
        begin = max(lanes.python, lanes.device)
        lanes.python = lanes.device = begin + option.cpu_s
        card.copy += option.shared_s  # both read the host's memory
        lanes.spans.append((index, "cpu", begin, lanes.device))
    if unpacks and slot is None:
        ready, wait = _unpack(lanes, index, option, ready=ready, wait=wait), 0.0
    if option.unpack_s and not unpacks:
        card.unpacked_ahead.remove(index)
        card.unpacked += 1
    if option.compute_s:
        begin = max(lanes.device, lanes.python, ready) + wait
        lanes.device = begin + option.compute_s
        if option.shared_s:  # the link serves copies too
            start = max(begin, card.copy)
            card.copy = start + option.shared_s
            lanes.spans.append((index, "copy", start, card.copy))
        lanes.spans.append((index, "compute", begin, lanes.device))
    if option.unpack_s:
        card.scratches[(card.unpacked - 1) % len(card.scratches)] = lanes.device
    elif slot is not None:
        card.slots[slot] = lanes.device + RELEASE_S


def _fetch_ahead(lanes: _Lanes, first: int, chosen: Sequence[Option]) -> None:
    """Fill scratch buffers and slots with the first blocks of the next pass, as far as those are free.

    With a single scratch buffer the runtime unpacks each block where it computes, and none ahead. Nor does it
    unpack ahead a block that is larger than all slots.
    """
    card = lanes.card
    card.unpacked = 0
    ahead = len(card.scratches) if len(card.scratches) > 1 else 0
    unpacked = [i for i, option in enumerate(chosen) if option.unpack_s][:ahead]
    held: set[int] = set()
    piece = 0
    for place, option in enumerate(chosen):
        pieces = option.pieces if option.copy_s else 0
        if not pieces and place not in unpacked:
            continue
        index, ready = first + place, 0.0
        slots = [(piece + nth) % len(card.slots) for nth in range(pieces)]
        unpacks = place in unpacked and pieces <= len(card.slots)
        for nth, slot in enumerate(slots):
            if slot in held:
                return
            ready = _copy(lanes, index, option, slot, nth=nth)
            card.copied_ahead.add(piece + nth)
            held.add(slot)
        if unpacks:
            begin = lanes.card.unpacked
            for nth in range(option.pieces):
                wait = ARRIVAL_S if option.copy_s else 0.0
                ready = _unpack(lanes, index, option, ready=ready, wait=wait, nth=nth)
            card.scratches[begin % len(card.scratches)] = ready
            card.unpacked_ahead.add(index)
            for slot in slots:
                card.slots[slot] = ready + RELEASE_S
            held.difference_update(slots)
        piece += pieces


def _copy(lanes: _Lanes, index: int, option: Option, slot: int, *, nth: int) -> float:
    ready = 0.0
    if option.disk_s:
        begin = max(lanes.disk, lanes.card.called[slot])
        ready = lanes.disk = begin + option.disk_s
        lanes.spans.append((index, "disk", begin, ready))
    begin = max(lanes.card.copy, lanes.card.slots[slot], lanes.card.called[slot], ready)
    lanes.card.copy = begin + option.part(nth)[0] * lanes.card.stretch
    lanes.spans.append((index, "copy", begin, lanes.card.copy))
    return lanes.card.copy


def _unpack(lanes: _Lanes, index: int, option: Option, *, ready: float, wait: float, nth: int = 0) -> float:
    card = lanes.card
    card.unpacked += nth == 0
    scratch = (card.unpacked - 1) % len(card.scratches)
    begin = max(lanes.device, ready, lanes.python, card.scratches[scratch]) + wait
    lanes.device = begin + option.part(nth)[1]
    lanes.spans.append((index, "unpack", begin, lanes.device))
    return lanes.device
