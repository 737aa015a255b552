"""Puts the rounds of a report together: each case once, with what every process measured of it. Pure.

Each round measures in fresh processes, because a figure that is steady within one process can differ between
two: memory is elsewhere, clocks and libraries have settled differently.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from probes.core.unknown import Unknown
from probes.records.rows import Gap, Measurement, Noise, Pass, Reads, Record, Split, Timed
from probes.records.schema import Failed, ProbeReport, ProbeRun

QUICK_ROUNDS, FULL_ROUNDS = 2, 3
Row = TypeVar("Row", Measurement, Reads, Pass)


def merged(report: ProbeReport) -> ProbeReport:
    """The report with one run for each probe and one record for each case. Idempotent."""
    probes = dict.fromkeys(run.probe for run in report.runs)
    runs = tuple(_one_run([run for run in report.runs if run.probe == probe]) for probe in probes)
    return replace(report, runs=runs)


def _one_run(runs: Sequence[ProbeRun]) -> ProbeRun:
    failures = [run.outcome for run in runs if isinstance(run.outcome, Failed)]
    return replace(
        runs[0],
        outcome=failures[0] if failures else runs[-1].outcome,
        seconds=sum(run.seconds for run in runs),
        records=tuple(_one_each(record for run in runs for record in run.records)),
        processes=sum(run.processes for run in runs),
        small=tuple(small for run in runs for small in run.small),
    )


def _one_each(records: Iterable[Record]) -> list[Record]:
    """Rows of one case become one, at the place of the first; a gap gives way to a row of its case."""
    cases: dict[tuple[type, str], list[Record]] = {}
    order: list[list[Record]] = []
    for record in records:
        if not isinstance(record, Measurement | Reads | Pass | Gap):
            order.append([record])
            continue
        key = type(record), record.case
        if key not in cases:
            cases[key] = []
            order.append(cases[key])
        cases[key].append(record)
    measured = {case for kind, case in cases if kind is not Gap}
    return [
        _one_record(group) for group in order if not (isinstance(group[0], Gap) and group[0].case in measured)
    ]


def _one_record(group: Sequence[Record]) -> Record:
    first = group[0]
    if isinstance(first, Pass):
        passes = [row for row in group if isinstance(row, Pass)]
        splits = [row.split for row in passes if isinstance(row.split, Split)]
        difference = max(row.difference for row in passes)
        first = replace(first, difference=difference, split=splits[0] if splits else first.split)
    return _one_row(first, cast(Sequence[Any], group)) if isinstance(first, Timed) else first


def _one_row(first: Row, group: Sequence[Row]) -> Row:
    """The first process's row, which carries the others."""
    if len(group) == 1:
        return first
    each = [process for row in group for process in _processes(row)]
    return replace(
        first,
        repeats=tuple(each[1:]),
        noise=_noise([process.noise for process in each]),
        host_bound=any(process.host_bound for process in each),
    )


def _processes(row: Row) -> tuple[Row, ...]:
    """A row's processes, a row each."""
    alone: Row = replace(row, repeats=())
    return (alone, *row.repeats)


def _noise(seen: Sequence[Noise | Unknown]) -> Noise | Unknown:
    known = [noise for noise in seen if isinstance(noise, Noise)]
    if not known:
        return seen[0]
    flags = dict.fromkeys(flag for noise in known for flag in noise.flags)
    unwatched = dict.fromkeys(reason for noise in known for reason in noise.unwatched)
    return Noise(tuple(flags), tuple(unwatched))
