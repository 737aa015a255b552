"""A report as text or Markdown. Tabulate draws the tables where it is installed (on the host)."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from probes.machine.describe import bytes_or_why, machine_lines
from probes.records import stats
from probes.records.rounds import merged
from probes.records.schema import (
    Block,
    Done,
    Expectation,
    Failed,
    Gap,
    Measurement,
    Noise,
    NumaPlaces,
    Pass,
    ProbeReport,
    ProbeRun,
    Reading,
    Reads,
    Record,
    Request,
    Stop,
    Timed,
    Unknown,
    Waived,
)
from probes.report import crossover, residency
from probes.report.answers import all_records, answers, groups, pick
from probes.report.fit import Piece, fit, points_of
from probes.report.headline import headline
from probes.report.tables import row_doubts
from probes.shared.quoting import markdown_sentence, terminal
from probes.shared.units import binary_bytes, duration, gb_per_s

Rows = list[list[str]]


def table(headers: Sequence[str], rows: Rows, *, markdown: bool) -> str:
    """The rows under their headers; figures keep the form they were given."""
    cells = [[_quoted(cell, markdown=markdown) for cell in row] for row in rows]
    try:
        from tabulate import tabulate
    except ImportError:
        return _plain_table(headers, cells, markdown=markdown)
    return tabulate(cells, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)


def _plain_table(headers: Sequence[str], rows: Rows, *, markdown: bool) -> str:
    lines = [list(headers), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    rule = ["-" * width for width in widths]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")
    texts = (
        edge + gap.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in (lines[0], rule, *rows)
    )
    return "\n".join(text + " |" if markdown else text.rstrip() for text in texts)


def _noted(drawn: str, notes: Sequence[str], *, markdown: bool) -> str:
    """A table and the notes on it: in Markdown a separate list, since notes would otherwise become rows."""
    said = _bullets(notes, markdown=True) if markdown else "\n".join(map(terminal, notes))
    return ("\n\n" if markdown else "\n").join(part for part in (drawn, said) if part)


def render(report: ProbeReport, *, markdown: bool = False) -> str:
    """The whole report: the answer first, what follows from the figures, the machine, each probe's tables."""
    said = answers(report)
    parts = [
        _heading("The answer", markdown=markdown) + _bullets(headline(report), markdown=markdown),
        _heading("What follows from the figures", markdown=markdown) + _bullets(said, markdown=markdown)
        if said
        else "",
        _heading("Machine", markdown=markdown) + _bullets(machine_lines(report.machine), markdown=markdown),
        _quoted(_settings_line(report), markdown=markdown),
        *(_run(run, all_records(report), markdown=markdown) for run in merged(report).runs),
    ]
    return "\n\n".join(part for part in parts if part)


def _settings_line(report: ProbeReport) -> str:
    asked = report.settings
    cap = "" if asked.vram_cap_bytes is None else f", VRAM capped to {binary_bytes(asked.vram_cap_bytes)}"
    return f"started {report.started}, {'quick' if asked.quick else 'full'}, seed {asked.seed}{cap}"


def _bullets(texts: Sequence[str], *, markdown: bool) -> str:
    return "\n".join(f"- {_quoted(text, markdown=markdown)}" for text in texts)


def _quoted(text: str, *, markdown: bool) -> str:
    """Names of devices, hosts and files, and what drivers say, are written by others."""
    return markdown_sentence(text) if markdown else terminal(text)


def _heading(text: str, *, markdown: bool) -> str:
    return f"## {markdown_sentence(text)}\n\n" if markdown else f"{terminal(text)}\n"


def _run(run: ProbeRun, every: Sequence[Record], *, markdown: bool) -> str:
    parts = [
        _heading(run.probe, markdown=markdown) + _ended(run, markdown=markdown),
        "\n".join(
            _quoted(line, markdown=markdown)
            for line in dict.fromkeys(map(numa_line, pick(run.records, NumaPlaces)))
        ),
        _transfer_table(run.records, markdown=markdown),
        _fit_table(pick(run.records, Measurement), markdown=markdown),
        _break_even_table(pick(every, Measurement), pick(run.records, Reads), markdown=markdown),
        _spill_text(run.records, markdown=markdown),
        _pass_table(run.records, markdown=markdown),
    ]
    return "\n\n".join(part for part in parts if part)


