"""Time over size as straight pieces: t(S) = alpha + S / beta on each. Pure.

Pieces, because real machines change their method at certain sizes: HIP copies by kernel up to 16 KiB and by a
copy engine beyond, CUDA stages pageable memory from 64 KiB on, a kernel's read leaves a cache.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import attrgetter

from probes.records.schema import Measurement, Unknown
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
        alpha, slope = min(through_zero, flat, key=lambda found: _squared(points, *found))
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
        found = min((_fitted(ordered, ends) for ends in _cuts(len(ordered), pieces)), key=poor, default=None)
        if found and (best is None or found.residual < best.residual):
            best = found
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
