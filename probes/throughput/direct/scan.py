"""Runs the direct half of a scan: the ceilings, then every way in a fresh process; saved after each row."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

from probes.core.errors import DeviceUnusable, Exit
from probes.core.unknown import Unknown
from probes.hardware import host, snapshot
from probes.measure import session, supervisor, this_machine
from probes.records.facts import Machine, TorchFacts
from probes.records.schema import Failed
from probes.throughput.ceilings import Ceilings, Device
from probes.throughput.direct import worker
from probes.throughput.direct.results import (
    Backend,
    BatchRow,
    DirectScan,
    End,
    Inputs,
    Mode,
    ModelFacts,
    Series,
    Way,
    latest,
)
from probes.throughput.direct.trials import SeriesEnd
from probes.throughput.report import ScanSettings, ThroughputReport, begun, write_new_scan, write_scan

BACKENDS: tuple[Backend, ...] = get_args(Backend)
MODES: tuple[Mode, ...] = get_args(Mode)
INPUTS: tuple[Inputs, ...] = get_args(Inputs)
DEVICES: tuple[Device, ...] = get_args(Device)
# Without --precision: what a device is quick in. Half precision on a CPU mostly isn't.
USUAL: dict[Device, tuple[Mode, ...]] = {"gpu": MODES, "cpu": ("fp32", "bf16")}
MOST_BATCH = 2**16


def powers(most: int) -> tuple[int, ...]:
    """Powers of two up to a batch size."""
    return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)


def devices(machine: Machine, asked: Sequence[str]) -> tuple[Device, ...]:
    """The devices that were asked for; without a wish the CPU, and the GPU that torch can use."""
    if asked:
        return tuple(device for device in DEVICES if device in asked)
    facts = machine.torch
    return ("gpu", "cpu") if isinstance(facts, TorchFacts) and facts.gpus else ("cpu",)


def ways(
    on: Sequence[Device],
    *,
    backends: Sequence[str] = (),
    precisions: Sequence[str] = (),
    inputs: Sequence[str] = (),
) -> tuple[Way, ...]:
    """Every combination that means something, each once. An empty wish is what is usual.

    The CPU reads its inputs where they are, so that they count as resident.
    """
    ways = []
    for device, backend in product(on, [one for one in BACKENDS if one in (backends or BACKENDS)]):
        for mode in [one for one in MODES if one in (precisions or USUAL[device])]:
            places: Sequence[Inputs] = ("resident",)
            if device == "gpu":
                places = [one for one in INPUTS if one in (inputs or ("copied",))]
            ways += [Way(device, backend, mode, place) for place in places]
    return tuple(ways)


ROOT = Path("/")
CEILINGS_LIMIT_S = 300.0
START_LIMIT_S = 180.0  # to import torch from a slow disk, build a model, export it
SLOWER = 4.0  # by how much a batch size may exceed its longest: warm-ups, draws of inputs, power
CUT_OFF = "the scan was killed while it measured this way"


class Listener:
    """A scan's progress. This one prints nothing."""

    path: Path | None = None  # of the report, once it is there

    def machine(self, found: Machine) -> None:
        """The machine was looked at."""

    def kept(self, path: Path) -> None:
        """The report's file is there, without figures yet."""
        self.path = path

    def ceilings(self, found: Ceilings | Unknown) -> None:
        """Receive the device's measured ceilings."""

    def started(self, way: Way) -> None:
        """Receive the name of the runtime that begins."""

    def row(self, row: BatchRow) -> None:
        """A batch size was measured."""

    def ended(self, series: Series) -> None:
        """Receive how a runtime's scan ended."""


@dataclass(frozen=True)
class ScanRequest:
    """What a scan is asked for, beyond what its report says about it."""

    settings: ScanSettings
    shapes: tuple[tuple[int, ...], ...]  # of a file's inputs
    longest_s: float  # of a batch size's trials


Oversee = Callable[..., supervisor.JobResult[worker.Message]]


def begin(settings: ScanSettings, listener: Listener) -> ThroughputReport:
    """A report without figures yet. Raises DeviceUnusable where torch is missing."""
    machine = this_machine.describe()
    listener.machine(machine)
    if isinstance(machine.torch, Unknown):
        raise DeviceUnusable(
            f"throughput runs a model in torch: {machine.torch.reason}",
            "run it where torch is; for a service: --url URL",
        )
    return begun(settings, machine, Unknown("not measured yet"))


def direct(
    report: ThroughputReport,
    asked: ScanRequest,
    folder: Path,
    listener: Listener,
    oversee: Oversee = supervisor.run_job,
) -> tuple[ThroughputReport, Path]:
    """The report with its direct half, and its file in `folder`: written at once, then after each row.

    Raises DeviceBusy when another run holds the GPU, ReportError where the folder can't be written, and
    KeyboardInterrupt when interrupted: the report then has what was measured.
    """
    on = devices(report.machine, asked.settings.devices)
    with this_machine.exclusive(folder, report.machine) if "gpu" in on else nullcontext():
        path = write_new_scan(report, folder, report_name(report))
        listener.kept(path)
        return _Scan(report, asked, path, listener, on=on, oversee=oversee).run(), path


