"""The program without the demand for whole counts: a linear one, and whole counts near its point. Pure."""

import math
from collections.abc import Sequence
from typing import Final

from probes.placement.planner.solver.program import SECOND, Choice, Group, Numbers, Program
from probes.placement.planner.solver.simplex import Tableau, maximise

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
