"""The best whole counts of a program, by branch and bound on linear relaxations. Pure."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MOST_REPAIRS: Final = 40  # blocks moved to make rounded counts fit
SECOND: Final = 1e-3  # weight of the sum of all lanes: of two equal times, the one with less work is taken

Numbers: TypeAlias = tuple[tuple[int, ...], ...]  # blocks by group and choice


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

    counts: Numbers
    cost: float
    gap: float


def cost(program: Program, counts: Numbers) -> float | None:
    """The time of the busiest lane and a small part of the sum of all; None where a memory is too small."""
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


def repaired(program: Program, counts: Numbers, *, steps: int = MOST_REPAIRS) -> Numbers:
    """Counts that fit, if moving a few blocks is enough: each time the one that frees most for its cost."""
    for _ in range(steps):
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
    """The counts with that block moved to another choice which then cost least; None if not below this."""
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
    """Seconds of each lane, bytes of each memory."""
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
    """Each group, choice that has a block, and other choice, by their places, and the two choices."""
    for g, (group, line) in enumerate(zip(program.groups, counts, strict=True)):
        for i, was in enumerate(group.choices):
            if line[i]:
                yield from (((g, i, j), was, then) for j, then in enumerate(group.choices) if j != i)


def _with_move(counts: Numbers, move: tuple[int, int, int]) -> Numbers:
    """One block of a group moved from one choice to another."""
    g, i, j = move
    moved = tuple(n - (k == i) + (k == j) for k, n in enumerate(counts[g]))
    return (*counts[:g], moved, *counts[g + 1 :])


TINY: Final = 1e-9  # relative to rows that the caller has scaled to about 1
MOST_PIVOTS: Final = 2_000
BLAND_AFTER: Final = 200  # pivots; then the rule that can't cycle

Row = list[float]


@dataclass
class Tableau:
    """Rows `x_basis + sum(a x_other) = right`, the right side last; `objective` likewise, of what is largest.

    Variables are numbered: first the caller's, then one for each row. Each is counted from one of its bounds:
    upwards from the lower one, or from the upper one down (`falling`). So those outside the basis are 0.
    """

    rows: list[Row]
    objective: Row
    basis: list[int]
    others: list[int]
    lower: list[float]
    spans: list[float]  # from the lower bound to the upper one
    falling: list[bool]

    @property
    def value(self) -> float:
        """The objective's at this point."""
        return self.objective[-1]

    def point(self, width: int) -> list[float]:
        """The values of the caller's variables."""
        found = [
            low + span if falls else low
            for low, span, falls in zip(self.lower[:width], self.spans, self.falling, strict=False)
        ]
        for row, basic in zip(self.rows, self.basis, strict=True):
            if basic < width:
                found[basic] += -row[-1] if self.falling[basic] else row[-1]
        return found

    def bounded(self, variable: int, number: float, *, most: bool, worth: float) -> "Tableau | None":
        """The best point with a basic variable at most, or at least, this; None if none is worth it."""
        found = self._copy()
        low, falls = self.lower[variable], self.falling[variable]
        high, row = low + self.spans[variable], found.rows[self.basis.index(variable)]
        if most:
            row[-1] += number - high if falls else 0.0
            found.spans[variable] = number - low
        else:
            row[-1] += 0.0 if falls else low - number
            found.lower[variable], found.spans[variable] = number, high - number
        return found if found._descend(worth) else None

    def _copy(self) -> "Tableau":
        return Tableau(
            [row[:] for row in self.rows],
            self.objective[:],
            self.basis[:],
            self.others[:],
            self.lower[:],
            self.spans[:],
            self.falling[:],
        )

    def pivot(self, row: int, column: int) -> None:
        """Exchange a basic variable and another."""
        line = self.rows[row]
        factor = 1.0 / line[column]
        line = self.rows[row] = [value * factor for value in line]
        line[column] = factor
        held = [(i, value) for i, value in enumerate(line) if value]
        for other in (*self.rows[:row], *self.rows[row + 1 :], self.objective):
            if share := other[column]:
                other[column] = 0.0
                for i, value in held:
                    other[i] -= share * value
        self.basis[row], self.others[column] = self.others[column], self.basis[row]

    def climb(self) -> bool:
        """Pivot until no column improves the objective. False: it grows without bound, or takes too long."""
        for count in range(MOST_PIVOTS):
            column = self._column(careful=count > BLAND_AFTER)
            if column is None:
                return True
            row = self._row(column)
            if row is None:
                return False
            self.pivot(row, column)
        return False

    def _column(self, *, careful: bool) -> int | None:
        costs = self.objective[:-1]
        if careful:
            better = (i for i, cost in enumerate(costs) if cost < -TINY)
            return min(better, key=self.others.__getitem__, default=None)
        least = min(costs, default=0.0)
        return costs.index(least) if least < -TINY else None

    def _row(self, column: int) -> int | None:
        steps = [
            (row[-1] / row[column], self.basis[i], i) for i, row in enumerate(self.rows) if row[column] > TINY
        ]
        return min(steps)[2] if steps else None

    def _descend(self, worth: float) -> bool:
        """From a point that is better than any that fits, pivot until all rows fit."""
        for _ in range(MOST_PIVOTS):
            row = self._beyond()
            if row is None:
                return True
            column = self._entering(self.rows[row], worth)
            if column is None:
                return False
            self.pivot(row, column)
        return False

    def _beyond(self) -> int | None:
        """The row whose variable is furthest beyond a bound, and counts from there; None where all fit."""
        found, least, above = None, -TINY, False
        for at, (row, basic) in enumerate(zip(self.rows, self.basis, strict=True)):
            right = row[-1]
            if right < least:
                found, least, above = at, right, False
            elif self.spans[basic] - right < least:
                found, least, above = at, self.spans[basic] - right, True
        if found is not None and above:
            self._turn(found)
        return found

    def _turn(self, at: int) -> None:
        """Count a basic variable from its other bound."""
        row, basic = self.rows[at], self.basis[at]
        self.rows[at] = [*(-share for share in row[:-1]), self.spans[basic] - row[-1]]
        self.falling[basic] = not self.falling[basic]

    def _entering(self, line: Row, worth: float) -> int | None:
        """The column for a row beyond a bound; None where no point fits, or none is worth it."""
        steps = [
            (self.objective[i] / -share, i)
            for i, (share, other) in enumerate(zip(line, self.others, strict=False))
            if share < -TINY and self.spans[other]
        ]
        if not steps:
            return None
        step, column = min(steps)
        return column if self.value + step * line[-1] > worth else None


