"""When each block is copied, unpacked and computed: a simulation of a pass, as the runtime runs it. Pure.

The predicted time of a pass is the simulated one. Work runs on lanes, each in call order: the link copies,
the GPU unpacks and computes, the disk reads ahead, and Python launches each block before it can begin.
Copies go to the slots of a prefetch pool, so a copy waits until its slot is free. Scratch buffers, which
blocks are unpacked to, are never waited for: the GPU unpacks a block after it has computed the one before. A
pass ends with a synchronisation. The third pass of a row is taken, for which the first copies were begun
during the one before.

A pass that is replayed as a CUDA graph is closed: what it copies ahead for the next one's first blocks is a
part of it, and nothing of the next one begins before it has ended. So its second pass is like all others.

Most blocks of a large model stay where they are. Between two blocks that move they act on the lanes as one
block would, so simulating a pass takes as long as there are blocks that move.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

from probes.placement.planner.costs import Option
from probes.placement.types import PrefetchPool

Lane: TypeAlias = Literal["disk", "copy", "unpack", "compute", "cpu"]
# Block, lane, and the span's begin and end in seconds from the beginning of the first pass
Raw: TypeAlias = tuple[int, Lane, float, float]


@dataclass(frozen=True)
class Span:
    """Work for a block on a lane, in seconds from the beginning of the pass. Copies may begin before it."""

    block: int
    lane: Lane
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One simulated pass of a row."""

    seconds: float
    begun_s: float
    raw: tuple[Raw, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of all blocks, counted from the beginning of this pass."""
        begun = self.begun_s
        return tuple(Span(block, lane, begin - begun, end - begun) for block, lane, begin, end in self.raw)


PASSES: Final = 3
REPLAYED_PASSES: Final = 2
# Latency between lanes: a kernel that waits for a copy begins this much later, even if the copy has ended
# long ago; and a copy this much after the kernel that it waits for. Graphs on an H100: 4 to 6 and 1.7 us.
ARRIVAL_S: Final = 5e-6
RELEASE_S: Final = 2e-6
# Share by which a copy takes longer while kernels use the memory that it writes to: 16 passes on an H100
# and five on an H200 took 1 % more for all their copies. (Where a graph's kernels change streams at each
# block, 12 %.)
BUSY: Final = 0.01


class _Run(NamedTuple):
    """Consecutive blocks that nothing moves for, as one step."""

    first: Option
    launch_s: float
    work_s: float  # of the GPU
    late_s: float  # from when Python begins with the first until the GPU has ended, if it was idle


_Steps: TypeAlias = list[tuple[int, Option | _Run]]


class Assignment:
    """The option of each block, in call order, and what doesn't depend on the prefetch pool."""

    def __init__(self, chosen: tuple[Option, ...]) -> None:
        self.chosen = chosen
        self.used: Mapping[Option, int] = Counter(chosen)

    @property
    def least_s(self) -> float:
        """A lower bound of the pass: all work of the GPU and the CPU, or all of Python's."""
        used = self.used.items()
        on_cpu = sum(option.cpu_s * number for option, number in used)
        on_gpu = sum(option.gpu_s * number for option, number in used)
        return on_cpu + max(on_gpu, sum(option.launch_s * number for option, number in used))

    @cached_property
    def stretch(self) -> float:
        """How much longer copies take for the kernels that run meanwhile, if those are spread evenly."""
        copied = sum([option.copy_s for option in self.chosen])
        if not copied:
            return 1.0
        busy = sum([option.gpu_s for option in self.chosen])
        return 1.0 + BUSY * min(busy / copied, 1.0)

    @cached_property
    def steps(self) -> _Steps:
        """The steps to simulate."""
        return _steps(self.chosen, drawn=False)


@dataclass(slots=True)
class _Card:
    """One card: when its link and its buffers are free, and what was begun ahead."""

    chosen: Sequence[Option]
    steps: _Steps
    slots: list[float]
    called: list[float]  # when the block that last used the slot was launched
    stretch: float  # of copies, by kernels that run meanwhile
    copy: float = 0.0
    moved: int = 0  # pieces copied in this pass; piece n uses slot n modulo their number
    copied_ahead: set[int] = field(default_factory=set)  # pieces whose copies are in the pass before


@dataclass(slots=True)
class _Lanes:
    """When what the cards share is free: they compute in turn, launched by one Python process."""

    card: _Card  # whose blocks are called now
    disk: float = 0.0
    device: float = 0.0
    python: float = 0.0
    drawn: bool = False  # whether spans are kept
    spans: list[Raw] = field(default_factory=list)


def simulate(chosen: Sequence[Option], pool: PrefetchPool, *, replayed: bool = False) -> Timeline:
    """The last of a few passes through blocks in call order, each in its tier. `replayed`: as graphs."""
    return simulate_cards([(chosen, pool)], replayed=replayed)


def simulate_cards(
    stages: Sequence[tuple[Sequence[Option], PrefetchPool]], *, replayed: bool = False
) -> Timeline:
    """The last of a few passes over several cards, each with the blocks that follow the card before's."""
    cards = [_card(Assignment(tuple(chosen)), pool) for chosen, pool in stages]
    return _passes(cards, replayed=replayed, drawn=True)


def pass_seconds(assignment: Assignment, pool: PrefetchPool, *, replayed: bool = False) -> float:
    """The seconds of the pass that `simulate` gives, found much faster because no spans are kept."""
    return _passes([_card(assignment, pool)], replayed=replayed, drawn=False).seconds


def _card(assignment: Assignment, pool: PrefetchPool) -> _Card:
    """A card where nothing has begun."""
    slots = max(pool.slots, 1)
    return _Card(assignment.chosen, assignment.steps, [0.0] * slots, [0.0] * slots, assignment.stretch)


def _steps(chosen: Sequence[Option], *, drawn: bool) -> _Steps:
    """Blocks that something moves for, and runs of the others: each of one block if spans are `drawn`."""
    steps: _Steps = []
    alone = [place for place, option in enumerate(chosen) if option.moves]
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
                card.steps = _steps(card.chosen, drawn=True)
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
    unpacks = option.unpack_s > 0
    slot = None
    for copy_s, unpack_s in option.each if option.copy_s else ():
        slot = card.moved % len(card.slots)
        ready = wait = 0.0
        if card.moved in card.copied_ahead:
            card.copied_ahead.remove(card.moved)
        else:
            ready, wait = _copy(lanes, index, option, slot, copy_s), ARRIVAL_S
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
    if option.compute_s:
        _compute(lanes, index, option, ready, wait)
    if slot is not None and not unpacks:
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
    """Fill the slots with the first blocks of the next pass."""
    card, piece = lanes.card, 0
    for place, option in enumerate(card.chosen):
        for copy_s, _ in option.each if option.copy_s else ():
            if piece == len(card.slots):
                return
            _copy(lanes, first + place, option, piece, copy_s)
            card.copied_ahead.add(piece)
            piece += 1


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
