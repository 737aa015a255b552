"""Percentiles with intervals from order statistics, and what correlation leaves of a sample. Pure.

Of n independent samples, how many are below the p-quantile is binomial with n and p, whatever their
distribution. So the k-th and m-th smallest enclose the quantile with a probability that only n, p, k and m
decide (H. A. David, H. N. Nagaraja, Order Statistics, 3rd ed., 2003, section 7.1). Latencies of neighbouring
requests resemble each other: n is cut to n (1 - r) / (1 + r) where neighbours correlate by r, and the
ranks are scaled back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes.records.stats import lag1, quantile
from probes.shared.unknown import Unknown

CONFIDENCE = 0.95
PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Percentile:
    """A quantile and its interval; an end that the sample is too small for is unknown."""

    share: float
    value: float
    low: float | Unknown
    high: float | Unknown


def independent(samples: Sequence[float]) -> float:
    """How many independent samples would say as much as these, which are in order of time; at least 1."""
    r = min(max(lag1(samples) or 0.0, 0.0), 0.999)
    return max(len(samples) * (1 - r) / (1 + r), 1.0)


def percentile(samples: Sequence[float], share: float) -> Percentile:
    """The quantile of samples in order of time. Raises ValueError for none."""
    ordered = sorted(samples)
    n = max(1, math.floor(independent(samples)))
    low, high = ranks(n, share)
    few = Unknown(f"too few samples: as many as {n} independent ones")
    scale = len(ordered) / n
    return Percentile(
        share,
        quantile(ordered, share),
        few if low < 1 else ordered[max(0, math.floor((low - 1) * scale))],
        few if high > n else ordered[min(len(ordered), math.ceil(high * scale)) - 1],
    )


def ranks(n: int, share: float, confidence: float = CONFIDENCE) -> tuple[int, int]:
    """The 1-based ranks of n sorted samples that enclose a quantile; 0 and n + 1 are beyond the sample.

    Each side misses with at most half of what is left of the confidence.
    """
    tail = (1 - confidence) / 2
    low = _most_below(n, share, tail)
    return low, n + 1 - _most_below(n, 1 - share, tail)


def _most_below(n: int, share: float, tail: float) -> int:
    """The largest rank k such that fewer than k of n are below with probability <= tail; 0: none."""
    rank, total = 0, 0.0
    start = max(0, math.floor(n * share - 12 * math.sqrt(n * share * (1 - share)) - 12))
    for count in range(start, n + 1):
        total += _binomial(n, count, share)
        if total > tail:
            break
        rank = count + 1
    return rank


def _binomial(n: int, count: int, share: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
    return math.exp(ways + count * math.log(share) + (n - count) * math.log1p(-share))
