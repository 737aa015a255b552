"""The verb `place`: a checkpoint or a model with random weights, placed here and timed next to baselines."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from probes.cli.arguments import PROFILES, VRAM, Verbs, add_compute, add_verb, seed, size
from probes.core.errors import Exit, UsageError
from probes.core.invocation import probe_line
from probes.core.output import echo, option, whole
from probes.core.units import binary_bytes, duration, typed_bytes
from probes.core.unknown import Unknown
from probes.measure.stacks import DTYPES, MODELS, CheckpointFolder, read_folder
from probes.measure.worker import require_torch
from probes.placement.models.reading import holds_a_model
from probes.placement.plan_file import read_plan
from probes.placement.types import Plan, Workload

if TYPE_CHECKING:
    from probes.measure.placement_benchmark import BenchmarkRow

BASELINES = ("accelerate", "resident")
TOKENS = 128  # of each sequence, where neither an option nor a plan says how many

_count = whole(1, 10**6)


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    place = add_verb(
        verbs,
        "place",
        "run a checkpoint, or a known model with random weights, in a VRAM budget on this machine, and "
        "compare it with accelerate",
    )
    place.add_argument(
        "model",
        metavar="MODEL",
        help="folder with config.json and safetensors of a model that takes token ids (needs transformers), "
        f"or a name, which gets random weights: {', '.join(MODELS)}",
    )
    _add_budget(place)
    option(
        place,
        "--host",
        "SIZE",
        "host memory that a checkpoint may take; on a machine with a GPU, the rest is read from disk in "
        "each pass (default: what is available, less a reserve)",
        size,
    )
    option(
        place,
        "--machine",
        "CARD|REPORT",
        "speeds to plan with: a probe report of this machine, or a card that has a profile "
        f"({PROFILES}; default: the most similar of these)",
    )
    option(place, "--batch", "N", "sequences at once (default: 1, or the plan's)", _count)
    option(place, "--tokens", "N", "tokens of each sequence (default: 128, or the plan's)", _count)
    place.add_argument(
        "--dtype",
        choices=DTYPES,
        help="number format of the weights (default: the checkpoint's own; bfloat16 for a name)",
    )
    place.add_argument(
        "--objective",
        choices=("exact", "fast"),
        help="exact: outputs have the bits of a model that fits; fast: kernels for packed weights compute as "
        "well, and round sums in another order (default: exact)",
    )
    add_compute(place)
    place.add_argument(
        "--compare",
        action="append",
        choices=BASELINES,
        default=[],
        help="also run it with accelerate's device_map, or with everything in VRAM; may be repeated",
    )
    place.add_argument(
        "--refine",
        action="store_true",
        help="time the blocks of a pass, plan again with that, and keep the quicker of both plans",
    )
    option(place, "--seed", "N", "seed for random weights and inputs", seed, default=0)
    place.set_defaults(do=_place)


def _add_budget(place: argparse.ArgumentParser) -> None:
    budget = place.add_mutually_exclusive_group(required=True)
    option(budget, "--vram", "SIZE", VRAM, size)
    option(
        budget,
        "--plan",
        "FILE",
        "follow this plan of the checkpoint, made by `plan FOLDER --vram SIZE --json FILE`",
        Path,
    )


def _checkpoint(args: argparse.Namespace) -> CheckpointFolder | None:
    """The folder, or None for a name. Raises what `read_folder` raises, and UsageError."""
    path = Path(args.model)
    if args.model not in MODELS or holds_a_model(path):
        return read_folder(path)
    if args.host is not None:
        raise UsageError("--host limits a checkpoint: random weights are made in host memory", "leave it out")
    return None


def _given(args: argparse.Namespace, checkpoint: CheckpointFolder | None) -> Plan:
    """The plan in the file that is named. Raises ReportError, and UsageError for what contradicts it."""
    if checkpoint is None:
        raise UsageError(
            "--plan is for a checkpoint: of a known name, the layers alone are built, with random weights",
            f"give the folder that has config.json and *.safetensors, or --vram instead: {args.model}",
        )
    for name in ("host", "machine", "objective"):
        if getattr(args, name) is not None:
            raise UsageError(f"--plan has a file that says --{name} already", f"leave --{name} out")
    if args.compute != "auto":
        raise UsageError("--plan has a file that says --compute already", "leave --compute out")
    plan = read_plan(args.plan)
    if not isinstance(plan, Plan):
        raise UsageError(
            f"{args.plan} is a plan over {len(plan.cards)} cards, and this runs a model on one",
            "place it in Python: probes.placement.load(factory, checkpoint, read_plan(file))",
        )
    return plan


def _place(args: argparse.Namespace) -> Exit:
    checkpoint = _checkpoint(args)
    given = _given(args, checkpoint) if args.plan else None
    work = given.workload if given else Workload(tokens=TOKENS)
    batch, tokens = args.batch or work.batch, args.tokens or work.tokens
    dtype = args.dtype or (checkpoint.dtype if checkpoint else "bfloat16")
    vram = given.vram_budget if given else args.vram
    machine = ("--machine", args.machine) if args.machine else ()
    instead = probe_line("plan", args.model, *machine, "--vram", typed_bytes(vram))
    require_torch(f"run it where torch is; for a prediction, which needs none: {instead}")
    from probes.measure import placement_benchmark

    options = placement_benchmark.BenchmarkOptions(
        model=args.model,
        dtype=dtype,
        vram=vram,
        machine=args.machine,
        batch=batch,
        tokens=tokens,
        objective=args.objective or "exact",
        seed=args.seed,
        checkpoint=checkpoint,
        host=args.host,
        compute=args.compute,
        given=given,
        refine=args.refine,
    )
    report = placement_benchmark.run(options, tuple(args.compare))
    echo(f"{args.model}, {dtype}, batch {batch}, {binary_bytes(vram)} of VRAM")
    echo("\n".join(report.report.splitlines()))
    for row in report.ways:
        echo(line(row, report.ways[0]))
    return Exit.OK


def line(row: "BenchmarkRow", ours: "BenchmarkRow") -> str:
    """One way of running the model, and how its time compares with ours."""
    if isinstance(row.wall_s, Unknown):
        return f"{row.how}: {row.wall_s}"
    text = f"{row.how}: {duration(row.wall_s)} a pass (wall)"
    if row is not ours and not isinstance(ours.wall_s, Unknown):
        text += f", {row.wall_s / ours.wall_s:.2f} of ours"
    if isinstance(row.peak_bytes, int):
        text += f", {binary_bytes(row.peak_bytes)} of VRAM at most"
    if row is not ours:
        text += ", same bits" if row.same_bits is True else ", other bits"
    return text
