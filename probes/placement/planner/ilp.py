"""Integer programs of a plan: how many blocks of each group take each choice. Pure.

`Search` finds the best whole counts by branch and bound on linear relaxations, and improves what it
finds by moving single blocks.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from probes.placement.planner.simplex import Tableau, maximise

GAP: Final = 1e-3  # the search ends when other counts can save at most this share of the time,
EARLY_NODES: Final = 24  # or after this many nodes,
LOOSE_GAP: Final = 1e-2  # at most this share,
MOST_NODES: Final = 120  # or after this many nodes,
MOST_WORK: Final = 7_000  # of larger programs, this many nodes times variables
LEAST_GAIN: Final = 1e-7  # share of the time below which a block isn't moved: there may be 100,000 blocks
SECOND: Final = 1e-3  # weight of the sum of all lanes, which breaks ties in favour of less work
MOST_REPAIRS: Final = 40  # blocks that are moved to make rounded counts fit
WHOLE: Final = 1e-6  # distance up to which a number counts as whole

Numbers: TypeAlias = tuple[tuple[int, ...], ...]  # blocks by group and choice


@dataclass(frozen=True)
class Choice:
    """What one block takes in one tier: seconds on each lane, bytes of each memory."""

    lanes: tuple[float, ...]
    memories: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """Blocks of equal cost, and the choices each of them has."""

    count: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Program:
    """The groups, the seconds for which each lane is busy anyway, and the limit of each memory in bytes."""

    groups: tuple[Group, ...]
    busy: tuple[float, ...]
    limits: tuple[float, ...]


@dataclass(frozen=True)
class Counts:
    """Blocks by group and choice, their cost, and the share of it that other counts may save at most."""

    counts: Numbers
    cost: float
    gap: float


class Search:
    """Branch and bound, best first: the node with the lowest bound is split at its most fractional count."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._best: Numbers | None = None
        self._tried: set[Numbers] = set()
        self._cost = math.inf
        self._ticket = itertools.count()
        self._waiting: list[tuple[float, int, Tableau]] = []
        if all(group.choices for group in program.groups):
            self._relaxation = Relaxation(program)
            self._push(self._relaxation.solve())

    @property
    def promise(self) -> float:
        """No counts cost less than this; infinite where nothing fits."""
        return self._waiting[0][0] if self._waiting else math.inf

    def run(self, better_than: float = math.inf) -> Counts | None:
        """The best counts found that cost less than `better_than`."""
        self._cost = better_than
        self._tried.clear()
        if not self._waiting:
            return None
        for count in range(min(MOST_NODES, MOST_WORK // max(len(self._relaxation.places), 1))):
            gap = GAP if count < EARLY_NODES else LOOSE_GAP
            if self.promise >= self._cost * (1 - gap):
                break
            _, _, solved = heapq.heappop(self._waiting)
            point = solved.point(len(self._relaxation.places))
            self._try(self._relaxation.whole(point))
            self._split(solved, point)
        if self._best is None:
            return None
        open_ = min(self.promise, self._cost)
        return Counts(self._best, self._cost, max(0.0, 1 - open_ / self._cost) if self._cost else 0.0)

    def _split(self, solved: Tableau, point: Sequence[float]) -> None:
        """Add two nodes: with less, and with more than the most fractional count."""
        away = [abs(value - round(value)) for value in point]
        most_away = max(away, default=0.0)
        if most_away <= WHOLE:
            return
        place = away.index(most_away)
        worth = self._relaxation.value(self._cost * (1 - GAP)) if self._cost < math.inf else -math.inf
        for most, number in ((True, math.floor(point[place])), (False, math.ceil(point[place]))):
            self._push(solved.bounded(place, number, most=most, worth=worth))

    def _push(self, solved: Tableau | None) -> None:
        bound = self._relaxation.cost(solved) if solved else math.inf
        if solved and bound < self._cost * (1 - GAP):
            heapq.heappush(self._waiting, (bound, next(self._ticket), solved))

    def _try(self, counts: Numbers) -> None:
        """Keep these counts if they fit and cost less, and then what moving single blocks makes of them."""
        if counts in self._tried:
            return
        self._tried.add(counts)
        moved: Numbers | None = counts if self._best else repaired(self._program, counts)
        while moved:
            total = cost(self._program, moved)
            if total is None or total >= self._cost * (1 - LEAST_GAIN):
                return
            self._best, self._cost = moved, total
            moved = with_best_move(self._program, moved, total * (1 - LEAST_GAIN))


class Relaxation:
    """The program without the demand for whole counts, as a linear program.

    Its variables are the counts of all choices except one in each group, the leanest, which takes what is
    left; and last, how far the time stays below the worst one, which is what is maximised.
    """

    def __init__(self, program: Program) -> None:
        self._groups = program.groups
        self._bases = tuple(_leanest(program, group) for group in program.groups)
        self.places = tuple(
            (g, c)
            for g, group in enumerate(program.groups)
            for c in range(len(group.choices))
            if c != self._bases[g]
        )
        self._rows: list[list[float]] = []
        self._limits: list[float] = []
        self._add_lanes(program)
        self._objective = [-SECOND * math.fsum(column) for column in zip(*self._rows, strict=True)]
        self._objective[-1] = 1.0
        self._constant = 1.0 + SECOND * math.fsum(1.0 - limit for limit in self._limits)
        self._add_memories(program)
        for g, group in enumerate(program.groups):
            if len(group.choices) > 1:
                self._add([float(place[0] == g) for place in self.places] + [0.0], float(group.count))

    def _add_lanes(self, program: Program) -> None:
        """A row for each lane that is used: the time is below the worst by no more than the lane is."""
        lanes = [[[c.lanes[i] for c in g.choices] for g in self._groups] for i in range(len(program.busy))]
        slowest = [busy + self._most(figures) for busy, figures in zip(program.busy, lanes, strict=True)]
        self._scale = sum(slowest) or 1.0
        for i, (busy, figures) in enumerate(zip(program.busy, lanes, strict=True)):
            if i and not slowest[i]:
                continue
            differences, base = self._line(figures)
            row = [value / self._scale for value in differences]
            self._add([*row, 1.0], 1.0 - (busy + base) / self._scale)

    def _add_memories(self, program: Program) -> None:
        """A row for each memory that all blocks together could fill."""
        for m, limit in enumerate(program.limits):
            figures = [[c.memories[m] for c in g.choices] for g in self._groups]
            if self._most(figures) > limit:
                differences, base = self._line(figures)
                unit = max(limit, base, 1.0)
                self._add([*(value / unit for value in differences), 0.0], (limit - base) / unit)

    def _most(self, figures: list[list[float]]) -> float:
        """The sum where all blocks take the choice that adds most."""
        return math.fsum(g.count * max(line) for g, line in zip(self._groups, figures, strict=True))

    def _line(self, figures: list[list[float]]) -> tuple[list[float], float]:
        """What each variable adds to a sum, and the sum where all blocks take their base choice."""
        bases = [line[c] for line, c in zip(figures, self._bases, strict=True)]
        base = math.fsum(group.count * one for group, one in zip(self._groups, bases, strict=True))
        return [figures[g][c] - bases[g] for g, c in self.places], base

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
        """The tableau's objective at a cost: the inverse of `cost`."""
        return self._constant - cost / self._scale

    def whole(self, point: Sequence[float]) -> Numbers:
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


def _rounded(shares: Sequence[float], count: int) -> tuple[int, ...]:
    floors = [int(share + WHOLE) for share in shares]
    left = count - sum(floors)
    if not left:
        return tuple(floors)
    for i in sorted(range(len(shares)), key=lambda i: floors[i] - shares[i])[:left]:
        floors[i] += 1
    return tuple(floors)


# Moves of single blocks


def cost(program: Program, counts: Numbers) -> float | None:
    """The time of the busiest lane plus a small share of the sum of all; None where a memory is too small."""
    chosen = [
        (number, choice)
        for group, numbers in zip(program.groups, counts, strict=True)
        for number, choice in zip(numbers, group.choices, strict=True)
        if number
    ]
    for m, limit in enumerate(program.limits):
        if math.fsum([number * choice.memories[m] for number, choice in chosen]) > limit:
            return None
    return _total(
        [
            busy + math.fsum([number * choice.lanes[lane] for number, choice in chosen])
            for lane, busy in enumerate(program.busy)
        ]
    )


def repaired(program: Program, counts: Numbers) -> Numbers:
    """Counts made to fit by moving a few blocks, each the one that frees most for its cost."""
    for _ in range(MOST_REPAIRS):
        lanes, memories = _sums(program, counts)
        over = _over(program, memories)
        if not over:
            break
        moves = []
        for move, was, then in _moves(program, counts):
            freed = over - _over(program, _moved(memories, was.memories, then.memories))
            if freed > 0:
                moves.append((_total(_moved(lanes, was.lanes, then.lanes)) / freed, move))
        if not moves:
            break
        counts = _with_move(counts, min(moves)[1])
    return counts


def with_best_move(program: Program, counts: Numbers, below: float) -> Numbers | None:
    """The counts with the one block moved that then cost least; None if none cost less than `below`."""
    lanes, memories = _sums(program, counts)
    time, busiest = max(zip(lanes, range(len(lanes)), strict=True))
    best = None
    for move, was, then in _moves(program, counts):
        if time - was.lanes[busiest] + then.lanes[busiest] >= below:
            continue
        total = _total(_moved(lanes, was.lanes, then.lanes))
        if total < below and not _over(program, _moved(memories, was.memories, then.memories)):
            best, below = move, total
    return _with_move(counts, best) if best else None


def _sums(program: Program, counts: Numbers) -> tuple[list[float], list[float]]:
    """Seconds on each lane and bytes of each memory."""
    lanes, memories = list(program.busy), [0.0] * len(program.limits)
    for group, numbers in zip(program.groups, counts, strict=True):
        for number, choice in zip(numbers, group.choices, strict=True):
            if number:
                lanes = [total + number * one for total, one in zip(lanes, choice.lanes, strict=True)]
                memories = [
                    total + number * one for total, one in zip(memories, choice.memories, strict=True)
                ]
    return lanes, memories


def _over(program: Program, memories: Sequence[float]) -> float:
    """By how much memories are too small, in shares of their limits."""
    return sum(
        [
            (taken - limit) / max(limit, 1.0)
            for taken, limit in zip(memories, program.limits, strict=True)
            if taken > limit
        ]
    )


def _moved(sums: Sequence[float], was: Sequence[float], then: Sequence[float]) -> list[float]:
    return [n - a + b for n, a, b in zip(sums, was, then, strict=True)]


def _total(lanes: Sequence[float]) -> float:
    return max(lanes) + SECOND * math.fsum(lanes)


def _moves(program: Program, counts: Numbers) -> Iterator[tuple[tuple[int, int, int], Choice, Choice]]:
    """Every move of one block: its group, choice and other choice by place, and the two choices."""
    for g, (group, line) in enumerate(zip(program.groups, counts, strict=True)):
        for i, was in enumerate(group.choices):
            if line[i]:
                yield from (((g, i, j), was, then) for j, then in enumerate(group.choices) if j != i)


def _with_move(counts: Numbers, move: tuple[int, int, int]) -> Numbers:
    """The counts with one block of a group moved from one choice to another."""
    g, i, j = move
    moved = tuple(n - (k == i) + (k == j) for k, n in enumerate(counts[g]))
    return (*counts[:g], moved, *counts[g + 1 :])
