"""Two runs of the probes side by side: ratios of times with their errors, row by row. Pure."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from probes.core.errors import ReportError
from probes.core.quoting import markdown, markdown_sentence
from probes.core.unknown import Unknown
from probes.records.facts import TorchFacts
from probes.records.rows import Block, Measurement, Pass, Reads, Request, Stop, Timed
from probes.records.schema import ProbeReport
from probes.records.stats import MEDIAN_ERROR, Times, median, median_errs, pair_ratios, summarize
from probes.reports import run_findings
from probes.reports.compare import Difference, Key, differences, heading, listed, only_in_one, refuse_unlike
from probes.reports.figures import figure, size, text, with_error
from probes.reports.run_findings import all_records, disturbed, pick
from probes.reports.text import plain_grid

# Chosen by simulation (tests/unit/probes/reports/test_ratio.py), held by an H200 (docs/probes.md): two runs
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
    ratios = pair_ratios(a, b)
    value = math.exp(median([ratio for ratio, _ in ratios]))
    if len(ratios) < FEWEST_PROCESSES:
        return Ratio(value, None, disturbed)
    own = pair_scatter(a, b)
    variance = (PRIOR_WEIGHT * shared + own.freedom * own.variance) / (PRIOR_WEIGHT + own.freedom)
    within = median([error for _, error in ratios]) / math.sqrt(len(ratios))
    return Ratio(
        value,
        value * max(median_errs(len(ratios), MEDIAN_ERROR) * math.sqrt(variance), within),
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
    if min(summary.processes for summary in summaries) < FEWEST_PROCESSES:
        return Ratio(value, None, disturbed)
    own = scatter(a, b)
    variance = (PRIOR_WEIGHT * shared + own.freedom * own.variance) / (PRIOR_WEIGHT + own.freedom)
    parts = []
    for summary in summaries:
        between = median_errs(summary.processes, MEDIAN_ERROR) * math.sqrt(variance)
        within = (summary.within or 0.0) / summary.median / math.sqrt(summary.processes)
        parts.append(max(between, within))
    return Ratio(value, value * math.hypot(*parts), disturbed)


def shared_by_kind(
    rows: Iterable[tuple[Kind, Times, Times]], *, of: Callable[[Times, Times], Scatter] = scatter
) -> dict[Kind, float]:
    """The variance that the rows of each kind share; each row as its kind and its times in both reports."""
    kinds: dict[Kind, list[Scatter]] = {}
    for kind, a, b in rows:
        kinds.setdefault(kind, []).append(of(a, b))
    return {kind: typical(scatters) for kind, scatters in kinds.items()}


LARGE = 2**20  # bytes: smaller rows take microseconds, and scatter more
HOST_SHARE = 1.5  # a pass that takes so many times the device's own time waits for the host


@dataclass(frozen=True)
class Line:
    """One row of both reports. `speed` is how many times faster B is; unknown where it can't be judged."""

    key: Key
    a: str
    b: str
    speed: Ratio | Unknown


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side."""

    names: tuple[str, str]
    forced: tuple[Difference, ...]  # that make the two unlike; listed even with --force
    remarks: tuple[Difference, ...]  # that may explain a ratio
    lines: tuple[Line, ...]
    only_a: tuple[Key, ...]
    only_b: tuple[Key, ...]
    verdicts: tuple[str, str]
    paired: bool = False  # measured in turns, and judged by pairs of processes


@dataclass(frozen=True)
class _Judge:
    """How rows of two reports are judged."""

    scatter: Callable[[Times, Times], Scatter]
    ratio: Callable[..., Ratio]


ALONE, PAIRED = _Judge(scatter, speed_ratio), _Judge(pair_scatter, paired_ratio)


_ALONE, _IN_PAIRS = "processes of both reports", "pairs of processes, measured in turns,"


def _in_pairs(a: Timed, b: Timed) -> _Judge:
    """By pairs, where each process of A has one of B beside it: one side may have broken in a round."""
    return PAIRED if len(a.times_s) == len(b.times_s) else ALONE


def compare(a: ProbeReport, b: ProbeReport, *, names: tuple[str, str], force: bool = False) -> Comparison:
    """The comparison. Raises ReportError naming what is unlike, unless forced; and where no row is common."""
    unlike = differences(a, b, UNLIKE)
    if not force:
        refuse_unlike(unlike, names, "compare like machines with the same settings")
    rows_a, rows_b = rows_of(a), rows_of(b)
    common = [key for key in rows_a if key in rows_b]
    paired = bool(a.pair) and a.pair == b.pair
    judges = {key: _in_pairs(rows_a[key], rows_b[key]) if paired else ALONE for key in common}
    shared = {
        judge: shared_by_kind(
            (
                (_kind(key, rows_a[key]), rows_a[key].times_s, rows_b[key].times_s)
                for key in common
                if judges[key] is judge and _alike(rows_a[key], rows_b[key])
            ),
            of=judge.scatter,
        )
        for judge in (ALONE, PAIRED)
    }
    if not common and not force:
        raise ReportError(
            f"{names[0]} and {names[1]} have no measured row in common", "run the same probes on both"
        )
    return Comparison(
        names=names,
        forced=unlike,
        remarks=differences(a, b, REMARKED),
        lines=tuple(
            _line(
                key,
                rows_a[key],
                rows_b[key],
                judges[key],
                shared[judges[key]].get(_kind(key, rows_a[key]), 0.0),
            )
            for key in common
        ),
        paired=paired,
        only_a=tuple(key for key in rows_a if key not in rows_b),
        only_b=tuple(key for key in rows_b if key not in rows_a),
        verdicts=(_verdict(a), _verdict(b)),
    )


def _gpu(report: ProbeReport) -> str:
    torch = report.machine.torch
    if not isinstance(torch, TorchFacts) or not torch.gpus:
        return "none"
    return f"{torch.gpus[0].name} ({torch.gpus[0].target})"


def _vram(report: ProbeReport) -> str:
    torch = report.machine.torch
    return _gib(torch.gpus[0].vram_total_bytes) if isinstance(torch, TorchFacts) and torch.gpus else "none"


def _gib(n_bytes: int | Unknown) -> str:
    """Whole GiB: firmware takes a little more or less of the same memory at each start."""
    return text(n_bytes) if isinstance(n_bytes, Unknown) else f"{n_bytes / 2**30:.0f} GiB"


def _torch(report: ProbeReport) -> str:
    torch = report.machine.torch
    return f"{torch.version} {torch.api_version}".strip() if isinstance(torch, TorchFacts) else text(torch)


UNLIKE: tuple[tuple[str, Callable[[ProbeReport], str]], ...] = (
    ("GPU", _gpu),
    ("VRAM", _vram),
    ("processors", lambda r: str(r.machine.cpus)),
    ("system RAM", lambda r: _gib(r.machine.ram_total_bytes)),
    ("WSL", lambda r: text(r.machine.wsl)),
    ("torch's API", lambda r: r.machine.torch.api if isinstance(r.machine.torch, TorchFacts) else "no torch"),
    ("mode", lambda r: "quick" if r.settings.quick else "full"),
    ("NUMA", lambda r: r.settings.numa.replace("_", " ")),
    ("VRAM cap", lambda r: "none" if r.settings.vram_cap_bytes is None else size(r.settings.vram_cap_bytes)),
)
REMARKED: tuple[tuple[str, Callable[[ProbeReport], str]], ...] = (
    ("host", lambda r: r.machine.host),
    ("kernel", lambda r: text(r.machine.kernel)),
    ("GPU driver", lambda r: text(r.machine.gpu_driver)),
    ("torch", _torch),
    ("container", lambda r: text(r.machine.container)),
    ("Weir", lambda r: r.tool_version),
)


def rows_of(report: ProbeReport) -> dict[Key, Timed]:
    """Every timed row by what makes it the same row in another report, in a fixed order."""
    records = all_records(report)
    rows: dict[Key, Timed] = {}
    for m in sorted(pick(records, Measurement), key=lambda m: (m.name, m.payload_bytes)):
        rows["transfer", m.name, size(m.payload_bytes)] = m
    for r in sorted(pick(records, Reads), key=lambda r: (r.way, r.payload_bytes, r.reads)):
        rows["reads", r.way, f"{size(r.payload_bytes)}, {r.reads} reads"] = r
    for p in sorted(pick(records, Pass), key=lambda p: (p.model, p.dtype, p.rows, p.scenario)):
        split = (
            f"{p.model} {p.dtype} batch {p.rows}, {size(p.spilled_bytes)} of {size(p.weight_bytes)} spilled"
        )
        rows["pass", p.scenario, split] = p
    return rows


def _kind(key: Key, row: Timed) -> tuple[str, str, bool]:
    """Rows that scatter alike: of one path, small ones and large ones apart; passes by what they wait for.

    On an H200 a pass that keeps the device busy scatters by 1 %, one that waits for Python by a quarter.
    """
    if isinstance(row, Pass):
        return key[0], "waits for the host" if _waits_for_host(row) else "keeps the device busy", True
    return key[0], key[1], row.payload_bytes >= LARGE


def _waits_for_host(row: Pass) -> bool:
    if isinstance(row.device_s, Unknown):
        return False
    return median(row.wall_s) > HOST_SHARE * median(row.device_s)


def _alike(a: Timed, b: Timed) -> bool:
    return a.leading == b.leading


def _line(key: Key, a: Timed, b: Timed, judge: _Judge, shared: float) -> Line:
    summaries = [_summary_of(row) for row in (a, b)]
    if not _alike(a, b):
        why = Unknown(f"A is by the {a.leading} clock, B by the {b.leading} clock")
        return Line(key, summaries[0], summaries[1], why)
    slower = max(a, b, key=lambda row: summarize(row.times_s).median)
    speed = judge.ratio(a.times_s, b.times_s, shared=shared, disturbed=disturbed(slower))
    return Line(key, summaries[0], summaries[1], speed)


def _summary_of(row: Timed) -> str:
    summary = summarize(row.times_s)
    processes = f"{summary.processes} process{'es' if summary.processes > 1 else ''}"
    return f"{figure(summary)} (n={summary.n}, {processes})"


def _verdict(report: ProbeReport) -> str:
    records = all_records(report)
    stops = pick(records, Stop)
    if not stops:
        return "unknown (`spill` holds no result)"
    return run_findings.verdict(pick(records, Request), pick(records, Block), stops[-1])


def render_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown, readable as plain text."""
    verdicts = zip(("A", "B"), comparison.verdicts, strict=True)
    parts = [
        *heading(comparison.names, comparison.forced),
        *listed("Also different (A / B):", comparison.remarks),
        _table(comparison.lines),
        "Times are medians of the processes' medians, ± what they differ by. *B is faster by* is the time of "
        f"A over that of B; its error is from how far {_IN_PAIRS if comparison.paired else _ALONE} scatter "
        f"in rows of its kind. *Same within errors* means less than {CLEAR:g} standard errors or "
        f"{NOTABLE:.1%}.",
        *only_in_one(comparison.only_a, comparison.only_b),
        "Asking for more device memory:\n"
        + "\n".join(f"- {name}: {markdown_sentence(verdict)}" for name, verdict in verdicts),
    ]
    return "\n\n".join(parts) + "\n"


def _table(lines: Sequence[Line]) -> str:
    headers = ("", "row", "size or case", "A", "B", "B is faster by", "")
    rows = [[*map(markdown, (*line.key, line.a, line.b, *_speed(line.speed)))] for line in lines]
    return plain_grid(headers, rows, markdown=True)


def _speed(speed: Ratio | Unknown) -> tuple[str, str]:
    return (text(speed), "") if isinstance(speed, Unknown) else (f"{speed} x", speed.verdict)
