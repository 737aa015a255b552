"""The verb `place`: a checkpoint or a model with random weights, placed here and timed next to peers."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from probes.arguments import Verbs, add_compute, seed, size, whole
from probes.errors import Exit, LibraryMissing, UsageError
from probes.placement.models.checkpointfolder import CheckpointFolder, read_folder
from probes.placement.split import DTYPES, MODELS
from probes.shared.invocation import probe_command
from probes.shared.output import tell
from probes.shared.units import binary_bytes, duration
from probes.shared.unknown import Unknown

if TYPE_CHECKING:
    from probes.placement.trial.peers import Ran

PEERS = ("accelerate", "resident")

_count = whole(1, 10**6)


def add_verbs(verbs: Verbs) -> None:
    """Add the verb and its arguments."""
    place = verbs.add_parser(
        "place",
        help="run a checkpoint, or a known model with random weights, in a VRAM budget on this machine, "
        "next to what others do",
    )
    place.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with config.json and safetensors, built by transformers (token ids only), or, with "
        f"random weights: {', '.join(MODELS)}",
    )
    place.add_argument(
        "--vram", type=size, required=True, metavar="SIZE", help="what torch may take, e.g. 4GiB"
    )
    place.add_argument(
        "--host",
        type=size,
        metavar="SIZE",
        help="host memory that a checkpoint may take; beside a GPU, the rest is read from disk in each "
        "pass (default: what is available, less a reserve)",
    )
    place.add_argument(
        "--machine",
        metavar="NAME|REPORT",
        help="where the plan's constants come from: a probe report of this machine, or a profile "
        "(default: the profile of the nearest card)",
    )
    place.add_argument("--batch", type=_count, default=1, metavar="N", help="sequences at once (%(default)s)")
    place.add_argument(
        "--tokens", type=_count, default=128, metavar="N", help="of each sequence (%(default)s)"
    )
    place.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: the checkpoint's own; bfloat16 for a name)"
    )
    place.add_argument(
        "--objective",
        choices=("exact", "fast"),
        default="exact",
        help="fast: also products from packed weights, with sums rounded in another order (%(default)s)",
    )
    add_compute(place)
    place.add_argument(
        "--compare", action="append", choices=PEERS, default=[], help="also run it so; may be repeated"
    )
    place.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of random weights and inputs (%(default)s)"
    )
    place.set_defaults(do=_place)


def _checkpoint(args: argparse.Namespace) -> CheckpointFolder | None:
    """The folder, or None for a name. Raises what `read_folder` raises, and UsageError."""
    path = Path(args.model)
    if path.is_dir() or args.model not in MODELS:
        return read_folder(path)
    if args.host is not None:
        raise UsageError("--host limits a checkpoint: random weights are made in host memory", "leave it out")
    return None


def _place(args: argparse.Namespace) -> Exit:
    checkpoint = _checkpoint(args)
    dtype = args.dtype or (checkpoint.dtype if checkpoint else "bfloat16")
    try:
        from probes.placement.trial import peers
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise LibraryMissing(
            "place runs a model, and torch isn't installed here",
            f"run it where torch is; for a prediction, which needs none: {probe_command()} plan {args.model}",
        ) from missing
    asked = peers.Asked(
        model=args.model,
        dtype=dtype,
        vram=args.vram,
        machine=args.machine,
        batch=args.batch,
        tokens=args.tokens,
        objective=args.objective,
        seed=args.seed,
        checkpoint=checkpoint,
        host=args.host,
        compute=args.compute,
    )
    found = peers.run(asked, tuple(args.compare))
    tell(f"{args.model}, {dtype}, batch {args.batch}, {binary_bytes(args.vram)} of VRAM")
    tell("\n".join(found.report.splitlines()))
    for ran in found.ways:
        tell(line(ran, found.ways[0]))
    return Exit.OK


def line(ran: "Ran", ours: "Ran") -> str:
    """One way of running it, with how its time compares with ours. Pure."""
    if isinstance(ran.wall_s, Unknown):
        return f"{ran.how}: {ran.wall_s}"
    said = f"{ran.how}: {duration(ran.wall_s)} a pass (wall)"
    if ran is not ours and not isinstance(ours.wall_s, Unknown):
        said += f", {ran.wall_s / ours.wall_s:.2f} of ours"
    if isinstance(ran.peak_bytes, int):
        said += f", {binary_bytes(ran.peak_bytes)} of VRAM at most"
    if ran is not ours:
        said += ", same bits" if ran.same_bits is True else ", other bits"
    return said
