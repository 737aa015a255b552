"""Where throughput stops growing with the batch: two straight lines in log2 throughput over log2 batch. Pure.

Up to the knee more inputs at once cost less than their share; after it they cost their share. The lines
meet at the knee. It is searched on a fine grid; for each place least squares give both lines. Its error is
the half-width of the places whose residual isn't worse than the best by more than one residual variance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probes.core.unknown import Unknown
from probes.throughput.ceilings import Ceiling, Ceilings, DeviceCeilings
from probes.throughput.direct.results import BatchRow, Series, Way, Work, latency_s, throughput

GROWS = 0.05  # per doubling: what counts as growth at the end of a scan
NEAR = 0.05  # of the largest throughput: within it a batch size counts as saturating
FEWEST = 4  # batch sizes that two lines and a knee need
STEPS = 64  # places to the octave
LEAST_ERROR = 0.005  # of a throughput: below it errors don't weigh more
SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Point:
    """Throughput at a batch size, inputs/s."""

    batch: int
    mean: float
    error: float  # standard error


@dataclass(frozen=True)
class Knee:
    """Throughput saturates."""

    tag: ClassVar[str] = "knee"
    batch: float  # where the lines meet
    octaves: float  # the standard error of log2 of that
    saturated_from: int  # the smallest measured batch within NEAR of the largest throughput

    @property
    def least(self) -> float:
        """Return the figure less one standard error."""
        return float(self.batch * 2**-self.octaves)

    @property
    def most(self) -> float:
        """Return the figure plus one standard error."""
        return float(self.batch * 2**self.octaves)


@dataclass(frozen=True)
class Flat:
    """Throughput saturates, and there is no bend to find: at the smallest batch or after a jump."""

    tag: ClassVar[str] = "flat"
    batch: int  # the smallest measured within NEAR of the largest throughput
    first: bool  # the smallest of all: the knee is at it or below


@dataclass(frozen=True)
class Growing:
    """Throughput still grows at the largest batch."""

    tag: ClassVar[str] = "growing"
    batch: int  # the largest measured
    per_doubling: float  # the growth at the end: 0.2 is 20 % for twice the batch


Found = Knee | Flat | Growing | Unknown


def of_series(series: Series) -> Found:
    """The knee of one way's rows."""
    rows = [(row.batch, throughput(row)) for row in series.rows]
    return find([Point(batch, found.mean, found.error or 0.0) for batch, found in rows])


def find(points: Sequence[Point]) -> Found:
    """The knee of throughput over batch, in any order. Unknown for too few batch sizes."""
    ordered = sorted(points, key=lambda point: point.batch)
    if len(ordered) < FEWEST:
        return Unknown(f"{len(ordered)} batch sizes are too few for a knee; {FEWEST} are needed")
    growth = _growth(ordered[-2], ordered[-1])
    if growth > GROWS:
        return Growing(ordered[-1].batch, growth)
    largest = max(point.mean for point in ordered)
    saturated = next(point.batch for point in ordered if point.mean >= largest * (1 - NEAR))
    if saturated == ordered[0].batch:
        return Flat(saturated, first=True)
    return _knee(ordered, saturated)


def _growth(before: Point, last: Point) -> float:
    """Per doubling, and 0 where the errors may have made it."""
    noise = SURE * math.hypot(before.error, last.error)
    if last.mean - before.mean <= noise:
        return 0.0
    return float((last.mean / before.mean) ** (1 / math.log2(last.batch / before.batch)) - 1)


def _knee(points: Sequence[Point], saturated: int) -> Knee | Flat:
    xs = [math.log2(point.batch) for point in points]
    ys = [math.log2(point.mean) for point in points]
    weights = [1 / max(point.error / point.mean, LEAST_ERROR) ** 2 for point in points]
    steps = round((xs[-1] - xs[0]) * STEPS)
    places = [xs[0] + step / STEPS for step in range(1, steps)]
    fits = [(place, *_lines(xs, ys, weights, place)) for place in places]
    rising = [fit for fit in fits if fit[2] > fit[3]]
    if not rising:
        return Flat(saturated, first=False)
    best = min(rising, key=lambda fit: fit[1])
    # Whatever the trials' own errors say, the lines are no better than their residuals.
    variance = max(best[1] / max(len(points) - 4, 1), (math.log2(math.e)) ** 2)
    near = [place for place, loss, *_ in rising if loss <= best[1] + variance]
    octaves = max((max(near) - min(near)) / 2, 0.5 / STEPS)
    return Knee(2 ** best[0], octaves, saturated)


