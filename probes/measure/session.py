"""One run of the probes: each in processes of its own, every record kept, the report written after each.

`measure` begins a run, `resume` goes on with one that was cut short, and `measure_in_turns` runs the probes
with two Pythons side by side.
"""

import importlib.util
import itertools
import os
import re
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from probes.core.errors import DeviceUnusable, Exit, ReportError
from probes.core.invocation import probe_command, tool_version
from probes.core.unknown import Unknown
from probes.measure import in_turns, journal, probe_worker, supervisor, this_machine
from probes.measure.catalog import Probe, limit_s, select, waive
from probes.measure.in_turns import SIDES
from probes.measure.journal import Journal, Past
from probes.measure.probe_worker import Job, ProbeMessage, SideMessage, worker_command
from probes.measure.schedule import PlannedCase, further_process, plan, schedule
from probes.measure.supervisor import Command, JobResult, WorkerProcess
from probes.records.facts import Machine, TorchFacts
from probes.records.rows import Case, Record, Small
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

CPUS_PER_WORKER = 2  # that is started ahead
PAIRS = 2  # of every row, in turns; a third would tell little more of a row that is steady
QUICK_LONGEST_S, FULL_LONGEST_S = 42.0, 540.0  # from its start, with further processes


class Listener:
    """What a run calls as it goes on. This one does nothing."""

    def machine(self, machine: Machine) -> None:
        """Receive the description of the machine."""

    def unfinished(self, report: Path) -> None:
        """An earlier run in this folder was cut short and can go on."""

    def kept(self, path: Path) -> None:
        """The report is written, and a run that is cut short from now on can go on."""

    def planned(self, plan: tuple[PlannedCase, ...]) -> None:
        """What the run is about to do."""

    def started(self, probe: Probe, turn: int) -> None:
        """A probe was started, in one round."""

    def record(self, record: ProbeMessage) -> None:
        """A probe sent a record."""

    def ended(self, run: ProbeRun) -> None:
        """A probe ended, or was waived."""


# ---- one Python ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A run in progress."""

    path: Path  # of its report
    journal: Journal
    listener: Listener
    workers: list[WorkerProcess]  # that were started ahead
    until_s: float  # of the monotonic clock: further processes end before it


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
    until_s = _deadline_s(longest_s, settings)
    ahead = workers_ahead(len(schedule(probes, settings)) + 1, os.cpu_count() or 1)
    with supervisor.idle_workers(ahead, worker_command) as workers:
        machine = _machine_with_torch(listener)
        report = _empty_report(probes, settings, machine)
        with this_machine.exclusive(folder, machine):
            for unfinished in journal.sweep(folder):
                listener.unfinished(unfinished)
            path = _free_name(folder / file_name(report))
            with journal.open_journal(path) as book:
                book.begin(report)
                write_report(report, path)
                listener.kept(path)
                return _go_on(report, Past(report, ()), _Run(path, book, listener, workers, until_s)), path


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
    machine = this_machine.describe()
    listener.machine(machine)
    this_machine.refuse_other_machine(past.begun.machine, machine)
    with this_machine.exclusive(path.parent, machine), journal.open_journal(path) as book:
        journal.sweep(path.parent)
        report = _without_interrupted(past.begun, path)
        listener.kept(path)
        return _go_on(report, past, _Run(path, book, listener, [], _deadline_s(None, report.settings))), path


def _deadline_s(longest_s: float | None, settings: Settings) -> float:
    """When a run begins no further process for rows that scatter, by the monotonic clock."""
    usual_s = QUICK_LONGEST_S if settings.quick else FULL_LONGEST_S
    return time.monotonic() + (usual_s if longest_s is None else longest_s)


