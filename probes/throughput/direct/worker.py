"""The worker of a throughput scan: with the arguments FD and PARENT it does one job.

A job is the ceilings, or all batch sizes of one way: each way has a fresh process, so that memory, allocators
and libraries of one don't change another's figures.
"""

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from probes.core.codec import Json, decode
from probes.core.errors import Exit, LibraryMissing, OutOfMemory, ProbeError, Unsupported
from probes.core.unknown import Unknown
from probes.hardware.kfd import listed
from probes.hardware.nvml import open_card
from probes.hardware.sysfs import read_int
from probes.measure import worker
from probes.measure.worker import require_torch, why_without
from probes.records.schema import Done, Failed
from probes.throughput.ceilings import Ceilings, Device
from probes.throughput.direct.results import BatchRow, ModelFacts, Way
from probes.throughput.direct.trials import Gauges, Repeats, Runner, SeriesEnd, rows

Message = Ceilings | ModelFacts | Way | BatchRow | SeriesEnd


@dataclass(frozen=True)
class ScanJob:
    """What a worker is to do: one way, or the ceilings of devices where there is none."""

    way: Way | None
    devices: tuple[Device, ...]
    model: str
    shapes: tuple[tuple[int, ...], ...]  # of a file's inputs
    batches: tuple[int, ...]
    trials: int
    longest_s: float
    aim: float
    seed: int
    threads: int
    pci_id: str | Unknown
    amd: bool
    cpu_name: str


@dataclass(frozen=True)
class ScanLine:
    """One line of the pipe."""

    message: Message | Done | Failed


def parse(line: Json) -> Message | Done | Failed:
    """A message of this worker. Raises ValueError for anything else."""
    return decode(ScanLine, line, "message").message


def messages(job: ScanJob, _tell: worker.Tell) -> Iterator[Message | Done | Failed]:
    """Do the job, sending what it finds; the last message is Done or Failed. Imports torch."""
    try:
        require_torch("run it where torch is")
        try:
            yield from _ceilings(job) if job.way is None else _series(job, job.way)
        except (LibraryMissing, Unsupported) as error:
            yield SeriesEnd("absent", error.message, error.hint)
        except OutOfMemory as error:
            yield SeriesEnd("out of memory", error.message, error.hint)
        yield Done()
    except ProbeError as error:
        yield Failed(error.message, error.hint, int(error.exit_code), wedged=False)
    except OSError as error:
        yield Failed(str(error), "check the place and the disk", int(Exit.BROKEN), wedged=False)


def _ceilings(job: ScanJob) -> Iterator[Message]:
    from probes.measure.device import TorchWorkbench
    from probes.throughput import measure_ceilings

    _use_threads(job)
    bench = TorchWorkbench(has_gpu="gpu" in job.devices)
    yield measure_ceilings.measure(bench, job.devices, cpu_name=job.cpu_name)


def _series(job: ScanJob, way: Way) -> Iterator[Message]:
    from probes.measure.device import TorchWorkbench
    from probes.throughput.direct import models
    from probes.throughput.direct.torch_runner import TorchRunner, settle_allocator
    from probes.throughput.measure_ceilings import supports

    _use_threads(job)
    settle_allocator()
    if way.precision != "autocast":
        lacking = supports(way.device, way.precision)
        if lacking:
            raise Unsupported(lacking.reason)
    spec = models.spec_of(job.model, job.shapes)
    runner: Runner
    if way.backend == "onnxruntime":
        runner, way = _onnx(job, way)
        yield way
    else:
        bench = TorchWorkbench(has_gpu=way.device == "gpu")
        runner = TorchRunner(spec, way, seed=job.seed, bench=bench)
        yield models.model_facts(spec, runner.module)
    yield from rows(runner, job.batches, Repeats(job.trials, job.longest_s, job.aim), _gauges(job, way))