def _ended(run: ProbeRun, *, markdown: bool) -> str:
    return "\n".join(_quoted(line, markdown=markdown) for line in ended_line(run).split("\n"))


def ended_line(run: ProbeRun) -> str:
    """How the probe ended."""
    match run.outcome:
        case Done():
            times = f" by {run.processes} processes" if run.processes > 1 else ""
            return f"done in {run.seconds:.1f} s{times}, {len(run.records)} records"
        case Waived(reason):
            return f"waived: {reason}"
        case Failed(reason=reason, hint=hint, wedged=wedged):
            state = f"{'WEDGED' if wedged else 'FAILED'} after {run.seconds:.1f} s"
            return f"{state}, {len(run.records)} records kept: {reason}" + (f"\n  {hint}" if hint else "")


def _transfer_table(records: Sequence[Record], *, markdown: bool) -> str:
    measured = sorted(pick(records, Measurement), key=lambda m: (m.name, m.payload_bytes))
    if not measured:
        return ""
    headers = ("path", "size", "GB/s", "median +- error", *_SPREAD, "wall median", "doubts")
    notes = [*_remedies(measured), *noise_lines(measured)]
    gaps = [
        f"not measured: {gap.name} {binary_bytes(gap.payload_bytes)}: {gap.reason}"
        for gap in pick(records, Gap)
    ]
    drawn = table(headers, [_transfer_row(m) for m in measured], markdown=markdown)
    return _noted(drawn, [*notes, *gaps], markdown=markdown)


def _transfer_row(measured: Measurement) -> list[str]:
    summary = stats.summarize(measured.times_s)
    return [
        measured.name,
        binary_bytes(measured.payload_bytes),
        f"{gb_per_s(measured.moved_bytes, summary.median):.3g}",
        _figure(summary),
        *_spread(summary),
        duration(stats.summarize(measured.walls_s).median),
        _doubts(measured),
    ]


_SPREAD = ("within", "between", "p5 .. p95", "n")


def _spread(summary: stats.Summary) -> list[str]:
    """How far apart samples are: the errors within a process and between processes, relative."""
    return [
        _share(summary.within, summary.median),
        _share(summary.between, summary.median),
        f"{duration(summary.p5)} .. {duration(summary.p95)}",
        f"{summary.n} of {summary.processes}" if summary.processes > 1 else str(summary.n),
    ]


def _share(error: float | None, of: float) -> str:
    return "unknown" if error is None else f"{error / of:.2%}"


def _doubts(row: Timed) -> str:
    flags = row.noise.flags if isinstance(row.noise, Noise) else ()
    kinds = dict.fromkeys(flag.split(":")[0] for flag in flags)
    return ", ".join([*(doubt.reason for doubt in row_doubts(row)), *kinds])


def _remedies(rows: Sequence[Timed]) -> list[str]:
    """What to do about the doubts of a table, each once."""
    found = [doubt.remedy for row in rows for doubt in row_doubts(row)]
    return [f"doubt: {remedy}" for remedy in dict.fromkeys(found)]


def noise_lines(rows: Sequence[Timed]) -> list[str]:
    """Other activity, each kind of disturbance once with its number of rows; what couldn't be watched."""
    seen = [row.noise for row in rows if isinstance(row.noise, Noise)]
    flags = Counter(flag for noise in seen for flag in noise.flags)
    kinds: dict[str, list[str]] = {}
    for flag in flags:
        kinds.setdefault(flag.split(":")[0], []).append(flag)
    lines = [
        f"noise, {sum(flags[flag] for flag in found)} times in {len(rows)} rows: {found[0]}"
        for found in kinds.values()
    ]
    missing = dict.fromkeys(reason for noise in seen for reason in noise.unwatched)
    return [*lines, *(f"not watched: {reason}" for reason in missing)]


def _figure(summary: stats.Summary) -> str:
    return duration(summary.median) + (f" +- {duration(summary.error)}" if summary.error is not None else "")


