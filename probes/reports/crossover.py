"""The break-even of copying to VRAM first, in reads: predicted from bandwidths, and as measured. Pure.

S bytes, a copy with latency alpha and bandwidth B_c, in-place reads at B_z, VRAM reads at B_v, f the share of
the buffer that a read touches, k reads:
  copied  alpha + S/B_c + k f S/B_v        in place  k f S/B_z
  k*  =  (alpha/S + 1/B_c) / (f (1/B_z - 1/B_v))
In times of whole operations, latencies included: k* = t_copy / (f (t_in_place - t_vram)).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from operator import attrgetter

from probes.core.unknown import Unknown
from probes.measure.workbench import READS_AFTER
from probes.records.rows import Measurement, Reads
from probes.records.stats import summarize

FEWEST_POINTS = 3  # in a piece: a line through two can't miss
MOST_PIECES = 4
GOOD_RESIDUAL = 0.05  # a smaller gain doesn't justify another break
WORST_RESIDUAL = 0.20  # a fit with a larger one is not shown


@dataclass(frozen=True)
class Point:
    """A measured time at one size."""

    n_bytes: int
    seconds: float


@dataclass(frozen=True)
class Piece:
    """One straight piece, for sizes from `first_bytes` to `last_bytes`."""

    first_bytes: int
    last_bytes: int
    alpha_s: float  # latency; not below zero
    s_per_byte: float  # 1 / beta; not below zero, 0 where the time doesn't grow

    def seconds(self, n_bytes: float) -> float:
        """The time at a size."""
        return self.alpha_s + n_bytes * self.s_per_byte

    @property
    def beta_gb_per_s(self) -> float:
        """Asymptotic bandwidth in GB/s; infinite where the time doesn't grow."""
        return 1e-9 / self.s_per_byte if self.s_per_byte else math.inf

    @property
    def half_bytes(self) -> float:
        """n1/2: the size that reaches half of beta, alpha * beta (Hockney). Infinite for a flat piece."""
        return self.alpha_s / self.s_per_byte if self.s_per_byte else math.inf


@dataclass(frozen=True)
class Fit:
    """Pieces in order of size; neighbours share the measured size at which they meet."""

    pieces: tuple[Piece, ...]
    residual: float  # largest relative distance of a point from its piece

    def piece(self, n_bytes: float) -> Piece:
        """The piece for a size; the outermost ones reach beyond what was measured."""
        return next((p for p in self.pieces if n_bytes <= p.last_bytes), self.pieces[-1])

    def seconds(self, n_bytes: float) -> float:
        """The time at a size, between the pieces' own sizes and beyond them."""
        return self.piece(n_bytes).seconds(n_bytes)


def line(points: Sequence[Point]) -> Piece:
    """The straight piece with the least sum of squared relative errors; neither figure below zero.

    Weighted least squares with weights 1 / t^2. Raises ValueError for no points.
    """
    if not points:
        raise ValueError("no points to fit")
    ones = math.fsum(1 / p.seconds for p in points)
    squares = math.fsum(1 / p.seconds**2 for p in points)
    sizes = math.fsum(p.n_bytes / p.seconds for p in points)
    mixed = math.fsum(p.n_bytes / p.seconds**2 for p in points)
    size_squares = math.fsum((p.n_bytes / p.seconds) ** 2 for p in points)
    determinant = squares * size_squares - mixed**2
    alpha = slope = -1.0
    if determinant > 1e-12 * squares * size_squares:
        alpha = (ones * size_squares - sizes * mixed) / determinant
        slope = (squares * sizes - mixed * ones) / determinant
    if alpha < 0 or slope < 0:  # one of them is held at zero: the better of the two remaining lines
        through_zero, flat = (0.0, sizes / size_squares), (ones / squares, 0.0)
        alpha, slope = min(through_zero, flat, key=lambda pair: _squared(points, *pair))
    return Piece(points[0].n_bytes, points[-1].n_bytes, alpha, slope)


def _squared(points: Sequence[Point], alpha: float, slope: float) -> float:
    return math.fsum(((alpha + slope * p.n_bytes) / p.seconds - 1) ** 2 for p in points)


def fit(points: Sequence[Point]) -> Fit | Unknown:
    """The fit with the fewest pieces that is good, else the best one there is; unknown when that is poor."""
    ordered = sorted(points, key=lambda p: p.n_bytes)
    if len({p.n_bytes for p in ordered}) < FEWEST_POINTS:
        return Unknown(f"a fit needs {FEWEST_POINTS} sizes, there are {len({p.n_bytes for p in ordered})}")
    best: Fit | None = None
    poor = attrgetter("residual")
    for pieces in range(1, MOST_PIECES + 1):
        candidate = min(
            (_fitted(ordered, ends) for ends in _cuts(len(ordered), pieces)), key=poor, default=None
        )
        if candidate and (best is None or candidate.residual < best.residual):
            best = candidate
        if best and best.residual <= GOOD_RESIDUAL:
            break
    assert best is not None  # one piece always fits somehow
    if best.residual > WORST_RESIDUAL:
        return Unknown(f"the times don't follow straight pieces: they miss by up to {best.residual:.0%}")
    return best