def workers_ahead(processes: int, cpus: int) -> int:
    """How many workers to start ahead: with enough processors, they import torch at the same time. Pure."""
    return min(processes, cpus // CPUS_PER_WORKER)


def _machine_with_torch(listener: Listener, command: Command = worker_command) -> Machine:
    """The machine as one Python sees it. Raises DeviceUnusable where that has no torch."""
    machine = this_machine.describe(command)
    listener.machine(machine)
    if isinstance(machine.torch, Unknown):
        raise DeviceUnusable(
            f"nothing can be measured: {machine.torch.reason}",
            "run the probes in an image that holds torch, or install it: pip install torch",
        )
    return machine


def _without_interrupted(begun: ProbeReport, path: Path) -> ProbeReport:
    """The report of a cut-short run without the interrupted probe; its beginning where there is none."""
    if not path.exists():
        return replace(begun, resumed=1)
    report = read_report(path)
    runs = tuple(run for run in report.runs if not _interrupted(run))
    return replace(report, runs=runs, resumed=report.resumed + 1)


def _interrupted(run: ProbeRun) -> bool:
    return isinstance(run.outcome, Failed) and run.outcome.exit_code == Exit.INTERRUPTED


def _go_on(report: ProbeReport, past: Past, run: _Run) -> ProbeReport:
    """Measure what the report lacks. At the end the journal is removed."""
    known = {(ended.probe, ended.round) for ended in report.runs}
    run.listener.planned(_remaining_plan(report, past))
    for probe, turn in schedule(select(report.asked), report.settings):
        if (probe.name, turn) in known or _is_over(report, probe):
            continue
        report = _add(report, _run_probe(probe, turn, report, past=past, run=run), run)
        if _is_wedged(report):
            return report
    while more := further_process((report,), left_s=run.until_s - time.monotonic()):
        (probe,) = select((more.probe,))
        ended = _run_probe(probe, more.round, report, past=past, run=run, skipped=more.skipped)
        report = _add(report, ended, run)
        if _is_wedged(report):
            return report
    write_report(report, run.path)
    run.journal.remove()
    return report


def _remaining_plan(report: ProbeReport, past: Past) -> tuple[PlannedCase, ...]:
    """What is left to do of a run."""
    known = {(run.probe, run.round) for run in report.runs}
    done = {(e.probe, e.round, e.record.case) for e in past.entries if isinstance(e.record, Case)}
    has_transformers = importlib.util.find_spec("transformers") is not None
    every = plan(report.asked, report.settings, report.machine, has_transformers=has_transformers)
    return tuple(
        item
        for item in every
        if (item.probe, item.round) not in known and (item.probe, item.round, item.case) not in done
    )


def _run_probe(
    probe: Probe, turn: int, report: ProbeReport, *, past: Past, run: _Run, skipped: tuple[str, ...] = ()
) -> ProbeRun:
    """A process of a probe, which doesn't measure the cases in `skipped`."""
    reason = waive(probe, report.machine)
    if reason:
        return ProbeRun(probe.name, Waived(reason), 0.0, (), turn)
    run.listener.started(probe, turn)
    # what has no case is part of a whole that has to be measured at one go
    kept = tuple(record for record in past.records(probe.name, turn) if isinstance(record, Case))

    def on_record(record: ProbeMessage) -> None:
        if not isinstance(record, SideMessage):
            run.journal.add(probe.name, record, turn)
        run.listener.record(record)

    result = probe_worker.run_job(
        _job(probe, turn, report, (*skipped, *(record.case for record in kept))),
        limit_s=limit_s(probe, report.settings),
        on_record=on_record,
        worker=run.workers.pop() if run.workers else None,
    )
    return _probe_run(probe, turn, result, kept=kept)


def _add(report: ProbeReport, ended: ProbeRun, run: _Run) -> ProbeReport:
    """The report with one more process, written. Raises KeyboardInterrupt where that was interrupted."""
    report = replace(report, runs=(*report.runs, ended))
    write_report(report, run.path)
    run.listener.ended(ended)
    if _interrupted(ended):
        raise KeyboardInterrupt
    return report


# ---- two Pythons in turns ------------------------------------------------------------------------------


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
    until_s = _deadline_s(longest_s, settings)
    commands = (worker_command, in_turns.python_command(python))
    pair = secrets.token_hex(8)
    begun = [
        replace(_empty_report(probes, settings, _machine_with_torch(listener, command)), pair=pair)
        for command in commands
    ]
    _refuse_other_gpu(*begun)
    with this_machine.exclusive(folder, begun[0].machine), ExitStack() as stack:
        paths = [_written(report, folder) for report in begun]
        listener.kept(paths[0])
        planned = [(probe, turn) for probe, turn in schedule(probes, settings) if turn < PAIRS]
        ahead = workers_ahead(len(SIDES) * len(planned), os.cpu_count() or 1) // len(SIDES)
        workers = [stack.enter_context(supervisor.idle_workers(ahead, command)) for command in commands]
        run = _PairedRun(commands, (workers[0], workers[1]), (paths[0], paths[1]), listener)
        reports = (begun[0], begun[1])
        for probe, turn in planned:
            is_over = any(_is_over(report, probe) for report in reports)
            if probe.alone or waive(probe, reports[0].machine) or is_over:
                continue
            reports = run.pair(probe, turn, reports, skipped=())
            if any(map(_is_wedged, reports)):
                break
        while more := further_process(reports, left_s=until_s - time.monotonic()):
            (probe,) = select((more.probe,))
            reports = run.pair(probe, more.round, reports, skipped=more.skipped)
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
class _PairedRun:
    """A run in turns: each side's command, the workers that were started ahead, the report's path."""

    commands: tuple[Command, Command]
    workers: tuple[list[WorkerProcess], list[WorkerProcess]]
    paths: tuple[Path, Path]
    listener: Listener

    def pair(
        self, probe: Probe, turn: int, reports: tuple[ProbeReport, ProbeReport], *, skipped: tuple[str, ...]
    ) -> tuple[ProbeReport, ProbeReport]:
        """A process of each side. Both reports are written."""
        self.listener.started(probe, turn)
        sides = [
            in_turns.Side(
                _job(probe, turn, report, skipped),
                command,
                self.listener.record,
                workers.pop() if workers else None,
            )
            for report, command, workers in zip(reports, self.commands, self.workers, strict=True)
        ]
        results = in_turns.run_both(
            (sides[0], sides[1]), first=turn % 2, limit_s=limit_s(probe, reports[0].settings)
        )
        grown = []
        for report, result, path in zip(reports, results, self.paths, strict=True):
            run = _probe_run(probe, turn, result, kept=())
            self.listener.ended(run)
            grown.append(replace(report, runs=(*report.runs, run)))
            write_report(grown[-1], path)
        return grown[0], grown[1]


# ---- reports of a run ----------------------------------------------------------------------------------


def _job(probe: Probe, turn: int, report: ProbeReport, done: tuple[str, ...]) -> Job:
    """The job of a process; each round has another order."""
    settings = replace(report.settings, seed=report.settings.seed + turn)
    return Job(probe.name, settings, report.machine, done)


def _probe_run(
    probe: Probe, turn: int, result: JobResult[ProbeMessage], *, kept: tuple[Record, ...]
) -> ProbeRun:
    records = tuple(record for record in result.records if not isinstance(record, SideMessage))
    small = tuple(record for record in result.records if isinstance(record, Small))
    return ProbeRun(probe.name, result.outcome, result.seconds, (*kept, *records), turn, small)


def _is_wedged(report: ProbeReport) -> bool:
    return isinstance(report.runs[-1].outcome, Failed) and report.runs[-1].outcome.wedged


def _is_over(report: ProbeReport, probe: Probe) -> bool:
    """Whether an earlier round of the probe was waived or failed: another one would end the same way."""
    return any(run.probe == probe.name and not isinstance(run.outcome, Done) for run in report.runs)


def _empty_report(probes: tuple[Probe, ...], settings: Settings, machine: Machine) -> ProbeReport:
    return ProbeReport(
        schema_version=SCHEMA_VERSION,
        tool_version=tool_version(),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        settings=settings,
        machine=machine,
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