def _fit_table(rows: Sequence[Measurement], *, markdown: bool) -> str:
    """The piecewise model of each path, or why it has none."""
    if not rows:
        return ""
    headers = ("path", "fitted from", "to", "alpha", "beta GB/s", "n1/2", "misses by up to")
    cells: Rows = []
    notes = ["model, fitted to the figures: t = alpha + size / beta; n1/2 = alpha beta reaches half of beta"]
    for name in sorted({row.name for row in rows}):
        found = fit(points_of(rows, name))
        if isinstance(found, Unknown):
            notes.append(f"{name} has no fit: {found.reason}")
        else:
            cells += [[name, *_piece_cells(piece), f"{found.residual:.1%}"] for piece in found.pieces]
    return _noted(table(headers, cells, markdown=markdown) if cells else "", notes, markdown=markdown)


def _piece_cells(piece: Piece) -> list[str]:
    grows = piece.s_per_byte > 0
    return [
        binary_bytes(piece.first_bytes),
        binary_bytes(piece.last_bytes),
        duration(piece.alpha_s),
        f"{piece.beta_gb_per_s:.4g}" if grows else "no limit seen",
        binary_bytes(piece.half_bytes) if grows else "",
    ]


def _break_even_table(rows: Sequence[Measurement], reads: Sequence[Reads], *, markdown: bool) -> str:
    """k* at each size, as predicted from `transfer` and as measured."""
    if not reads:
        return ""
    met = crossover.crossings(rows, reads)
    if isinstance(met, Unknown):
        return _quoted(f"break-even can't be predicted: {met.reason}", markdown=markdown)
    headers = ("size", "k* predicted", "k* measured", "prediction off by")
    cells = [
        [binary_bytes(one.n_bytes), _reads(one.predicted), _reads(one.measured), f"{one.off:+.1%}"]
        for one in met
    ]
    note = "k*: from this many full reads on, copying the buffer to VRAM first is faster"
    return _noted(table(headers, cells, markdown=markdown), [note, *noise_lines(reads)], markdown=markdown)


def _reads(found: crossover.BreakEven) -> str:
    return f"{found.reads:.3f} +- {found.error:.3f}" if math.isfinite(found.reads) else "never"


def _spill_text(records: Sequence[Record], *, markdown: bool) -> str:
    blocks = pick(records, Block)
    if not blocks:
        return ""
    placed = sorted(
        residency.place(blocks), key=lambda p: (p.block.asked, not p.block.control, p.block.index)
    )
    alike = groupby(placed, key=lambda p: (p.block.asked, p.block.control, p.by_timing, p.by_counters))
    headers = ("asked as", "blocks", "bytes", "read GB/s", "first read", "by timing", "by counters", "doubts")
    rows = [_block_row(list(members)) for _, members in alike]
    gauges = _gauge_lines(pick(records, Reading))
    return _noted(table(headers, rows, markdown=markdown), gauges, markdown=markdown)


def _block_row(alike: Sequence[residency.Placed]) -> list[str]:
    """A row for neighbouring blocks of one kind and one outcome."""
    first = alike[0]
    return [
        f"{first.block.asked}{' (control)' if first.block.control else ''}",
        str(len(alike)),
        binary_bytes(sum(p.block.n_bytes for p in alike)),
        f"{stats.median([p.gb_per_s for p in alike]):.4g}",
        _first_read([p.block for p in alike]),
        first.by_timing,
        first.by_counters,
        "signals disagree" if first.disagree else "",
    ]


def _first_read(alike: Sequence[Block]) -> str:
    """The middle and the longest of the first reads."""
    known = [block.first_read_s for block in alike if isinstance(block.first_read_s, float)]
    if not known:
        return "not timed"
    return f"{duration(stats.median(known))}, longest {duration(max(known))}"


