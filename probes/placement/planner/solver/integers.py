"""The best whole counts of a program, by branch and bound on linear relaxations. Pure."""

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Final

from probes.placement.planner.solver.program import (
    Counts,
    Numbers,
    Program,
    cost,
    repaired,
    with_best_move,
)
from probes.placement.planner.solver.relaxation import WHOLE, Relaxation
from probes.placement.planner.solver.simplex import Tableau

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
