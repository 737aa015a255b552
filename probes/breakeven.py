"""From how many reads on does copying to VRAM first pay: predicted from bandwidths, and as measured. Pure.

S bytes, a copy with latency alpha and bandwidth B_c, in-place reads at B_z, VRAM reads at B_v, f the share of
the buffer that a read touches, k reads:
  copied  alpha + S/B_c + k f S/B_v        in place  k f S/B_z
  k*  =  (alpha/S + 1/B_c) / (f (1/B_z - 1/B_v))
In times of whole operations, latencies included: k* = t_copy / (f (t_in_place - t_vram)).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from probes.fit import Fit, Point, between, fit
from probes.report import Measurement, Reads, Unknown
from probes.stats import summarize

# The copy as work that waits for it sees it: copies in a row hide the handover between engines, which on an
# H200 is three times a copy's own latency. VRAM as rereads see it: what was just copied may lie in a cache.
COPY = "h2d_used"
PATHS = (COPY, "zero_copy_read", "vram_reread")


@dataclass(frozen=True)
class Timed:
    """Seconds with their standard error."""

    seconds: float
    error_s: float


@dataclass(frozen=True)
class BreakEven:
    """k* for one size; from so many full reads on, copying first is faster. Infinite: it never is."""

    n_bytes: int
    reads: float
    error: float  # standard error of `reads`, infinite with it


def k_star(n_bytes: int, copy: Timed, *, in_place: Timed, vram: Timed, share: float = 1.0) -> BreakEven:
    """k* from the times of one copy and one read each, errors propagated to first order.

    `share`: of the buffer that a read touches, over 0 to 1; the reads' times are those of the whole.
    """
    gain = share * (in_place.seconds - vram.seconds)
    if gain <= 0:
        return BreakEven(n_bytes, math.inf, math.inf)
    reads = copy.seconds / gain
    gain_error = share * math.hypot(in_place.error_s, vram.error_s)
    error = math.hypot(copy.error_s / gain, reads * gain_error / gain)
    return BreakEven(n_bytes, reads, error)


def k_star_of_bandwidths(
    n_bytes: int, *, alpha_s: float, copy: float, in_place: float, vram: float, share: float = 1.0
) -> float:
    """The same from bandwidths in GB/s and the copy's latency alone, as a datasheet gives them."""
    gain = share * (1 / in_place - 1 / vram)
    return (alpha_s * 1e9 / n_bytes + 1 / copy) / gain if gain > 0 else math.inf


@dataclass(frozen=True)
class _Curve:
    """Times of one path over size, and the widest standard error among them, relative.

    Copies follow latency plus size over bandwidth, and a fit evens out a size that was unlucky. Reads by a
    kernel don't: it spreads over more of the GPU as the size grows.
    """

    points: tuple[Point, ...]
    error: float
    pieces: Fit | None  # where the path follows one

    def at(self, n_bytes: float) -> Timed:
        if self.pieces:
            seconds = self.pieces.seconds(n_bytes)
            return Timed(seconds, seconds * max(self.error, self.pieces.residual))
        seconds = between(self.points, n_bytes)
        return Timed(seconds, seconds * self.error)


@dataclass(frozen=True)
class Adviser:
    """What `transfer` measured of the three paths on one machine."""

    used: _Curve
    in_place: _Curve
    reread: _Curve

    def at(self, n_bytes: int, *, share: float = 1.0) -> BreakEven:
        """k* at any size; between measured sizes by straight lines."""
        used, touch = (
            self.used.at(n_bytes),
            self.reread.points[0].seconds,
        )  # the kernel that the copy waits for
        copy = Timed(max(used.seconds - touch, 0.0), used.error_s)
        return k_star(
            n_bytes, copy, in_place=self.in_place.at(n_bytes), vram=self.reread.at(n_bytes), share=share
        )


def _means(rows: Sequence[Measurement], name: str) -> tuple[Point, ...]:
    """Means, not medians: a copy that is waited for takes one of two times at small sizes, by chance."""
    mine = sorted((row for row in rows if row.name == name), key=lambda row: row.payload_bytes)
    return tuple(Point(row.payload_bytes, summarize(row.samples_s).mean) for row in mine)


