"""Statistics of repeated readings, derived from the raw samples whenever they are asked for. Pure.

One figure represents a row everywhere: the median over its processes of each process's median. Medians,
because a slow spell spoils some samples of a process, or one process, and not the rest.

Its error comes from two places. Within a process: half the distance between the quantiles at
1/2 -+ 1/(2 sqrt(n)), which is where the median of n independent samples is two times in three; n is cut to
n (1 - r) / (1 + r) where successive samples correlate by r. Between processes: how far apart their medians
are. The larger of the two is reported, as the half-width of an interval that covers two times in three.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

FEW_SAMPLES = 10
WIDE_ERROR = 0.02  # of the figure: above it a difference of a few percent can't be seen
CORRELATED = 0.5  # lag 1: above it a process's samples mostly repeat each other
MOST_CORRELATED = 0.999  # lag 1 that is counted at most
LONG_TAIL = 1.5  # p95 over median
# The median of R normal values errs by SPREAD[R] s, two times in three, where s is their own standard
# deviation: Student's t for the few values behind s, and what a median loses against a mean. By simulation;
# tests/unit/probes/records/test_probe_stats.py holds the coverage.
SPREAD = {2: 1.30, 3: 0.87, 4: 0.65, 5: 0.61}
# Of normal values with a well known deviation the median of so many errs by this share of it.
MEDIAN_ERROR = {2: 0.707, 3: 0.670, 4: 0.546, 5: 0.536}
# Student's t for 95 %, both sides, by degrees of freedom: W. S. Gosset (1908), as in every table.
STUDENT_95 = {
    1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23,
    12: 2.18, 15: 2.13, 20: 2.09, 30: 2.04, 60: 2.00,
}  # fmt: skip
AIM = 0.01  # of the figure: where its error is less, no more processes are needed to see a difference of 5 %

Times = Sequence[Sequence[float]]  # of each process, seconds


@dataclass(frozen=True)
class Summary:
    """The statistics of a row. Every figure has the unit of the samples."""

    n: int  # samples of all processes
    processes: int
    median: float  # of the processes' medians: the figure
    error: float | None  # its standard error; None for a single sample
    within: float | None  # standard error of one process's median, the middle one; None for single samples
    between: float | None  # standard deviation of the processes' medians; None for one process
    p5: float
    p95: float
    least: float
    lag1: float | None  # autocorrelation at lag 1, the middle one of the processes'; None where undefined


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The quantile by linear interpolation between order statistics. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples")
    return _quantile(sorted(samples), fraction)


def _quantile(ordered: Sequence[float], fraction: float) -> float:
    place = min(max(fraction, 0.0), 1.0) * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(samples: Sequence[float]) -> float:
    """The middle of the samples. Raises ValueError for no samples."""
    return quantile(samples, 0.5)


def lag1(samples: Sequence[float]) -> float | None:
    """Autocorrelation of successive samples; None for fewer than 3 or for equal ones."""
    if len(samples) < 3:
        return None
    mean = statistics.fmean(samples)
    away = [sample - mean for sample in samples]
    spread = math.fsum(a * a for a in away)
    if spread == 0:
        return None
    return math.fsum(a * b for a, b in pairwise(away)) / spread


def effective_n(samples: Sequence[float]) -> float:
    """How many independent samples say as much as these, which are in order of time: n (1 - r) / (1 + r).

    r is their autocorrelation at lag 1, where it is positive. At least 1.
    """
    r = min(max(lag1(samples) or 0.0, 0.0), MOST_CORRELATED)
    return max(len(samples) * (1 - r) / (1 + r), 1.0)


def error_of_median(samples: Sequence[float]) -> float | None:
    """The standard error of the median of one process's samples; None for a single one."""
    if len(samples) < 2:
        return None
    ordered, half = sorted(samples), 0.5 / math.sqrt(effective_n(samples))
    return (_quantile(ordered, 0.5 + half) - _quantile(ordered, 0.5 - half)) / 2


def deviation(values: Sequence[float]) -> float | None:
    """The standard deviation of values, by n - 1; None for one."""
    return statistics.stdev(values) if len(values) > 1 else None


def student_95(freedom: int) -> float:
    """Student's t for 95 %, at the next smaller count that the table has. Raises ValueError below 1."""
    if freedom < 1:
        raise ValueError("no degrees of freedom")
    return STUDENT_95[max(known for known in STUDENT_95 if known <= freedom)]


