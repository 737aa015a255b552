"""A throughput report as a document: its answer in sentences, its tables. Pure."""

import math
from dataclasses import dataclass

from probes.core.units import binary_bytes, decimal_bytes, duration
from probes.core.unknown import Unknown
from probes.records.facts import Surroundings
from probes.records.stats import median
from probes.reports.document import Document, Section, Table
from probes.reports.figures import span
from probes.reports.run import moment, subject_of
from probes.reports.saturation import between
from probes.reports.scan_served import served_findings, served_tables
from probes.throughput.ceilings import Ceiling, Ceilings, DeviceCeilings
from probes.throughput.direct.knee import (
    NEAR,
    SURE,
    Flat,
    Growing,
    Knee,
    Resource,
    Saturation,
    arithmetic,
    of_series,
    saturation,
)
from probes.throughput.direct.results import (
    BatchRow,
    DirectScan,
    Series,
    Way,
    joules_per_input,
    latency_s,
    throughput,
)
from probes.throughput.report import ThroughputReport
from probes.throughput.served import results
from probes.throughput.served.results import Level, ServedScan

HEADERS = (
    "batch",
    "n",
    "wall",
    "p95",
    "device",
    "inputs/s",
    "compute",
    "memory",
    "link",
    "host",
    "binds",
    "busy",
    "J/input",
    "peak",
)
WORDS = frozenset({"binds"})
NOTE = (
    "n: trials; wall: from call to end, their median; device: the pass without copies, by its own clock. "
    "inputs/s: mean of the trials ± its standard error, in which correlated trials count for less. "
    "compute, memory, link, host: the share of a trial that each would need by itself at this machine's "
    "ceilings; memory counts every operation's tensors once, so that above 100% caches served them. "
    "busy: what nvidia-smi and rocm-smi call utilisation: time in which any kernel ran, not saturation."
)


def rate(row: BatchRow) -> str:
    """Inputs per second with the standard error."""
    speed = throughput(row)
    error = "" if speed.share is None else f" ± {speed.share:.1%}"
    return f"{speed.mean:,.4g}{error}" if speed.mean < 1e4 else f"{speed.mean:,.0f}{error}"


def direct_tables(scan: DirectScan, ceilings: Ceilings | Unknown) -> tuple[Table, ...]:
    """The ceilings, every way, and all ways side by side where there are several."""
    shown = [series for series in scan.series if series.rows]
    side = (_all_ways(shown),) if len(shown) > 1 else ()
    ways = (_of_way(one, ceilings, note="" if at else NOTE) for at, one in enumerate(shown))
    return (*ceiling_tables(ceilings), *ways, *side)


def _of_way(series: Series, ceilings: Ceilings | Unknown, *, note: str) -> Table:
    ended = [] if series.end == "finished" else [f"Ended: {series.end}, {series.reason}."]
    note = " ".join(part for part in [note, *ended, *(f"{reason}." for reason in _missing(series))] if part)
    rows = tuple(_cells(row, series.way, ceilings) for row in series.rows)
    return Table(f"Direct, {series.way.label}", (note,) if note else (), HEADERS, rows, WORDS)


def _cells(row: BatchRow, way: Way, ceilings: Ceilings | Unknown) -> tuple[str, ...]:
    wall_s, late_s = latency_s(row)
    shares = saturation(row, way, ceilings)
    joules = joules_per_input(row)
    return (
        str(row.batch),
        str(len(row.wall_s)),
        duration(wall_s),
        duration(late_s),
        "?" if isinstance(row.pass_s, Unknown) else duration(row.pass_s),
        rate(row),
        *(_percent(share) for share in (shares.compute, shares.memory, shares.link, shares.host)),
        shares.binds,
        "?" if isinstance(row.busy_percent, Unknown) else f"{row.busy_percent:.0f}%",
        "?" if isinstance(joules, Unknown) else f"{joules:.3g}",
        "?" if isinstance(row.peak_bytes, Unknown) else binary_bytes(row.peak_bytes),
    )


