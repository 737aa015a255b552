"""Two throughput reports side by side: a row differs only where its 95 % intervals do. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from probes.core.errors import ReportError
from probes.core.quoting import markdown
from probes.core.unknown import Unknown
from probes.records.facts import TorchFacts
from probes.reports.compare import Difference, differences, heading, listed, only_in_one, refuse_unlike
from probes.reports.figures import span, text, with_error
from probes.reports.run_compare import NOTABLE
from probes.reports.saturation import agreement
from probes.reports.scan_served import callers
from probes.reports.text import plain_grid
from probes.throughput.direct.results import throughput as direct_throughput
from probes.throughput.report import ThroughputReport
from probes.throughput.served import results
from probes.throughput.served.results import Level, ServedScan

Key = tuple[str, str, str]  # half and way, where on the curve, what
RATES_ALIKE = 0.01  # open-loop levels whose rates differ by less are the same level
# Student's t for 95 %, over that for two times in three, by windows: what turns an error into an interval
WIDER = {2: 12.71 / 1.84, 3: 4.30 / 1.32, 4: 3.18 / 1.20, 5: 2.78 / 1.14, 6: 2.57 / 1.11}
SEM_TO_95 = 1.96


@dataclass(frozen=True)
class Figure:
    """A figure with its 95 % interval. `more_is_better`: a throughput, not a time."""

    shown: str
    value: float
    low: float | Unknown
    high: float | Unknown
    more_is_better: bool


@dataclass(frozen=True)
class Compared:
    """One row of both reports."""

    key: Key
    a: Figure
    b: Figure

    @property
    def ratio(self) -> float | Unknown:
        """B over A; unknown where A is 0, as the throughput of a level without a good answer."""
        return self.b.value / self.a.value if self.a.value else Unknown("A is 0")

    @property
    def verdict(self) -> str:
        """Whether B differs, by the intervals alone."""
        ends = (self.a.low, self.a.high, self.b.low, self.b.high)
        if any(isinstance(end, Unknown) for end in ends):
            return "can't be judged: too few samples"
        low_a, high_a, low_b, high_b = (float(end) for end in ends if not isinstance(end, Unknown))
        apart = low_b > high_a or high_b < low_a
        if not apart or abs(self.b.value - self.a.value) < NOTABLE * self.a.value:
            return "same within errors"
        return "better" if (self.b.value > self.a.value) == self.a.more_is_better else "worse"


@dataclass(frozen=True)
class ScanComparison:
    """Two reports side by side."""

    names: tuple[str, str]
    unlike: tuple[Difference, ...]
    rows: tuple[Compared, ...]
    only: tuple[tuple[Key, ...], tuple[Key, ...]]
    agreement: tuple[str, ...] = ()  # on whether the server is saturated, where both asked one


def compare_scans(
    a: ThroughputReport, b: ThroughputReport, *, names: tuple[str, str], force: bool = False
) -> ScanComparison:
    """The comparison. Raises ReportError naming what is unlike, unless forced; and where no row is common."""
    unlike = differences(a, b, _UNLIKE)
    if not force:
        refuse_unlike(unlike, names, "compare like scans of like machines")
    rows_a, rows_b = dict(_figures(a)), dict(_figures(b))
    rates = _matched(rows_a, rows_b)
    compared = tuple(Compared(key, rows_a[key], rows_b[rates[key]]) for key in rates)
    if not compared:
        raise ReportError(f"{names[0]} and {names[1]} have no measured row in common", "scan alike on both")
    taken = set(rates.values())
    only = (
        tuple(key for key in rows_a if key not in rates),
        tuple(key for key in rows_b if key not in taken),
    )
    agreed = agreement(a.served, b.served) if a.served and b.served else []
    return ScanComparison(names, unlike, compared, only, tuple(agreed))


def _matched(rows_a: dict[Key, Figure], rows_b: dict[Key, Figure]) -> dict[Key, Key]:
    """Which row of B belongs to each of A: the same, or the open loop's nearest rate within a percent."""
    matches = {}
    for key in rows_a:
        if key in rows_b:
            matches[key] = key
        elif key[1].endswith("/s"):
            near = [
                other for other in rows_b if (other[0], other[2]) == (key[0], key[2]) and _near(key, other)
            ]
            if near:
                matches[key] = near[0]
    return matches


