"""What each plot shows, as values: measured points with their errors apart from predicted lines. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from probes.records.schema import (
    Block,
    Label,
    Measurement,
    Pass,
    ProbeReport,
    Reads,
    Request,
    Scenario,
    Stop,
    Unknown,
)
from probes.report import crossover, residency
from probes.report.answers import all_records, best_gb_per_s, groups, pick
from probes.report.headline import missing
from probes.report.pieces import fit, points_of
from probes.report.quantities import Rate, rate, size

STEPS = 60  # of a drawn line
FAMILIES = (  # panel title, how its paths begin
    ("Between host and VRAM", ("h2d", "d2h", "zero_copy")),
    ("Within VRAM", ("vram",)),
    ("Within host memory", ("h2h",)),
)


@dataclass(frozen=True)
class Trace:
    """One path of `transfer`: measured rates by size (bytes), and the model's line where its fit is good."""

    path: str
    points: tuple[tuple[int, Rate], ...]
    fitted: tuple[tuple[float, float], ...]  # bytes, GB/s; empty where there is no fit
    no_fit: str  # why


@dataclass(frozen=True)
class BandwidthPanel:
    """Paths of one order of magnitude."""

    title: str
    traces: tuple[Trace, ...]


@dataclass(frozen=True)
class Cell:
    """One block of device memory in the order of allocation, with its read rate and both labels."""

    first_bytes: int
    last_bytes: int
    read: Rate
    by_timing: Label
    by_counters: Label
    disagree: bool


@dataclass(frozen=True)
class ResidencyChart:
    """Where blocks are, between the read rates (GB/s) of the controls of known place."""

    cells: tuple[Cell, ...]
    controls: residency.Controls | Unknown
    limit_bytes: int | None  # the cap that the probe set itself; None where it set none
    ended: str


@dataclass(frozen=True)
class ScenarioPanel:
    """Wall-clock times of a pass in every scenario of one model, element type and batch; the link's limit."""

    title: str
    bars: tuple[Pass, ...]
    link_s: float | None  # computed: spilled bytes over the link's measured bandwidth
    link_told: str


@dataclass(frozen=True)
class BreakEvenChart:
    """k* over size: a predicted line with its error, and measured points."""

    predicted: tuple[crossover.BreakEven, ...]
    measured: tuple[crossover.BreakEven, ...]


@dataclass(frozen=True)
class Charts:
    """Everything that is drawn; a chart that can't be drawn gives the reason."""

    bandwidth: tuple[BandwidthPanel, ...] | Unknown
    residency: ResidencyChart | Unknown
    scenarios: tuple[ScenarioPanel, ...] | Unknown
    break_even: BreakEvenChart | Unknown


def charts(report: ProbeReport) -> Charts:
    """The charts of a report."""
    records = all_records(report)
    measured = pick(records, Measurement)
    return Charts(
        bandwidth=_bandwidth(measured) or Unknown(missing(report, "transfer")),
        residency=_residency(pick(records, Block), pick(records, Request), pick(records, Stop))
        or Unknown(missing(report, "spill")),
        scenarios=_scenarios(pick(records, Pass), best_gb_per_s(records, "h2d_pinned"))
        or Unknown(missing(report, "scenarios")),
        break_even=_break_even(report, measured, pick(records, Reads)),
    )


def spread(first: float, last: float) -> tuple[float, ...]:
    """Places for a line from first to last, evenly spaced on a logarithmic axis."""
    return tuple(first * (last / first) ** (i / (STEPS - 1)) for i in range(STEPS))


def _bandwidth(rows: Sequence[Measurement]) -> tuple[BandwidthPanel, ...]:
    names = sorted({row.name for row in rows})
    known = tuple(start for _, starts in FAMILIES for start in starts)
    families = (*FAMILIES, ("Other paths", tuple(n for n in names if not n.startswith(known))))
    panels = [
        BandwidthPanel(title, tuple(_trace(rows, name) for name in names if name.startswith(starts)))
        for title, starts in families
    ]
    return tuple(panel for panel in panels if panel.traces)


