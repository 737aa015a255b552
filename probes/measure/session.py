"""One run: look at the machine, run each probe in its own process, keep every record, save after each."""

import importlib.util
import itertools
import os
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from probes.core.errors import DeviceUnusable, Exit, ReportError
from probes.core.invocation import probe_command, tool_version
from probes.core.unknown import Unknown
from probes.measure import in_turns, journal, supervisor, this_machine
from probes.measure.catalog import Planned, Probe, limit_s, plan, schedule, select, waive
from probes.measure.in_turns import SIDES
from probes.measure.journal import Journal, Past
from probes.measure.supervisor import Command, Ended, Spare
from probes.measure.worker import Aside, Job, Told
from probes.records.facts import Machine, TorchFacts
from probes.records.rounds import merged
from probes.records.rows import Case, Record, Small, Timed
from probes.records.schema import (
    SCHEMA_VERSION,
    Done,
    Failed,
    ProbeReport,
    ProbeRun,
    Settings,
    Waived,
    read_report,
    write_report,
)
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


CPUS_PER_SPARE = 2
PAIRS = 2  # of every row, in turns; a third would tell little more of a row that is steady
QUICK_LONGEST_S, FULL_LONGEST_S = 42.0, 540.0  # from its start, with further processes


class Listener:
    """A run's progress. This one prints nothing."""

    def machine(self, found: Machine) -> None:
        """The machine was looked at."""

    def unfinished(self, report: Path) -> None:
        """An earlier run in this folder was cut short and can go on."""

    def kept(self, path: Path) -> None:
        """The report is written, and a run that is cut short from now on can go on."""

    def planned(self, plan: tuple[Planned, ...]) -> None:
        """What the run is about to do."""

    def started(self, probe: Probe, turn: int) -> None:
        """A probe was started, in one round."""

    def record(self, record: Told) -> None:
        """A probe found something."""

    def ended(self, run: ProbeRun) -> None:
        """A probe ended, or was waived."""


def longest_s(*, quick: bool) -> float:
    """When a run begins no further process for rows that scatter, seconds after its start. Pure."""
    return QUICK_LONGEST_S if quick else FULL_LONGEST_S


def measure(
    probes: tuple[Probe, ...],
    settings: Settings,
    *,
    folder: Path,
    listener: Listener,
    longest_s: float | None = None,
) -> tuple[ProbeReport, Path]:
    """Run the probes and write the report again after each probe, and a journal of every record.

    Rows that scatter are then measured by further processes, as long as those end within `longest_s`.

    Raises DeviceUnusable where there is no torch, DeviceBusy when another run holds the GPU, ReportError when
    the report can't be written, KeyboardInterrupt when interrupted; then, as after a power cut, `resume` goes
    on from there.
    """
    until_s = time.monotonic() + _within(longest_s, settings)
    with supervisor.crew(spares(len(schedule(probes, settings)) + 1, os.cpu_count() or 1)) as crew:
        return _measure(probes, settings, folder=folder, listener=listener, crew=crew, until_s=until_s)


def _within(asked_s: float | None, settings: Settings) -> float:
    return longest_s(quick=settings.quick) if asked_s is None else asked_s


