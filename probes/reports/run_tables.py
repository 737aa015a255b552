"""The tables of a run of the probes: measured rows with their errors and n; models apart. Pure."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from probes.core.unknown import Unknown
from probes.records.rows import (
    Block,
    Expectation,
    Gap,
    Measurement,
    Noise,
    NumaPlaces,
    Pass,
    Reading,
    Reads,
    Record,
    Request,
    Samples,
    Split,
    Stop,
    Timed,
)
from probes.records.schema import ProbeRun
from probes.records.stats import Doubt, doubts, median, summarize
from probes.reports import crossover, run_findings
from probes.reports.crossover import Fit, fit, points_of
from probes.reports.document import Table
from probes.reports.figures import field_text, figure, rate, size, span, text, with_error
from probes.reports.run_findings import pick

OWN = (Measurement, Reads, Block, Pass)  # have a table of their own; all others are listed field by field
TITLES = {
    Expectation: "What should happen, predicted before trying",
    Gap: "Not measured",
    NumaPlaces: "NUMA nodes of the GPU, the processors and the buffers",
    Reading: "Memory gauges",
    Request: "Requests for memory",
    Stop: "Why the probe asked for no more",
}


@dataclass(frozen=True)
class Column:
    """One column: its header, the cell for a record, whether it holds words, whether only a page has room."""

    header: str
    cell: Callable[..., str]
    words: bool = False
    wide: bool = False


def run_tables(records: Sequence[Record], every: Sequence[Record]) -> tuple[Table, ...]:
    """The tables of what a run timed and of the models fitted to it, those with rows.

    Break-even is predicted from what another probe measured, which is among `every` record of the report.
    """
    tables = (
        break_even_table(pick(every, Measurement), pick(records, Reads)),
        _table("Transfers, measured", _TRANSFER_NOTE, _TRANSFER, _in_order(pick(records, Measurement))),
        fits_table(pick(records, Measurement)),
        _table("Repeated reads, measured", _READS_NOTE, _READS, _in_order(pick(records, Reads))),
        _table("Passes, measured", _PASS_NOTE, _PASS, _in_order(pick(records, Pass))),
    )
    return tuple(table for table in tables if table.rows)


def page_tables(run: ProbeRun) -> tuple[Table, ...]:
    """The tables of all other records of a run, which only a page has room for, those with rows."""
    records = run.records
    blocks = _table("Blocks, measured", _BLOCK_NOTE, _BLOCK, run_findings.label_blocks(pick(records, Block)))
    kinds = dict.fromkeys(type(record) for record in records if not isinstance(record, OWN))
    fields = [_field_table(kind, [r for r in records if type(r) is kind]) for kind in kinds]
    small = _table("Launches and classes of operation, measured", _SMALL_NOTE, _SMALL, run.small)
    return tuple(replace(table, only="page") for table in (small, blocks, *fields) if table.rows)


def break_even_table(rows: Sequence[Measurement], reads: Sequence[Reads]) -> Table:
    """k* by size, predicted and measured side by side, each in a column that says which."""
    advice = crossover.adviser(rows)
    headers = ("size", "k* predicted", "k* measured", "prediction off by")
    cells = []
    for n_bytes in sorted({row.payload_bytes for row in reads}):
        foretold = advice if isinstance(advice, Unknown) else advice.at(n_bytes)
        seen = crossover.measured(reads, n_bytes)
        known = [one.reads for one in (foretold, seen) if not isinstance(one, Unknown)]
        both = len(known) == 2 and all(map(math.isfinite, known))
        off = f"{known[0] / known[1] - 1:+.1%}" if both else ""
        cells.append((size(n_bytes), _reads(foretold), _reads(seen), off))
    note = "Full reads of a buffer from which copying it to VRAM first is faster, ± standard error."
    return Table("Break-even", (note,), headers, tuple(cells), frozenset())


def _reads(break_even: crossover.BreakEven | Unknown) -> str:
    if isinstance(break_even, Unknown):
        return text(break_even)
    return with_error(break_even.reads, break_even.error) if math.isfinite(break_even.reads) else "never"


def fits_table(rows: Sequence[Measurement]) -> Table:
    """The piecewise model of each path; a path without a good one says why."""
    cells: list[tuple[str, ...]] = []
    for name in sorted({row.name for row in rows}):
        fitted = fit(points_of(rows, name))
        cells += (
            [(name, f"no fit: {fitted.reason}", *[""] * 5)]
            if isinstance(fitted, Unknown)
            else _pieces(name, fitted)
        )
    headers = (
        "path",
        "sizes",
        "α, latency",
        "1/β, per MiB",
        "β, payload GB/s",
        "n½ = αβ",
        "largest residual",
    )
    note = (
        "A model and no measurement: t(S) = α + S/β on each piece, fitted to the figures of the rows above."
    )
    return Table("Fits, from the model", (note,), headers, tuple(cells), frozenset({"path", "sizes"}))


def _pieces(name: str, fitted: Fit) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{size(piece.first_bytes)} to {size(piece.last_bytes)}",
            span(piece.alpha_s, bare=True),
            span(piece.s_per_byte * 2**20, bare=True),
            f"{piece.beta_gb_per_s:.4g}" if piece.s_per_byte else "no limit seen",
            size(round(piece.half_bytes)) if piece.s_per_byte else "none",
            f"{fitted.residual:.1%}",
        )
        for piece in fitted.pieces
    ]


def _in_order(rows: Iterable[Timed]) -> list[Timed]:
    return sorted(rows, key=_order)


def _order(row: Timed) -> tuple[str, str, int, int, str]:
    match row:
        case Measurement():
            return row.name, "", row.payload_bytes, 0, ""
        case Reads():
            return row.way, "", row.payload_bytes, row.reads, ""
        case Pass():
            return row.model, row.dtype, row.rows, 0, row.scenario


def _table(title: str, note: str, columns: Sequence[Column], rows: Iterable[object]) -> Table:
    cells = tuple(tuple(column.cell(row) for column in columns) for row in rows)
    words, wide = (
        frozenset(column.header for column in columns if getattr(column, name)) for name in ("words", "wide")
    )
    return Table(title, (note,), tuple(column.header for column in columns), cells, words, wide)


def _timed(of: Callable[..., Sequence[Sequence[float]]]) -> tuple[Column, ...]:
    """The columns of each process's samples, in seconds."""
    return (
        Column("processes", lambda row: str(len(of(row)))),
        Column("n", lambda row: str(summarize(of(row)).n)),
        Column("median ± error", lambda row: figure(summarize(of(row)))),
        Column("within", lambda row: _share(of(row), "within")),
        Column("between", lambda row: _share(of(row), "between")),
        Column("p5", lambda row: span(summarize(of(row)).p5, bare=True)),
        Column("p95", lambda row: span(summarize(of(row)).p95, bare=True)),
        Column("min", lambda row: span(summarize(of(row)).least, bare=True), wide=True),
        Column("lag 1", lambda row: _lag(of(row)), wide=True),
    )


