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

from probes.placement.planner.solver.simplex import maximise

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


@dataclass(frozen=True)
class _Bound:
    """A limit to one variable: at most, or at least, so many."""

    place: int
    most: bool  # else at least
    number: int


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
    if any(not group.choices for group in program.groups):
        return None
    return _Search(program, better_than).run()


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
        lanes = [
            self._line([[c.lanes[i] for c in g.choices] for g in program.groups])
            for i in range(len(program.busy))
        ]
        for (differences, base), busy in zip(lanes, program.busy, strict=True):
            self._add(
                [value / self._scale for value in differences] + [1.0], 1.0 - (busy + base) / self._scale
            )
        self._objective = [
            -SECOND * math.fsum(row[i] for row in self._rows) for i in range(len(self.places))
        ] + [1.0]
        self._constant = 1.0 + SECOND * math.fsum(1.0 - limit for limit in self._limits)
        for m, limit in enumerate(program.limits):
            differences, base = self._line([[c.memories[m] for c in g.choices] for g in program.groups])
            unit = max(limit, base, 1.0)
            self._add([value / unit for value in differences] + [0.0], (limit - base) / unit)
        self._alone = {
            place for place, (g, _) in enumerate(self.places) if len(program.groups[g].choices) == 2
        }
        for g, group in enumerate(program.groups):
            if len(group.choices) > 2:  # one variable of its own is limited by a bound
                self._add([float(place[0] == g) for place in self.places] + [0.0], float(group.count))

    def _line(self, figures: list[list[float]]) -> tuple[list[float], float]:
        """What each variable adds to a sum, and the sum where all blocks take their base choice."""
        differences = [figures[g][c] - figures[g][self._bases[g]] for g, c in self.places]
        base = math.fsum(group.count * figures[g][self._bases[g]] for g, group in enumerate(self._groups))
        return differences, base

    def _add(self, row: list[float], limit: float) -> None:
        self._rows.append(row)
        self._limits.append(limit)

    def solve(self, bounds: Sequence[_Bound]) -> tuple[float, tuple[float, ...]] | None:
        """The least cost within these bounds and the variables' values; None where nothing fits.

        Only variables that the bounds leave free are columns; each counts from its lower bound.
        """
        lower, upper = self._ranges(bounds)
        free = [place for place in range(len(self.places)) if upper[place] > lower[place]]
        columns, shifted = [*free, -1], [(place, number) for place, number in enumerate(lower) if number]
        rows = [[row[column] for column in columns] for row in self._rows]
        limits = [
            limit - math.fsum(row[place] * number for place, number in shifted)
            for row, limit in zip(self._rows, self._limits, strict=True)
        ]
        for nth, place in enumerate(free):
            if place in self._alone or upper[place] < self._groups[self.places[place][0]].count:
                rows.append([0.0] * len(columns))
                rows[-1][nth] = 1.0
                limits.append(float(upper[place] - lower[place]))
        found = maximise([self._objective[column] for column in columns], rows, limits)
        if found is None:
            return None
        point = [float(number) for number in lower]
        for place, value in zip(free, found.point, strict=False):
            point[place] += value
        fixed = math.fsum(self._objective[place] * number for place, number in shifted)
        return (self._constant - found.value - fixed) * self._scale, tuple(point)

    def _ranges(self, bounds: Sequence[_Bound]) -> tuple[list[int], list[int]]:
        """The least and the largest number of each variable."""
        lower = [0] * len(self.places)
        upper = [self._groups[g].count for g, _ in self.places]
        for bound in bounds:
            if bound.most:
                upper[bound.place] = min(upper[bound.place], bound.number)
            else:
                lower[bound.place] = max(lower[bound.place], bound.number)
        taken = [0] * len(self._groups)
        for (g, _), number in zip(self.places, lower, strict=True):
            taken[g] += number
        for place, (g, _) in enumerate(self.places):  # what others of the group must have isn't left for it
            upper[place] = min(upper[place], self._groups[g].count - taken[g] + lower[place])
        return lower, upper

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


class _Search:
    """Best first: the node whose relaxation promises most is split at its most fractional count."""

    def __init__(self, program: Program, better_than: float) -> None:
        self._program = program
        self._relaxation = _Relaxation(program)
        self._best: tuple[tuple[int, ...], ...] | None = None
        self._cost = better_than
        self._ticket = itertools.count()
        self._waiting: list[tuple[float, int, tuple[_Bound, ...], tuple[float, ...]]] = []

    def run(self) -> Counts | None:
        """The best counts found."""
        self._push(())
        for count in range(min(MOST_NODES, MOST_WORK // max(len(self._relaxation.places), 1))):
            gap = GAP if count < EARLY_NODES else LOOSE_GAP
            if not self._waiting or self._waiting[0][0] >= self._cost * (1 - gap):
                break
            _, _, bounds, point = heapq.heappop(self._waiting)
            whole = self._relaxation.whole(point)
            self._try(whole if self._best else repaired(self._program, whole))
            place = max(range(len(point)), key=lambda i: abs(point[i] - round(point[i])), default=None)
            if place is None or abs(point[place] - round(point[place])) <= WHOLE:
                continue
            self._push((*bounds, _Bound(place, most=True, number=math.floor(point[place]))))
            self._push((*bounds, _Bound(place, most=False, number=math.ceil(point[place]))))
        if self._best is None:
            return None
        open_ = self._waiting[0][0] if self._waiting else self._cost
        return Counts(self._best, self._cost, max(0.0, 1 - open_ / self._cost) if self._cost else 0.0)

    def _push(self, bounds: tuple[_Bound, ...]) -> None:
        found = self._relaxation.solve(bounds)
        if found and found[0] < self._cost * (1 - GAP):
            heapq.heappush(self._waiting, (found[0], next(self._ticket), bounds, found[1]))

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
