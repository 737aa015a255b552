"""The direct half in sentences: first whether each device is saturated, then where each way ends. Pure."""

from probes.shared.unknown import Unknown
from probes.throughput.ceilings.ceiling import Ceiling, Ceilings
from probes.throughput.direct.figures import throughput
from probes.throughput.direct.knee import Flat, Found, Growing, Knee, of_series
from probes.throughput.direct.saturation import Resource, Saturation, arithmetic, saturation
from probes.throughput.direct.scanned import BatchRow, DirectScan, Series, Way
from probes.throughput.showing.directtables import rate

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


def direct_answer(scan: DirectScan, ceilings: Ceilings | Unknown) -> tuple[str, ...]:
    """Whether each device is saturated; then one sentence for each way, or why it wasn't measured."""
    fastest: dict[str, Series] = {}
    for series in scan.series:
        if series.rows and _most(series) > _most(fastest.get(series.way.device)):
            fastest[series.way.device] = series
    asked = tuple(_verdict(series, ceilings) for series in fastest.values())
    return (*asked, *(f"{one.way.label}: {_way(one, ceilings)}" for one in scan.series))


def _most(series: Series | None) -> float:
    return throughput(_best(series)).mean if series else 0.0


def _best(series: Series) -> BatchRow:
    return max(series.rows, key=lambda row: throughput(row).mean)


def _verdict(series: Series, ceilings: Ceilings | Unknown) -> str:
    """Whether the device is saturated, by its fastest way at its best batch size."""
    best, way = _best(series), series.way
    shares = saturation(best, way, ceilings)
    where = "" if way.device == "cpu" else f", inputs {way.inputs}"
    said = [
        f"Is the {way.device.upper()} saturated? {_judged(series, best, shares)}.",
        f"Fastest way: {way.backend}, {way.precision}{where}.",
    ]
    wide = _widest(way, ceilings)
    if wide > WIDE:
        said.append(
            f"The ceilings err by up to {wide:.0%}: another program ran, so end it and repeat the scan."
        )
    if not isinstance(best.busy_percent, Unknown):
        said.append(f"Its driver calls it {best.busy_percent:.0f}% busy: some kernel ran, no more than that.")
    return " ".join(said)


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
    found = of_series(series)
    if isinstance(found, Unknown):
        return f"Unknown: {found.reason}. At batch {best.batch} {_reached(shares)}"
    if isinstance(found, Growing):
        further = series.hint or "for larger batches: --max-batch"
        return (
            f"Not yet: at batch {found.batch}, the largest measured, throughput still grows by "
            f"{found.per_doubling:.0%} per doubling ({further}). There {_reached(shares)}"
        )
    start = found.saturated_from if isinstance(found, Knee) else found.batch
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
    return f"{rate(best)} inputs/s at batch {best.batch}, {_knee(of_series(series))}; {limit}{doubts}{ended}"


def _knee(found: Found) -> str:
    if isinstance(found, Knee):
        return (
            f"hardly more than from batch {found.saturated_from} on "
            f"(knee at {found.batch:.3g}, {found.least:.3g} to {found.most:.3g})"
        )
    if isinstance(found, Flat):
        which = "the smallest measured" if found.first else "before which it doesn't rise as one line"
        return f"hardly more than from batch {found.batch} on, {which}"
    if isinstance(found, Growing):
        return f"and it still grows by {found.per_doubling:.0%} per doubling there"
    return f"knee {found}"