def _share(times: Sequence[Sequence[float]], which: Literal["within", "between"]) -> str:
    """An error as a share of the figure."""
    summary = summarize(times)
    error = summary.within if which == "within" else summary.between
    return "unknown" if error is None else f"{error / summary.median:.2%}"


def _lag(times: Sequence[Sequence[float]]) -> str:
    lag1 = summarize(times).lag1
    return "undefined" if lag1 is None else f"{lag1:+.2f}"


def row_doubts(row: Timed) -> tuple[Doubt, ...]:
    """What makes a row's figure doubtful, by its samples."""
    return doubts(summarize(row.times_s), host_bound=row.host_bound)


def doubts_of(row: Timed) -> str:
    """The doubts that a row's samples raise, and what else was seen to go on while they were taken."""
    flags = row.noise.flags if isinstance(row.noise, Noise) else ()
    return ", ".join((*(doubt.reason for doubt in row_doubts(row)), *flags))


def _wall(row: Measurement | Reads) -> str:
    summary = summarize(row.walls_s)
    return f"{figure(summary)} (n={summary.n})"


def _device(row: Pass) -> str:
    if isinstance(row.devices_s, Unknown):
        return text(row.devices_s)
    summary = summarize(row.devices_s)
    return f"{figure(summary)} (n={summary.n}){', host-bound' if row.host_bound else ''}"


def _seconds(value: float | Unknown) -> str:
    return text(value) if isinstance(value, Unknown) else span(value, bare=True)


