"""One run: look at the machine, run each probe in its own process, save after each."""

import importlib.metadata
import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from probes import machine, worker
from probes.catalog import Probe, limit_s, waive
from probes.errors import Exit
from probes.job import DESCRIBE, Job, Told
from probes.lock import gpu_lock
from probes.report import (
    SCHEMA_VERSION,
    Failed,
    Machine,
    ProbeReport,
    ProbeRun,
    Settings,
    TorchFacts,
    Unknown,
    Waived,
    write_report,
)

DESCRIBE_LIMIT_S = 90.0  # a cold import of torch from a slow disk takes most of a minute
ROOT = Path("/")


class Listener:
    """What a run tells while it goes on. This one keeps silent."""

    def machine(self, found: Machine) -> None:
        """The machine was looked at."""

    def started(self, probe: Probe) -> None:
        """A probe was started."""

    def record(self, record: Told) -> None:
        """A probe found something."""

    def ended(self, run: ProbeRun) -> None:
        """A probe ended, or was waived."""


def measure(
    probes: tuple[Probe, ...], settings: Settings, *, folder: Path, listener: Listener
) -> tuple[ProbeReport, Path]:
    """Run the probes and write the report, after each probe anew: a power cut keeps those before it.

    Raises DeviceBusy when another run holds the GPU, ReportError when the report can't be written,
    KeyboardInterrupt when interrupted, with what was measured by then in the report.
    """
    facts = _torch_facts(settings)
    found = machine.describe(ROOT, facts)
    listener.machine(found)
    report = _empty(settings, found)
    with _exclusive(folder, found):
        path = _free_name(folder / file_name(report))
        write_report(report, path)  # a full disk or a read-only folder shows now, not after ten minutes
        for probe in probes:
            run = _run(probe, report, listener=listener)
            report = replace(report, runs=(*report.runs, run))
            write_report(report, path)
            listener.ended(run)
            if isinstance(run.outcome, Failed) and run.outcome.exit_code == Exit.INTERRUPTED:
                raise KeyboardInterrupt
            if isinstance(run.outcome, Failed) and run.outcome.wedged:
                break
    return report, path


def _torch_facts(settings: Settings) -> TorchFacts | Unknown:
    ended = worker.run(Job(DESCRIBE, settings, None), limit_s=DESCRIBE_LIMIT_S, heard=lambda _: None)
    for record in ended.records:
        if isinstance(record, TorchFacts):
            return record
    if isinstance(ended.outcome, Failed) and ended.outcome.exit_code == Exit.INTERRUPTED:
        raise KeyboardInterrupt
    reason = ended.outcome.reason if isinstance(ended.outcome, Failed) else "torch told nothing"
    return Unknown(reason)


def _empty(settings: Settings, found: Machine) -> ProbeReport:
    return ProbeReport(
        schema_version=SCHEMA_VERSION,
        tool_version=_version(),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        settings=settings,
        machine=found,
        runs=(),
    )


def _version() -> str:
    try:
        return importlib.metadata.version("gpu-weir")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree, as in the images
        return "source"


def file_name(report: ProbeReport) -> str:
    """`<timestamp>-<variant or host>.json`; WEIR_VARIANT names the image that the probes run in."""
    stamp = re.sub(r"[-:]", "", report.started)
    name = os.environ.get("WEIR_VARIANT") or report.machine.host
    return f"{stamp}-{re.sub(r'[^A-Za-z0-9._]+', '-', name)}.json"


def _free_name(path: Path) -> Path:
    """The path, with a number where a report of the same second is there."""
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], numbered) if not name.exists())


@contextmanager
def _exclusive(folder: Path, found: Machine) -> Iterator[None]:
    facts = found.torch
    if isinstance(facts, Unknown) or not facts.gpus:
        yield
        return
    pci_id = machine.pci_id_of_first_gpu(facts, found.cards, ROOT)
    with gpu_lock(folder, pci_id if isinstance(pci_id, str) else "first"):
        yield


def _run(probe: Probe, report: ProbeReport, *, listener: Listener) -> ProbeRun:
    reason = waive(probe, report.machine)
    if reason:
        return ProbeRun(probe.name, Waived(reason), 0.0, ())
    listener.started(probe)
    ended = worker.run(
        Job(probe.name, report.settings, report.machine),
        limit_s=limit_s(probe, report.settings),
        heard=listener.record,
    )
    records = tuple(record for record in ended.records if not isinstance(record, TorchFacts))
    return ProbeRun(probe.name, ended.outcome, ended.seconds, records)


def exit_code(report: ProbeReport, *, require_gpu: bool) -> Exit:
    """What a script is told about the run. Pure."""
    failures = [run.outcome.exit_code for run in report.runs if isinstance(run.outcome, Failed)]
    facts = report.machine.torch
    if failures:
        return Exit.DEVICE if all(code == Exit.DEVICE for code in failures) else Exit.BROKEN
    if isinstance(facts, Unknown):
        return Exit.DEVICE
    if facts.obstacle and facts.api != "none" and report.machine.device_files:
        return Exit.DEVICE  # a GPU build beside a GPU that it can't use
    if require_gpu and facts.obstacle:
        return Exit.REQUIRED
    return Exit.OK
