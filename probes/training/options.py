"""The options of training: the worker's own, of which `weir probe epochs` has most. Needs no torch."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from probes.core.errors import UsageError
from probes.core.output import Parser, flag, option, whole
from probes.training.report import ATTENTIONS, PRECISIONS, SCALINGS, STRATEGIES, SYNTHETIC, Settings

TIMEOUT_S: Final = 600
MOST: Final = 10**9
NAMES: Final = {field.name: field.default for field in fields(Settings)}


@dataclass(frozen=True)
class Start:
    """What the command line and the launcher say."""

    settings: Settings
    folder: Path
    repetition: int
    timeout_s: float
    every: int  # steps between two checkpoints; 0: none unless asked for by a signal
    resumes: bool
    rank: int
    world: int
    local: int


def add_options(parser: argparse.ArgumentParser, *, needs_model: bool = True) -> None:
    """The options that are the same for one run and for many."""
    parser.add_argument(
        "model",
        nargs=None if needs_model else "?",
        metavar="MODEL",
        help="bert-base, resnet-50, qwen2.5-3b or another known name, a config.json, or MODULE:FUNCTION that "
        "returns a torch module",
    )
    option(
        parser,
        "--data",
        "MODULE:FUNCTION",
        "what returns a dataset whose samples the model takes",
        default=SYNTHETIC,
    )
    option(parser, "--samples", "N", "samples of an epoch", whole(1, MOST), default=NAMES["samples"])
    option(parser, "--tokens", "N", "tokens of each sequence", whole(1, MOST), default=NAMES["tokens"])
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=NAMES["strategy"],
        help="how ranks share the model: DDP, or FSDP2 (default: %(default)s)",
    )
    option(parser, "--lora", "RANK", "train LoRA adapters alone; 0: all weights", whole(0, MOST), default=0)
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default=NAMES["attention"],
        help="kernels of attention; own: what the library chooses (default: %(default)s)",
    )
    flag(parser, "--checkpointing", "compute activations again instead of keeping them")
    option(parser, "--workers", "N", "processes of each rank's loader", whole(0, 256), default=0)
    option(parser, "--epochs", "N", "epochs of a run; the first one stands apart", whole(1, MOST), default=2)
    option(parser, "--seed", "N", "seed of weights, samples and their order", whole(0, MOST), default=0)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="where to train; auto: on a GPU if torch sees one (default: %(default)s)",
    )
    option(
        parser,
        "--timeout",
        "SECONDS",
        "a rank that makes no progress for so long ends",
        whole(1, MOST),
        default=TIMEOUT_S,
    )


def worker_parser() -> argparse.ArgumentParser:
    """The worker's command line."""
    parser = Parser(
        prog="python3 -m probes.training.worker",
        description="One rank of a training run. The launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
        "and MASTER_PORT, as torchrun does; without RANK it is a run of one process.",
        epilog="Exit codes: 0 done, 75 checkpointed (start it again with --resume), 2 usage, 3 no device, "
        "library or memory, 4 failed, 5 a file can't be read or written, 143 ended by SIGTERM. SIGUSR1 asks "
        "for a checkpoint at the next step.",
    )
    add_options(parser)
    option(parser, "--batch", "N", "samples at once", whole(1, MOST), default=NAMES["batch"])
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="number format (default: %(default)s)"
    )
    option(parser, "--accumulate", "N", "batches for each step of the optimizer", whole(1, MOST), default=1)
    parser.add_argument(
        "--scaling",
        choices=SCALINGS,
        default="strong",
        help="whether --samples are of all ranks together (strong) or of each (weak) (default: %(default)s)",
    )
    option(parser, "--threads", "N", "threads of a CPU; 0: torch's own choice", whole(0, 4096), default=0)
    option(parser, "--repetition", "N", "which of several equal runs this is", whole(1, MOST), default=1)
    option(
        parser, "--checkpoint-every", "STEPS", "between two checkpoints; 0: none", whole(0, MOST), default=0
    )
    flag(parser, "--resume", "go on from the folder's checkpoint, if there is one")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder of this run")
    return parser


def start_of(argv: Sequence[str]) -> Start:
    """What was asked for. Raises UsageError for an environment that contradicts itself; exits for usage."""
    args = vars(worker_parser().parse_args(argv))
    rank, world, local = (_environment(*each) for each in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if not 0 <= rank < world or ("RANK" in os.environ and "WORLD_SIZE" not in os.environ):
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {world}", "start it by torchrun, or set both")
    return Start(
        Settings(**{name: args[name] for name in NAMES}),
        args["out"].absolute(),  # a user's code may change the directory
        args["repetition"],
        args["timeout"],
        args["checkpoint_every"],
        args["resume"],
        rank,
        world,
        local,
    )


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 8):
        raise UsageError(f"{name} is {text[:40]!r}, no number", "start it by torchrun, or set it")
    return int(text)
