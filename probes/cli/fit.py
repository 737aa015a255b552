"""The verb `fit`: the largest batch and the longest sequence within a budget. Predicting needs no torch."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.cli.arguments import (
    PLACE,
    VRAM,
    Verbs,
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
from probes.core.codec import to_json
from probes.core.errors import Exit, ModelUnknown, ProbeError, UsageError
from probes.core.output import echo, option, progress, whole, write
from probes.fit.report import CAPS, TASKS, Question
from probes.records.files import reserving

if TYPE_CHECKING:
    from probes.fit.report import FitReport, Measured, Precision
    from probes.fit.worker import SearchRequest
    from probes.placement.models.description import ModelDescription
    from probes.placement.planner.machine import Constants


FIT_EXITS = (
    "Exit codes: 0 it fits, 1 it doesn't (the smallest budget that works is named), 2 usage, 3 no torch, GPU "
    "or memory for --measure, 4 the trials don't say whether it fits, 5 unreadable model or "
    "report, 130 interrupted (what was found is shown)."
)
TOKENS = 1024  # of a sequence
LIMIT_S = 120  # of all trials together
MOST_TRIED = 10**6  # of a size
TRY_IT = "--measure cpu --vram SIZE"
INTERRUPTED = "interrupted"  # what the supervisor calls it

_count = whole(1, 10**9)


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    fit = add_verb(
        verbs,
        "fit",
        "find the largest batch and the longest sequence that fit in memory: predicted, or also measured",
        exits=FIT_EXITS,
    )
    _add_budget(fit)
    add_model(fit)
    _add_what_is_run(fit)
    fit.add_argument(
        "--measure",
        choices=("cpu", "gpu"),
        help="also try sizes: run steps with random weights, in fresh processes limited to --vram",
    )
    fit.add_argument(
        "--axis",
        choices=("batch", "tokens"),
        help="which size --measure searches for (default: batch)",
    )
    fit.add_argument(
        "--cap",
        choices=CAPS,
        help="how --measure cpu limits memory: a cgroup, or the process's own limit (default: auto, a cgroup "
        "if one can be made)",
    )
    option(fit, "--limit", "SECONDS", "time for all trials of --measure together (default: 120)", _count)
    option(fit, "--json", "FILE", "write the answer as JSON; - prints it", Path)
    option(fit, "--picture", "FILE.svg", "draw what takes the bytes", picture)
    fit.set_defaults(do=_fit)


def _add_budget(fit: argparse.ArgumentParser) -> None:
    """Add --vram and its older name; errors have the one that was typed."""
    budget = fit.add_mutually_exclusive_group()
    budget.add_argument(
        "--vram",
        action=_Budget,
        type=size,
        dest="budget",
        metavar="SIZE",
        help=f"{VRAM}; with --measure cpu, memory (default: the card's, less the driver's context)",
    )
    budget.add_argument(
        "--budget",
        action=_Budget,
        type=size,
        dest="budget",
        metavar="SIZE",
        help="another name of --vram",
    )
    fit.set_defaults(budget_option="--vram")


class _Budget(argparse.Action):
    """Keeps the bytes, and the name of the option that was typed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,  # noqa: ANN401 - argparse's own
        option_string: str | None = None,
    ) -> None:
        """Store the value, and the name of the option that set it."""
        namespace.budget, namespace.budget_option = values, option_string


def _add_what_is_run(fit: argparse.ArgumentParser) -> None:
    """Add the arguments that say what a pass or a step is."""
    fit.add_argument(
        "--task", choices=TASKS, default="inference", help="what has to fit (default: %(default)s)"
    )
    option(fit, "--batch", "N", "sequences at once", _count, default=1)
    positions = "tokens of each sequence (default: 1024, or as many as the model has positions for)"
    option(fit, "--tokens", "N", positions, _count)
    add_step(fit)


def _fit(args: argparse.Namespace) -> Exit:
    from probes.reports.pictures import draw_fit

    question = _question(args)
    refuse_overwriting(
        Path(args.model), [Path(args.machine)] if args.machine else [], [args.json, args.picture]
    )
    file = None if args.json == Path("-") else args.json
    with reserving(file, PLACE) as kept, reserving(args.picture, PLACE) as place:
        report = _report(args, question)
        try:
            _say(report, as_json=args.json == Path("-"))
        finally:  # trials take minutes: a lost output doesn't cost the files
            if kept:
                write_file(args.json, to_json(report), place=kept)
            if place:
                write_file(args.picture, draw_fit(report), place=place)
    return _exit(report)


def _say(report: "FitReport", *, as_json: bool) -> None:
    from probes.reports.fit import lines

    if as_json:
        write(to_json(report))
    else:
        echo(paragraphs(lines(report), torch_note(report.constants)))


