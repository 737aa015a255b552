"""Which rows need another process: those that scatter too much for a small difference to be seen. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from probes.records.rounds import merged
from probes.records.schema import Case, Done, ProbeReport, ProbeRun, Timed
from probes.records.stats import pairs_scatter, scatters

MOST = 6  # processes of a probe in all
START_S = 2.0  # of a process
FIXED = 0.5  # of a process's time doesn't depend on how many rows it measures: buffers, models


@dataclass(frozen=True)
class Further:
    """One more process of a probe. `leave`: the cases that it doesn't measure."""

    probe: str
    round: int
    leave: tuple[str, ...]


def further(reports: Sequence[ProbeReport], *, left_s: float) -> Further | None:
    """The next process that is worth its time and ends within `left_s`, by what earlier ones took.

    `reports` are one, or the two sides of a run in turns. First comes the probe that had fewest of them.
    """
    found = []
    for probe in dict.fromkeys(run.probe for run in reports[0].runs):
        runs = [run for report in reports for run in report.runs if run.probe == probe]
        rounds = {run.round for run in runs}
        if len(rounds) >= MOST or not all(isinstance(run.outcome, Done) for run in runs):
            continue
        wanted, cases = _wanted(reports, probe), _cases(runs)
        share = FIXED + (1 - FIXED) * len(wanted) / max(len(cases), 1)
        cost_s = START_S + share * max(run.seconds for run in runs)  # of a pair each waits for the other
        if wanted and cost_s <= left_s:
            leave = tuple(case for case in cases if case not in wanted)
            found.append((len(rounds), Further(probe, max(rounds) + 1, leave)))
    return min(found, key=lambda one: one[0])[1] if found else None


def _cases(runs: Sequence[ProbeRun]) -> list[str]:
    return list(
        dict.fromkeys(record.case for run in runs for record in run.records if isinstance(record, Case))
    )


def _wanted(reports: Sequence[ProbeReport], probe: str) -> set[str]:
    """The cases of a probe that scatter, each side by itself or in pairs."""
    sides = [
        {
            row.case: row.times_s
            for run in merged(report).runs
            if run.probe == probe
            for row in run.records
            if isinstance(row, Timed)
        }
        for report in reports
    ]
    first, *others = sides
    if not others:
        return {case for case, times in first.items() if scatters(times)}
    other = others[0]
    return {
        case
        for case, times in first.items()
        if case in other and len(times) == len(other[case]) and pairs_scatter(times, other[case])
    }
