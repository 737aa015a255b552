"""What a service costs over the bare model: served levels next to the direct rows of as many inputs. Pure."""

from dataclasses import dataclass

from probes.records.stats import median
from probes.report.quantities import span
from probes.report.tables import Table
from probes.shared.unknown import Unknown
from probes.throughput.direct.figures import latency_s, throughput
from probes.throughput.direct.scanned import BatchRow, DirectScan, Series
from probes.throughput.served import servedcurve
from probes.throughput.served.servedscan import Level, ServedScan


@dataclass(frozen=True)
class Beside:
    """A level of the closed loop, and the direct row of the largest batch that its callers could fill."""

    level: Level
    in_flight: int  # inputs that callers have under way
    row: BatchRow

    def served_per_s(self, rows: int) -> float:
        """Inputs a second through the service."""
        return rows * servedcurve.throughput(self.level).value


def beside(series: Series, served: ServedScan) -> tuple[Beside, ...]:
    """The levels that a direct row can be set next to."""
    found = []
    for level in served.of("closed"):
        in_flight = level.callers * served.settings.rows
        rows = [row for row in series.rows if row.batch <= in_flight]
        if rows and level.latency_s:
            found.append(Beside(level, in_flight, max(rows, key=lambda row: row.batch)))
    return tuple(found)


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
        note,
        ("callers", "inputs under way", "direct batch", "direct inputs/s", "served inputs/s", "served/direct",
         "direct median", "served p50", "difference"),
        tuple(_cells(one, rows) for one in beside(series, served)),
        frozenset(),
    )  # fmt: skip


def _cells(one: Beside, rows: int) -> tuple[str, ...]:
    direct, mine = throughput(one.row).mean, one.served_per_s(rows)
    trial_s, p50 = latency_s(one.row)[0], median(one.level.latency_s)
    sign = "-" if p50 < trial_s else ""
    return (
        str(one.level.callers),
        str(one.in_flight),
        str(one.row.batch),
        f"{direct:.4g}",
        f"{mine:.4g}",
        f"{mine / direct:.2f}",
        span(trial_s, bare=True),
        span(p50, bare=True),
        f"{sign}{span(abs(p50 - trial_s), bare=True)}",
    )
