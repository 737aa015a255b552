"""The doctor inside a container: what is visible there, and claims about the card, tried in a process."""

from collections.abc import Callable

from probes.errors import Exit
from probes.machine.describe import machine_lines
from probes.machine.expectation import maker_of
from probes.records.facts import Check, Machine, TorchFacts
from probes.records.schema import Failed
from probes.run import supervisor, thismachine
from probes.run.child import CHECK, Job, Told

LIMIT_S = 120.0  # a first convolution compiles its kernels


def look() -> tuple[Machine, tuple[Check, ...]]:
    """The machine, and the checks of the card that torch uses; none where torch uses none."""
    machine = thismachine.look()
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
