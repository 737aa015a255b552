"""One run: look at the machine, run each probe in its own process, keep every record, save after each."""

import importlib.util
import itertools
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from probes.errors import Exit, ReportError
from probes.records.schema import (
    SCHEMA_VERSION,
    Case,
    Done,
    Failed,
    Machine,
    ProbeReport,
    ProbeRun,
    Record,
    Settings,
    Small,
    Unknown,
    Waived,
    read_report,
    write_report,
)
from probes.run import journal, supervisor, thismachine
from probes.run.catalog import Probe, limit_s, plan, schedule, select, waive
from probes.run.child import Aside, Job, Told
from probes.run.journal import Journal, Past
from probes.run.remaining import Planned
from probes.run.supervisor import Spare
from probes.shared.invocation import probe_command, tool_version

CPUS_PER_SPARE = 2


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


def measure(
    probes: tuple[Probe, ...], settings: Settings, *, folder: Path, listener: Listener
) -> tuple[ProbeReport, Path]:
    """Run the probes and write the report again after each probe, and a journal of every record.

    Raises DeviceBusy when another run holds the GPU, ReportError when the report can't be written,
    KeyboardInterrupt when interrupted; then, as after a power cut, `resume` goes on from there.
    """
    with supervisor.crew(spares(len(schedule(probes, settings)), os.cpu_count() or 1)) as crew:
        return _measure(probes, settings, folder=folder, listener=listener, crew=crew)


def spares(processes: int, cpus: int) -> int:
    """How many workers to start ahead: with enough processors, they import torch at the same time. Pure."""
    return min(processes, cpus // CPUS_PER_SPARE)


def _measure(
    probes: tuple[Probe, ...], settings: Settings, *, folder: Path, listener: Listener, crew: list[Spare]
) -> tuple[ProbeReport, Path]:
    found = thismachine.look()
    listener.machine(found)
    report = _empty(probes, settings, found)
    with thismachine.exclusive(folder, found):
        for left in journal.sweep(folder):
            listener.unfinished(left)
        path = _free_name(folder / file_name(report))
        with journal.open_journal(path) as book:
            book.begin(report)
            write_report(report, path)
            listener.kept(path)
            run = _Run(path, book, listener, crew)
            return _go_on(report, Past(report, ()), run), path


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
    found = thismachine.look()
    listener.machine(found)
    thismachine.refuse_other_machine(past.begun.machine, found)
    with thismachine.exclusive(path.parent, found), journal.open_journal(path) as book:
        journal.sweep(path.parent)
        report = _kept(past.begun, path)
        listener.kept(path)
        return _go_on(report, past, _Run(path, book, listener, [])), path


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


def _go_on(report: ProbeReport, past: Past, going: _Run) -> ProbeReport:
    """Run what the report lacks. At the end the journal is removed."""
    known = {(run.probe, run.round) for run in report.runs}
    going.listener.planned(_plan(report, past))
    for probe, turn in schedule(select(report.asked), report.settings):
        if (probe.name, turn) in known or _is_over(report, probe):
            continue
        run = _run(probe, turn, report, past=past.records(probe.name, turn), going=going)
        report = replace(report, runs=(*report.runs, run))
        write_report(report, going.path)
        going.listener.ended(run)
        if _interrupted(run):
            raise KeyboardInterrupt
        if isinstance(run.outcome, Failed) and run.outcome.wedged:
            return report
    write_report(report, going.path)
    going.book.remove()
    return report


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


def _run(probe: Probe, turn: int, report: ProbeReport, *, past: Sequence[Record], going: _Run) -> ProbeRun:
    reason = waive(probe, report.machine)
    if reason:
        return ProbeRun(probe.name, Waived(reason), 0.0, (), turn)
    going.listener.started(probe, turn)
    # what has no case is part of a whole that has to be measured at one go
    kept = [record for record in past if isinstance(record, Case)]

    def heard(record: Told) -> None:
        if not isinstance(record, Aside):
            going.book.add(probe.name, record, turn)
        going.listener.record(record)

    ended = supervisor.run(
        Job(
            probe.name,
            replace(report.settings, seed=report.settings.seed + turn),  # another order in every round
            report.machine,
            tuple(record.case for record in kept),
        ),
        limit_s=limit_s(probe, report.settings),
        heard=heard,
        spare=going.crew.pop() if going.crew else None,
    )
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
