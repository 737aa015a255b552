"""`weir plan`: print what a build would make, as JSON; nothing is fetched, made or changed."""

import argparse
import json

from buildtool.build import pipeline
from buildtool.build.workplace import default_workplace
from buildtool.cli.arguments import add_variant_arguments, build_options
from buildtool.core.errors import Exit
from buildtool.engine.buildx import literal
from probes.core.output import write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_variant_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan, as far as earlier builds know the inputs."""
    options = build_options(args, _silent)
    plan = pipeline.locked_plan(
        default_workplace(_silent, args.catalog),
        options.candidates,
        epoch=options.epoch,
        every_target=options.targets_given,
    )
    made = plan.as_json()
    if "bake" in made:
        made["bake"] = literal(made["bake"])
    write(json.dumps(made, indent=2) + "\n")
    return int(Exit.OK)


def _silent(_line: str) -> None:
    """Only the plan is printed."""
