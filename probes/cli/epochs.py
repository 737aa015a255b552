"""The verb `epochs`: trains here for some epochs in many ways, or reads what ranks elsewhere reported."""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from probes.cli.arguments import PLACE, Verbs, add_verb, write_file
from probes.core import files
from probes.core.codec import to_json
from probes.core.errors import DeviceUnusable, Exit, UsageError
from probes.core.output import echo, error, option, progress, whole, write
from probes.records.files import reserving
from probes.training.options import add_options
from probes.training.report import PRECISIONS, SCALINGS

if TYPE_CHECKING:
    from probes.training.report import Run, Settings

EXITS = (
    "Exit codes: 0 every run is done, 2 usage, 3 no torch, 4 a run failed (the others are reported), 5 "
    "unreadable or unwritable file (other runs are reported), 130 interrupted. The worker is a module that "
    "any launcher starts: python3 -m probes.training.worker --help."
)
MOST_RUNS = 500


@dataclass(frozen=True)
class Planned:
    """One case that is to be run."""

    settings: "Settings"
    world: int


def _several(read: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    """What reads a list with commas. Raises argparse.ArgumentTypeError."""

    def read_all(text: str) -> tuple[object, ...]:
        return tuple(dict.fromkeys(read(word.strip()) for word in text.split(",")))

    return read_all


def _word_of(words: Sequence[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is none of {', '.join(words)}")
        return text

    return read


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    epochs = add_verb(
        verbs,
        "epochs",
        "measure training: time per epoch, samples/s, scaling efficiency, and what the time goes into",
        exits=EXITS,
    )
    add_options(epochs, needs_model=False)
    option(epochs, "--from", "FOLDER", "report what workers wrote below this folder, and train nothing", Path)
    counts = _several(whole(1, 4096))
    option(epochs, "--processes", "N,N", "how many processes train here, one a GPU", counts, default="1")
    option(epochs, "--batch", "N,N", "samples at once on each rank", _several(whole(1, 10**9)), default="32")
    precisions = _several(_word_of(PRECISIONS))
    option(
        epochs, "--precision", "P,P", f"number formats: {', '.join(PRECISIONS)}", precisions, default="fp32"
    )
    option(epochs, "--accumulate", "N,N", "batches for each step of the optimizer", counts, default="1")
    option(
        epochs,
        "--scaling",
        "S,S",
        "strong: all ranks share --samples; weak: each has as many",
        _several(_word_of(SCALINGS)),
        default="strong",
    )
    option(epochs, "--repetitions", "N", "runs of each case, in turns", whole(1, 1000), default=3)
    option(epochs, "--out", "DIR", "keep each run's own files there (default: they aren't kept)", Path)
    option(epochs, "--json", "FILE", "write the report as JSON, for show and html; - prints it", Path)
    epochs.set_defaults(do=_epochs)


def _epochs(args: argparse.Namespace) -> Exit:
    from probes.reports.epochs import epochs_document
    from probes.reports.text import render_text
    from probes.training.report import report_of, runs_below

    folder = getattr(args, "from")
    if bool(args.model) == bool(folder):
        raise UsageError("epochs needs a model to train, or --from", "weir probe epochs bert-base")
    printed = args.json == Path("-")
    with reserving(None if printed else args.json, PLACE) as place:
        runs, refused = runs_below(folder) if folder else (_trained(tuple(_planned(args)), args), ())
        report = report_of(runs)
        try:
            write(to_json(report)) if printed else echo(render_text(epochs_document(report)))
        finally:  # runs take minutes: a lost output doesn't cost the file
            if place:
                write_file(args.json, to_json(report), place=place)
    for failure in refused:
        error(f"error: {failure}")
    if refused:
        return Exit.DATA
    return Exit.OK if all(run.state == "done" for run in runs) else Exit.BROKEN


def _planned(args: argparse.Namespace) -> Iterator[Planned]:
    """Every combination. Raises UsageError for too many."""
    from probes.training.local import threads_each
    from probes.training.report import Settings

    threads = threads_each(max(args.processes)) if args.device != "gpu" else 0
    base = Settings(
        model=args.model,
        data=args.data,
        strategy=args.strategy,
        samples=args.samples,
        tokens=args.tokens,
        lora=args.lora,
        checkpointing=args.checkpointing,
        attention=args.attention,
        workers=args.workers,
        threads=threads,
        epochs=args.epochs,
        seed=args.seed,
        device=args.device,
    )
    combinations = list(
        itertools.product(args.precision, args.batch, args.accumulate, args.scaling, args.processes)
    )
    if len(combinations) * args.repetitions > MOST_RUNS:
        raise UsageError(
            f"{len(combinations)} cases with {args.repetitions} repetitions are more than {MOST_RUNS} runs",
            "leave some out",
        )
    seen = set()
    for precision, batch, accumulate, scaling, world in combinations:
        alone = world == 1  # strong and weak are the same then
        settings = replace(
            base,
            precision=precision,
            batch=batch,
            accumulate=accumulate,
            scaling="strong" if alone else scaling,
        )
        if (settings, world) not in seen:
            seen.add((settings, world))
            yield Planned(settings, world)


def _trained(planned: Sequence[Planned], args: argparse.Namespace) -> "tuple[Run, ...]":
    """Run all cases in turns, so that a slow spell of the machine meets all of them."""
    from probes.reports.epochs import minutes
    from probes.training.figures import cause_of, wall_s, was_interrupted
    from probes.training.local import run_here

    if find_spec("torch") is None:
        raise DeviceUnusable(
            "training needs torch, and this Python has none",
            "install a build for this machine's cards: weir doctor; or --from what ranks elsewhere wrote",
        )
    runs: list[Run] = []
    failed: set[Planned] = set()
    with ExitStack() as stack:
        out = args.out or stack.enter_context(files.scratch())
        if args.out and args.out.exists() and any(args.out.iterdir()):
            raise UsageError(f"{args.out} isn't empty", "choose another folder: --out DIR")
        for repetition in range(1, args.repetitions + 1):
            for case in planned:
                if case in failed:
                    continue
                name = f"{_folder(case)}-{repetition}"
                timeout = ("--timeout", str(args.timeout))
                run = run_here(case.settings, case.world, out / name, repetition=repetition, more=timeout)
                if was_interrupted(run):
                    raise KeyboardInterrupt
                runs.append(run)
                if run.state != "done":
                    failed.add(case)
                    progress(f"{name}: {cause_of(run)}")
                else:
                    last = run.ranks[0].epochs[-1].number
                    progress(f"{name}: {minutes(wall_s(run, last))} for the last epoch")
    return tuple(runs)


def _folder(case: Planned) -> str:
    settings = case.settings
    parts = [f"{case.world}p", f"b{settings.batch}", settings.precision]
    parts += [f"a{settings.accumulate}"] if settings.accumulate > 1 else []
    parts += [settings.scaling] if case.world > 1 else []
    return "-".join(parts)
