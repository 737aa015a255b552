"""`buildtool plan`: the bake file that a build would run, printed; nothing is fetched, made or changed."""

import argparse
from pathlib import Path

from buildtool.builder import pipeline
from buildtool.builder.choices import add_targets, wanted, workplace
from buildtool.engine.bakefile import render_plan
from buildtool.errors import Exit
from buildtool.shipped import IMAGES
from probes.shared.output import hand_over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("variants", nargs="*", metavar="VARIANT")
    add_targets(parser)
    parser.add_argument("--catalog", type=Path, default=IMAGES / "variants.yaml", metavar="FILE")


def run(args: argparse.Namespace) -> int:
    """Print the plan as a bake file, as far as earlier builds know the inputs."""
    asked, candidates, epoch = wanted(args, _silent)
    plan = pipeline.locked_plan(workplace(_silent), candidates, epoch=epoch, asked=asked)
    hand_over(render_plan(plan.bake(zstd=True)) + "\n")
    return int(Exit.OK)


def _silent(_line: str) -> None:
    """Only the bake file is printed."""
