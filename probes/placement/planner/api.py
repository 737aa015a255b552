"""`plan` and `plan_cards`, the planner's public functions; and what they take as a model or a machine.

Whatever names a model becomes a `ModelDescription`, whatever names a machine its `Constants`.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from probes.core.errors import UsageError
from probes.core.unknown import Unknown
from probes.hardware.host_card import HostCard, host_cards
from probes.placement.models.description import ModelDescription
from probes.placement.models.reading import describe, is_known, named_path
from probes.placement.planner.compute_dtype import Compute, with_compute_dtype
from probes.placement.planner.machine import Constants, from_report, machine_named, machine_of_card
from probes.placement.planner.multi_gpu import make_cards_plan
from probes.placement.planner.plan import check_workload, make_plan
from probes.placement.types import CardsPlan, Objective, Plan, Workload
from probes.records.schema import read_report

if TYPE_CHECKING:
    import torch

    from probes.placement.models.modules import Module
    from probes.placement.models.tracing import PassInputs


EXAMPLES = (
    "--machine 'RX 7900 XTX', --machine 'MI50 16GB' or, of a report that `run` wrote, --machine run.json"
)
LINK_BYTES = 64 << 20  # copied to measure the link
Model: TypeAlias = "ModelDescription | Module | str | os.PathLike[str]"


def plan(
    model: Model,
    *,
    vram: int,
    machine: Constants | str | Path,
    host: int | None = None,
    batch: int = 1,
    tokens: int = 1,
    context: int = 0,
    objective: Objective = "exact",
    captured: bool = False,
    compute: Compute = "auto",
    inputs: "PassInputs | None" = None,
    measure: bool = False,
) -> Plan:
    """Where each block of a model goes on a machine, what that takes, how long a pass should last.

    `model`: a module (on meta, too), a config.json, a safetensors file, index or folder, a known model's
    name, or a description.
    `machine`: a card's name, as people write it (`RX 7900 XTX`, `MI50 16GB`), or a probe report's file.
    `vram` and `host` in bytes: `vram` limits torch's allocator, and the card's size limits that and the
    driver's context; without `host`, what the machine has, or 64 GiB with a profile, which doesn't say it.
    With `context` tokens of room in the KV cache, the time is that of one generated token after `tokens` of
    prompt, else of a pass of `batch` x `tokens` rows.
    `captured`: the pass is replayed as a graph.
    `inputs`: what the module is called with, for a trace of its operations and activations on tensors without
    numbers: a tensor, a tuple of positional or a dict of named ones, on any device or on meta. Without them,
    models of transformers are traced with inputs by their config; others, and all where torch is missing, are
    planned by rules, which a note says and the interval of the time shows.
    `measure`: each distinct operation of the trace is run on this machine's GPU, some seconds in all: the
    plan counts with its time and with the bytes that it takes meanwhile, an eager one also with what a pass
    takes the host. `machine` must be this one's.
    `compute`: the dtype in which a GPU without bfloat16 units computes with bfloat16 weights. float16 doesn't
    hold all of them: `place` and `load` refuse one that it doesn't hold.

    Raises PlanImpossible naming the smallest budget that works; CheckpointUnreadable, ModelUnknown,
    ReportError and UsageError for what can't be read or makes no sense.
    """
    workload = Workload(batch, tokens, context)
    description = resolve_model(model, workload, inputs, measure=measure, captured=captured)
    constants = resolve_machine(machine, measure=measure)
    description = with_compute_dtype(description, constants, objective=objective, compute=compute)
    return make_plan(
        description,
        constants,
        vram=vram,
        host=host,
        workload=workload,
        objective=objective,
        captured=captured,
    ).plan


def plan_cards(
    model: Model,
    *,
    cards: int,
    vram: int,
    machine: Constants | str | Path,
    host: int | None = None,
    batch: int = 1,
    tokens: int = 1,
    context: int = 0,
    objective: Objective = "exact",
    compute: Compute = "auto",
    inputs: "PassInputs | None" = None,
) -> CardsPlan:
    """The plan over `cards` equal cards with `vram` bytes each and `host` bytes in all.

    The rest is as for `plan`. Raises as that does, and UsageError for more cards than the model has blocks.
    """
    workload = Workload(batch, tokens, context)
    description, constants = resolve_model(model, workload, inputs), resolve_machine(machine)
    description = with_compute_dtype(description, constants, objective=objective, compute=compute)
    return make_cards_plan(
        description,
        constants,
        cards=cards,
        vram=vram,
        host=host,
        workload=workload,
        objective=objective,
    ).plan


def resolve_model(
    model: Model,
    workload: Workload | None = None,
    inputs: "PassInputs | None" = None,
    *,
    measure: bool = False,
    captured: bool = False,
) -> ModelDescription:
    """The description of whatever names a model, or is one. Raises as `describe` does.

    With a workload it is traced, if torch is there, and transformers for a config. Known models have rules,
    which were compared with measured passes: they take no torch, and no seconds.
    """
    if isinstance(model, ModelDescription):
        return model
    if isinstance(model, str | os.PathLike):
        path = str(named_path(model, "model"))
        if (
            workload is None
            or (is_known(path) and not measure)
            or not all(map(importlib.util.find_spec, ("torch", "transformers")))
        ):
            return describe(path)
        check_workload(workload)
        from probes.placement.models import tracing

        return tracing.traced_config(
            path, workload, measure=gpu_here() if measure else None, captured=captured
        )
    torch = sys.modules.get("torch")  # imported by then, if it is a module
    if torch is None or not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"the model is {ascii(model)[:40]}, which isn't one",
            "give a module, a path, a known model's name or a ModelDescription",
        )
    from probes.placement.models import modules, tracing

    described = modules.describe_module(model)
    if workload is None:
        return described
    check_workload(workload)
    return tracing.traced_module(
        model, described, workload, inputs, measure=gpu_here() if measure else None, captured=captured
    )


def gpu_here() -> "torch.device":
    """This machine's GPU. Raises UsageError where torch has none."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            "operations can't be measured: torch finds no GPU here",
            "leave out measure, or run it on the GPU's machine",
        )
    return torch.device("cuda", torch.cuda.current_device())


