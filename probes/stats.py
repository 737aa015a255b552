"""Statistics of repeated readings, derived from the raw samples whenever they are asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

FEW_SAMPLES = 10
WIDE_SEM = 0.02  # of the mean: above it a difference of a few percent can't be told
CORRELATED = 0.5  # lag 1: above it the SEM, which assumes independence, is too small
LONG_TAIL = 1.5  # p95 over median
PARTS = 10  # of the samples of a row


@dataclass(frozen=True)
class Summary:
    """What is told about a set of samples. Every figure has the unit of the samples."""

    n: int
    mean: float
    sem: float | None  # standard error of the mean, s / sqrt(n) with ddof 1; None for one sample
    median: float
    p5: float
    p95: float
    least: float
    lag1: float | None  # autocorrelation at lag 1; None where it isn't defined


def quantile(samples: Sequence[float], fraction: float) -> float:
    """The quantile by linear interpolation between order statistics. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(samples: Sequence[float]) -> float:
    """The middle of the samples. Raises ValueError for no samples."""
    return quantile(samples, 0.5)


def settled(samples: Sequence[float]) -> tuple[float, float]:
    """The median of the means of up to ten successive parts, and its standard error.

    Means, because single samples may take one of several times by chance; the median of them, because a spell
    in which something else was slow spoils a few parts and not all. The error is 1.2533 s / sqrt(parts), that
    of a median of normal values; 0 for a single part. Raises ValueError for no samples.
    """
    count = min(PARTS, len(samples))
    ends = [len(samples) * i // count for i in range(count + 1)] if count else []
    means = [math.fsum(samples[a:b]) / (b - a) for a, b in pairwise(ends)]
    middle = median(means)
    if count < 2:
        return middle, 0.0
    mean = math.fsum(means) / count
    spread = math.sqrt(math.fsum((m - mean) ** 2 for m in means) / (count - 1))
    return middle, 1.2533 * spread / math.sqrt(count)


def lag1(samples: Sequence[float]) -> float | None:
    """Autocorrelation of successive samples; None for fewer than 3 or for equal ones."""
    if len(samples) < 3:
        return None
    mean = math.fsum(samples) / len(samples)
    away = [sample - mean for sample in samples]
    spread = math.fsum(a * a for a in away)
    if spread == 0:
        return None
    return math.fsum(a * b for a, b in pairwise(away)) / spread


def summarize(samples: Sequence[float]) -> Summary:
    """All figures of the samples, in order of measurement. Raises ValueError for no samples."""
    n = len(samples)
    middle = median(samples)
    mean = math.fsum(samples) / n
    sem = None
    if n > 1:
        sem = math.sqrt(math.fsum((s - mean) ** 2 for s in samples) / (n - 1) / n)
    return Summary(
        n=n,
        mean=mean,
        sem=sem,
        median=middle,
        p5=quantile(samples, 0.05),
        p95=quantile(samples, 0.95),
        least=min(samples),
        lag1=lag1(samples),
    )


@dataclass(frozen=True)
class Doubt:
    """A reason not to believe a figure too much, and what would help."""

    reason: str
    remedy: str


def doubts(summary: Summary) -> tuple[Doubt, ...]:
    """Every doubt that the figures raise about themselves."""
    found = []
    if summary.n < FEW_SAMPLES:
        found.append(Doubt(f"n={summary.n}", "few samples: run without --quick"))
    if summary.sem is not None and summary.sem > WIDE_SEM * summary.mean:
        found.append(Doubt(f"SEM {summary.sem / summary.mean:.1%}", "wide SEM: end other programs, repeat"))
    if summary.n >= FEW_SAMPLES and summary.lag1 is not None and summary.lag1 > CORRELATED:
        remedy = "successive samples correlate: the true SEM is larger; repeat the run and compare"
        found.append(Doubt(f"lag1 {summary.lag1:.2f}", remedy))
    if summary.p95 > LONG_TAIL * summary.median:
        remedy = "long tail: something else ran; believe the median"
        found.append(Doubt(f"p95 {summary.p95 / summary.median:.1f}x", remedy))
    return tuple(found)