def _percent(share: float | Unknown) -> str:
    return "?" if isinstance(share, Unknown) else f"{share:.0%}"


def _missing(series: Series) -> tuple[str, ...]:
    """Why columns have no figure, each reason once."""
    reasons = [
        f"? {what}: {value.reason}"
        for row in series.rows
        for what, value in (
            ("device", row.pass_s),
            ("J/input", row.joules),
            ("busy", row.busy_percent),
            ("peak", row.peak_bytes),
            ("shares", row.work),
        )
        if isinstance(value, Unknown)
    ]
    return tuple(dict.fromkeys(reasons))


def _all_ways(shown: list[Series]) -> Table:
    """Inputs per second of every way by batch size: CPU next to GPU where both were measured."""
    batches = sorted({row.batch for series in shown for row in series.rows})
    by_way = [{row.batch: rate(row) for row in series.rows} for series in shown]
    rows = tuple((str(batch), *(rates.get(batch, "") for rates in by_way)) for batch in batches)
    headers = ("batch", *(series.way.label for series in shown))
    return Table("Direct, inputs/s side by side", (), headers, rows, frozenset())


def ceiling_tables(ceilings: Ceilings | Unknown) -> tuple[Table, ...]:
    """This machine's ceilings, one table a device."""
    return () if isinstance(ceilings, Unknown) else tuple(_ceilings_of(on) for on in ceilings.devices)


def _ceilings_of(on: DeviceCeilings) -> Table:
    rates: list[tuple[str, Ceiling | Unknown, str]] = [
        *((f"{one.precision} products", one.rate, "FLOP/s") for one in on.flop),
        ("memory, read and written", on.memory, "B/s"),
        ("link to the device", on.to_device, "B/s"),
        ("link from the device", on.from_device, "B/s"),
        ("launches", on.launches, "/s"),
    ]
    return Table(
        f"Ceilings of {on.name} ({on.device})",
        ("Measured in the same run, each with nothing else going on; the largest rate over sizes counts.",),
        ("what", "rate", "n", "by", "of"),
        tuple((what, *_ceiling(ceiling, unit)) for what, ceiling, unit in rates),
        frozenset({"what", "by", "of"}),
    )


def _ceiling(ceiling: Ceiling | Unknown, unit: str) -> tuple[str, str, str, str]:
    if isinstance(ceiling, Unknown):
        return "?", "", "", ceiling.reason
    error = "" if ceiling.error is None else f" ± {ceiling.error / ceiling.median:.1%}"
    return f"{_scaled(ceiling.median, unit)}{error}", str(ceiling.n), ceiling.clock, ceiling.of