def median_errs(processes: int, few: Mapping[int, float]) -> float:
    """The standard error of the median of so many processes, in their standard deviations.

    `few` has those of small counts; beyond, sqrt(pi / 2) / sqrt(n), as of normal values.
    """
    return few.get(processes, 1.2533 / math.sqrt(processes))


def summarize(times: Sequence[Sequence[float]]) -> Summary:
    """All figures of a row. `times` holds the samples of each process, in order of measurement.

    Raises ValueError where a process has no samples, or there is none.
    """
    return _summary(tuple(map(tuple, times)))


@lru_cache(maxsize=4096)  # every column of a table asks for the figures of its rows by itself
def _summary(times: tuple[tuple[float, ...], ...]) -> Summary:
    medians = [median(samples) for samples in times]
    middle = median(medians)
    ordered = sorted(sample for samples in times for sample in samples)
    errors = [error for error in map(error_of_median, times) if error is not None]
    lags = [lag for lag in map(lag1, times) if lag is not None]
    within, between = median(errors) if errors else None, deviation(medians)
    return Summary(
        n=len(ordered),
        processes=len(times),
        median=middle,
        error=_error(within, between, len(times)),
        within=within,
        between=between,
        p5=_quantile(ordered, 0.05),
        p95=_quantile(ordered, 0.95),
        least=ordered[0],
        lag1=median(lags) if lags else None,
    )


def _error(within: float | None, between: float | None, processes: int) -> float | None:
    if between is None:
        return within
    apart = median_errs(processes, SPREAD) * between
    return max(apart, (within or 0.0) / math.sqrt(processes))


def pair_ratios(a: Times, b: Times) -> tuple[tuple[float, float], ...]:
    """Of each pair of processes: the logarithm of A over B, and its standard error.

    Samples are paired by when they were taken: a spell of the machine that both sides meet doesn't move the
    middle of their ratios, however long it was.
    """
    return tuple(
        (median(logs), error_of_median(logs) or 0.0)
        for logs in (_logs(*pair) for pair in zip(a, b, strict=True))
    )


def _logs(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """The ratios of samples taken at about the same time; the longer list is thinned out."""
    n = min(len(a), len(b))
    return [math.log(a[k * len(a) // n] / b[k * len(b) // n]) for k in range(n)]


def scatters(times: Times) -> bool:
    """Whether a row's error is too wide for a small difference to be seen: more processes help."""
    summary = summarize(times)
    return summary.error is None or summary.error > AIM * summary.median


def pairs_scatter(a: Times, b: Times) -> bool:
    """Whether the ratio of two sides, measured in turns, errs too much for a small difference to be seen."""
    ratios = [ratio for ratio, _ in pair_ratios(a, b)]
    apart = deviation(ratios)
    return apart is None or median_errs(len(ratios), SPREAD) * apart > AIM


@dataclass(frozen=True)
class Doubt:
    """A reason not to trust a figure too far, and what would help."""

    reason: str
    remedy: str


HOST_BOUND = Doubt(
    "host-bound", "host-bound: the device waited for the host, so its clock includes handing the work over"
)


def doubts(summary: Summary, *, host_bound: bool = False) -> tuple[Doubt, ...]:
    """Every doubt that the figures raise about themselves; `host_bound` as in a report's rows."""
    raised = [HOST_BOUND] if host_bound else []
    if summary.n < FEW_SAMPLES:
        raised.append(Doubt(f"n={summary.n}", "few samples: run without --quick"))
    if summary.processes == 1:
        raised.append(
            Doubt("one process", "another process may differ by more than the error: repeat the run")
        )
    if summary.error is not None and summary.error > WIDE_ERROR * summary.median:
        wide = f"error {summary.error / summary.median:.1%}"
        raised.append(Doubt(wide, "wide error: end other programs, repeat"))
    if summary.n >= FEW_SAMPLES and summary.lag1 is not None and summary.lag1 > CORRELATED:
        remedy = "successive samples correlate: they carry less information than their number suggests"
        raised.append(Doubt(f"lag1 {summary.lag1:.2f}", remedy))
    if summary.p95 > LONG_TAIL * summary.median:
        remedy = "long tail: something else ran; the median stays close"
        raised.append(Doubt(f"p95 {summary.p95 / summary.median:.1f}x", remedy))
    return tuple(raised)
