"""Linear programs of a few dozen variables, solved by the simplex method on a dense tableau. Pure.

Small on purpose: a plan has a handful of kinds of blocks with a handful of tiers each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TINY: Final = 1e-9  # relative to rows that the caller has scaled to about 1
MOST_PIVOTS: Final = 2_000
BLAND_AFTER: Final = 200  # pivots; then the rule that can't cycle

Row = list[float]


@dataclass(frozen=True)
class Solution:
    """A point with the largest value of the objective."""

    value: float
    point: tuple[float, ...]


@dataclass
class _Tableau:
    """Rows `x_basis = right - sum(a x)`, the right side last; `objective` holds reduced costs likewise."""

    rows: list[Row]
    objective: Row
    basis: list[int]

    def pivot(self, row: int, column: int) -> None:
        line = self.rows[row]
        factor = 1.0 / line[column]
        line = self.rows[row] = [value * factor for value in line]
        held = [(i, value) for i, value in enumerate(line) if value]  # one in six
        for other in (*self.rows[:row], *self.rows[row + 1 :], self.objective):
            if share := other[column]:
                for i, value in held:
                    other[i] -= share * value
        self.basis[row] = column

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
            return next((i for i, cost in enumerate(costs) if cost > TINY), None)
        best = max(range(len(costs)), key=costs.__getitem__)
        return best if costs[best] > TINY else None

    def _row(self, column: int) -> int | None:
        steps = [
            (row[-1] / row[column], self.basis[i], i) for i, row in enumerate(self.rows) if row[column] > TINY
        ]
        return min(steps)[2] if steps else None


def maximise(
    objective: Sequence[float], rows: Sequence[Sequence[float]], limits: Sequence[float]
) -> Solution | None:
    """The point x >= 0 with the largest objective * x, where each row * x is at most its limit.

    None where no point fits, or the objective has no largest value.
    """
    width, height = len(objective), len(rows)
    tableau = _Tableau(
        [
            [*map(float, row), *([0.0] * i), 1.0, *([0.0] * (height - 1 - i)), float(limit)]
            for i, (row, limit) in enumerate(zip(rows, limits, strict=True))
        ],
        [],
        list(range(width, width + height)),
    )
    if min(limits, default=0.0) < 0 and not _feasible(tableau):
        return None
    reduced = [*map(float, objective), *([0.0] * (height + 1))]
    for row, basic in zip(tableau.rows, tableau.basis, strict=True):
        if reduced[basic]:
            reduced = [a - reduced[basic] * b for a, b in zip(reduced, row, strict=True)]
    tableau.objective = reduced
    if not tableau.climb():
        return None
    point = [0.0] * (width + height)
    for row, basic in zip(tableau.rows, tableau.basis, strict=True):
        point[basic] = row[-1]
    return Solution(-tableau.objective[-1], tuple(point[:width]))


def _feasible(tableau: _Tableau) -> bool:
    """Move to a point that fits every row, by way of one more variable that relaxes them all at once."""
    extra = len(tableau.rows[0]) - 1
    tableau.rows = [[*row[:-1], -1.0, row[-1]] for row in tableau.rows]
    tableau.objective = [0.0] * extra + [-1.0, 0.0]
    worst = min(range(len(tableau.rows)), key=lambda i: tableau.rows[i][-1])
    tableau.pivot(worst, extra)
    if not tableau.climb() or abs(tableau.objective[-1]) > 1e-7:
        return False
    if extra in tableau.basis:
        row = tableau.basis.index(extra)
        column = max(range(extra), key=lambda i: abs(tableau.rows[row][i]))
        tableau.pivot(row, column)
    tableau.rows = [[*row[:-2], row[-1]] for row in tableau.rows]
    return True