def maximise(
    objective: Sequence[float], rows: Sequence[Sequence[float]], limits: Sequence[float]
) -> Tableau | None:
    """The point x >= 0 with the largest objective * x, where each row * x is at most its limit.

    None where no point fits, or the objective has no largest value.
    """
    width, height = len(objective), len(rows)
    tableau = Tableau(
        [[*map(float, row), float(limit)] for row, limit in zip(rows, limits, strict=True)],
        [],
        list(range(width, width + height)),
        list(range(width)),
        [0.0] * (width + height),
        [math.inf] * (width + height),
        [False] * (width + height),
    )
    if min(limits, default=0.0) < 0 and not _feasible(tableau):
        return None
    costs = [*map(float, objective), *([0.0] * height)]
    reduced = [*(-costs[other] for other in tableau.others), 0.0]
    for row, basic in zip(tableau.rows, tableau.basis, strict=True):
        if share := costs[basic]:
            reduced = [a + share * b for a, b in zip(reduced, row, strict=True)]
    tableau.objective = reduced
    return tableau if tableau.climb() else None


def _feasible(tableau: Tableau) -> bool:
    """Move to a point that fits every row, by way of one more variable that relaxes them all at once."""
    extra = len(tableau.basis) + len(tableau.others)
    tableau.rows = [[*row[:-1], -1.0, row[-1]] for row in tableau.rows]
    tableau.objective = [*([0.0] * len(tableau.others)), 1.0, 0.0]
    tableau.others = [*tableau.others, extra]
    worst = min(range(len(tableau.rows)), key=lambda i: tableau.rows[i][-1])
    tableau.pivot(worst, len(tableau.others) - 1)
    if not tableau.climb() or abs(tableau.value) > 1e-7:
        return False
    if extra in tableau.basis:
        row = tableau.basis.index(extra)
        tableau.pivot(row, max(range(len(tableau.others)), key=lambda i: abs(tableau.rows[row][i])))
    column = tableau.others.index(extra)
    del tableau.others[column]
    for line in tableau.rows:
        del line[column]
    return True


WHOLE: Final = 1e-6  # a number so close to a whole one is that


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
        """A row for each lane that is used: the time stays below the worst by no more than the lane does."""
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
        """The other way round: of the tableau's objective."""
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


GAP: Final = 1e-3  # the search ends when no better choice can gain more than this share of the time
LOOSE_GAP: Final = 1e-2  # and after so many nodes, with this share
EARLY_NODES: Final = 24
MOST_NODES: Final = 120
MOST_WORK: Final = 7_000  # nodes times variables, for larger programs
LEAST_GAIN: Final = 1e-7  # of the time, below which a block isn't moved: there may be 100,000 of them


def solve(program: Program, *, better_than: float = math.inf) -> Counts | None:
    """The counts with the least cost below `better_than`; None where there are none, or nothing fits."""
    return Search(program).run(better_than)


class Search:
    """Best first: the node whose relaxation promises most is split at its most fractional count."""

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
        """Two nodes with fewer, and with more of the most fractional count."""
        away = [abs(value - round(value)) for value in point]
        most_away = max(away, default=0.0)
        if most_away <= WHOLE:
            return
        place = away.index(most_away)
        worth = self._relaxation.value(self._cost * (1 - GAP)) if self._cost < math.inf else -math.inf
        for most, number in ((True, math.floor(point[place])), (False, math.ceil(point[place]))):
            self._push(solved.bounded(place, number, most=most, worth=worth))

    def _push(self, solved: Tableau | None) -> None:
        found = self._relaxation.cost(solved) if solved else math.inf
        if solved and found < self._cost * (1 - GAP):
            heapq.heappush(self._waiting, (found, next(self._ticket), solved))

    def _try(self, counts: Numbers) -> None:
        """Keep these counts if they fit and cost less, and then any that one moved block makes better."""
        if counts in self._tried:
            return
        self._tried.add(counts)
        moved: Numbers | None = counts if self._best else repaired(self._program, counts)
        while moved:
            found = cost(self._program, moved)
            if found is None or found >= self._cost * (1 - LEAST_GAIN):
                return
            self._best, self._cost = moved, found
            moved = with_best_move(self._program, moved, found * (1 - LEAST_GAIN))
