"""The report of a run of the probes as a document, and its records as lines of progress. Pure."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from probes.core.units import binary_bytes, duration, gb_per_s
from probes.core.unknown import Unknown
from probes.hardware.snapshot import bytes_or_why
from probes.records import stats
from probes.records.facts import Machine, TorchFacts
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
from probes.reports import run_findings as residency
from probes.reports.document import Document, Section, Table
from probes.reports.figures import size
from probes.reports.run_findings import all_records, figure_text, findings, pick
from probes.reports.run_headline import headline
from probes.reports.run_tables import doubts_of, page_tables, row_doubts, run_tables


def run_document(report: ProbeReport) -> Document:
    """What a run of the probes found: the answer first, then what each probe measured."""
    records = all_records(report)
    subject = subject_of(report.machine)
    return Document(
        kicker="Memory placement, measured",
        title=f"{subject}: memory placement, measured",
        subject=subject,
        details=_details(report),
        headline=headline(report),
        follows=findings(report),
        machine=report.machine,
        settings=_settings_line(report),
        doubts=_doubts(records),
        sections=tuple(_section(run, records) for run in merged(report).runs),
        has_samples=any(isinstance(record, Timed) for record in records),
    )


def subject_of(machine: Machine) -> str:
    """What was measured, as a title."""
    if isinstance(machine.torch, TorchFacts) and machine.torch.gpus:
        return machine.torch.gpus[0].name
    known = "GPU unknown" if isinstance(machine.torch, Unknown) else "no GPU for torch"
    return f"{machine.cpus} CPUs, {known}"


def moment(started: str) -> str:
    """A report's `started` as people read it."""
    return started.replace("T", " ").replace("Z", " UTC")


def _details(report: ProbeReport) -> tuple[str, ...]:
    settings = report.settings
    return (
        moment(report.started),
        "quick run" if settings.quick else "full run",
        *([] if settings.vram_cap_bytes is None else [f"VRAM capped to {size(settings.vram_cap_bytes)}"]),
        *([f"resumed {report.resumed} times"] if report.resumed else []),
        f"seed {settings.seed}",
        f"Weir {report.tool_version}",
    )


def _settings_line(report: ProbeReport) -> str:
    settings = report.settings
    cap = settings.vram_cap_bytes
    capped = "" if cap is None else f", VRAM capped to {binary_bytes(cap)}"
    return f"started {report.started}, {'quick' if settings.quick else 'full'}, seed {settings.seed}{capped}"


def _doubts(records: Sequence[Record]) -> tuple[str, ...]:
    """How many rows raise a doubt; then what to do, what else went on, and what wasn't measured."""
    rows = [record for record in records if isinstance(record, Timed)]
    doubted = sum(bool(doubts_of(row)) for row in rows)
    count = "Nothing was timed, so there is nothing to doubt."
    if rows:
        count = f"{doubted} of {len(rows)} measured rows raise a doubt; the tables say which and why."
    return (count, *_notes(records))


def _section(run: ProbeRun, every: Sequence[Record]) -> Section:
    """The section of one probe. `every` are the records of all probes."""
    return Section(
        title=run.probe,
        state=type(run.outcome).__name__.lower(),
        outcome=ended_line(run),
        lines=tuple(dict.fromkeys(map(numa_line, pick(run.records, NumaPlaces)))),
        tables=(*run_tables(run.records, every), *_block_digest(run.records), *page_tables(run)),
        notes=tuple(_notes(run.records)),
    )


def _notes(records: Sequence[Record]) -> list[str]:
    """Below the tables: what to do about doubts, what else went on, and what wasn't measured."""
    rows = [record for record in records if isinstance(record, Timed)]
    sized = ((gap, f" {size(gap.payload_bytes)}" if gap.payload_bytes else "") for gap in pick(records, Gap))
    gaps = [f"not measured: {gap.name}{n_bytes}: {gap.reason}" for gap, n_bytes in sized]
    return [*_remedies(rows), *_noise_lines(rows), *gaps]


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
    remedies = [doubt.remedy for row in rows for doubt in row_doubts(row)]
    return [f"doubt: {remedy}" for remedy in dict.fromkeys(remedies)]


