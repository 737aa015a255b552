"""How many blocks of each kind go to each tier: a small integer program, by branch and bound. Pure.

Blocks of equal cost form a group. A choice takes time on several lanes and bytes of several memories; lanes
run at the same time, so a pass takes as long as the busiest lane. Sought are whole counts for each group and
choice with the least such time, within every memory's limit.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from probes.placement.planner.solver.simplex import Tableau, maximise

GAP: Final = 1e-3  # the search ends when no better choice can gain more than this share of the time
LOOSE_GAP: Final = 1e-2  # and after so many nodes, with this share
EARLY_NODES: Final = 24
MOST_NODES: Final = 120
MOST_WORK: Final = 7_000  # nodes times variables, for larger programs
LEAST_GAIN: Final = 1e-7  # of the time, below which a block isn't moved: there may be 100,000 of them
MOST_REPAIRS: Final = 40  # blocks moved to make rounded counts fit
WHOLE: Final = 1e-6
SECOND: Final = 1e-3  # weight of the sum of all lanes: of two equal times, the one with less work is taken


@dataclass(frozen=True)
class Choice:
    """What one block takes when it goes to one tier: seconds on each lane, bytes of each memory."""

    lanes: tuple[float, ...]
    memories: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """Blocks of equal cost, and the choices each of them has."""

    count: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Program:
    """The groups, what each lane is busy with anyway (seconds), and the limit of each memory (bytes)."""

    groups: tuple[Group, ...]
    busy: tuple[float, ...]
    limits: tuple[float, ...]


@dataclass(frozen=True)
class Counts:
    """Blocks by group and choice, their cost, and the share of it that a better choice can save at most."""

    counts: tuple[tuple[int, ...], ...]
    cost: float
    gap: float


def cost(program: Program, counts: Sequence[Sequence[int]]) -> float | None:
    """The time of the busiest lane and a small part of the sum of all; None where a memory is too small."""
    chosen = [
        (number, choice)
        for group, numbers in zip(program.groups, counts, strict=True)
        for number, choice in zip(numbers, group.choices, strict=True)
    ]
    for m, limit in enumerate(program.limits):
        if math.fsum(number * choice.memories[m] for number, choice in chosen) > limit:
            return None
    sums = [
        busy + math.fsum(number * choice.lanes[lane] for number, choice in chosen)
        for lane, busy in enumerate(program.busy)
    ]
    return _total(sums)


def repaired(
    program: Program, counts: tuple[tuple[int, ...], ...], *, steps: int = MOST_REPAIRS
) -> tuple[tuple[int, ...], ...]:
    """Counts that fit, if moving a few blocks is enough: each time the one that frees most for its cost."""
    for _ in range(steps):
        lanes, memories = _sums(program, counts)
        over = _over(program, memories)
        if not over:
            break
        moves = []
        for g, i, j in _moves(counts):
            was, then = program.groups[g].choices[i], program.groups[g].choices[j]
            freed = over - _over(program, _moved(memories, was.memories, then.memories))
            if freed > 0:
                moves.append((_total(_moved(lanes, was.lanes, then.lanes)) / freed, g, i, j))
        if not moves:
            break
        _, g, i, j = min(moves)
        counts = _with_move(counts, g, i, j)
    return counts


def _sums(program: Program, counts: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """Seconds of each lane, bytes of each memory."""
    lanes, memories = list(program.busy), [0.0] * len(program.limits)
    for group, numbers in zip(program.groups, counts, strict=True):
        for number, choice in zip(numbers, group.choices, strict=True):
            if number:
                lanes = [sum_ + number * one for sum_, one in zip(lanes, choice.lanes, strict=True)]
                memories = [sum_ + number * one for sum_, one in zip(memories, choice.memories, strict=True)]
    return lanes, memories


def _over(program: Program, memories: Sequence[float]) -> float:
    """By how much memories are too small, in shares of their limits."""
    return sum(
        max(0.0, n - limit) / max(limit, 1.0) for n, limit in zip(memories, program.limits, strict=True)
    )


def _moved(sums: Sequence[float], was: Sequence[float], then: Sequence[float]) -> list[float]:
    return [n - a + b for n, a, b in zip(sums, was, then, strict=True)]


def _total(lanes: Sequence[float]) -> float:
    return max(lanes) + SECOND * math.fsum(lanes)


def solve(program: Program, *, better_than: float = math.inf) -> Counts | None:
    """The counts with the least cost below `better_than`; None where there are none, or nothing fits."""
    return Search(program).run(better_than)


class _Relaxation:
    """The program without the demand for whole counts, as a linear program.

    Its variables are the counts of all choices except one in each group, the leanest, which takes what is
    left; and last, how far the time stays below the worst one, which is what is maximised.
    """

    def __init__(self, program: Program) -> None:
        self._bases = tuple(_leanest(program, group) for group in program.groups)
        self._groups = program.groups
        self.places = tuple(
            (g, c)
            for g, group in enumerate(program.groups)
            for c in range(len(group.choices))
            if c != self._bases[g]
        )
        self._scale = sum(_slowest(program)) or 1.0
        self._rows: list[list[float]] = []
        self._limits: list[float] = []
        for i, busy in enumerate(program.busy):
            if i and not busy and not any(c.lanes[i] for g in program.groups for c in g.choices):
                continue
            differences, base = self._line([[c.lanes[i] for c in g.choices] for g in program.groups])
            self._add(
                [value / self._scale for value in differences] + [1.0], 1.0 - (busy + base) / self._scale
            )
        self._objective = [
            -SECOND * math.fsum(row[i] for row in self._rows) for i in range(len(self.places))
        ] + [1.0]
        self._constant = 1.0 + SECOND * math.fsum(1.0 - limit for limit in self._limits)
        for m, limit in enumerate(program.limits):
            if math.fsum(g.count * max(c.memories[m] for c in g.choices) for g in program.groups) <= limit:
                continue
            differences, base = self._line([[c.memories[m] for c in g.choices] for g in program.groups])
            unit = max(limit, base, 1.0)
            self._add([value / unit for value in differences] + [0.0], (limit - base) / unit)
        for g, group in enumerate(program.groups):
            if len(group.choices) > 1:
                self._add([float(place[0] == g) for place in self.places] + [0.0], float(group.count))

    def _line(self, figures: list[list[float]]) -> tuple[list[float], float]:
        """What each variable adds to a sum, and the sum where all blocks take their base choice."""
        differences = [figures[g][c] - figures[g][self._bases[g]] for g, c in self.places]
        base = math.fsum(group.count * figures[g][self._bases[g]] for g, group in enumerate(self._groups))
        return differences, base

    def _add(self, row: list[float], limit: float) -> None:
        self._rows.append(row)
        self._limits.append(limit)

    def solve(self) -> Tableau | None:
        """The counts with the least cost as the tableau's point; None where nothing fits."""
        return maximise(self._objective, self._rows, self._limits)

    def cost(self, solved: Tableau) -> float:
        """The least cost of counts within all bounds."""
        return (self._constant - solved.value) * self._scale

    def value(self, cost: float) -> float:
        """The other way round: of the tableau's objective."""
        return self._constant - cost / self._scale

    def whole(self, point: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        """Whole counts near a point, by largest remainders in each group."""
        shares = [[0.0] * len(group.choices) for group in self._groups]
        for (g, c), value in zip(self.places, point, strict=True):
            shares[g][c] = max(0.0, value)
        for g, group in enumerate(self._groups):
            shares[g][self._bases[g]] = max(0.0, group.count - math.fsum(shares[g]))
        return tuple(_rounded(line, group.count) for line, group in zip(shares, self._groups, strict=True))


def _leanest(program: Program, group: Group) -> int:
    """The choice that takes the least of the memories, each in proportion to its limit."""

    def taken(choice: Choice) -> float:
        return math.fsum(
            n / max(limit, 1.0) for n, limit in zip(choice.memories, program.limits, strict=True)
        )

    return min(
        range(len(group.choices)), key=lambda c: (taken(group.choices[c]), sum(group.choices[c].lanes))
    )


def _slowest(program: Program) -> list[float]:
    return [
        busy + math.fsum(g.count * max(choice.lanes[lane] for choice in g.choices) for g in program.groups)
        for lane, busy in enumerate(program.busy)
    ]


def _rounded(shares: Sequence[float], count: int) -> tuple[int, ...]:
    floors = [int(share + WHOLE) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: floors[i] - shares[i])
    for i in order[: count - sum(floors)]:
        floors[i] += 1
    return tuple(floors)


class Search:
    """Best first: the node whose relaxation promises most is split at its most fractional count."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._best: tuple[tuple[int, ...], ...] | None = None
        self._cost = math.inf
        self._ticket = itertools.count()
        self._waiting: list[tuple[float, int, Tableau]] = []
        if all(group.choices for group in program.groups):
            self._relaxation = _Relaxation(program)
            self._push(self._relaxation.solve())

    @property
    def promise(self) -> float:
        """No counts cost less than this; infinite where nothing fits."""
        return self._waiting[0][0] if self._waiting else math.inf

    def run(self, better_than: float = math.inf) -> Counts | None:
        """The best counts found that cost less than `better_than`."""
        self._cost = better_than
        if not self._waiting:
            return None
        for count in range(min(MOST_NODES, MOST_WORK // max(len(self._relaxation.places), 1))):
            gap = GAP if count < EARLY_NODES else LOOSE_GAP
            if self.promise >= self._cost * (1 - gap):
                break
            _, _, solved = heapq.heappop(self._waiting)
            point = solved.point(len(self._relaxation.places))
            whole = self._relaxation.whole(point)
            self._try(whole if self._best else repaired(self._program, whole))
            self._split(solved, point)
        if self._best is None:
            return None
        open_ = min(self.promise, self._cost)
        return Counts(self._best, self._cost, max(0.0, 1 - open_ / self._cost) if self._cost else 0.0)

    def _split(self, solved: Tableau, point: Sequence[float]) -> None:
        """Two nodes with fewer, and with more of the most fractional count."""
        place = max(range(len(point)), key=lambda i: abs(point[i] - round(point[i])), default=None)
        if place is None or abs(point[place] - round(point[place])) <= WHOLE:
            return
        worth = self._relaxation.value(self._cost * (1 - GAP)) if self._cost < math.inf else -math.inf
        for most, number in ((True, math.floor(point[place])), (False, math.ceil(point[place]))):
            self._push(solved.bounded(place, number, most=most, worth=worth))

    def _push(self, solved: Tableau | None) -> None:
        found = self._relaxation.cost(solved) if solved else math.inf
        if solved and found < self._cost * (1 - GAP):
            heapq.heappush(self._waiting, (found, next(self._ticket), solved))

    def _try(self, counts: tuple[tuple[int, ...], ...]) -> None:
        """Keep these counts if they fit and cost less, and then any that one moved block makes better."""
        while True:
            found = cost(self._program, counts)
            if found is None or found >= self._cost * (1 - LEAST_GAIN):
                return
            self._best, self._cost = counts, found
            counts = _with_best_move(self._program, counts)


def _with_best_move(program: Program, counts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """The counts with that block moved from one choice to another which then cost least."""
    lanes, memories = _sums(program, counts)
    best, least = None, math.inf
    for g, i, j in _moves(counts):
        was, then = program.groups[g].choices[i], program.groups[g].choices[j]
        taken = _moved(memories, was.memories, then.memories)
        if all(n <= limit for n, limit in zip(taken, program.limits, strict=True)):
            total = _total(_moved(lanes, was.lanes, then.lanes))
            if total < least:
                best, least = (g, i, j), total
    return _with_move(counts, *best) if best else counts


def _moves(counts: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int, int]]:
    """Each group, choice that has a block, and other choice."""
    for g, line in enumerate(counts):
        for i, j in itertools.permutations(range(len(line)), 2):
            if line[i]:
                yield g, i, j


def _with_move(counts: tuple[tuple[int, ...], ...], g: int, i: int, j: int) -> tuple[tuple[int, ...], ...]:
    """One block of a group moved from one choice to another."""
    moved = tuple(n - (k == i) + (k == j) for k, n in enumerate(counts[g]))
    return (*counts[:g], moved, *counts[g + 1 :])
