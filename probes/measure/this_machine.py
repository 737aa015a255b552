"""The machine that is measured: what it is, whether an earlier run was on it, and a hold on its GPU."""

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
from probes.measure import supervisor
from probes.measure.journal import gpu_lock
from probes.measure.supervisor import Command
from probes.measure.worker import CHECK, DESCRIBE, Job, Told
from probes.records.facts import Check, Machine, NvidiaCard, TorchFacts
from probes.records.schema import Failed

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
        return numa.with_nodes(found, ROOT, Unknown("no GPU to measure"))
    return numa.with_nodes(found, ROOT, snapshot.pci_id_of_first_gpu(facts, found.cards, ROOT))


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


LIMIT_S = 120.0  # a first convolution compiles its kernels


def check_machine() -> tuple[Machine, tuple[Check, ...]]:
    """The machine, and the checks of the card that torch uses; none where torch uses none."""
    machine = look()
    usable = isinstance(machine.torch, TorchFacts) and not machine.torch.obstacle
    return machine, checks(
        lambda job: supervisor.run(job, limit_s=LIMIT_S, heard=lambda _: None)
    ) if usable else ()


def checks(run: Callable[[Job], supervisor.Ended[Told]]) -> tuple[Check, ...]:
    """The checks that a process made; one that ends the process is a failed check of its own."""
    ended = run(Job(CHECK))
    found = tuple(record for record in ended.records if isinstance(record, Check))
    if isinstance(ended.outcome, Failed):
        return (
            *found,
            Check("the process", holds=False, said=f"it ended after {_last(found)}: {ended.outcome.reason}"),
        )
    return found


def _last(found: tuple[Check, ...]) -> str:
    return f"`{found[-1].name}`" if found else "its start"


def lines(machine: Machine, found: tuple[Check, ...]) -> list[str]:
    """The facts, the checks and the next command, which is the last line."""
    tried = [f"check: {one.name}: {'holds' if one.holds else 'FAILS'}: {one.said}" for one in found]
    return [*machine_lines(machine), *tried, "", "next, type:", f"  {next_command(machine, found)}"]


def next_command(machine: Machine, found: tuple[Check, ...]) -> str:
    """The one command to type next; those of the host are typed there."""
    if found and all(one.holds for one in found):
        return "python3 -m probes run --quick"
    if found:
        return "weir doctor"
    if maker_of(machine) == "unseen":
        return "python3 -m probes run --quick" if isinstance(machine.torch, TorchFacts) else "weir build cpu"
    return "weir doctor --fix"


def exit_code(machine: Machine, found: tuple[Check, ...]) -> Exit:
    """3 where a card is here that torch can't use, or a check fails."""
    lame = maker_of(machine) != "unseen" and not found
    return Exit.DEVICE if lame or not all(one.holds for one in found) else Exit.OK
