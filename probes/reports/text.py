"""A report as text or Markdown. Tabulate draws the tables where it is installed (on the host)."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from probes.core.quoting import markdown_sentence, terminal
from probes.core.units import binary_bytes, duration, gb_per_s
from probes.core.unknown import Unknown
from probes.hardware.snapshot import bytes_or_why, machine_lines
from probes.records import stats
from probes.records.rounds import merged
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
    Stop,
    Timed,
)
from probes.records.schema import Done, Failed, ProbeReport, ProbeRun, Waived
from probes.reports import answers as residency
from probes.reports.answers import all_records, answers, pick, timing
from probes.reports.headline import headline
from probes.reports.tables import Table, row_doubts, run_tables, size

Rows = list[list[str]]


def table(headers: Sequence[str], rows: Rows, *, markdown: bool) -> str:
    """The rows under their headers; figures keep the form they were given."""
    cells = [[_quoted(cell, markdown=markdown) for cell in row] for row in rows]
    try:
        from tabulate import tabulate
    except ImportError:
        return plain_table(headers, cells, markdown=markdown)
    return tabulate(cells, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)


def plain_table(headers: Sequence[str], rows: Rows, *, markdown: bool) -> str:
    """The same without tabulate, from cells that are quoted already."""
    lines = [list(headers), *rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(headers))]
    rule = ["-" * width for width in widths]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")
    texts = (
        edge + gap.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in (lines[0], rule, *rows)
    )
    return "\n".join(text + " |" if markdown else text.rstrip() for text in texts)


def _noted(drawn: str, notes: Sequence[str], *, markdown: bool) -> str:
    """A table and the notes on it: in Markdown a separate list, since notes would otherwise become rows."""
    said = bullets(notes, markdown=True) if markdown else "\n".join(map(terminal, notes))
    return ("\n\n" if markdown else "\n").join(part for part in (drawn, said) if part)


def render(report: ProbeReport, *, markdown: bool = False) -> str:
    """The whole report: the answer first, what follows from the figures, the machine, each probe's tables."""
    said = answers(report)
    parts = [
        heading("The answer", markdown=markdown) + bullets(headline(report), markdown=markdown),
        heading("What follows from the figures", markdown=markdown) + bullets(said, markdown=markdown)
        if said
        else "",
        heading("Machine", markdown=markdown) + bullets(machine_lines(report.machine), markdown=markdown),
        _quoted(_settings_line(report), markdown=markdown),
        *(_run(run, all_records(report), markdown=markdown) for run in merged(report).runs),
    ]
    return "\n\n".join(part for part in parts if part)


def _settings_line(report: ProbeReport) -> str:
    asked = report.settings
    cap = "" if asked.vram_cap_bytes is None else f", VRAM capped to {binary_bytes(asked.vram_cap_bytes)}"
    return f"started {report.started}, {'quick' if asked.quick else 'full'}, seed {asked.seed}{cap}"


def bullets(texts: Sequence[str], *, markdown: bool) -> str:
    """Sentences as a list."""
    return "\n".join(f"- {_quoted(text, markdown=markdown)}" for text in texts)


def _quoted(text: str, *, markdown: bool) -> str:
    """Names of devices, hosts and files, and what drivers say, are written by others."""
    return markdown_sentence(text) if markdown else terminal(text)


def heading(text: str, *, markdown: bool) -> str:
    """A title and what follows it."""
    return f"## {markdown_sentence(text)}\n\n" if markdown else f"{terminal(text)}\n"


def _run(run: ProbeRun, every: Sequence[Record], *, markdown: bool) -> str:
    parts = [
        heading(run.probe, markdown=markdown) + _ended(run, markdown=markdown),
        "\n".join(
            _quoted(line, markdown=markdown)
            for line in dict.fromkeys(map(numa_line, pick(run.records, NumaPlaces)))
        ),
        *(drawn_table(found, markdown=markdown) for found in run_tables(run.records, every)),
        _spill_text(run.records, markdown=markdown),
        _noted("", notes(run.records), markdown=markdown),
    ]
    return "\n\n".join(part for part in parts if part)


def drawn_table(found: Table, *, markdown: bool) -> str:
    """A table with its title and note, without the columns that only a page has room for."""
    kept = [at for at, header in enumerate(found.headers) if header not in found.wide]
    kept.sort(key=lambda at: found.headers[at] == "doubts")  # which may be long: last
    rows = [[row[at] for at in kept] for row in found.rows]
    drawn = table([found.headers[at] for at in kept], rows, markdown=markdown)
    title = f"### {markdown_sentence(found.title)}\n\n" if markdown else f"{terminal(found.title)}\n"
    return title + _noted(drawn, [found.note] if found.note else [], markdown=markdown)


def notes(records: Sequence[Record]) -> list[str]:
    """Below the tables: what to do about doubts, what else went on, and what wasn't measured."""
    rows = [record for record in records if isinstance(record, Timed)]
    sized = ((gap, f" {size(gap.payload_bytes)}" if gap.payload_bytes else "") for gap in pick(records, Gap))
    gaps = [f"not measured: {gap.name}{n_bytes}: {gap.reason}" for gap, n_bytes in sized]
    return [*_remedies(rows), *noise_lines(rows), *gaps]


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


def record_line(record: Record) -> str:
    """One record as a run prints it in progress; empty for those that only the report needs."""
    text = ""
    match record:
        case Measurement():
            summary = stats.summarize(record.times_s)
            rate = f"{gb_per_s(record.moved_bytes, summary.median):9.3g} GB/s"
            text = f"{_row_name(record)} {rate}  {timing(record)}  n={summary.n}"
        case Reads():
            size = f"{binary_bytes(record.payload_bytes):>10}"
            text = f"{record.way:<16} {size} k={record.reads} {timing(record)}"
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
            name = f"{record.model} {record.dtype}"
            took = f"{timing(record)}  n={stats.summarize(record.times_s).n}"
            text = f"{name:<22} {record.scenario:<18} batch {record.rows:<4} {took}"
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