def _scaled(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{decimal_bytes(value)}/s"
    if unit == "/s":
        return f"{value:,.0f}/s"
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


@dataclass(frozen=True)
class LevelAndRow:
    """A level of the closed loop, and the direct row of the largest batch that its callers could fill."""

    level: Level
    in_flight: int  # inputs that callers have under way
    row: BatchRow

    def served_per_s(self, rows: int) -> float:
        """Inputs a second through the service."""
        return rows * results.throughput(self.level).value


def levels_with_rows(series: Series, served: ServedScan) -> tuple[LevelAndRow, ...]:
    """The levels that a direct row can be set next to."""
    pairs = []
    for level in served.of("closed"):
        in_flight = level.callers * served.settings.rows
        rows = [row for row in series.rows if row.batch <= in_flight]
        if rows and level.latency_s:
            pairs.append(LevelAndRow(level, in_flight, max(rows, key=lambda row: row.batch)))
    return tuple(pairs)


def side_by_side(direct: DirectScan, served: ServedScan) -> tuple[Table, ...]:
    """A table for each way of the direct half."""
    name = direct.model.name if not isinstance(direct.model, Unknown) else "an unknown model"
    note = (
        f"Direct: {name}, called in a loop at the largest measured batch that the callers' inputs fill. "
        f"Served: {served.by.model or served.by.url}. The difference is what the service costs, if both "
        "are the same model on the same device; batches that the service joins may be smaller."
    )
    return tuple(_table(series, served, note) for series in direct.series)


def _table(series: Series, served: ServedScan, note: str) -> Table:
    rows = served.settings.rows
    return Table(
        f"Direct and served, {series.way.label}",
        (note,),
        ("callers", "inputs under way", "direct batch", "direct inputs/s", "served inputs/s", "served/direct",
         "direct median", "served p50", "difference"),
        tuple(_pair_cells(one, rows) for one in levels_with_rows(series, served)),
        frozenset(),
    )  # fmt: skip


def _pair_cells(pair: LevelAndRow, rows: int) -> tuple[str, ...]:
    direct, served = throughput(pair.row).mean, pair.served_per_s(rows)
    trial_s, p50 = latency_s(pair.row)[0], median(pair.level.latency_s)
    sign = "-" if p50 < trial_s else ""
    return (
        str(pair.level.callers),
        str(pair.in_flight),
        str(pair.row.batch),
        f"{direct:.4g}",
        f"{served:.4g}",
        f"{served / direct:.2f}",
        span(trial_s, bare=True),
        span(p50, bare=True),
        f"{sign}{span(abs(p50 - trial_s), bare=True)}",
    )


WIDE = 0.1  # error of a ceiling
MOST = 1.1  # of the arithmetic's ceiling: more is impossible, so that ceiling was measured on a busy machine
FULL = 0.8  # of a ceiling: a device that reaches it has hardly anything left
NAMES: dict[Resource, str] = {"compute": "compute", "memory": "memory bandwidth", "link": "the link"}
LIMITS: dict[Resource, str] = {
    "compute": "compute binds",
    "memory": "memory bandwidth binds",
    "link": "the link binds",
    "host": "the host binds: it launches operations slower than the device runs them",
    "none": "no resource is near its ceiling: operations are too small, or their kernels reach little",
}


def direct_findings(scan: DirectScan, ceilings: Ceilings | Unknown) -> tuple[str, ...]:
    """Whether each device is saturated; then one sentence for each way, or why it wasn't measured."""
    fastest: dict[str, Series] = {}
    for series in scan.series:
        if series.rows and _most(series) > _most(fastest.get(series.way.device)):
            fastest[series.way.device] = series
    verdicts = tuple(_verdict(series, ceilings) for series in fastest.values())
    return (*verdicts, *(f"{one.way.label}: {_way(one, ceilings)}" for one in scan.series))


def _most(series: Series | None) -> float:
    return throughput(_best(series)).mean if series else 0.0


def _best(series: Series) -> BatchRow:
    return max(series.rows, key=lambda row: throughput(row).mean)


def _verdict(series: Series, ceilings: Ceilings | Unknown) -> str:
    """Whether the device is saturated, by its fastest way at its best batch size."""
    best, way = _best(series), series.way
    shares = saturation(best, way, ceilings)
    where = "" if way.device == "cpu" else f", inputs {way.inputs}"
    sentences = [
        f"Is the {way.device.upper()} saturated? {_judged(series, best, shares)}.",
        f"Fastest way: {way.backend}, {way.precision}{where}.",
    ]
    wide = _widest(way, ceilings)
    if wide > WIDE:
        sentences.append(
            f"The ceilings err by up to {wide:.0%}: another program ran, so end it and repeat the scan."
        )
    if not isinstance(best.busy_percent, Unknown):
        sentences.append(
            f"Its driver calls it {best.busy_percent:.0f}% busy: some kernel ran, no more than that."
        )
    return " ".join(sentences)


def _widest(way: Way, ceilings: Ceilings | Unknown) -> float:
    """The largest error of the ceilings that a way is compared with, as a part of each."""
    on = ceilings if isinstance(ceilings, Unknown) else ceilings.on(way.device)
    used = () if isinstance(on, Unknown) else (on.flops(arithmetic(way)), on.memory)
    known = (one for one in used if isinstance(one, Ceiling) and one.error is not None)
    return max(((one.error or 0.0) / one.median for one in known), default=0.0)


def _judged(series: Series, best: BatchRow, shares: Saturation) -> str:
    if not isinstance(shares.compute, Unknown) and shares.compute > MOST:
        return (
            f"Unknown: compute is at {shares.compute:.0%} of its ceiling, which is impossible: another "
            "program ran while that was measured, so end it and repeat the scan"
        )
    bend = of_series(series)
    if isinstance(bend, Unknown):
        return f"Unknown: {bend.reason}. At batch {best.batch} {_reached(shares)}"
    if isinstance(bend, Growing):
        further = series.hint or "for larger batches: --max-batch"
        return (
            f"Not yet: at batch {bend.batch}, the largest measured, throughput still grows by "
            f"{bend.per_doubling:.0%} per doubling ({further}). There {_reached(shares)}"
        )
    start = bend.saturated_from if isinstance(bend, Knee) else bend.batch
    return f"{_limit(shares)}. From batch {start} on it does {rate(best)} inputs/s and hardly more"


def _limit(shares: Saturation) -> str:
    """What limits a throughput that no longer grows."""
    if shares.binds == "host":
        return "No, it waits for the host, which launches operations slower than the device runs them"
    if shares.binds == "none":
        if isinstance(shares.compute, Unknown) and isinstance(shares.memory, Unknown):
            return f"Unknown: {_reached(shares)}"
        return f"No, the model's operations are too small, or their kernels reach little: {_reached(shares)}"
    share = shares.share(shares.binds)
    assert not isinstance(share, Unknown)
    if share >= FULL:
        return f"Yes: {NAMES[shares.binds]} is at {share:.0%} of its ceiling"
    return f"In part: {NAMES[shares.binds]} limits it, at {share:.0%} of its ceiling"


def _reached(shares: Saturation) -> str:
    """`compute is at 60% of its ceiling, memory bandwidth at 26%`, those that are known."""
    named = (("compute", shares.compute), ("memory bandwidth", shares.memory))
    known = [f"{name} is at {share:.0%}" for name, share in named if not isinstance(share, Unknown)]
    if isinstance(shares.compute, Unknown) and not known:
        return f"no share of a ceiling is known: {shares.compute.reason}"
    return ", ".join([f"{known[0]} of its ceiling", *known[1:]])


def _way(series: Series, ceilings: Ceilings | Unknown) -> str:
    if not series.rows:
        hint = f" ({series.hint})" if series.hint else ""
        return f"not measured: {series.reason}{hint}"
    best = _best(series)
    limit = LIMITS[saturation(best, series.way, ceilings).binds]
    ended = "" if series.end == "finished" else f"; ended early ({series.reason})"
    doubts = "".join(f"; {doubt}" for doubt in dict.fromkeys(row.doubt for row in series.rows) if doubt)
    return f"{rate(best)} inputs/s at batch {best.batch}, {_knee(series)}; {limit}{doubts}{ended}"


def _knee(series: Series) -> str:
    bend = of_series(series)
    if isinstance(bend, Knee):
        where = between([row.batch for row in series.rows], bend.batch)
        knee = ""  # of two lines; one beyond where saturation begins is only where throughput falls
        if str(bend.saturated_from) in where.split():
            knee = f" (knee {where})"
        elif bend.batch < bend.saturated_from:
            knee = f" (knee {where}, where growth slows)"
        return f"hardly more than from batch {bend.saturated_from} on{knee}{_falling(series)}"
    if isinstance(bend, Flat):
        which = "the smallest measured" if bend.first else "before which it doesn't rise as one line"
        return f"hardly more than from batch {bend.batch} on, {which}"
    if isinstance(bend, Growing):
        return f"and it still grows by {bend.per_doubling:.0%} per doubling there"
    return f"knee {bend}"


def _falling(series: Series) -> str:
    """That the largest batch does less than a smaller one, beyond the errors of both."""
    last, best = max(series.rows, key=lambda row: row.batch), _best(series)
    end, most = throughput(last), throughput(best)
    noise = SURE * math.hypot(end.error or 0.0, most.error or 0.0)
    if end.mean >= most.mean * (1 - NEAR) - noise:
        return ""
    return f", and less at batch {last.batch}: {rate(last)} inputs/s"


def scan_document(report: ThroughputReport) -> Document:
    """What a throughput scan found: what follows, the machine, then the tables of each half and of both."""
    title = f"{name_of_model(report.direct, report.served)}{_where(report)}: throughput"
    return Document(
        kicker="Throughput, measured",
        title=title,
        subject=title,
        details=_details(report),
        headline=scan_findings(report),
        machine=report.machine,
        sections=(Section(tables=scan_tables(report)),),
        has_samples=True,
    )


def _where(report: ThroughputReport) -> str:
    """On which devices the model was called, or from which server it answered, for a title."""
    if report.direct is not None:
        return f" on {' and '.join(_devices(report, report.direct)) or subject_of(report.machine)}"
    if report.served is not None and report.served.by.model:
        return f", served at {'/'.join(report.served.by.url.split('/')[:3])}"
    return "" if report.served is not None else f" on {subject_of(report.machine)}"


def _devices(report: ThroughputReport, direct: DirectScan) -> tuple[str, ...]:
    """The devices that were measured, by name; those that were tried where none was."""
    measured = [series.way.device for series in direct.series if series.rows]
    tried = [series.way.device for series in direct.series]
    return tuple(_device(report, device) for device in dict.fromkeys(measured or tried))


def _device(report: ThroughputReport, device: str) -> str:
    on = report.ceilings if isinstance(report.ceilings, Unknown) else report.ceilings.on(device)
    if device == "gpu":
        return subject_of(report.machine) if isinstance(on, Unknown) else on.name
    count = f"{report.machine.cpus} CPU{'s' if report.machine.cpus != 1 else ''}"
    return count if isinstance(on, Unknown) else f"{on.name}, {count}"


def _details(report: ThroughputReport) -> tuple[str, ...]:
    details = (moment(report.started), f"Weir {report.tool_version}")
    if report.served is None:
        return details
    by = report.served.by
    return (*details, by.url, *([by.server] if by.server else []), by.request)


def name_of_model(direct: DirectScan | None, served: ServedScan | None) -> str:
    """What was measured, for a title."""
    if direct is not None and not isinstance(direct.model, Unknown):
        return direct.model.name
    return served.by.model or served.by.url if served else "a model"


def scan_findings(report: ThroughputReport) -> tuple[str, ...]:
    """What follows from both halves, in sentences."""
    direct = direct_findings(report.direct, report.ceilings) if report.direct else ()
    served = served_findings(report.served) if report.served else ()
    return (*served[:1], *direct, *_limited(report), *served[1:]) or (
        "Nothing was measured: the scan ended before its first row.",
    )


def _limited(report: ThroughputReport) -> tuple[str, ...]:
    """That a limit holds the CPU back; torch starts a thread for each processor all the same."""
    around, cpus = report.machine.surroundings, report.machine.cpus
    limit = around.cpu_limit if isinstance(around, Surroundings) else 0.0
    measured = report.direct and any(one.rows and one.way.device == "cpu" for one in report.direct.series)
    if not measured or isinstance(limit, Unknown) or not 0 < limit < cpus:
        return ()
    return (
        f"A CPU limit of {limit:g} of {cpus} processors holds this container back: passes stop in the middle "
        f"when it is used up. Raise it, or measure with --threads {max(int(limit), 1)}.",
    )


def scan_tables(report: ThroughputReport) -> tuple[Table, ...]:
    """The tables of both halves, and of both side by side, those with rows."""
    tables = [
        *(direct_tables(report.direct, report.ceilings) if report.direct else ()),
        *(served_tables(report.served) if report.served else ()),
        *(side_by_side(report.direct, report.served) if report.direct and report.served else ()),
    ]
    return tuple(table for table in tables if table.rows)