def _split(row: Pass) -> str:
    if isinstance(row.split, Split):
        return " / ".join(
            span(s, bare=True) for s in (row.split.copy_s, row.split.wait_s, row.split.compute_s)
        )
    return text(row.split)


_TRANSFER_NOTE = (
    "Times by the clock that leads for the path: the median of the processes' medians. Within is the error "
    "of one process's median, with successive samples' correlation (lag 1) in it; between is how far apart "
    "the processes' medians are; the larger of the two makes the error. GB/s is 10⁹ bytes/s."
)
_TRANSFER = (
    Column("path", lambda m: m.name, words=True),
    Column("size", lambda m: size(m.payload_bytes)),
    Column("GB/s ± error", lambda m: str(rate(m.moved_bytes, m.times_s))),
    Column("clock", lambda m: m.clock, words=True, wide=True),
    Column("doubts", doubts_of, words=True),
    *_timed(lambda m: m.times_s),
    Column("wall clock", _wall),
)
_READS_NOTE = "The time for all reads of one buffer of host memory, the copy included where there is one."
_READS = (
    Column("way", lambda r: r.way, words=True),
    Column("size", lambda r: size(r.payload_bytes)),
    Column("reads", lambda r: str(r.reads)),
    Column("doubts", doubts_of, words=True),
    *_timed(lambda r: r.times_s),
    Column("wall clock", _wall),
)


def _middle(samples: Samples | Unknown) -> str:
    return text(samples) if isinstance(samples, Unknown) else span(median(samples), bare=True)


_SMALL_NOTE = "Launches, and classes of operation: plans from this report count passes by them."
_SMALL = (
    Column("what", lambda s: s.name, words=True),
    Column("operations", lambda s: str(s.count)),
    Column("device clock", lambda s: _middle(s.device_s)),
    Column("wall clock", lambda s: _middle(s.wall_s)),
)
_BLOCK_NOTE = (
    "Each block was read again after all were allocated; what a driver had paged out comes back in the first "
    "read. Controls are in a known place."
)
_BLOCK = (
    Column("block", lambda p: str(p.block.index)),
    Column("asked as", lambda p: p.block.asked + (" (control)" if p.block.control else ""), words=True),
    Column("size", lambda p: size(p.block.n_bytes)),
    Column("GB/s ± error", lambda p: str(rate(p.block.n_bytes, [p.block.read_s]))),
    Column("first read", lambda p: _seconds(p.block.first_read_s)),
    Column("by timing", lambda p: p.by_timing, words=True),
    Column("by counters", lambda p: p.by_counters, words=True),
    Column("signals", lambda p: "DISAGREE" if p.disagree else "", words=True),
    *_timed(lambda p: [p.block.read_s]),
    Column("free VRAM fell by", lambda p: size(p.block.vram_drop_bytes)),
    Column("GTT grew by", lambda p: size(p.block.gtt_growth_bytes)),
)
_PASS_NOTE = (
    "One forward pass by the wall clock. Device time alone is taken behind a queued wait, so that launching "
    "the pass isn't part of it. `differs` is the largest difference of outputs from the all-resident ones, "
    "over the largest output. The split is of one more pass, measured for this alone."
)
_PASS = (
    Column("model", lambda p: p.model, words=True),
    Column("type", lambda p: p.dtype, words=True),
    Column("batch", lambda p: str(p.rows)),
    Column("scenario", lambda p: p.scenario, words=True),
    Column("weights", lambda p: size(p.weight_bytes)),
    Column("in system RAM", lambda p: size(p.spilled_bytes)),
    Column("doubts", doubts_of, words=True),
    *_timed(lambda p: p.times_s),
    Column("device time alone", _device),
    Column("copy / wait / compute", _split, wide=True),
    Column("differs", lambda p: f"{p.difference:.1e}"),
)


def _field_table(kind: type[Record], rows: Sequence[Record]) -> Table:
    fields = [field.name for field in dataclasses.fields(kind)]
    cells = tuple(tuple(field_text(name, getattr(row, name)) for name in fields) for row in rows)
    words = frozenset(_words(name) for name in fields if not name.endswith("_bytes"))
    return Table(TITLES.get(kind, kind.__name__), (), tuple(map(_words, fields)), cells, words)


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
