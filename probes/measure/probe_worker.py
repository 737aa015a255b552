"""The worker process of probes: its jobs, its messages, and how the parent runs one.

A job is one round of a probe, a description of torch and its GPUs, or the checks of the card. Run as a
program, this module is the worker.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from probes.core.codec import Json, decode
from probes.core.errors import ProbeError
from probes.hardware import numa
from probes.hardware.snapshot import pci_id_of_first_gpu
from probes.measure.background_load import BackgroundLoad, judge
from probes.measure.catalog import PROBES, Context
from probes.measure.supervisor import GRACE_S, Command, JobResult, WorkerProcess, module_command
from probes.measure.supervisor import run_job as supervise
from probes.measure.worker import Send, exit_now, require_torch, why_without, work
from probes.records.facts import Check, Machine, TorchFacts
from probes.records.rows import Measurement, Pass, Reads, Record, Small
from probes.records.schema import Done, Failed, Settings

MODULE = "probes.measure.probe_worker"
DESCRIBE = "describe"  # a job that is no probe: reports TorchFacts
CHECK = "check"  # likewise: tries claims about the card
NO_SETTINGS = Settings(quick=True, seed=0, vram_cap_bytes=None)  # of a job that is no probe


@dataclass(frozen=True)
class Turn:
    """The worker pauses, and lets the other side of a run in turns measure until it is answered."""

    tag: ClassVar[str] = "turn"


SideMessage = TorchFacts | Check | Small | Turn  # no records of a report
ProbeMessage = Record | SideMessage


@dataclass(frozen=True)
class Job:
    """What a worker is to do: a probe's name, or DESCRIBE or CHECK, which need nothing else."""

    probe: str
    settings: Settings = NO_SETTINGS
    machine: Machine | None = None
    done: tuple[str, ...] = ()  # the probe's cases that need not be measured again
    beside: int = 0  # the process of the other side, where two measure in turns


@dataclass(frozen=True)
class Line:
    """One line of the pipe."""

    message: ProbeMessage | Done | Failed


# ---- in the parent -------------------------------------------------------------------------------------

worker_command = module_command(MODULE)


def run_job(
    job: Job,
    *,
    limit_s: float,
    on_record: Callable[[ProbeMessage], None],
    command: Command = worker_command,
    grace_s: float = GRACE_S,
    worker: WorkerProcess | None = None,
) -> JobResult[ProbeMessage]:
    """Run a job in a fresh process; see `supervisor.run_job`."""
    return supervise(
        job,
        parse_message,
        limit_s=limit_s,
        on_record=on_record,
        command=command,
        grace_s=grace_s,
        worker=worker,
    )


def parse_message(line: Json) -> ProbeMessage | Done | Failed:
    """A message of this worker. Raises ValueError for anything else."""
    return decode(Line, line, "message").message


# ---- in the worker -------------------------------------------------------------------------------------


def messages(job: Job, send: Send) -> Iterator[ProbeMessage | Done | Failed]:
    """Do the job and yield its messages, of which the last is Done or Failed. Imports torch."""
    try:
        require_torch("run the probes in an image that holds torch")
        if job.probe == CHECK:
            yield from _torch_build().checks()
        elif job.machine is None:
            yield _torch_build().describe()
        else:
            yield from _measured(job, job.machine, send)
        yield Done()
    except ProbeError as error:
        yield Failed(error.message, error.hint, int(error.exit_code), wedged=False)


def _torch_build() -> ModuleType:
    from probes.hardware import torch_build

    return torch_build


def _measured(job: Job, machine: Machine, send: Send) -> Iterator[Record | Small]:
    from probes.measure import device

    context = Context(job.settings, machine, Path("/"), frozenset(job.done))
    probe = next(probe for probe in PROBES if probe.name == job.probe)
    held = job.settings.numa == "gpu"
    if held:
        numa.hold_to_gpu(machine)
    yield_turn = partial(_yield_turn, send) if job.beside else None
    bench = device.TorchWorkbench(has_gpu=not context.torch.obstacle, yield_turn=yield_turn)
    pinned, pageable = bench.numa_nodes()
    yield numa.places(machine, pinned=pinned, pageable=pageable, held=held)
    pci_id = pci_id_of_first_gpu(context.torch, machine.cards, context.root)
    load = BackgroundLoad(bench, context.root, pci_id, beside=job.beside)
    yield from with_noise(probe.run(bench, context), load)


def _yield_turn(send: Send) -> None:
    """A pause in which the other side measures. Ends this process when nobody reads it any more."""
    if not send(Turn()):
        sys.exit(1)


def with_noise(records: Iterator[Record | Small], load: BackgroundLoad) -> Iterator[Record | Small]:
    """The records, each timing with what else went on while it was taken."""
    before = load.observe()
    for record in records:
        if isinstance(record, Measurement | Reads | Pass):
            after = load.observe()
            yield replace(record, noise=judge(before, after))
            before = after
        else:
            yield record


def _preload() -> None:
    """Import torch before there is a job; an error is reported when there is one."""
    if not why_without():
        importlib.import_module("probes.measure.device")


if __name__ == "__main__":
    exit_now(work(sys.argv[1:], Job, messages, preload=_preload))