def _cuts(count: int, pieces: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut `count` points into pieces of enough points that share their ends; as indices."""
    for inner in combinations(range(1, count - 1), pieces - 1):
        ends = (0, *inner, count - 1)
        if all(b - a + 1 >= FEWEST_POINTS for a, b in pairwise(ends)):
            yield ends


def _fitted(points: Sequence[Point], ends: Sequence[int]) -> Fit:
    groups = [points[a : b + 1] for a, b in pairwise(ends)]
    pieces = tuple(line(group) for group in groups)
    misses = [
        abs(piece.seconds(p.n_bytes) / p.seconds - 1)
        for piece, group in zip(pieces, groups, strict=True)
        for p in group
    ]
    return Fit(pieces, max(misses))


def between(points: Sequence[Point], n_bytes: float) -> float:
    """The time at a size on the straight line through its measured neighbours, or the outermost two.

    Raises ValueError for fewer than two points; they are in order of size.
    """
    if len(points) < 2:
        raise ValueError("a line needs two points")
    first = next((i for i in range(len(points) - 2) if n_bytes <= points[i + 1].n_bytes), len(points) - 2)
    left, right = points[first], points[first + 1]
    slope = (right.seconds - left.seconds) / (right.n_bytes - left.n_bytes)
    return left.seconds + slope * (n_bytes - left.n_bytes)


def points_of(rows: Sequence[Measurement], name: str) -> tuple[Point, ...]:
    """The figures of a path's rows over the size of its buffer."""
    return tuple(
        Point(row.payload_bytes, summarize(row.times_s).median)
        for row in sorted(rows, key=lambda row: row.payload_bytes)
        if row.name == name
    )


# The copy as the work that reads it sees it: copies in a row hide the handover between the copy engine and
# kernels, which on an H200 is twice a small copy's own latency. VRAM as rereads see it: what was just copied
# may be in a cache.
COPY, IN_PLACE, REREAD = "h2d_then_read", "zero_copy_read", "vram_reread"
PATHS = (COPY, IN_PLACE, REREAD)


@dataclass(frozen=True)
class Timed:
    """Seconds with their standard error."""

    seconds: float
    error_s: float


@dataclass(frozen=True)
class BreakEven:
    """k* for one size; from this many full reads on, copying first is faster. Infinite: it never is."""

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


@dataclass(frozen=True)
class _Curve:
    """Times over size, each with its standard error; between sizes the nearest one's error counts.

    Copies follow latency plus size over bandwidth, and a fit smooths out an unlucky size. Reads by a
    kernel don't: it spreads over more of the GPU as the size grows.
    """

    points: tuple[Point, ...]
    errors: tuple[float, ...]  # of the points, relative
    pieces: Fit | None = None  # where the path follows one

    def at(self, n_bytes: float) -> Timed:
        nearest = min(range(len(self.points)), key=lambda i: abs(math.log(self.points[i].n_bytes / n_bytes)))
        seconds = self.pieces.seconds(n_bytes) if self.pieces else between(self.points, n_bytes)
        return Timed(seconds, seconds * self.errors[nearest])


@dataclass(frozen=True)
class Adviser:
    """What `transfer` measured of the three paths on one machine."""

    copy: _Curve
    in_place: _Curve
    reread: _Curve

    def at(self, n_bytes: int, *, share: float = 1.0) -> BreakEven:
        """k* at any size; between measured sizes by straight lines."""
        copy, in_place, reread = (curve.at(n_bytes) for curve in (self.copy, self.in_place, self.reread))
        return k_star(n_bytes, copy, in_place=in_place, vram=reread, share=share)


def adviser(rows: Sequence[Measurement]) -> Adviser | Unknown:
    """What the rows of `transfer` allow to predict; unknown where a path was measured at too few sizes."""
    timed = {name: _timed(rows, name) for name in PATHS}
    for name, by_size in timed.items():
        if len(by_size) < 2:
            return Unknown(f"{name} was measured at {len(by_size)} sizes")
    copies = {
        n_bytes: _copy_alone(read, timed[REREAD][n_bytes])
        for n_bytes, read in timed[COPY].items()
        if n_bytes in timed[REREAD]
    }
    copies = {n_bytes: copy for n_bytes, copy in copies.items() if copy.seconds > 0}
    if len(copies) < 2:
        return Unknown("compared with the reads that follow it, a copy costs nothing measurable")
    copy = _curve(copies)
    fitted = fit(copy.points)
    copy = replace(copy, pieces=fitted if isinstance(fitted, Fit) else None)
    return Adviser(copy, _curve(timed[IN_PLACE]), _curve(timed[REREAD]))


def _timed(rows: Sequence[Measurement], name: str) -> dict[int, Timed]:
    """A path's times by size."""
    of_path = sorted((row for row in rows if row.name == name), key=lambda row: row.payload_bytes)
    return {row.payload_bytes: timed(row) for row in of_path}


def timed(row: Measurement | Reads) -> Timed:
    """A row's figure with its standard error, 0 for a single sample."""
    summary = summarize(row.times_s)
    return Timed(summary.median, summary.error or 0.0)


def _copy_alone(read: Timed, reread: Timed) -> Timed:
    """What the copy adds to the reads that follow it."""
    error_s = math.hypot(read.error_s, READS_AFTER * reread.error_s)
    return Timed(read.seconds - READS_AFTER * reread.seconds, error_s)


def _curve(by_size: dict[int, Timed]) -> _Curve:
    points = tuple(Point(n_bytes, time.seconds) for n_bytes, time in by_size.items())
    return _Curve(points, tuple(time.error_s / time.seconds for time in by_size.values()))


@dataclass(frozen=True)
class Crossing:
    """Predicted and measured k* at one size."""

    n_bytes: int
    predicted: BreakEven
    measured: BreakEven

    @property
    def off(self) -> float:
        """How much too high the prediction is, as a share of the measurement."""
        return self.predicted.reads / self.measured.reads - 1

    @property
    def distance(self) -> float:
        """Of the prediction from the measurement, relative."""
        return abs(self.off)


def measured(rows: Iterable[Reads], n_bytes: int) -> BreakEven | Unknown:
    """k* where the two straight lines of time over reads meet; unknown for too few rows or no crossing."""
    of_size = [row for row in rows if row.payload_bytes == n_bytes]
    copied = _line([row for row in of_size if row.way == "copy_first"])
    in_place = _line([row for row in of_size if row.way == "in_place"])
    if copied is None or in_place is None:
        return Unknown("fewer than two counts of reads were measured")
    gain = in_place.slope_s - copied.slope_s
    start = copied.start_s - in_place.start_s
    if gain <= 0:
        return BreakEven(n_bytes, math.inf, math.inf)
    if start <= 0:
        return Unknown("the copy costs nothing measurable")
    reads = start / gain
    error_s = math.hypot(copied.error_s(reads), in_place.error_s(reads))
    return BreakEven(n_bytes, reads, error_s / gain)


@dataclass(frozen=True)
class _Line:
    start_s: float
    slope_s: float  # per read
    middle: float  # weighted mean of the counts of reads
    middle_error_s: float  # standard error of the line there
    slope_error_s: float

    def error_s(self, reads: float) -> float:
        """The standard error of the line at a number of reads."""
        return math.hypot(self.middle_error_s, self.slope_error_s * (reads - self.middle))


def _line(rows: Sequence[Reads]) -> _Line | None:
    """The line through times over reads, by least squares on relative error."""
    if len({row.reads for row in rows}) < 2:
        return None
    figures = [(row.reads, timed(row)) for row in rows]
    points = [(k, time.seconds, time.error_s) for k, time in figures]
    weights = [1 / seconds**2 for _, seconds, _ in points]
    total = math.fsum(weights)
    x = math.fsum(w * k for w, (k, _, _) in zip(weights, points, strict=True)) / total
    y = math.fsum(w * seconds for w, (_, seconds, _) in zip(weights, points, strict=True)) / total
    spread = math.fsum(w * (k - x) ** 2 for w, (k, _, _) in zip(weights, points, strict=True))
    slope = math.fsum(w * (k - x) * (s - y) for w, (k, s, _) in zip(weights, points, strict=True))
    slope /= spread
    # the line at the middle and its slope are weighted sums of the times, and so are their errors
    parts = [
        (w / total, w * (k - x) / spread, error) for w, (k, _, error) in zip(weights, points, strict=True)
    ]
    middle_error = math.hypot(*(share * error for share, _, error in parts))
    slope_error = math.hypot(*(lever * error for _, lever, error in parts))
    return _Line(y - slope * x, slope, x, middle_error, slope_error)


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
    """Which way was the faster one, by size and count of reads."""
    times: dict[tuple[int, int], dict[str, float]] = {}
    for row in reads:
        ways_here = times.setdefault((row.payload_bytes, row.reads), {})
        ways_here[row.way] = timed(row).seconds
    return {key: min(ways, key=lambda way: ways[way]) for key, ways in times.items() if len(ways) == 2}