def _near(a: Key, b: Key) -> bool:
    rate_a, rate_b = (float(key[1].removesuffix("/s")) for key in (a, b))
    return abs(rate_b / rate_a - 1) <= RATES_ALIKE


def _gpus(report: ThroughputReport) -> str:
    torch = report.machine.torch
    gpus = torch.gpus if isinstance(torch, TorchFacts) else ()
    return ", ".join(gpu.name for gpu in gpus) or "none"


def _threads(report: ThroughputReport) -> str:
    """Of torch on the CPU, where a model was called directly."""
    torch = report.machine.torch
    if report.direct is None or isinstance(torch, Unknown):
        return "none"
    return str(report.settings.threads or torch.threads)


def _of_served(fact: Callable[[ServedScan], str]) -> Callable[[ThroughputReport], str]:
    return lambda report: fact(report.served) if report.served else "no server"


def _model(report: ThroughputReport) -> str:
    if report.direct is None or isinstance(report.direct.model, Unknown):
        return "none"
    return report.direct.model.name


_UNLIKE: tuple[tuple[str, Callable[[ThroughputReport], str]], ...] = (
    ("GPU", _gpus),
    ("processors", lambda report: str(report.machine.cpus)),
    ("CPU threads", _threads),
    ("model called directly", _model),
    ("model served", _of_served(lambda served: served.by.model)),
    ("request", _of_served(lambda served: served.by.request)),
    ("connections", _of_served(lambda served: "kept" if served.settings.keep_alive else "new")),
)


def _figures(report: ThroughputReport) -> Iterator[tuple[Key, Figure]]:
    for series in report.direct.series if report.direct else ():
        for row in sorted(series.rows, key=lambda row: row.batch):
            speed = direct_throughput(row)
            half = Unknown("a single trial") if speed.error is None else SEM_TO_95 * speed.error
            shown = f"{with_error(speed.mean, speed.error)} inputs/s"
            key = (f"direct, {series.way.label}", f"batch {row.batch}", "throughput")
            yield key, _rate(shown, speed.mean, half)
    for level in report.served.levels if report.served else ():
        yield from _level(level)


def _level(level: Level) -> Iterator[tuple[Key, Figure]]:
    where = callers(level.callers) if level.loop == "closed" else f"{level.rate_per_s:.6g}/s"
    half = f"served, {level.loop} loop"
    speed = results.throughput(level)
    if level.loop == "closed":
        wider = WIDER.get(results.counted_windows(level), SEM_TO_95)
        margin = Unknown("a single window") if speed.error is None else wider * speed.error
        shown = f"{with_error(speed.value, speed.error)} answers/s"
        yield (half, where, "throughput"), _rate(shown, speed.value, margin)
    percentiles = results.latencies(level)
    for percentile in () if isinstance(percentiles, Unknown) else percentiles:
        shown = span(percentile.value, bare=True)
        yield (
            (half, where, f"p{100 * percentile.share:g}"),
            Figure(shown, percentile.value, percentile.low, percentile.high, False),
        )


def _rate(shown: str, value: float, half: float | Unknown) -> Figure:
    if isinstance(half, Unknown):
        return Figure(shown, value, half, half, True)
    return Figure(shown, value, value - half, value + half, True)


def _cells(row: Compared) -> tuple[str, ...]:
    ratio = text(row.ratio) if isinstance(row.ratio, Unknown) else f"{row.ratio:.3f}"
    return (*row.key, row.a.shown, row.b.shown, ratio, row.verdict)


def render_scan_markdown(comparison: ScanComparison) -> str:
    """The comparison as Markdown, readable as plain text."""
    headers = ("", "where", "figure", "A", "B", "B over A", "B is")
    parts = [
        *heading(comparison.names, comparison.unlike),
        *listed("**Is the server saturated?**", comparison.agreement),
        plain_grid(headers, [[*map(markdown, _cells(row))] for row in comparison.rows], markdown=True),
        "*Better* or *worse* only where the 95 % intervals of A and B don't overlap and the figures differ "
        f"by {NOTABLE:.1%} or more. Each report is one run, and another run of the same machine can differ "
        "by more than its intervals say: repeat both before you conclude.",
        *only_in_one(*comparison.only),
    ]
    return "\n\n".join(parts) + "\n"
