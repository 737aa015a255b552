"""Whether a row of one report is faster than that of another, judged by what differs between processes. Pure.

Two runs of one machine differ by more than either's samples within a process suggest. Each row is therefore
measured by several fresh processes, and what their medians differ by is the error of the row. Three processes
say little about how far they scatter, so that is estimated from all rows of its kind (large or small sizes of
a path) in both reports and from the row itself, weighted by the processes behind each (empirical Bayes).

Reports of a run in turns are judged by pairs: what slows a machine down for a while slows both sides of a
pair, so their ratio scatters less than either.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from probes.records.stats import MEDIAN_ERROR, Times, median, median_errs, pair_ratios, summarize
from probes.report.quantities import with_error

# Chosen by simulation (tests/unit/probes/report/test_ratio.py), held by an H200 (docs/probes.md): two runs
# of one machine differ in 2 % of rows at most, and a slowdown of 5 % is found in 95 % of those from 1 MiB on.
CLEAR = 2.25  # standard errors
NOTABLE = 0.025  # below it a difference may be the machine's own from one hour to the next
TYPICAL = 0.83  # of a standard deviation: what `scatter` finds in three and three normal values
TYPICAL_OF_PAIRS = {2: 0.71, 3: 0.95, 4: 0.80, 5: 0.83, 6: 0.78}  # what `pair_scatter` finds, by pairs
PRIOR_WEIGHT = 8.0  # the kind's scatter counts as much as that of this many further processes
FEWEST_PROCESSES = 2  # of each report

Kind = Hashable  # rows that scatter alike


@dataclass(frozen=True)
class Scatter:
    """How far the processes of a row differ: a variance of logarithms, and its degrees of freedom."""

    variance: float
    freedom: int


@dataclass(frozen=True)
class Ratio:
    """How many times faster B is. `disturbed`: something else went on while the slower one was measured."""

    value: float
    error: float | None  # standard; None where a report has a single process
    disturbed: bool = False

    @property
    def verdict(self) -> str:
        """Whether B differs by more than the errors and by a notable amount."""
        if self.error is None:
            return "can't be judged: one process"
        off = math.log(self.value)
        if abs(off) <= CLEAR * self.error / self.value or abs(off) < NOTABLE:
            return "same within errors"
        if self.disturbed:
            return "can't be judged: disturbed"
        return "faster" if off > 0 else "slower"

    def __str__(self) -> str:
        return f"{self.value:.4g}" if self.error is None else with_error(self.value, self.error)


def scatter(a: Times, b: Times) -> Scatter:
    """Of the processes of one row in both reports, robust against one that is off.

    The middle one of their distances from their report's median. Those of the median itself are left out.
    """
    away = []
    for times in (a, b):
        logs = [math.log(median(samples)) for samples in times]
        middle = median(logs)
        distances = sorted(abs(one - middle) for one in logs)
        away += distances[1:]
    freedom = len(a) + len(b) - 2
    if freedom < 1 or not away:
        return Scatter(0.0, 0)
    return Scatter((median(away) / TYPICAL) ** 2, freedom)


def pair_scatter(a: Times, b: Times) -> Scatter:
    """Of the pairs of one row. The nearest to their middle are left out, as in `scatter`."""
    ratios = [ratio for ratio, _ in pair_ratios(a, b)]
    if len(ratios) < FEWEST_PROCESSES:
        return Scatter(0.0, 0)
    middle = median(ratios)
    away = sorted(abs(one - middle) for one in ratios)[1:]
    return Scatter((median(away) / TYPICAL_OF_PAIRS.get(len(ratios), 0.8)) ** 2, len(ratios) - 1)


def paired_ratio(a: Times, b: Times, *, shared: float, disturbed: bool = False) -> Ratio:
    """How many times faster B is, by processes that were measured in turns: as many of A as of B."""
    found = pair_ratios(a, b)
    value = math.exp(median([ratio for ratio, _ in found]))
    if len(found) < FEWEST_PROCESSES:
        return Ratio(value, None, disturbed)
    mine = pair_scatter(a, b)
    variance = (PRIOR_WEIGHT * shared + mine.freedom * mine.variance) / (PRIOR_WEIGHT + mine.freedom)
    within = median([error for _, error in found]) / math.sqrt(len(found))
    return Ratio(
        value,
        value * max(median_errs(len(found), MEDIAN_ERROR) * math.sqrt(variance), within),
        disturbed,
    )


def typical(rows: Sequence[Scatter]) -> float:
    """The variance that rows of one kind share: the mean without the tenth that scatters most."""
    known = sorted(row.variance for row in rows if row.freedom)
    kept = known[: max(1, math.floor(0.9 * len(known)))]
    return math.fsum(kept) / len(kept) if kept else 0.0


def speed_ratio(a: Times, b: Times, *, shared: float, disturbed: bool = False) -> Ratio:
    """How many times faster B is; `shared` is the variance that the rows of its kind have in common.

    Raises ValueError for no samples.
    """
    summaries = summarize(a), summarize(b)
    value = summaries[0].median / summaries[1].median
    if min(one.processes for one in summaries) < FEWEST_PROCESSES:
        return Ratio(value, None, disturbed)
    mine = scatter(a, b)
    variance = (PRIOR_WEIGHT * shared + mine.freedom * mine.variance) / (PRIOR_WEIGHT + mine.freedom)
    parts = []
    for one in summaries:
        between = median_errs(one.processes, MEDIAN_ERROR) * math.sqrt(variance)
        within = (one.within or 0.0) / one.median / math.sqrt(one.processes)
        parts.append(max(between, within))
    return Ratio(value, value * math.hypot(*parts), disturbed)


def shared_by_kind(
    rows: Iterable[tuple[Kind, Times, Times]], *, of: Callable[[Times, Times], Scatter] = scatter
) -> dict[Kind, float]:
    """The variance that the rows of each kind share; each row as its kind and its times in both reports."""
    kinds: dict[Kind, list[Scatter]] = {}
    for kind, a, b in rows:
        kinds.setdefault(kind, []).append(of(a, b))
    return {kind: typical(found) for kind, found in kinds.items()}
