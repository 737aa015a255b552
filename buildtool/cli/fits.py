"""`weir fits MODEL [CARD]`: whether a model runs on a card, how, how fast, and what would help."""

import argparse
import datetime
from pathlib import Path

from buildtool.core.errors import Exit
from probes.cli.arguments import card_by, refuse_more_than_the_card, size
from probes.core.output import echo, flag, option, whole, write

_count = whole(1, 10**9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    card_by(parser, "")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="config.json, *.safetensors, a folder that has one, or a name such as qwen2.5-3b",
    )
    parser.add_argument(
        "card",
        nargs="?",
        metavar="CARD",
        help="the card's name, such as 'MI50 16GB' or rx7900xtx, or the file of a probe report (default: "
        "this host's card)",
    )
    option(
        parser,
        "--vram",
        "SIZE",
        "VRAM that the program may use beside the driver's context, e.g. 4GiB (default: all of the card's)",
        size,
    )
    option(
        parser,
        "--host",
        "SIZE",
        "host memory for weights (default: all of this host's for its own card, or that of a probe report; "
        "else 64GiB)",
        size,
    )
    parser.add_argument(
        "--task",
        choices=("inference", "lora", "training"),
        default="inference",
        help="what the model is for; lora: adapters of rank 16 (default: %(default)s)",
    )
    option(parser, "--batch", "N", "sequences at once", _count, default=1)
    option(
        parser,
        "--tokens",
        "N",
        "tokens of each sequence (default: 1024, or as many as the model has positions for)",
        _count,
    )
    flag(parser, "--json", "print the answer as JSON; sizes in bytes, speeds per second")


def run(args: argparse.Namespace) -> int:
    """Print the answer; 1 when the model doesn't run there."""
    from buildtool.doctor.compatibility import compatibility
    from buildtool.doctor.host import platform_of
    from buildtool.fits.answer import Asked, ask
    from buildtool.fits.card import Torches, choose_card
    from buildtool.fits.text import lines
    from probes.core.codec import to_json
    from probes.core.errors import UsageError
    from probes.core.quoting import command
    from probes.hardware.cards import is_card
    from probes.placement.models.reading import is_known
    from probes.placement.planner.api import resolve_model

    if args.card and is_known(args.card) and is_card(args.model):
        then = command("weir", "fits", args.card, args.model)
        raise UsageError(f"{args.model} is a card and {args.card} a model: the model comes first", then)
    model = resolve_model(args.model)
    today = datetime.datetime.now(datetime.UTC).date()
    card = choose_card(args.card, Torches(compatibility(), platform_of(Path("/")), today))
    refuse_more_than_the_card("--vram", args.vram, card.machine, other="another card")
    answer = ask(Asked(args.model, args.task, args.batch, args.tokens, args.vram, args.host), model, card)
    if args.json:
        write(to_json(answer))
    else:
        echo(lines(answer))
    return int(Exit.OK if answer.runs else Exit.FINDINGS)
