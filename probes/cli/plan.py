"""The verb `plan`: where the blocks of a model would go. It needs neither torch nor a GPU nor weights."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.cli.arguments import (
    VRAM,
    Verbs,
    add_compute,
    add_model,
    add_verb,
    machine_of,
    paragraphs,
    picture,
    refuse_more_than_the_card,
    refuse_overwriting,
    size,
    torch_note,
    write_file,
)
from probes.core.errors import Exit, UsageError
from probes.core.output import echo, flag, option, whole, write
from probes.core.units import binary_bytes

if TYPE_CHECKING:
    from probes.placement.models.description import ModelDescription
    from probes.placement.planner.machine import Constants
    from probes.placement.types import Workload


PLAN_EXITS = (
    "Exit codes: 0 planned, 1 impossible (the smallest budget that works is named), 2 usage, "
    "5 unreadable model or report."
)

_count = whole(0, 10**9)


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    plan = add_verb(
        verbs,
        "plan",
        "predict whether a model runs on a card, how, and how fast; needs no torch, GPU or weights",
        exits=PLAN_EXITS,
    )
    option(plan, "--vram", "SIZE", f"{VRAM} (default: all of the card's)", size)
    option(
        plan,
        "--host",
        "SIZE",
        "host memory for weights (default: all that the machine of a probe report has; 64GiB with a profile)",
        size,
    )
    add_model(plan)
    option(plan, "--batch", "N", "sequences at once", _count, default=1)
    option(
        plan,
        "--tokens",
        "N",
        "tokens of each sequence in a pass; with --context, of the prompt",
        _count,
        default=1,
    )
    plan.add_argument(
        "--context",
        type=_count,
        default=0,
        metavar="N",
        help="predict generation, with room for this many tokens in the KV cache (default: a single pass)",
    )
    plan.add_argument(
        "--objective",
        choices=("exact", "fast"),
        default="exact",
        help="exact: outputs have the bits of a model that fits; fast: the CPU and kernels for packed "
        "weights compute as well, and round sums in another order (default: %(default)s)",
    )
    option(
        plan,
        "--cards",
        "N",
        "number of equal cards, each with --vram and a part of the layers",
        _count,
        default=1,
    )
    add_compute(plan)
    flag(plan, "--captured", "plan for passes that are replayed as CUDA graphs")
    flag(
        plan,
        "--measure",
        "run each distinct operation of the model on this machine's GPU, and plan with that",
    )
    option(plan, "--json", "FILE", "write the plan as JSON; - prints it", Path)
    option(plan, "--picture", "FILE.svg", "draw where each layer is kept, and a pass over time", picture)
    plan.set_defaults(do=_plan)


def _plan(args: argparse.Namespace) -> Exit:
    refuse_overwriting(
        Path(args.model), [Path(args.machine)] if args.machine else [], [args.json, args.picture]
    )
    if args.measure and args.cards > 1:
        raise UsageError("--measure is for a plan for one card", "leave out --measure or --cards")
    text, document, drawn = _one_card(args) if args.cards == 1 else _several_cards(args)
    printed = args.json == Path("-")
    if printed:
        write(document())
    else:
        echo(text)
    if args.json and not printed:
        write_file(args.json, document())
    if args.picture:
        write_file(args.picture, drawn())
    return Exit.OK


Shown = tuple[str, Callable[[], str], Callable[[], str]]


def _one_card(args: argparse.Namespace) -> Shown:
    """The plan as text, and what makes JSON and a picture of it."""
    from probes.core.codec import to_json
    from probes.placement.planner.api import resolve_model, with_measured_link
    from probes.placement.planner.plan import make_plan
    from probes.reports.pictures import draw_plan
    from probes.reports.plan import lines

    model = resolve_model(args.model, _workload(args), measure=args.measure, captured=args.captured)
    machine = with_measured_link(_machine(args)) if args.measure else _machine(args)
    made = make_plan(model, machine, **_plan_options(args, model, machine))
    text = paragraphs(lines(made.plan), torch_note(machine.origin))
    return text, partial(to_json, made.plan), partial(draw_plan, made.plan, made.search.timeline)


def _several_cards(args: argparse.Namespace) -> Shown:
    """A plan over several cards as text, and what makes JSON and a picture of it."""
    from probes.core.codec import to_json
    from probes.placement.planner.api import resolve_model
    from probes.placement.planner.multi_gpu import make_cards_plan
    from probes.reports.pictures import draw_plan
    from probes.reports.plan import cards_lines

    model = resolve_model(args.model, _workload(args), captured=args.captured)
    machine = _machine(args)
    made = make_cards_plan(model, machine, cards=args.cards, **_plan_options(args, model, machine))
    text = paragraphs(cards_lines(made.plan), torch_note(machine.origin))
    return text, partial(to_json, made.plan), partial(draw_plan, made.joined, made.timeline)


def _machine(args: argparse.Namespace) -> "Constants":
    """The machine; without --vram, a note says how much it is."""
    machine = machine_of(args.machine)
    if args.vram is not None:
        return machine
    note = f"{binary_bytes(machine.vram_bytes)} of VRAM, all that the card has: --vram SIZE plans for less"
    return replace(machine, notes=(*machine.notes, note))


def _workload(args: argparse.Namespace) -> "Workload":
    from probes.placement.types import Workload

    return Workload(args.batch, args.tokens, args.context)


def _plan_options(
    args: argparse.Namespace, model: "ModelDescription", machine: "Constants"
) -> dict[str, Any]:
    from probes.placement.planner.api import weight_ranges

    refuse_more_than_the_card("--vram", args.vram, machine)
    return {
        "vram": machine.vram_bytes if args.vram is None else args.vram,
        "host": args.host,
        "workload": _workload(args),
        "objective": args.objective,
        "captured": args.captured,
        "compute": args.compute,
        "ranges": weight_ranges(args.model, model, machine, objective=args.objective, compute=args.compute),
    }
