"""The machine that is measured: its description, a hold on its GPU, and the check-up of `doctor`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from probes.core.errors import Exit, ReportError
from probes.core.invocation import probe_command
from probes.core.unknown import Unknown
from probes.hardware import numa, snapshot
from probes.hardware.expectation import maker_of
from probes.hardware.nvml import open_nvml
from probes.hardware.snapshot import machine_lines
from probes.measure import probe_worker
from probes.measure.journal import gpu_lock
from probes.measure.probe_worker import CHECK, DESCRIBE, Job, ProbeMessage, worker_command
from probes.measure.supervisor import Command, JobResult
from probes.records.facts import Check, Machine, NvidiaCard, TorchFacts
from probes.records.schema import Failed

DESCRIBE_LIMIT_S = 90.0  # a cold import of torch from a slow disk takes most of a minute
CHECK_LIMIT_S = 120.0  # a first convolution compiles its kernels
ROOT = Path("/")


def describe(command: Command = worker_command) -> Machine:
    """One snapshot of this machine; torch is asked in a separate process, which `command` starts."""
    machine = snapshot.describe(ROOT, _torch_facts(command), _nvidia_cards())
    facts = machine.torch
    if isinstance(facts, Unknown) or facts.obstacle:
        return numa.with_nodes(machine, ROOT, Unknown("no GPU to measure"))
    return numa.with_nodes(machine, ROOT, snapshot.pci_id_of_first_gpu(facts, machine.cards, ROOT))


def _torch_facts(command: Command) -> TorchFacts | Unknown:
    result = probe_worker.run_job(
        Job(DESCRIBE), limit_s=DESCRIBE_LIMIT_S, on_record=lambda _: None, command=command
    )
    return result.answer(TorchFacts, "torch reported nothing")


def _nvidia_cards() -> tuple[NvidiaCard, ...]:
    """What NVML shows, where there is one."""
    nvml = open_nvml()
    return () if isinstance(nvml, Unknown) else nvml.cards()


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
def exclusive(folder: Path, machine: Machine) -> Iterator[None]:
    """Hold the GPU that is measured, where there is one. Raises as `gpu_lock` does."""
    facts = machine.torch
    if isinstance(facts, Unknown) or not facts.gpus:
        yield
        return
    pci_id = snapshot.pci_id_of_first_gpu(facts, machine.cards, ROOT)
    with gpu_lock(folder, pci_id if isinstance(pci_id, str) else "first"):
        yield


# ---- check-up ------------------------------------------------------------------------------------------


def check_machine() -> tuple[Machine, tuple[Check, ...]]:
    """The machine, and the checks of the card that torch uses; none where torch uses none."""
    machine = describe()
    usable = isinstance(machine.torch, TorchFacts) and not machine.torch.obstacle
    return machine, checks(
        lambda job: probe_worker.run_job(job, limit_s=CHECK_LIMIT_S, on_record=lambda _: None)
    ) if usable else ()


def checks(run: Callable[[Job], JobResult[ProbeMessage]]) -> tuple[Check, ...]:
    """The checks that a process made; one that ends the process is a failed check of its own."""
    result = run(Job(CHECK))
    made = tuple(record for record in result.records if isinstance(record, Check))
    if isinstance(result.outcome, Failed):
        last = f"`{made[-1].name}`" if made else "its start"
        return (
            *made,
            Check("the process", holds=False, said=f"it ended after {last}: {result.outcome.reason}"),
        )
    return made


def check_lines(machine: Machine, made: tuple[Check, ...]) -> list[str]:
    """The facts, the checks and the next command, which is the last line."""
    tried = [f"check: {check.name}: {'holds' if check.holds else 'FAILS'}: {check.said}" for check in made]
    return [*machine_lines(machine), *tried, "", "next, type:", f"  {next_command(machine, made)}"]


def next_command(machine: Machine, made: tuple[Check, ...]) -> str:
    """The one command to type next; those of the host are typed there."""
    if made and all(check.holds for check in made):
        return "python3 -m probes run --quick"
    if made:
        return "weir doctor"
    if maker_of(machine) == "unseen":
        return "python3 -m probes run --quick" if isinstance(machine.torch, TorchFacts) else "weir build cpu"
    return "weir doctor --fix"


def check_exit_code(machine: Machine, made: tuple[Check, ...]) -> Exit:
    """3 where a card is here that torch can't use, or a check fails."""
    unusable = maker_of(machine) != "unseen" and not made
    return Exit.DEVICE if unusable or not all(check.holds for check in made) else Exit.OK