def _lines(
    xs: Sequence[float], ys: Sequence[float], weights: Sequence[float], place: float
) -> tuple[float, float, float]:
    """Weighted least squares of c + a min(x - k, 0) + b max(x - k, 0): the loss, a and b.

    No point is on both sides, so two of the nine sums are 0 and three are there twice.
    """
    points = [(w, x - place, y) for w, x, y in zip(weights, xs, ys, strict=True)]
    left = _Side([point for point in points if point[1] < 0])
    right = _Side([point for point in points if point[1] > 0])
    normal = [
        [math.fsum(weights), left.wx, right.wx, math.fsum([w * y for w, _, y in points])],
        [left.wx, left.wxx, 0.0, left.wxy],
        [right.wx, 0.0, right.wxx, right.wxy],
    ]
    c, a, b = _solved(normal)
    loss = math.fsum([w * (y - c - (a if x < 0 else b) * x) ** 2 for w, x, y in points])
    return loss, a, b


class _Side:
    """Sums over the points on one side of the knee, of weights, distances from it, and values."""

    def __init__(self, points: Sequence[tuple[float, float, float]]) -> None:
        self.wx = math.fsum([w * x for w, x, _ in points])
        self.wxx = math.fsum([w * x * x for w, x, _ in points])
        self.wxy = math.fsum([w * x * y for w, x, y in points])


def _solved(rows: list[list[float]]) -> list[float]:
    """Three equations by elimination with pivots; with points on both sides there is a solution."""
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(size):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


Resource = Literal["compute", "memory", "link", "host", "none"]
BINDS = 0.5  # of a trial: a resource that needs less doesn't explain its length
AUTOCAST = {"gpu": "fp16", "cpu": "bf16"}  # torch's default dtype of autocast
CROSSES = ("copied", "pinned", "in-place")  # inputs that go over the link in every trial


@dataclass(frozen=True)
class Saturation:
    """Shares of a trial's time."""

    compute: float | Unknown
    memory: float | Unknown  # by the model that every operation reads and writes memory
    link: float | Unknown
    host: (
        float | Unknown
    )  # in which the device waits for the host, or the host's own work where it has no clock
    binds: Resource

    def share(self, resource: Resource) -> float | Unknown:
        """One of the shares."""
        found: float | Unknown = getattr(self, resource, Unknown("nothing binds"))
        return found


def saturation(row: BatchRow, way: Way, ceilings: Ceilings | Unknown) -> Saturation:
    """The shares of one batch size. What lacks a ceiling or a count is unknown with the reason."""
    on = ceilings if isinstance(ceilings, Unknown) else ceilings.on(way.device)
    trial_s = latency_s(row)[0]
    crossing = way.device == "gpu" and way.inputs in CROSSES
    link = _share(row, on, lambda work: work.input_bytes, lambda d: d.to_device, trial_s) if crossing else 0.0
    shares: dict[Resource, float | Unknown] = {
        "compute": _share(row, on, lambda work: work.flop, lambda d: d.flops(arithmetic(way)), trial_s),
        "memory": _share(row, on, lambda work: work.op_bytes, lambda d: d.memory, trial_s),
        "link": link,
        "host": _host(row, on, trial_s, link),
    }
    known: dict[Resource, float] = {name: x for name, x in shares.items() if not isinstance(x, Unknown)}
    largest = max(known, key=lambda name: known[name]) if known else "none"
    return Saturation(
        compute=shares["compute"],
        memory=shares["memory"],
        link=shares["link"],
        host=shares["host"],
        binds=largest if known.get(largest, 0.0) >= BINDS else "none",
    )


def arithmetic(way: Way) -> str:
    """The precision whose ceiling a way is compared with."""
    return AUTOCAST[way.device] if way.precision == "autocast" else way.precision


def _share(
    row: BatchRow,
    on: DeviceCeilings | Unknown,
    of: Callable[[Work], float],
    ceiling: Callable[[DeviceCeilings], Ceiling | Unknown],
    trial_s: float,
) -> float | Unknown:
    if isinstance(row.work, Unknown):
        return row.work
    if isinstance(on, Unknown):
        return on
    ceiling_here = ceiling(on)
    return ceiling_here if isinstance(ceiling_here, Unknown) else of(row.work) / ceiling_here.median / trial_s


def _host(
    row: BatchRow, on: DeviceCeilings | Unknown, trial_s: float, link: float | Unknown
) -> float | Unknown:
    """By the device's clock: what a trial takes beyond the pass and the copy. Else by counted operations."""
    if isinstance(row.pass_s, Unknown):
        return _share(row, on, lambda work: work.operations, lambda d: d.launches, trial_s)
    copied = 0.0 if isinstance(link, Unknown) else link
    return max(1.0 - row.pass_s / trial_s - copied, 0.0)
