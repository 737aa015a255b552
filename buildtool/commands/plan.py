"""`buildtool plan`: the bake file that a build would run, printed; nothing is fetched, made or changed."""

import argparse
from pathlib import Path

from buildtool import catalog, plan
from buildtool.commands.build import add_targets, chosen_targets, workplace
from buildtool.errors import Exit
from buildtool.lock import Lock
from buildtool.shipped import IMAGES
from probes.output import hand_over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    add_targets(parser)
    parser.add_argument("--catalog", type=Path, default=IMAGES / "variants.yaml", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Print what is locked as a bake file; what isn't locked yet is planned from the first source."""
    _, gpu_targets = chosen_targets(args.targets, lambda _line: None)
    chosen = catalog.load(args.catalog, gpu_targets=gpu_targets)
    place = workplace(lambda _line: None)
    lock = Lock.load(place.lock)
    targets = [
        plan.Target(
            variant,
            lock.get(variant) or plan.unresolved(variant),
            place.state / "context" / variant.name,
        )
        for variant in chosen.select(tuple(args.variants))
    ]
    bake = plan.plan_bake(targets, epoch=chosen.source_date_epoch, zstd=True)
    hand_over(plan.render_plan(bake) + "\n")
    return int(Exit.OK)