def _report(args: argparse.Namespace, question: Question) -> "FitReport":
    """The answer by rules, and by trials with --measure; by trials alone where there are no rules."""
    from probes.fit.answer import answer, budget_for_torch, by_trials, compared, cpu_constants, with_defaults
    from probes.fit.forecast import CPU
    from probes.fit.placed import with_placement
    from probes.placement.models.reading import config_of
    from probes.placement.planner.api import resolve_model

    machine = cpu_constants() if args.measure == "cpu" else machine_of(args.machine)
    refuse_more_than_the_card(args.budget_option, args.budget, machine)
    try:
        model = resolve_model(args.model)
        question = with_defaults(question, model, machine, tokens=args.tokens, precision=args.precision)
        report = answer(model, question, machine, budget=args.budget)
    except ModelUnknown as unknown:
        if not args.measure:
            raise ModelUnknown(unknown.message, f"{unknown.hint}; or try it for real: {TRY_IT}") from unknown
        config = config_of(args.model)
        progress(f"{unknown.message}; so two small trials say what a larger one takes")
        budget = budget_for_torch(machine, args.budget, CPU)
        measured = _measured(_request(args, config, question, budget))
        try:
            return by_trials(question, machine, budget, measured)
        except ProbeError:
            if measured.ended == INTERRUPTED:
                raise KeyboardInterrupt from None
            raise
    if not args.measure:
        return with_placement(report, model, machine, named=args.machine)
    request = _request(args, config_of(args.model), question, report.budget_bytes)
    measured = _measured(guided(request, report, model, machine))
    return compared(report, model, machine, measured)


def _request(
    args: argparse.Namespace, config: Mapping[str, Any], question: Question, budget: int
) -> "SearchRequest":
    """The measurement of --measure, where nothing was predicted."""
    from probes.fit.search import Hint
    from probes.fit.worker import SearchRequest

    return SearchRequest(
        json.dumps(dict(config)),
        question,
        args.measure,
        args.axis or "batch",
        budget,
        Hint(),
        most=MOST_TRIED,
        limit_s=args.limit or LIMIT_S,
        cap=args.cap or "auto",
    )


def guided(
    request: "SearchRequest", report: "FitReport", model: "ModelDescription", machine: "Constants"
) -> "SearchRequest":
    """The request with a search that begins at the predicted size."""
    from probes.fit.answer import predicted_rise
    from probes.fit.report import Largest
    from probes.fit.search import Hint

    predicted = report.predicted_largest_batch if request.axis == "batch" else report.predicted_largest_tokens
    assert isinstance(predicted, Largest), "by rules"
    ends = predicted.exact and predicted.fails is None
    most = predicted.fits if ends else MOST_TRIED
    guess = min(max(predicted.fits, 1), most)
    slope = predicted_rise(model, request.question, machine, request.axis, guess)
    return replace(request, hint=Hint(guess, slope), most=most)


def _measured(request: "SearchRequest") -> "Measured":
    """Run the trials, and print each as it ends."""
    from probes.fit.report import VERDICTS
    from probes.fit.worker import measure

    return measure(request, lambda trial: progress(f"{request.axis} {trial.size}: {VERDICTS[trial.verdict]}"))


def _exit(report: "FitReport") -> Exit:
    """The measurement's verdict where there is one, else the prediction's."""
    from probes.fit.report import SHORT_OF_MEMORY, Measured

    measured = report.measured
    if not isinstance(measured, Measured):
        return Exit.OK if report.fits else Exit.REQUIRED
    if measured.ended == INTERRUPTED:
        return Exit.INTERRUPTED
    axis = measured.largest.axis
    wanted = report.question.batch if axis == "batch" else report.question.tokens
    if measured.largest.fits >= wanted:
        return Exit.OK
    refused = any(t.size <= wanted and t.verdict in SHORT_OF_MEMORY for t in measured.trials)
    return Exit.REQUIRED if refused else Exit.BROKEN


def _question(args: argparse.Namespace) -> Question:
    """The question that the arguments ask. Raises UsageError for what contradicts itself."""
    training = args.task == "training"
    _refuse_what_does_not_apply(args)
    if args.measure and args.budget is None:
        raise UsageError("trials need a limit", "say what they may take: --vram 4GiB")
    precision: Precision = args.precision or ("amp-bf16" if training and not args.lora else "bf16")
    if precision.startswith("amp") and not training:
        raise UsageError(f"{precision} is a precision of training", "for inference: --precision bf16")
    return Question(
        model=args.model,
        task=args.task,
        batch=args.batch,
        tokens=args.tokens or TOKENS,
        precision=precision,
        **step_of(args),
    )


def _refuse_what_does_not_apply(args: argparse.Namespace) -> None:
    """Raise UsageError for an argument that nothing of what is asked would use."""
    for names, applies, what, hint in (
        (
            ("lora", "checkpointing", "optimizer", "accumulate"),
            args.task == "training",
            "changes training only",
            "add --task training",
        ),
        (("axis", "limit"), args.measure, "is for trials", f"leave it out, or try sizes: {TRY_IT}"),
        (("cap",), args.measure == "cpu", "limits trials on the CPU", f"leave it out, or add {TRY_IT}"),
        (("machine",), args.measure != "cpu", "isn't tried by --measure cpu", "leave it out"),
    ):
        for name in names:
            if getattr(args, name) and not applies:
                raise UsageError(f"--{name} {what}", hint)
