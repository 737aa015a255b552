"""Linear programs by the simplex method: `maximise` solves one, `Tableau.bounded` adds a bound. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TINY: Final = 1e-9  # tolerance; the caller scales rows to about 1
MOST_PIVOTS: Final = 2_000
BLAND_AFTER: Final = 200  # pivots, after which Bland's rule is used, which can't cycle

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
        """The objective's value at this point."""
        return self.objective[-1]

    def point(self, width: int) -> list[float]:
        """The values of the caller's variables."""
        values = [
            low + span if falls else low
            for low, span, falls in zip(self.lower[:width], self.spans, self.falling, strict=False)
        ]
        for row, basic in zip(self.rows, self.basis, strict=True):
            if basic < width:
                values[basic] += -row[-1] if self.falling[basic] else row[-1]
        return values

    def bounded(self, variable: int, number: float, *, most: bool, worth: float) -> "Tableau | None":
        """The best point with a basic variable at most, or at least, a number; None if not worth that."""
        copy = self._copy()
        low, falls = self.lower[variable], self.falling[variable]
        high, row = low + self.spans[variable], copy.rows[self.basis.index(variable)]
        if most:
            row[-1] += number - high if falls else 0.0
            copy.spans[variable] = number - low
        else:
            row[-1] += 0.0 if falls else low - number
            copy.lower[variable], copy.spans[variable] = number, high - number
        return copy if copy._descend(worth) else None

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
        """The row whose variable is furthest beyond a bound, counted from that bound; None where all fit."""
        furthest, least, above = None, -TINY, False
        for at, (row, basic) in enumerate(zip(self.rows, self.basis, strict=True)):
            right = row[-1]
            if right < least:
                furthest, least, above = at, right, False
            elif self.spans[basic] - right < least:
                furthest, least, above = at, self.spans[basic] - right, True
        if furthest is not None and above:
            self._turn(furthest)
        return furthest

    def _turn(self, at: int) -> None:
        """Count a basic variable from its other bound."""
        row, basic = self.rows[at], self.basis[at]
        self.rows[at] = [*(-share for share in row[:-1]), self.spans[basic] - row[-1]]
        self.falling[basic] = not self.falling[basic]

    def _entering(self, line: Row, worth: float) -> int | None:
        """The column that enters for a row beyond a bound; None where no point fits, or none is worth it."""
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
    """Move to a point that fits every row, by an extra variable that relaxes them all (phase one)."""
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