def adviser(rows: Sequence[Measurement]) -> Adviser | Unknown:
    """What the rows of `transfer` allow to predict; unknown where a path was measured at too few sizes."""
    curves = []
    for name in PATHS:
        points = _means(rows, name)
        if len(points) < 2:
            return Unknown(f"{name} was measured at {len(points)} sizes")
        told = [summarize(row.samples_s) for row in rows if row.name == name]
        found = fit(points) if name == COPY else None
        pieces = found if isinstance(found, Fit) else None
        curves.append(_Curve(points, max((one.sem or 0.0) / one.mean for one in told), pieces))
    return Adviser(*curves)


@dataclass(frozen=True)
class Crossing:
    """Predicted and measured k* at one size."""

    n_bytes: int
    predicted: BreakEven
    measured: BreakEven

    @property
    def distance(self) -> float:
        """Of the prediction from the measurement, relative."""
        return abs(self.predicted.reads / self.measured.reads - 1)


def measured(rows: Iterable[Reads], n_bytes: int) -> BreakEven | Unknown:
    """k* where the two straight lines of time over reads meet; unknown for too few rows or no crossing."""
    mine = [row for row in rows if row.payload_bytes == n_bytes]
    copied = _line([row for row in mine if row.way == "copy_first"])
    in_place = _line([row for row in mine if row.way == "in_place"])
    if copied is None or in_place is None:
        return Unknown("fewer than two counts of reads were measured")
    gain = in_place.slope_s - copied.slope_s
    start = copied.start_s - in_place.start_s
    if gain <= 0:
        return BreakEven(n_bytes, math.inf, math.inf)
    if start <= 0:
        return Unknown("the copy costs nothing measurable")
    reads = start / gain
    error = math.hypot(math.hypot(copied.error_s, in_place.error_s) / start, _slope_error(mine) / gain)
    return BreakEven(n_bytes, reads, reads * error)


@dataclass(frozen=True)
class _Line:
    start_s: float
    slope_s: float  # per read
    error_s: float  # of the start


def _line(rows: Sequence[Reads]) -> _Line | None:
    """The line through times over reads, by least squares on relative error."""
    if len({row.reads for row in rows}) < 2:
        return None
    told = [(row.reads, summarize(row.samples_s)) for row in rows]
    weights = [1 / one.mean**2 for _, one in told]
    total = math.fsum(weights)
    x = math.fsum(w * k for w, (k, _) in zip(weights, told, strict=True)) / total
    y = math.fsum(w * one.mean for w, (_, one) in zip(weights, told, strict=True)) / total
    spread = math.fsum(w * (k - x) ** 2 for w, (k, _) in zip(weights, told, strict=True))
    slope = math.fsum(w * (k - x) * (one.mean - y) for w, (k, one) in zip(weights, told, strict=True))
    slope /= spread
    return _Line(y - slope * x, slope, max(one.sem or 0.0 for _, one in told))


def _slope_error(rows: Sequence[Reads]) -> float:
    errors = [(summarize(row.samples_s).sem or 0.0) / row.reads for row in rows]
    return max(errors, default=0.0)


def crossings(rows: Sequence[Measurement], reads: Sequence[Reads]) -> tuple[Crossing, ...] | Unknown:
    """Prediction against measurement at every size where both exist and are finite."""
    advice = adviser(rows)
    if isinstance(advice, Unknown):
        return advice
    found = []
    for n_bytes in sorted({row.payload_bytes for row in reads}):
        seen = measured(reads, n_bytes)
        if isinstance(seen, BreakEven) and math.isfinite(seen.reads):
            found.append(Crossing(n_bytes, advice.at(n_bytes), seen))
    return tuple(found)


def faster(reads: Sequence[Reads]) -> dict[tuple[int, int], str]:
    """Which way was the faster one, by size and count of reads, from the means."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in reads:
        place = times.setdefault((row.payload_bytes, row.reads), {})
        place[row.way] = summarize(row.samples_s).mean
    return {key: min(ways, key=lambda way: ways[way]) for key, ways in times.items() if len(ways) == 2}
