"""What a run does in which order, how long that takes, which further processes are worth their time. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from probes.measure import breakeven, scenarios, spill, transfer
from probes.measure.catalog import Probe, select, waive
from probes.records.facts import Machine, TorchFacts
from probes.records.rounds import merged
from probes.records.rows import Case, Timed
from probes.records.schema import Done, ProbeReport, ProbeRun, Settings
from probes.records.stats import pairs_scatter, scatters

START_S = 2.0  # to start a process, import torch and open the card; less where one waits
BEGINNING = ""  # the case that represents a probe's start; it is done with the first record

# ---- the processes of a run ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedCase:
    """One case of a probe and about how many seconds it takes on an ordinary machine."""

    probe: str
    case: str  # as in the journal
    cost_s: float
    round: int = 0


def schedule(probes: Sequence[Probe], settings: Settings) -> tuple[tuple[Probe, int], ...]:
    """The processes of a run in order: each probe and its round.

    Round by round, so that the rounds of a case are as far apart in time as the run allows.
    """
    rounds = [probe.quick_rounds if settings.quick else probe.full_rounds for probe in probes]
    return tuple(
        (probe, turn)
        for turn in range(max(rounds, default=0))
        for probe, most in zip(probes, rounds, strict=True)
        if turn < most
    )


def plan(
    names: tuple[str, ...], settings: Settings, machine: Machine, *, has_transformers: bool
) -> tuple[PlannedCase, ...]:
    """Every case of the probes of these names that can apply here, with about what it costs."""
    has_gpu = isinstance(machine.torch, TorchFacts) and not machine.torch.obstacle
    cases = {
        "transfer": transfer.planned(settings, has_gpu=has_gpu),
        "breakeven": breakeven.planned(settings),
        "spill": (("spill", spill.QUICK_S if settings.quick else spill.FULL_S),),
        "scenarios": scenarios.planned(settings, has_transformers=has_transformers),
    }
    return tuple(
        PlannedCase(probe.name, case, cost_s, turn)
        for probe, turn in schedule(select(names), settings)
        if waive(probe, machine) is None
        for case, cost_s in ((BEGINNING, START_S), *cases[probe.name])
    )


# ---- progress ------------------------------------------------------------------------------------------

TRUST = 0.05  # of the planned cost: until about as much is done, the plan counts more than the pace


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done: int
    total: int
    left_s: float


def progress(
    plan: Sequence[PlannedCase],
    done: Collection[tuple[str, int, str]],
    ended: Collection[tuple[str, int]],
    *,
    elapsed_s: float,
) -> Progress:
    """Where a run stands `elapsed_s` after it was planned.

    `done` has finished cases as (probe, round, case), `ended` finished processes as (probe, round). What is
    left costs its plan times the pace: seconds spent over seconds planned for what is done.
    """
    over = [
        item
        for item in plan
        if (item.probe, item.round) in ended or (item.probe, item.round, item.case) in done
    ]
    spent_s = sum(item.cost_s for item in over)
    whole_s = sum(item.cost_s for item in plan)
    trust_s = TRUST * whole_s
    pace = (elapsed_s + trust_s) / (spent_s + trust_s) if whole_s else 1.0
    cases = [item for item in plan if item.case != BEGINNING]
    finished = sum(item.case != BEGINNING for item in over)
    return Progress(finished, len(cases), (whole_s - spent_s) * pace)


def sentence(at: Progress, *, so_far_s: float) -> str:
    """`42 s so far, 61 of 141 cases done, about 55 s left`."""
    return f"{_span(so_far_s)} so far, {at.done} of {at.total} cases done, about {_about(at.left_s)} left"


def _span(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60} min {whole % 60:02} s"


def _about(seconds: float) -> str:
    """To five seconds below two minutes, to whole minutes above; never nothing."""
    return f"{max(5, 5 * round(seconds / 5))} s" if seconds < 100 else f"{math.ceil(seconds / 60)} min"


# ---- further processes ---------------------------------------------------------------------------------

MOST_PROCESSES = 6  # of a probe in all
FIXED = 0.5  # of a process's time doesn't depend on how many rows it measures: buffers, models


@dataclass(frozen=True)
class FurtherProcess:
    """One more process of a probe, which doesn't measure the cases in `skipped`."""

    probe: str
    round: int
    skipped: tuple[str, ...]


def further_process(reports: Sequence[ProbeReport], *, left_s: float) -> FurtherProcess | None:
    """The next process that is worth its time and ends within `left_s`, by what earlier ones took.

    `reports` are one, or the two sides of a run in turns. First comes the probe that had fewest of them.
    """
    candidates = []
    for probe in dict.fromkeys(run.probe for run in reports[0].runs):
        runs = [run for report in reports for run in report.runs if run.probe == probe]
        rounds = {run.round for run in runs}
        if len(rounds) >= MOST_PROCESSES or not all(isinstance(run.outcome, Done) for run in runs):
            continue
        scattering, cases = _scattering(reports, probe), _cases(runs)
        share = FIXED + (1 - FIXED) * len(scattering) / max(len(cases), 1)
        cost_s = START_S + share * max(run.seconds for run in runs)  # of a pair each waits for the other
        if scattering and cost_s <= left_s:
            skipped = tuple(case for case in cases if case not in scattering)
            candidates.append((len(rounds), FurtherProcess(probe, max(rounds) + 1, skipped)))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _cases(runs: Sequence[ProbeRun]) -> list[str]:
    return list(
        dict.fromkeys(record.case for run in runs for record in run.records if isinstance(record, Case))
    )


def _scattering(reports: Sequence[ProbeReport], probe: str) -> set[str]:
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
