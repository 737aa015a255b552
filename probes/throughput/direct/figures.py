"""What the trials of a batch size come to: throughput with its error, latency, energy. Pure.

A trial's throughput is batch over seconds; the figure is the mean of the trials, its error the standard
error of that mean. n trials of which successive ones correlate by r count as n (1 - r) / (1 + r), as in
`probes.records.stats`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes.records.stats import deviation, lag1, median, quantile
from probes.shared.unknown import Unknown
from probes.throughput.direct.scanned import BatchRow


@dataclass(frozen=True)
class Throughput:
    """Inputs per second over the trials of a batch size."""

    n: int  # trials
    mean: float
    error: float | None  # standard error of the mean; None for a single trial
    lag1: float | None  # autocorrelation of successive trials

    @property
    def share(self) -> float | None:
        """The error as a part of the mean."""
        return None if self.error is None else self.error / self.mean


def throughput(row: BatchRow) -> Throughput:
    """Inputs per second. Raises ValueError for a row without trials."""
    if not row.wall_s:
        raise ValueError(f"batch {row.batch} has no trials")
    return of_trials(row.batch, row.wall_s)


def of_trials(batch: int, wall_s: Sequence[float]) -> Throughput:
    """Inputs per second of at least one trial."""
    rates = [batch / seconds for seconds in wall_s]
    mean = math.fsum(rates) / len(rates)
    spread, correlated = deviation(rates), lag1(rates)
    if spread is None:
        return Throughput(len(rates), mean, None, None)
    r = max(correlated or 0.0, 0.0)
    independent = max(len(rates) * (1 - r) / (1 + r), 1.0)
    return Throughput(len(rates), mean, spread / math.sqrt(independent), correlated)


def error_share(batch: int, wall_s: Sequence[float]) -> float:
    """The error as a part of the mean; infinite for a single trial, whose error isn't known."""
    share = of_trials(batch, wall_s).share
    return math.inf if share is None else share


def latency_s(row: BatchRow) -> tuple[float, float]:
    """The median and the 95th percentile of the seconds from call to end."""
    return median(row.wall_s), quantile(row.wall_s, 0.95)


def joules_per_input(row: BatchRow) -> float | Unknown:
    """The device's energy for one input, idle power included."""
    if isinstance(row.joules, Unknown):
        return row.joules
    if not row.powered:
        return Unknown("no passes were measured with the power gauge")
    return row.joules / (row.powered * row.batch)
