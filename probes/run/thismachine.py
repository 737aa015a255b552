"""The machine that is measured: what it is, whether an earlier run was on it, and a hold on its GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from probes.errors import ReportError
from probes.machine import numa, snapshot
from probes.machine.nvml import open_nvml
from probes.records.schema import Machine, NvidiaCard, TorchFacts, Unknown
from probes.run import supervisor
from probes.run.child import DESCRIBE, Job
from probes.run.lock import gpu_lock
from probes.run.supervisor import Command
from probes.shared.invocation import probe_command

DESCRIBE_LIMIT_S = 90.0  # a cold import of torch from a slow disk takes most of a minute
ROOT = Path("/")


def nvidia_cards() -> tuple[NvidiaCard, ...]:
    """What NVML shows, where there is one."""
    nvml = open_nvml()
    return () if isinstance(nvml, Unknown) else nvml.cards()


def look(command: Command = supervisor.command) -> Machine:
    """One snapshot of this machine; torch is asked in a separate process, which `command` starts."""
    found = snapshot.describe(ROOT, _torch_facts(command), nvidia_cards())
    facts = found.torch
    if isinstance(facts, Unknown) or facts.obstacle:
        return numa.described(found, ROOT, Unknown("no GPU to measure"))
    return numa.described(found, ROOT, snapshot.pci_id_of_first_gpu(facts, found.cards, ROOT))


def _torch_facts(command: Command) -> TorchFacts | Unknown:
    ended = supervisor.run(Job(DESCRIBE), limit_s=DESCRIBE_LIMIT_S, heard=lambda _: None, command=command)
    return ended.answer(TorchFacts, "torch reported nothing")


def refuse_other_machine(then: Machine, now: Machine) -> None:
    """Figures of two machines don't belong in one report. Raises ReportError naming what differs."""
    for what, a, b in (
        ("host", then.host, now.host),
        ("torch", _identity(then.torch), _identity(now.torch)),
        ("CPUs", then.cpus, now.cpus),
    ):
        if a != b:
            raise ReportError(
                f"the run was begun with {what} {a}, here it is {b}", f"start again: {probe_command()} run"
            )


def _identity(facts: TorchFacts | Unknown) -> str:
    if isinstance(facts, Unknown):
        return "missing"
    return " ".join((facts.version, *(f"{gpu.name} {gpu.pci_id}" for gpu in facts.gpus)))


@contextmanager
def exclusive(folder: Path, found: Machine) -> Iterator[None]:
    """Hold the GPU that is measured, where there is one. Raises as `gpu_lock` does."""
    facts = found.torch
    if isinstance(facts, Unknown) or not facts.gpus:
        yield
        return
    pci_id = snapshot.pci_id_of_first_gpu(facts, found.cards, ROOT)
    with gpu_lock(folder, pci_id if isinstance(pci_id, str) else "first"):
        yield
