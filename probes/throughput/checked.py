"""What types don't say of a throughput report from outside, so that no figure derived from it fails. Pure."""

from collections.abc import Iterator

from probes.shared.codec import Misfit
from probes.shared.unknown import Unknown
from probes.throughput.ceilings.ceiling import Ceiling, Ceilings
from probes.throughput.direct.scanned import DirectScan
from probes.throughput.served.servedscan import ServedScan

LEAST = 1e-12  # of a time in seconds, or of work: far below any that was measured, and its inverse is finite

Place = tuple[str, float]


def check_parts(ceilings: Ceilings | Unknown, direct: DirectScan | None, served: ServedScan | None) -> None:
    """Raises Misfit for a part that no scan writes."""
    places = [*_of_ceilings(ceilings), *_of_direct(direct), *_of_served(served)]
    for where, value in places:
        if value < LEAST:
            raise Misfit(f"report.{where}: expected a figure above 0, found {value!r}")


def _of_ceilings(ceilings: Ceilings | Unknown) -> Iterator[Place]:
    for device in () if isinstance(ceilings, Unknown) else ceilings.devices:
        rates = [device.memory, device.to_device, device.from_device, device.launches]
        for rate in (*rates, *(one.rate for one in device.flop)):
            if isinstance(rate, Ceiling):
                yield "ceilings: the work of a ceiling", rate.work
                yield from _samples("ceilings: the seconds of a ceiling", rate.seconds)


def _of_direct(direct: DirectScan | None) -> Iterator[Place]:
    for row in (row for series in (direct.series if direct else ()) for row in series.rows):
        yield "direct: a batch size", row.batch
        yield from _samples("direct: the trials of a batch size", row.wall_s)


def _of_served(served: ServedScan | None) -> Iterator[Place]:
    for level in served.levels if served else ():
        yield "served: the seconds of a level", level.seconds
        yield "served: the callers of a level", level.callers
        if level.loop == "open":
            yield "served: the rate of an open loop", level.rate_per_s or 0.0
        yield from (("served: the seconds of a window", window.seconds) for window in level.windows)
        answers = len(level.latency_s)
        waits = answers if level.loop == "open" else 0
        if (len(level.due_s), len(level.waited_s)) != (answers, waits):
            raise Misfit("report.served: the lists of a level don't belong together")


def _samples(where: str, seconds: tuple[float, ...]) -> Iterator[Place]:
    yield f"{where} (how many)", len(seconds)
    yield where, min(seconds, default=LEAST)