def spares(processes: int, cpus: int) -> int:
    """How many workers to start ahead: with enough processors, they import torch at the same time. Pure."""
    return min(processes, cpus // CPUS_PER_SPARE)


def _measure(
    probes: tuple[Probe, ...],
    settings: Settings,
    *,
    folder: Path,
    listener: Listener,
    crew: list[Spare],
    until_s: float,
) -> tuple[ProbeReport, Path]:
    found = _looked(listener)
    report = _empty(probes, settings, found)
    with this_machine.exclusive(folder, found):
        for left in journal.sweep(folder):
            listener.unfinished(left)
        path = _free_name(folder / file_name(report))
        with journal.open_journal(path) as book:
            book.begin(report)
            write_report(report, path)
            listener.kept(path)
            run = _Run(path, book, listener, crew, until_s)
            return _go_on(report, Past(report, ()), run), path


def _looked(listener: Listener, command: Command = supervisor.command) -> Machine:
    """The machine as one Python sees it. Raises DeviceUnusable where that has no torch."""
    found = this_machine.look(command)
    listener.machine(found)
    if isinstance(found.torch, Unknown):
        raise DeviceUnusable(
            f"nothing can be measured: {found.torch.reason}",
            "run the probes in an image that holds torch, or install it: pip install torch",
        )
    return found


def measure_in_turns(
    probes: tuple[Probe, ...],
    settings: Settings,
    python: Path,
    *,
    folder: Path,
    listener: Listener,
    longest_s: float | None = None,
) -> tuple[tuple[ProbeReport, Path], tuple[ProbeReport, Path]]:
    """Run the probes with this Python and with another, process beside process in turns: a report of each.

    Rows whose pairs scatter are measured by further pairs, as `measure` does it. Both reports are written
    again after each pair; a run that is cut short can't be resumed. Raises as `measure` does.
    """
    until_s = time.monotonic() + _within(longest_s, settings)
    commands = (supervisor.command, in_turns.running_in(python))
    pair = secrets.token_hex(8)
    begun = [replace(_empty(probes, settings, _looked(listener, command)), pair=pair) for command in commands]
    _refuse_other_gpu(*begun)
    with this_machine.exclusive(folder, begun[0].machine), ExitStack() as stack:
        paths = [_written(report, folder) for report in begun]
        listener.kept(paths[0])
        planned = [(probe, turn) for probe, turn in schedule(probes, settings) if turn < PAIRS]
        ahead = spares(len(SIDES) * len(planned), os.cpu_count() or 1) // len(SIDES)
        crews = [stack.enter_context(supervisor.crew(ahead, command)) for command in commands]
        two = _Two(commands, (crews[0], crews[1]), (paths[0], paths[1]), listener)
        reports = (begun[0], begun[1])
        for probe, turn in planned:
            is_over = any(_is_over(report, probe) for report in reports)
            if probe.alone or waive(probe, reports[0].machine) or is_over:
                continue
            reports = two.run(probe, turn, reports, leave=())
            if any(map(_is_wedged, reports)):
                break
        while more := further(reports, left_s=until_s - time.monotonic()):
            (probe,) = select((more.probe,))
            reports = two.run(probe, more.round, reports, leave=more.leave)
    return (reports[0], paths[0]), (reports[1], paths[1])


def _refuse_other_gpu(a: ProbeReport, b: ProbeReport) -> None:
    """Two sides measure one GPU, or none. Raises DeviceUnusable."""
    gpus = [
        [gpu.pci_id for gpu in x.machine.torch.gpus]
        for x in (a, b)
        if isinstance(x.machine.torch, TorchFacts)
    ]
    if gpus[0] != gpus[1]:
        raise DeviceUnusable(
            f"this Python's torch has the GPUs {gpus[0] or 'none'}, the other's has {gpus[1] or 'none'}",
            "see what each can use: python3 -m probes doctor",
        )


def _written(report: ProbeReport, folder: Path) -> Path:
    path = _free_name(folder / file_name(report))
    write_report(report, path)
    return path


@dataclass(frozen=True)
class _Two:
    """A run in turns: the commands of its two sides, and where their reports are."""

    commands: tuple[Command, Command]
    crews: tuple[list[Spare], list[Spare]]
    paths: tuple[Path, Path]
    listener: Listener

    def run(
        self, probe: Probe, turn: int, reports: tuple[ProbeReport, ProbeReport], *, leave: tuple[str, ...]
    ) -> tuple[ProbeReport, ProbeReport]:
        """A process of each side. Both reports are written."""
        self.listener.started(probe, turn)
        sides = [
            in_turns.Side(
                _job(probe, turn, report, leave),
                command,
                self.listener.record,
                crew.pop() if crew else None,
            )
            for report, command, crew in zip(reports, self.commands, self.crews, strict=True)
        ]
        ended = in_turns.both(
            (sides[0], sides[1]), first=turn % 2, limit_s=limit_s(probe, reports[0].settings)
        )
        found = []
        for report, one, path in zip(reports, ended, self.paths, strict=True):
            run = _ended(probe, turn, one, kept=())
            self.listener.ended(run)
            found.append(replace(report, runs=(*report.runs, run)))
            write_report(found[-1], path)
        return found[0], found[1]


def resume(path: Path, *, listener: Listener) -> tuple[ProbeReport, Path]:
    """Resume a run that was cut short, named by its report or journal; measured cases are kept.

    Raises as `measure` does, and ReportError when there is nothing to go on with or this is another machine.
    """
    path = journal.report_of(path)
    past = journal.read(path)
    if past is None:
        raise ReportError(
            f"{path.name} was cut short before it had begun", f"start again: {probe_command()} run"
        )
    if past.begun.schema_version != SCHEMA_VERSION:
        raise ReportError(
            f"{path.name} was begun by another version of Weir", f"start again: {probe_command()} run"
        )
    found = this_machine.look()
    listener.machine(found)
    this_machine.refuse_other_machine(past.begun.machine, found)
    with this_machine.exclusive(path.parent, found), journal.open_journal(path) as book:
        journal.sweep(path.parent)
        report = _kept(past.begun, path)
        listener.kept(path)
        until_s = time.monotonic() + longest_s(quick=report.settings.quick)
        return _go_on(report, past, _Run(path, book, listener, [], until_s)), path


def _kept(begun: ProbeReport, path: Path) -> ProbeReport:
    """The report of a cut-short run without the interrupted probe; its beginning where there is none."""
    if not path.exists():
        return replace(begun, resumed=1)
    report = read_report(path)
    runs = tuple(run for run in report.runs if not _interrupted(run))
    return replace(report, runs=runs, resumed=report.resumed + 1)


def _interrupted(run: ProbeRun) -> bool:
    return isinstance(run.outcome, Failed) and run.outcome.exit_code == Exit.INTERRUPTED


@dataclass(frozen=True)
class _Run:
    """The state of a run in progress."""

    path: Path
    book: Journal
    listener: Listener
    crew: list[Spare]
    until_s: float  # of the monotonic clock: further processes end before it


def _go_on(report: ProbeReport, past: Past, going: _Run) -> ProbeReport:
    """Run what the report lacks. At the end the journal is removed."""
    known = {(run.probe, run.round) for run in report.runs}
    going.listener.planned(_plan(report, past))
    for probe, turn in schedule(select(report.asked), report.settings):
        if (probe.name, turn) in known or _is_over(report, probe):
            continue
        report = _add(report, _run(probe, turn, report, past=past, going=going), going)
        if _is_wedged(report):
            return report
    while more := further((report,), left_s=going.until_s - time.monotonic()):
        (probe,) = select((more.probe,))
        run = _run(probe, more.round, report, past=past, going=going, leave=more.leave)
        report = _add(report, run, going)
        if _is_wedged(report):
            return report
    write_report(report, going.path)
    going.book.remove()
    return report


def _add(report: ProbeReport, run: ProbeRun, going: _Run) -> ProbeReport:
    """The report with one more process, written. Raises KeyboardInterrupt where that was interrupted."""
    report = replace(report, runs=(*report.runs, run))
    write_report(report, going.path)
    going.listener.ended(run)
    if _interrupted(run):
        raise KeyboardInterrupt
    return report


def _is_wedged(report: ProbeReport) -> bool:
    return isinstance(report.runs[-1].outcome, Failed) and report.runs[-1].outcome.wedged


def _is_over(report: ProbeReport, probe: Probe) -> bool:
    """Whether an earlier round of the probe was waived or failed: another one would end the same way."""
    return any(run.probe == probe.name and not isinstance(run.outcome, Done) for run in report.runs)


def _plan(report: ProbeReport, past: Past) -> tuple[Planned, ...]:
    """What is left to do of a run."""
    known = {(run.probe, run.round) for run in report.runs}
    done = {(e.probe, e.round, e.record.case) for e in past.entries if isinstance(e.record, Case)}
    has_transformers = importlib.util.find_spec("transformers") is not None
    every = plan(report.asked, report.settings, report.machine, has_transformers=has_transformers)
    return tuple(
        one
        for one in every
        if (one.probe, one.round) not in known and (one.probe, one.round, one.case) not in done
    )


def _empty(probes: tuple[Probe, ...], settings: Settings, found: Machine) -> ProbeReport:
    return ProbeReport(
        schema_version=SCHEMA_VERSION,
        tool_version=tool_version(),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        settings=settings,
        machine=found,
        runs=(),
        asked=tuple(probe.name for probe in probes),
    )


def file_name(report: ProbeReport) -> str:
    """`<timestamp>-<variant or host>.json`; WEIR_VARIANT names the image that the probes run in."""
    return f"{re.sub(r'[-:]', '', report.started)}-{place_name(report.machine)}.json"


def place_name(machine: Machine) -> str:
    """The variant or the host, for the name of a report's file."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", os.environ.get("WEIR_VARIANT") or machine.host)


def _free_name(path: Path) -> Path:
    """The path, with a number where a report of the same second is there."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    names = itertools.chain([path], numbered)
    return next(name for name in names if not name.exists() and not journal.path_of(name).exists())


def _run(
    probe: Probe, turn: int, report: ProbeReport, *, past: Past, going: _Run, leave: tuple[str, ...] = ()
) -> ProbeRun:
    """A process of a probe. `leave`: cases that it doesn't measure."""
    reason = waive(probe, report.machine)
    if reason:
        return ProbeRun(probe.name, Waived(reason), 0.0, (), turn)
    going.listener.started(probe, turn)
    # what has no case is part of a whole that has to be measured at one go
    kept = tuple(record for record in past.records(probe.name, turn) if isinstance(record, Case))

    def heard(record: Told) -> None:
        if not isinstance(record, Aside):
            going.book.add(probe.name, record, turn)
        going.listener.record(record)

    ended = supervisor.run(
        _job(probe, turn, report, (*leave, *(record.case for record in kept))),
        limit_s=limit_s(probe, report.settings),
        heard=heard,
        spare=going.crew.pop() if going.crew else None,
    )
    return _ended(probe, turn, ended, kept=kept)


def _job(probe: Probe, turn: int, report: ProbeReport, done: tuple[str, ...]) -> Job:
    """The job of a process; each round has another order."""
    settings = replace(report.settings, seed=report.settings.seed + turn)
    return Job(probe.name, settings, report.machine, done)


def _ended(probe: Probe, turn: int, ended: Ended[Told], *, kept: tuple[Record, ...]) -> ProbeRun:
    records = tuple(record for record in ended.records if not isinstance(record, Aside))
    small = tuple(record for record in ended.records if isinstance(record, Small))
    return ProbeRun(probe.name, ended.outcome, ended.seconds, (*kept, *records), turn, small)


def exit_code(report: ProbeReport, *, require_gpu: bool) -> Exit:
    """The run's exit code. Pure."""
    failures = [run.outcome.exit_code for run in report.runs if isinstance(run.outcome, Failed)]
    facts = report.machine.torch
    if failures:
        return Exit.DEVICE if all(code == Exit.DEVICE for code in failures) else Exit.BROKEN
    if isinstance(facts, Unknown):
        return Exit.DEVICE
    if facts.obstacle and facts.api != "none" and report.machine.device_files:
        return Exit.DEVICE  # a GPU build on a machine with a GPU that it can't use
    if require_gpu and facts.obstacle:
        return Exit.REQUIRED
    return Exit.OK