def resolve_machine(machine: Constants | str | Path, *, measure: bool = False) -> Constants:
    """The constants of a card by its name, or of a probe report's file. Raises UsageError and ReportError.

    `measure`: it is this machine, and its link is measured anew.
    """
    constants = machine if isinstance(machine, Constants) else _named_machine(machine)
    return with_measured_link(constants) if measure else constants


def with_measured_link(machine: Constants) -> Constants:
    """The machine with the rate of its link as measured here: slots and their neighbours differ."""
    device = gpu_here()
    if machine.unified:
        return machine
    from probes.placement.operation_times import link_times
    from probes.placement.runtime.host_memory import HostArena, node_of_gpu

    arena = HostArena(LINK_BYTES, node_of_gpu(device))
    host = arena.take(LINK_BYTES)
    arena.pin(lambda: None)
    try:
        rate, alpha_s = link_times(host, device)
    finally:
        arena.release()
    in_place = machine.zero_copy_rate * rate / machine.link_rate
    return replace(machine, link_rate=rate, link_alpha_s=alpha_s, zero_copy_rate=in_place)


def _named_machine(machine: str | Path) -> Constants:
    path = named_path(machine, "machine")
    if path.suffix != ".json":
        return machine_named(str(machine))
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise UsageError(
            f"{path} is not a regular file",
            "give a card's name, or the file of a report that `run` has written",
        )
    return from_report(read_report(path), name=path.name)


def this_hosts_machine(found: Sequence[HostCard] | None = None) -> Constants:
    """The constants of this host's card, with a note that says so. `found`: the cards, where they are known.

    Raises UsageError, which asks for --machine: where there is no card, where it isn't in the list or has no
    profile, and where there are several different ones.
    """
    found = host_cards() if found is None else found
    # a processor's GPU, which shares the machine's memory, comes last
    own = [one for one in found if not one.cards or any(card.memory_variants for card in one.cards)]
    found = own or found
    if not found:
        raise _asking("no card was found on this host to plan for")
    first = found[0]
    if any(other.cards != first.cards for other in found):
        raise _asking(f"this host has several cards: {', '.join(dict.fromkeys(map(_name, found)))}")
    if len(first.cards) != 1:
        unclear = f"could be {_name(first)}" if first.cards else "isn't in our list of cards"
        raise _asking(f"this host's card, {first.seen}, {unclear}")
    try:
        vram = None if isinstance(first.vram_bytes, Unknown) else first.vram_bytes
        made = machine_of_card(first.cards[0], vram)
    except UsageError as error:
        raise UsageError(f"this host's card: {error.message}", error.hint) from error
    return replace(
        made, notes=(*made.notes, f"for this host's card, {_name(first)}: --machine names another")
    )


def _name(found: HostCard) -> str:
    return " or ".join(card.name for card in found.cards) or found.seen


def _asking(why: str) -> UsageError:
    return UsageError(f"which machine? {why}", f"name one: {EXAMPLES}")