def _onnx(job: ScanJob, way: Way) -> tuple[Runner, Way]:
    from probes.measure.device import TorchWorkbench
    from probes.throughput.direct import models, onnx_runner
    from probes.throughput.direct.torch_runner import TorchRunner

    onnx_runner.refuse(way)
    spec = models.spec_of(job.model, job.shapes)
    on_cpu = replace(way, device="cpu", inputs="resident")
    counted = TorchRunner(spec, on_cpu, seed=job.seed, bench=TorchWorkbench(has_gpu=False))
    runner = onnx_runner.OnnxRunner(spec, way, seed=job.seed, threads=job.threads, counted=counted)
    return runner, replace(way, provider=onnx_runner.provider(way.device).removesuffix("ExecutionProvider"))


def _use_threads(job: ScanJob) -> None:
    if job.threads:
        importlib.import_module("torch").set_num_threads(job.threads)


def _gauges(job: ScanJob, way: Way) -> Gauges:
    root = Path("/")
    if way.device == "cpu":
        return CpuGauges(root)
    return AmdGauges(root, job.pci_id) if job.amd else NvidiaGauges(job.pci_id)


def _preload() -> None:
    """Import torch before there is a job; an error is reported when there is one."""
    if not why_without():
        importlib.import_module("probes.throughput.direct.torch_runner")


MICRO = 1e-6


class CpuGauges:
    """The CPU's package energy. How busy processors are isn't what is compared here."""

    def __init__(self, root: Path) -> None:
        self._packages = [
            place / "energy_uj"
            for place in listed(root / "sys/class/powercap")
            if place.name.startswith("intel-rapl:") and place.name.count(":") == 1
        ]

    def joules(self) -> float | Unknown:
        """Energy of all packages, from any beginning."""
        if not self._packages:
            return Unknown("no powercap (RAPL) here")
        found = [read_int(package) for package in self._packages]
        missing = [value for value in found if isinstance(value, Unknown)]
        return missing[0] if missing else MICRO * sum(value for value in found if isinstance(value, int))

    def busy_percent(self) -> float | Unknown:
        """Not a driver's figure."""
        return Unknown("a CPU has no driver that counts it")


class AmdGauges:
    """An AMD card's, by the kernel's files. Energy from power readings where the card has no counter."""

    def __init__(
        self, root: Path, pci_id: str | Unknown, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        self._device = root / "sys/bus/pci/devices" / str(pci_id)
        sensors = listed(self._device / "hwmon") if isinstance(pci_id, str) else []
        self._sensor = sensors[0] if sensors else None
        self._at_s: float | None = None
        self._sum = 0.0

    def joules(self) -> float | Unknown:
        """Energy since the first reading; by power, it is exact only between readings close together."""
        if self._sensor is None:
            return Unknown("no hwmon of the card here")
        counted = read_int(self._sensor / "energy1_input")
        if isinstance(counted, int):
            return MICRO * counted
        watts = read_int(self._sensor / "power1_average")
        if isinstance(watts, Unknown):
            return watts
        at_s = self._now()
        self._sum += MICRO * watts * (at_s - self._at_s) if self._at_s is not None else 0.0
        self._at_s = at_s
        return self._sum

    def busy_percent(self) -> float | Unknown:
        """What rocm-smi shows as use."""
        found = read_int(self._device / "gpu_busy_percent")
        return found if isinstance(found, Unknown) else float(found)


class NvidiaGauges:
    """An NVIDIA card's, by NVML."""

    def __init__(self, pci_id: str | Unknown) -> None:
        self._card = open_card(pci_id)

    def joules(self) -> float | Unknown:
        """Energy since the driver was loaded."""
        found = self._card if isinstance(self._card, Unknown) else self._card.energy_mj()
        return found if isinstance(found, Unknown) else found / 1e3

    def busy_percent(self) -> float | Unknown:
        """What nvidia-smi shows as GPU-Util."""
        found = self._card if isinstance(self._card, Unknown) else self._card.utilization()
        return found if isinstance(found, Unknown) else float(found[0])


if __name__ == "__main__":
    worker.end(worker.work(sys.argv[1:], ScanJob, messages, preload=_preload))
