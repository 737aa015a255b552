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
    add_step,
    add_verb,
    machine_of,
    paragraphs,
    picture,
    refuse_more_than_the_card,
    refuse_overwriting,
    size,
    step_of,
    torch_note,
    write_file,
)
from probes.core.errors import Exit, UsageError
from probes.core.output import echo, flag, option, whole, write
from probes.core.units import binary_bytes
from probes.measure.worker import require_torch

if TYPE_CHECKING:
    from probes.placement.models.description import ModelDescription
    from probes.placement.planner.machine import Constants
    from probes.placement.types import Workload


PLAN_EXITS = (
    "Exit codes: 0 planned, 1 impossible (the smallest budget that works is named), 2 usage, 3 no "
    "torch or no trace for --train, 5 unreadable model or report."
)

_count = whole(0, 10**9)
STEP = ("precision", "optimizer", "checkpointing", "lora", "targets", "accumulate")


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
        "tokens of each sequence in a pass; with --context, of the prompt (default: 1; 1024 with --train)",
        _count,
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
    flag(
        plan,
        "--train",
        "predict a training step instead: its time by tracing it, its bytes as fit does; needs torch and "
        "transformers, but neither GPU nor weights",
    )
    add_step(plan)
    option(plan, "--json", "FILE", "write the plan as JSON; - prints it", Path)
    option(plan, "--picture", "FILE.svg", "draw where each layer is kept, and a pass over time", picture)
    plan.set_defaults(do=_plan)


def _plan(args: argparse.Namespace) -> Exit:
    refuse_overwriting(
        Path(args.model), [Path(args.machine)] if args.machine else [], [args.json, args.picture]
    )
    if args.measure and args.cards > 1:
        raise UsageError("--measure is for a plan for one card", "leave out --measure or --cards")
    if args.train:
        return _train(args)
    for name in STEP:
        if getattr(args, name):
            raise UsageError(f"--{name} is of a training step", "add --train, or leave it out")
    args.tokens = 1 if args.tokens is None else args.tokens
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


def _train(args: argparse.Namespace) -> Exit:
    """The plan of a training step."""
    require_torch("run it where torch is; for its bytes alone, which need none: fit --task training")
    from probes.core.codec import to_json
    from probes.fit.answer import answer, with_defaults
    from probes.fit.report import Question
    from probes.fit.step_plan import plan_step
    from probes.placement.models.reading import config_of
    from probes.placement.planner.api import gpu_here, resolve_model
    from probes.placement.planner.plan import check_workload
    from probes.placement.types import Workload
    from probes.reports.fit import step_lines

    for name, default in (
        ("host", None),
        ("context", 0),
        ("objective", "exact"),
        ("captured", False),
        ("compute", "auto"),
    ):
        if getattr(args, name) != default:
            raise UsageError(
                f"--{name} is of a pass, not of a training step", "leave it out, or leave out --train"
            )
    if args.cards > 1 or args.picture:
        raise UsageError(
            "--train predicts one card's step, as text or JSON", "leave out --cards and --picture"
        )
    check_workload(Workload(args.batch, 1 if args.tokens is None else args.tokens))
    machine = machine_of(args.machine)
    refuse_more_than_the_card("--vram", args.vram, machine)
    model = resolve_model(args.model)
    asked = Question(args.model, "training", batch=args.batch, **step_of(args))
    question = with_defaults(asked, model, machine, tokens=args.tokens, precision=args.precision)
    memory = answer(model, question, machine, budget=args.vram)
    measure = gpu_here() if args.measure else None
    made = plan_step(config_of(args.model), memory, machine, measure=measure)
    if args.json == Path("-"):
        write(to_json(made))
    else:
        echo(paragraphs(step_lines(made), torch_note(memory.constants)))
        if args.json:
            write_file(args.json, to_json(made))
    return Exit.OK if memory.fits else Exit.REQUIRED


Shown = tuple[str, Callable[[], str], Callable[[], str]]


def _one_card(args: argparse.Namespace) -> Shown:
    """The plan as text, and what makes JSON and a picture of it."""
    from probes.core.codec import to_json
    from probes.placement.planner.api import resolve_model, with_measured_link
    from probes.placement.planner.plan import make_plan
    from probes.reports.pictures import draw_plan
    from probes.reports.plan import lines

    described = resolve_model(args.model, _workload(args), measure=args.measure, captured=args.captured)
    machine = with_measured_link(_machine(args)) if args.measure else _machine(args)
    made = make_plan(_computed(args, described, machine), machine, **_plan_options(args, machine))
    text = paragraphs(lines(made.plan), torch_note(machine.origin))
    return text, partial(to_json, made.plan), partial(draw_plan, made.plan, made.search.timeline)


def _several_cards(args: argparse.Namespace) -> Shown:
    """A plan over several cards as text, and what makes JSON and a picture of it."""
    from probes.core.codec import to_json
    from probes.placement.planner.api import resolve_model
    from probes.placement.planner.multi_gpu import make_cards_plan
    from probes.reports.pictures import draw_plan
    from probes.reports.plan import cards_lines

    described = resolve_model(args.model, _workload(args), captured=args.captured)
    machine = _machine(args)
    model, options = _computed(args, described, machine), _plan_options(args, machine)
    made = make_cards_plan(model, machine, cards=args.cards, **options)
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


def _computed(
    args: argparse.Namespace, model: "ModelDescription", machine: "Constants"
) -> "ModelDescription":
    from probes.placement.planner.compute_dtype import with_compute_dtype

    return with_compute_dtype(model, machine, objective=args.objective, compute=args.compute)


def _plan_options(args: argparse.Namespace, machine: "Constants") -> dict[str, Any]:
    refuse_more_than_the_card("--vram", args.vram, machine)
    return {
        "vram": machine.vram_bytes if args.vram is None else args.vram,
        "host": args.host,
        "workload": _workload(args),
        "objective": args.objective,
        "captured": args.captured,
    }