def _gauge_lines(readings: Sequence[Reading]) -> list[str]:
    """Each gauge with its readings in order; one that was never known appears only with its reason."""
    lines = []
    for gauge in dict.fromkeys(reading.gauge for reading in readings):
        mine = [reading for reading in readings if reading.gauge == gauge]
        if all(isinstance(reading.value_bytes, Unknown) for reading in mine):
            mine = mine[:1]
        history = ", ".join(f"{reading.moment} {bytes_or_why(reading.value_bytes)}" for reading in mine)
        lines.append(f"gauge {gauge}: {history}")
    return lines


def _pass_table(records: Sequence[Record], *, markdown: bool) -> str:
    passes = [one for ways in groups(pick(records, Pass)).values() for one in ways.values()]
    gaps = [f"not measured: {gap.name}: {gap.reason}" for gap in pick(records, Gap) if not gap.payload_bytes]
    if not passes:
        return "\n".join(_quoted(gap, markdown=markdown) for gap in gaps)
    headers = (
        "model",
        "dtype",
        "scenario",
        "batch",
        "weights",
        "spilled",
        "wall clock, median +- error",
        *_SPREAD,
        "device time alone",
        "differs",
        "doubts",
    )
    notes = [DEVICE_TIME, *_remedies(passes), *noise_lines(passes), *gaps]
    return _noted(table(headers, [_pass_row(p) for p in passes], markdown=markdown), notes, markdown=markdown)


DEVICE_TIME = (
    "device time alone: behind a queued wait, so the time excludes handing the pass over; what calls a "
    "model waits for the wall clock's time"
)


def _pass_row(passes: Pass) -> list[str]:
    summary = stats.summarize(passes.times_s)
    device_s = passes.devices_s
    return [
        passes.model,
        passes.dtype,
        passes.scenario,
        str(passes.rows),
        binary_bytes(passes.weight_bytes),
        binary_bytes(passes.spilled_bytes),
        _figure(summary),
        *_spread(summary),
        "unknown" if isinstance(device_s, Unknown) else duration(stats.summarize(device_s).median),
        f"{passes.difference:.1e}",
        _doubts(passes),
    ]


def record_line(record: Record) -> str:
    """One record as a run prints it in progress; empty for those that only the report needs."""
    text = ""
    match record:
        case Measurement():
            summary = stats.summarize(record.times_s)
            rate = f"{gb_per_s(record.moved_bytes, summary.median):9.3g} GB/s"
            text = f"{_row_name(record)} {rate}  {_figure(summary)}  n={summary.n}"
        case Reads():
            summary = stats.summarize(record.times_s)
            size = f"{binary_bytes(record.payload_bytes):>10}"
            text = f"{record.way:<16} {size} k={record.reads} {_figure(summary)}"
        case Gap():
            text = f"{_row_name(record)} not measured: {record.reason}"
        case Expectation():
            text = expectation_line(record)
        case Stop():
            text = f"stopped at {binary_bytes(record.held_bytes)}, {record.cause}: {record.note}"
        case Request(purpose="oversize"):
            answer = "granted" if record.granted else f"refused: {record.message}"
            text = f"asked the driver for {binary_bytes(record.asked_bytes)}: {answer}"
        case Pass():
            summary = stats.summarize(record.times_s)
            name = f"{record.model} {record.dtype}"
            text = (
                f"{name:<22} {record.scenario:<18} batch {record.rows:<4} {_figure(summary)}  n={summary.n}"
            )
        case NumaPlaces():
            text = numa_line(record)
        case Request() | Block() | Reading():
            pass
    return text


def numa_line(found: NumaPlaces) -> str:
    """On which NUMA nodes a process measured."""
    nodes = ", ".join(map(str, found.processors)) or "unknown"
    return (
        f"NUMA nodes: GPU {found.gpu}, processors {nodes}, "
        f"pinned buffers {found.pinned_buffer}, pageable buffers {found.pageable_buffer}"
        f"{'; held to the node of the GPU' if found.held else ''}"
    )


def expectation_line(expected: Expectation) -> str:
    """What should happen, by which source, and what else can happen."""
    return f"expected: {expected.sentence} [{expected.source}] {expected.note}".rstrip()


def _row_name(record: Measurement | Gap) -> str:
    return f"{record.name:<16} {binary_bytes(record.payload_bytes):>10}"
