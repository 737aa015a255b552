"""When each block is copied, unpacked and computed: a simulation of the lanes with rings between them. Pure.

The predicted time of a pass is the simulation's: of the third pass of a row, when copies for its first blocks
were begun during the one before. Lanes: the link copies in call order; the GPU unpacks and computes in call
order; the disk reads ahead; Python hands each block over before it can begin. A pass ends with a
synchronisation. Scratch buffers are never waited for: the GPU unpacks the next block after it has computed
the one before.

A pass that is replayed as a graph is a closed piece of work: what it fetches ahead for the next one's first
blocks is a part of it, and nothing of the next one begins before it has ended. The runtime's order for that:
scratch buffers first, then slots. So its second pass is like all others.

Most blocks of a large model stay where they are. Between two that move they change the lanes as one block
would, so a pass takes as long to simulate as it has blocks that move.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

from probes.placement.planner.costs import Option
from probes.placement.types import PrefetchPool

Lane: TypeAlias = Literal["disk", "copy", "unpack", "compute", "cpu"]
# A span whose times count from the beginning of the first pass
Raw: TypeAlias = tuple[int, Lane, float, float]


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


PASSES: Final = 3
REPLAYED_PASSES: Final = 2
# Between lanes, beyond what each takes: a kernel that waits for a copy begins so much later, even if the copy
# has ended long ago; a copy so much after the kernel that it waits for. Graphs on an H100: 4 to 6 and 1.7 us.
ARRIVAL_S: Final = 5e-6
RELEASE_S: Final = 2e-6
# What a copy takes longer while kernels use the memory that it writes to: 16 passes on an H100 and five on an
# H200 took 1 % more for all their copies. (Where a graph's kernels change streams at each block, 12 %.)
BUSY: Final = 0.01


class _Run(NamedTuple):
    """Blocks in a row that nothing moves for, as one."""

    first: Option
    launch_s: float
    work_s: float  # of the GPU
    late_s: float  # from when Python begins with the first until the GPU has ended, if it was idle


_Steps: TypeAlias = list[tuple[int, Option | _Run]]


class Assignment:
    """Blocks in call order, each in its tier, and what is the same for all rings."""

    def __init__(self, chosen: tuple[Option, ...]) -> None:
        self.chosen = chosen
        self.used: Mapping[Option, int] = Counter(chosen)
        self._steps: dict[tuple[int, ...], _Steps] = {}

    @property
    def least_s(self) -> float:
        """What a pass takes at least: all that the GPU and the CPU do, or Python."""
        used = self.used.items()
        on_cpu = sum(option.cpu_s * number for option, number in used)
        on_gpu = sum(option.gpu_s * number for option, number in used)
        return on_cpu + max(on_gpu, sum(option.launch_s * number for option, number in used))

    @cached_property
    def stretch(self) -> float:
        """How much longer copies take: by the share of their time in which kernels run, if spread evenly."""
        copied = sum([option.copy_s for option in self.chosen])
        if not copied:
            return 1.0
        busy = sum([option.gpu_s for option in self.chosen])
        return 1.0 + BUSY * min(busy / copied, 1.0)

    def steps(self, ahead: tuple[int, ...]) -> _Steps:
        """What to simulate if these are unpacked ahead."""
        if ahead not in self._steps:
            self._steps[ahead] = _steps(self.chosen, ahead, drawn=False)
        return self._steps[ahead]


@dataclass(slots=True)
class _Card:
    """When the link and the buffers of one card are free."""

    chosen: Sequence[Option]
    steps: _Steps
    slots: list[float]
    called: list[float]  # when the block that last used the slot was handed over
    stretch: float  # of copies, by kernels that run meanwhile
    ahead: tuple[int, ...]  # blocks that are unpacked at the end of the pass before, if there is time
    copy: float = 0.0
    moved: int = 0  # pieces in this pass: each has its slot by its place among them
    copied_ahead: set[int] = field(default_factory=set)  # pieces whose copies are in the pass before
    unpacked_ahead: set[int] = field(default_factory=set)  # blocks that were unpacked there


@dataclass(slots=True)
class _Lanes:
    """When everything that the cards share is free: they compute in turn, and one Python feeds them."""

    card: _Card  # whose blocks are called now
    disk: float = 0.0
    device: float = 0.0
    python: float = 0.0
    drawn: bool = False  # whether spans are kept
    spans: list[Raw] = field(default_factory=list)


def simulate(chosen: Sequence[Option], rings: PrefetchPool, *, replayed: bool = False) -> Timeline:
    """The last of a few passes through blocks in call order, each in its tier. `replayed`: as graphs."""
    return simulate_cards([(chosen, rings)], replayed=replayed)


def simulate_cards(
    stages: Sequence[tuple[Sequence[Option], PrefetchPool]], *, replayed: bool = False
) -> Timeline:
    """The same over several cards, each of which has the blocks that follow those of the card before."""
    cards = [_card(Assignment(tuple(chosen)), rings, replayed=replayed) for chosen, rings in stages]
    return _passes(cards, replayed=replayed, drawn=True)


def pass_seconds(blocks: Assignment, rings: PrefetchPool, *, replayed: bool = False) -> float:
    """The time of that pass alone, which is found much faster."""
    return _passes([_card(blocks, rings, replayed=replayed)], replayed=replayed, drawn=False).seconds


def _card(blocks: Assignment, rings: PrefetchPool, *, replayed: bool) -> _Card:
    """A card where nothing has begun.

    With a single scratch buffer the runtime unpacks each block where it computes, and none ahead.
    """
    chosen = blocks.chosen
    ahead: tuple[int, ...] = ()
    if replayed and rings.scratches > 1:
        unpacked = (place for place, option in enumerate(chosen) if option.unpack_s)
        ahead = tuple(itertools.islice(unpacked, rings.scratches))
    slots = max(rings.slots, 1)
    return _Card(chosen, blocks.steps(ahead), [0.0] * slots, [0.0] * slots, blocks.stretch, ahead)


def _steps(chosen: Sequence[Option], ahead: Sequence[int], *, drawn: bool) -> _Steps:
    """Blocks that something moves for, and runs of others, of one block each if they are drawn."""
    steps: _Steps = []
    alone = [place for place, option in enumerate(chosen) if option.moves or place in ahead]
    begin = 0
    for place in (*alone, len(chosen)):
        ends = range(begin + 1, place + 1) if drawn else (place,) * (begin < place)
        for end in ends:
            steps.append((begin, _run(chosen[begin:end])))
            begin = end
        if place < len(chosen):
            steps.append((place, chosen[place]))
        begin = place + 1
    return steps


def _run(chosen: Sequence[Option]) -> _Run:
    launch = work = late = 0.0
    for option in chosen:
        launch += option.launch_s
        if option.gpu_s:
            work += option.gpu_s
            late = max(late, launch) + option.gpu_s
    return _Run(chosen[0], launch, work, late)


def _passes(cards: Sequence[_Card], *, replayed: bool, drawn: bool) -> Timeline:
    lanes = _Lanes(cards[0])
    begun = 0.0
    for left in reversed(range(REPLAYED_PASSES if replayed else PASSES)):
        begun = lanes.python
        lanes.drawn = drawn and not left
        index = 0
        for card in cards:
            lanes.card = card
            card.moved = 0
            if lanes.drawn:
                card.steps = _steps(card.chosen, card.ahead, drawn=True)
            _pass(lanes, index)
            if replayed:
                _fetch_ahead(lanes, index)
            index += len(card.chosen)
        lanes.python = max(lanes.python, lanes.device)
        if replayed:
            lanes.python = lanes.device = max(lanes.python, *(card.copy for card in cards))
    return Timeline(lanes.python - begun, begun, tuple(lanes.spans))


def _pass(lanes: _Lanes, first: int) -> None:
    """One pass through the blocks of a card."""
    for place, step in lanes.card.steps:
        if not isinstance(step, _Run):
            _block(lanes, first + place, step)
            continue
        begun = lanes.python
        lanes.python = begun + step.launch_s
        if step.work_s:
            lanes.device = end = max(lanes.device + step.work_s, begun + step.late_s)
            if not lanes.drawn:
                continue
            between = end - step.first.compute_s
            if step.first.unpack_s:
                lanes.spans.append((first + place, "unpack", end - step.work_s, between))
            if step.first.compute_s:
                lanes.spans.append((first + place, "compute", between, end))


def _block(lanes: _Lanes, index: int, option: Option) -> None:
    card = lanes.card
    lanes.python += option.launch_s
    ready = wait = 0.0
    was_unpacked = index in card.unpacked_ahead
    unpacks = option.unpack_s > 0 and not was_unpacked
    slot = None
    for copy_s, unpack_s in option.each if option.copy_s else ():
        slot = card.moved % len(card.slots)
        ready = wait = 0.0
        if card.moved in card.copied_ahead:
            card.copied_ahead.remove(card.moved)
        else:
            ready, wait = _copy(lanes, index, option, slot, copy_s), ARRIVAL_S
        if not was_unpacked:
            card.called[slot] = lanes.python
        card.moved += 1
        if unpacks:
            ready, wait = _unpack(lanes, index, unpack_s, ready, wait), 0.0
            card.slots[slot] = ready + RELEASE_S
    if option.cpu_s:
        begin = max(lanes.python, lanes.device)
        lanes.python = lanes.device = begin + option.cpu_s
        card.copy += option.shared_s  # both read the host's memory
        if lanes.drawn:
            lanes.spans.append((index, "cpu", begin, lanes.device))
    if unpacks and slot is None:
        ready, wait = _unpack(lanes, index, option.each[0][1], ready, wait), 0.0
    if was_unpacked:
        card.unpacked_ahead.remove(index)
    if option.compute_s:
        _compute(lanes, index, option, ready, wait)
    if slot is not None and not option.unpack_s:
        card.slots[slot] = lanes.device + RELEASE_S


def _compute(lanes: _Lanes, index: int, option: Option, ready: float, wait: float) -> None:
    begin = max(lanes.device, lanes.python, ready) + wait
    lanes.device = end = begin + option.compute_s
    if option.shared_s:  # the link serves copies too
        card = lanes.card
        start = max(begin, card.copy)
        card.copy = start + option.shared_s
        if lanes.drawn:
            lanes.spans.append((index, "copy", start, card.copy))
    if lanes.drawn:
        lanes.spans.append((index, "compute", begin, end))


def _fetch_ahead(lanes: _Lanes, first: int) -> None:
    """Fill scratch buffers and slots with the first blocks of the next pass, as far as those are free.

    The runtime doesn't unpack ahead a block that is larger than all slots.
    """
    card = lanes.card
    held: set[int] = set()
    piece = 0
    for place, option in enumerate(card.chosen):
        pieces = option.pieces if option.copy_s else 0
        if not pieces and place not in card.ahead:
            continue
        index, ready = first + place, 0.0
        slots = [(piece + nth) % len(card.slots) for nth in range(pieces)]
        for nth, slot in enumerate(slots):
            if slot in held:
                return
            ready = _copy(lanes, index, option, slot, option.each[nth][0])
            card.copied_ahead.add(piece + nth)
            held.add(slot)
        if place in card.ahead and pieces <= len(card.slots):
            for _, unpack_s in option.each:
                ready = _unpack(lanes, index, unpack_s, ready, ARRIVAL_S if option.copy_s else 0.0)
            card.unpacked_ahead.add(index)
            for slot in slots:
                card.slots[slot] = ready + RELEASE_S
            held.difference_update(slots)
        piece += pieces


def _copy(lanes: _Lanes, index: int, option: Option, slot: int, copy_s: float) -> float:
    card, ready = lanes.card, 0.0
    called = card.called[slot]
    if option.disk_s:
        begin = max(lanes.disk, called)
        ready = lanes.disk = begin + option.disk_s
        if lanes.drawn:
            lanes.spans.append((index, "disk", begin, ready))
    begin = max(card.copy, card.slots[slot], called, ready)
    card.copy = end = begin + copy_s * card.stretch
    if lanes.drawn:
        lanes.spans.append((index, "copy", begin, end))
    return end


def _unpack(lanes: _Lanes, index: int, unpack_s: float, ready: float, wait: float) -> float:
    begin = max(lanes.device, ready, lanes.python) + wait
    lanes.device = end = begin + unpack_s
    if lanes.drawn:
        lanes.spans.append((index, "unpack", begin, end))
    return end


GAIN: Final = 1e-4  # of the time that a move must save
MANY_BLOCKS: Final = 4_096  # above which candidates are compared by windows of so many blocks:
WINDOW: Final = 256
WINDOWS: Final = 8
SLOT_COUNTS: Final = (1, 2, 3, 4)
PIECE_SLOT_COUNTS: Final = (1, 2, 3, 4, 6)  # where a slot holds a piece of a block
SCRATCH_COUNTS: Final = (1, 2)
Chosen: TypeAlias = tuple[Option, ...]


@dataclass(frozen=True)
class Limits:
    """Bytes that weights, rings, keys and values may take; of host memory; of it pinned. How passes run."""

    vram: int
    host: int
    pinned: int
    replayed: bool = False  # passes are replayed as graphs, which end with all copies that they begin


@dataclass(frozen=True)
class Placement:
    """Options in call order, with the rings they need, and the simulated time of the pass that follows."""

    chosen: Chosen
    rings: PrefetchPool
    seconds: float


def pool_bytes(rings: PrefetchPool) -> int:
    """Bytes of VRAM that the rings take."""
    return rings.slots * rings.slot_bytes + rings.scratches * rings.scratch_bytes


def disk_buffer_bytes(used: Iterable[Option], slot: int) -> int:
    """Bytes of pinned memory through which weights come from the disk."""
    return 2 * slot if any(option.tier == "disk" for option in used) else 0


def pool_room(used: Mapping[Option, int], limits: Limits) -> tuple[int, int, int] | None:
    """Bytes of a slot and of a scratch buffer that options, so many of each, need, and what is left for them.

    None where host memory is too small.
    """
    slot = max(option.slot_bytes for option in used)
    scratch = max(option.scratch_bytes for option in used)
    pinned = sum(option.pinned_bytes * number for option, number in used.items())
    pinned += disk_buffer_bytes(used, slot)
    pageable = sum(option.pageable_bytes * number for option, number in used.items())
    if pinned > limits.pinned or pinned + pageable > limits.host:
        return None
    return slot, scratch, limits.vram - sum(option.vram_bytes * number for option, number in used.items())


def with_best_pool(blocks: Assignment, limits: Limits) -> Placement | None:
    """With the rings that make the pass shortest, the fewest of equal ones; None where it doesn't fit."""
    room = pool_room(blocks.used, limits)
    if room is None:
        return None
    slot, scratch, left = room
    best, pieces = None, max(option.pieces for option in blocks.used)
    windows = _windows(blocks)
    as_often = len(blocks.chosen) / sum(len(window.chosen) for window in windows)
    counts = (0,) if not slot else PIECE_SLOT_COUNTS if pieces > 1 else SLOT_COUNTS
    for slots, scratches in itertools.product(counts, scratch_counts(scratch, limits)):
        rings = PrefetchPool(slots, slot, scratches, scratch, ahead=max(slots, 1), pieces=pieces)
        if pool_bytes(rings) > left:
            continue
        found = as_often * sum(pass_seconds(one, rings, replayed=limits.replayed) for one in windows)
        if best is None or found < best.seconds * (1 - GAIN):
            best = Placement(blocks.chosen, rings, found)
    return best


def scratch_counts(scratch: int, limits: Limits) -> tuple[int, ...]:
    """A second one is of use to a graph alone, which unpacks a block ahead for the next pass."""
    return (0,) if not scratch else SCRATCH_COUNTS if limits.replayed else SCRATCH_COUNTS[:1]


def _windows(blocks: Assignment) -> list[Assignment]:
    """What is simulated: the blocks, of very many only some windows."""
    chosen = blocks.chosen
    if len(chosen) <= MANY_BLOCKS:
        return [blocks]
    last = len(chosen) - WINDOW
    starts = (round(i * last / (WINDOWS - 1)) for i in range(WINDOWS))
    return [Assignment(chosen[at : at + WINDOW]) for at in starts]