def _trace(rows: Sequence[Measurement], name: str) -> Trace:
    mine = sorted((row for row in rows if row.name == name), key=lambda row: row.payload_bytes)
    points = tuple((row.payload_bytes, rate(row.moved_bytes, row.times_s)) for row in mine)
    found = fit(points_of(mine, name))
    if isinstance(found, Unknown):
        return Trace(name, points, (), found.reason)
    weight = mine[0].moved_bytes / mine[0].payload_bytes
    line = tuple(
        (n_bytes, n_bytes * weight / found.seconds(n_bytes) / 1e9)
        for n_bytes in spread(mine[0].payload_bytes, mine[-1].payload_bytes)
    )
    return Trace(name, points, line, "")


def _residency(
    blocks: Sequence[Block], requests: Sequence[Request], stops: Sequence[Stop]
) -> ResidencyChart | None:
    cells, held = [], 0
    for placed in sorted(residency.place(blocks), key=lambda p: p.block.index):
        block = placed.block
        if block.asked != "vram" or block.control:
            continue
        read = rate(block.n_bytes, [block.read_s])
        labels = (placed.by_timing, placed.by_counters, placed.disagree)
        cells.append(Cell(held, held + block.n_bytes, read, *labels))
        held += block.n_bytes
    if not cells:
        return None
    limits = [request.cap_bytes for request in requests if request.cap_bytes is not None]
    ended = _ended(stops[-1]) if stops else ""
    return ResidencyChart(tuple(cells), residency.controls(blocks), max(limits, default=None), ended)


def _ended(stop: Stop) -> str:
    """The first sentence of the driver's answer is what a caption can hold; the tables have the rest."""
    note = stop.note.split(". ", maxsplit=1)[0].rstrip(".")
    return f"The probe stopped at {size(stop.held_bytes)}, {stop.cause}: {note}."


SCENARIO_ORDER: tuple[Scenario, ...] = (
    "resident",
    "placed",
    "packed",
    "streamed",
    "zero_copy_weights",
    "zero_copy_all",
)


def _scenarios(passes: Sequence[Pass], link: float | None) -> tuple[ScenarioPanel, ...]:
    panels = []
    for (model, dtype, rows), ways in groups(passes).items():
        spilled = max(one.spilled_bytes for one in ways.values())
        known = link is not None and spilled > 0
        panels.append(
            ScenarioPanel(
                title=f"{model}, {dtype}, batch {rows}",
                bars=tuple(ways[name] for name in SCENARIO_ORDER if name in ways),
                link_s=spilled / link / 1e9 if link and known else None,
                link_told=f"{size(spilled)} at {link:.3g} GB/s" if known else "",
            )
        )
    return tuple(panels)


def _break_even(
    report: ProbeReport, rows: Sequence[Measurement], reads: Sequence[Reads]
) -> BreakEvenChart | Unknown:
    seen = [crossover.measured(reads, n_bytes) for n_bytes in sorted({row.payload_bytes for row in reads})]
    measured = tuple(one for one in seen if isinstance(one, crossover.BreakEven) and math.isfinite(one.reads))
    advice = crossover.adviser(rows)
    predicted: tuple[crossover.BreakEven, ...] = ()
    if isinstance(advice, crossover.Adviser):
        sizes = [row.payload_bytes for row in rows if row.name in crossover.PATHS]
        places = (advice.at(round(n)) for n in spread(min(sizes), max(sizes)))
        predicted = tuple(one for one in places if math.isfinite(one.reads))
    if predicted or measured:
        return BreakEvenChart(predicted, measured)
    if isinstance(advice, Unknown):
        return Unknown(missing(report, "breakeven"))
    return Unknown("reading in place is as fast as VRAM at every size, so a copy never pays")