class _Scan:
    """A scan in progress."""

    def __init__(
        self,
        report: ThroughputReport,
        asked: ScanRequest,
        path: Path,
        listener: Listener,
        *,
        on: tuple[Device, ...],
        oversee: Oversee,
    ) -> None:
        self._report, self._asked, self._path = report, asked, path
        self._listener, self._on, self._oversee = listener, on, oversee

    def run(self) -> ThroughputReport:
        here = tuple(device for device in self._on if not lacking(self._report.machine, device))
        self._save(replace(self._report, ceilings=self._ceilings(here)))
        self._listener.ceilings(self._report.ceilings)
        settings = self._asked.settings
        for way in ways(
            self._on, backends=settings.backends, precisions=settings.precisions, inputs=settings.inputs
        ):
            self._listener.started(way)
            series, messages = self._way(way)
            self._save(self._with(series, messages))
            self._listener.ended(series)
            if series.end == "interrupted":
                raise KeyboardInterrupt
        return self._report

    def _save(self, report: ThroughputReport) -> None:
        self._report = report
        write_scan(report, self._path)

    def _with(self, series: Series, messages: Sequence[worker.Message]) -> ThroughputReport:
        before = self._report.direct or DirectScan(Unknown("no way has loaded it"), ())
        facts = [one for one in messages if isinstance(one, ModelFacts)]
        model = facts[0] if facts and isinstance(before.model, Unknown) else before.model
        return replace(self._report, direct=DirectScan(model, (*before.series, series)))

    def _ceilings(self, here: tuple[Device, ...]) -> Ceilings | Unknown:
        ended = self._work(None, here, CEILINGS_LIMIT_S)
        return ended.answer(Ceilings, "the worker reported none")

    def _way(self, way: Way) -> tuple[Series, Sequence[worker.Message]]:
        obstacle = lacking(self._report.machine, way.device)
        if obstacle:
            return Series(way, (), "absent", obstacle), ()
        each_s = SLOWER * self._asked.longest_s
        limit_s = START_LIMIT_S + each_s * len(self._asked.settings.batches)
        so_far: list[worker.Message] = []

        def on_record(message: worker.Message) -> None:
            so_far.append(message)
            if isinstance(message, BatchRow):
                # the worker waits meanwhile: what is shown is kept, whatever kills this process later
                partly = Series(_named(way, so_far), _rows(so_far), "interrupted", CUT_OFF)
                write_scan(self._with(partly, so_far), self._path)
                self._listener.row(message)

        ended = self._work(way, (way.device,), limit_s, on_record)
        return series_of(way, ended), ended.records

    def _work(
        self,
        way: Way | None,
        on: tuple[Device, ...],
        limit_s: float,
        on_record: Callable[[worker.Message], None] = lambda _message: None,
    ) -> supervisor.JobResult[worker.Message]:
        machine, settings = self._report.machine, self._asked.settings
        assert isinstance(machine.torch, TorchFacts)
        cpu = host.cpu_name(ROOT)
        job = worker.ScanJob(
            way=way,
            devices=on,
            model=settings.model,
            shapes=self._asked.shapes,
            batches=settings.batches,
            trials=settings.trials,
            longest_s=self._asked.longest_s,
            aim=settings.aim,
            seed=settings.seed,
            threads=settings.threads,
            pci_id=snapshot.pci_id_of_first_gpu(machine.torch, machine.cards, ROOT),
            amd=machine.torch.api == "hip",
            cpu_name="CPU" if isinstance(cpu, Unknown) else cpu,
        )
        return self._oversee(
            job,
            worker.parse,
            limit_s=limit_s,
            on_record=on_record,
            command=supervisor.module_command(worker.__name__),
        )


def series_of(way: Way, ended: supervisor.JobResult[worker.Message]) -> Series:
    """A way's rows and how it ended, by its worker's messages and end. Pure."""
    rows, named = _rows(ended.records), _named(way, ended.records)
    last = next((one for one in ended.records if isinstance(one, SeriesEnd)), None)
    if isinstance(ended.outcome, Failed):
        end: End = "interrupted" if ended.outcome.exit_code == Exit.INTERRUPTED else "failed"
        return Series(named, rows, end, ended.outcome.reason, ended.outcome.hint)
    if last is None:
        return Series(named, rows, "failed", "the worker did not say how it ended")
    return Series(named, rows, last.end, last.reason, last.hint)


def _rows(messages: Sequence[worker.Message]) -> tuple[BatchRow, ...]:
    return latest(one for one in messages if isinstance(one, BatchRow))


def _named(way: Way, messages: Sequence[worker.Message]) -> Way:
    """The way with its provider, once the worker has said it."""
    return next((one for one in messages if isinstance(one, Way)), way)


def lacking(machine: Machine, device: Device) -> str:
    """Why a device can't be measured here; empty when it can. Pure."""
    facts = machine.torch
    if device == "cpu" or (isinstance(facts, TorchFacts) and facts.gpus):
        return ""
    return facts.reason if isinstance(facts, Unknown) else facts.obstacle or "torch sees no GPU"


def report_name(report: ThroughputReport) -> str:
    """`<variant or host>-throughput`, for the report's file."""
    return f"{session.place_name(report.machine)}-throughput"


def exit_code(report: ThroughputReport) -> Exit:
    """0 where a way has rows and none broke; 3 where no way could run here; 4 where one broke. Pure."""
    series = report.direct.series if report.direct else ()
    if any(one.end == "failed" for one in series):
        return Exit.BROKEN
    return Exit.OK if any(one.rows for one in series) else Exit.DEVICE
