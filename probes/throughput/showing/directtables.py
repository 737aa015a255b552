"""The direct half as tables: ceilings, a table for each way, all ways side by side. Pure."""

from probes.report.tables import Table
from probes.shared.units import binary_bytes, decimal_bytes, duration
from probes.shared.unknown import Unknown
from probes.throughput.ceilings.ceiling import Ceiling, Ceilings, DeviceCeilings
from probes.throughput.direct.figures import joules_per_input, latency_s, throughput
from probes.throughput.direct.saturation import saturation
from probes.throughput.direct.scanned import BatchRow, DirectScan, Series, Way

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
    found = throughput(row)
    error = "" if found.share is None else f" ± {found.share:.1%}"
    return f"{found.mean:,.4g}{error}" if found.mean < 1e4 else f"{found.mean:,.0f}{error}"


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
    return Table(f"Direct, {series.way.label}", note, HEADERS, rows, WORDS)


def _cells(row: BatchRow, way: Way, ceilings: Ceilings | Unknown) -> tuple[str, ...]:
    wall_s, late_s = latency_s(row)
    found = saturation(row, way, ceilings)
    joules = joules_per_input(row)
    return (
        str(row.batch),
        str(len(row.wall_s)),
        duration(wall_s),
        duration(late_s),
        "?" if isinstance(row.pass_s, Unknown) else duration(row.pass_s),
        rate(row),
        *(_percent(share) for share in (found.compute, found.memory, found.link, found.host)),
        found.binds,
        "?" if isinstance(row.busy_percent, Unknown) else f"{row.busy_percent:.0f}%",
        "?" if isinstance(joules, Unknown) else f"{joules:.3g}",
        "?" if isinstance(row.peak_bytes, Unknown) else binary_bytes(row.peak_bytes),
    )


def _percent(share: float | Unknown) -> str:
    return "?" if isinstance(share, Unknown) else f"{share:.0%}"


def _missing(series: Series) -> tuple[str, ...]:
    """Why columns have no figure, each reason once."""
    found = [
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
    return tuple(dict.fromkeys(found))


def _all_ways(shown: list[Series]) -> Table:
    """Inputs per second of every way by batch size: CPU next to GPU where both were measured."""
    batches = sorted({row.batch for series in shown for row in series.rows})
    by_way = [{row.batch: rate(row) for row in series.rows} for series in shown]
    rows = tuple((str(batch), *(rates.get(batch, "") for rates in by_way)) for batch in batches)
    headers = ("batch", *(series.way.label for series in shown))
    return Table("Direct, inputs/s side by side", "", headers, rows, frozenset())


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
        "Measured in the same run, each with nothing else going on; the largest rate over sizes counts.",
        ("what", "rate", "n", "by", "of"),
        tuple((what, *_ceiling(found, unit)) for what, found, unit in rates),
        frozenset({"what", "by", "of"}),
    )


def _ceiling(found: Ceiling | Unknown, unit: str) -> tuple[str, str, str, str]:
    if isinstance(found, Unknown):
        return "?", "", "", found.reason
    error = "" if found.error is None else f" ± {found.error / found.median:.1%}"
    return f"{_scaled(found.median, unit)}{error}", str(found.n), found.clock, found.of


def _scaled(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{decimal_bytes(value)}/s"
    if unit == "/s":
        return f"{value:,.0f}/s"
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