def _noise_lines(rows: Sequence[Timed]) -> list[str]:
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


def _block_digest(records: Sequence[Record]) -> tuple[Table, ...]:
    """Blocks of the spill probe, those that are alike in one row, and the gauges; a page has every block."""
    blocks = pick(records, Block)
    if not blocks:
        return ()
    placed = sorted(
        residency.label_blocks(blocks), key=lambda p: (p.block.asked, not p.block.control, p.block.index)
    )
    alike = groupby(placed, key=lambda p: (p.block.asked, p.block.control, p.by_timing, p.by_counters))
    headers = ("asked as", "blocks", "bytes", "read GB/s", "first read", "by timing", "by counters", "doubts")
    rows = tuple(_block_row(list(members)) for _, members in alike)
    return (Table("", _gauge_lines(pick(records, Reading)), headers, rows, only="text"),)


def _block_row(alike: Sequence[residency.LabelledBlock]) -> tuple[str, ...]:
    """A row for neighbouring blocks of one kind and one outcome."""
    first = alike[0]
    return (
        f"{first.block.asked}{' (control)' if first.block.control else ''}",
        str(len(alike)),
        binary_bytes(sum(p.block.n_bytes for p in alike)),
        f"{stats.median([p.gb_per_s for p in alike]):.4g}",
        _first_read([p.block for p in alike]),
        first.by_timing,
        first.by_counters,
        "signals disagree" if first.disagree else "",
    )


def _first_read(alike: Sequence[Block]) -> str:
    """The middle and the longest of the first reads."""
    known = [block.first_read_s for block in alike if isinstance(block.first_read_s, float)]
    if not known:
        return "not timed"
    return f"{duration(stats.median(known))}, longest {duration(max(known))}"


def _gauge_lines(readings: Sequence[Reading]) -> tuple[str, ...]:
    """Each gauge with its readings in order; one that was never known appears only with its reason."""
    lines = []
    for gauge in dict.fromkeys(reading.gauge for reading in readings):
        of_gauge = [reading for reading in readings if reading.gauge == gauge]
        if all(isinstance(reading.value_bytes, Unknown) for reading in of_gauge):
            of_gauge = of_gauge[:1]
        history = ", ".join(f"{reading.moment} {bytes_or_why(reading.value_bytes)}" for reading in of_gauge)
        lines.append(f"gauge {gauge}: {history}")
    return tuple(lines)


def record_line(record: Record) -> str:
    """One record as a run prints it in progress; empty for those that only the report needs."""
    text = ""
    match record:
        case Measurement():
            summary = stats.summarize(record.times_s)
            rate = f"{gb_per_s(record.moved_bytes, summary.median):9.3g} GB/s"
            text = f"{_row_name(record)} {rate}  {figure_text(record)}  n={summary.n}"
        case Reads():
            size = f"{binary_bytes(record.payload_bytes):>10}"
            text = f"{record.way:<16} {size} k={record.reads} {figure_text(record)}"
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
            took = f"{figure_text(record)}  n={stats.summarize(record.times_s).n}"
            text = f"{name:<22} {record.scenario:<18} batch {record.rows:<4} {took}"
        case NumaPlaces():
            text = numa_line(record)
        case Request() | Block() | Reading():
            pass
    return text


def numa_line(places: NumaPlaces) -> str:
    """On which NUMA nodes a process measured."""
    nodes = ", ".join(map(str, places.processors)) or "unknown"
    return (
        f"NUMA nodes: GPU {places.gpu}, processors {nodes}, "
        f"pinned buffers {places.pinned_buffer}, pageable buffers {places.pageable_buffer}"
        f"{'; held to the node of the GPU' if places.held else ''}"
    )


def expectation_line(expected: Expectation) -> str:
    """What should happen, by which source, and what else can happen."""
    return f"expected: {expected.sentence} [{expected.source}] {expected.note}".rstrip()


def _row_name(record: Measurement | Gap) -> str:
    return f"{record.name:<16} {binary_bytes(record.payload_bytes):>10}"
