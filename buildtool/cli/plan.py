"""`weir plan`: print the bake file that a build would run; nothing is fetched, made or changed."""

import argparse

from buildtool.build import pipeline
from buildtool.build.workplace import default_workplace
from buildtool.cli.arguments import add_variant_arguments, build_options
from buildtool.core.errors import Exit, ToolError
from buildtool.engine.buildx import render_plan
from buildtool.engine.client import ANSWER_TIMEOUT_S, Engine
from probes.core.output import error, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_variant_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan as a bake file, as far as earlier builds know the inputs."""
    options = build_options(args, _silent)
    plan = pipeline.locked_plan(
        default_workplace(_silent, args.catalog),
        options.candidates,
        epoch=options.epoch,
        every_target=options.targets_given,
    )
    write(render_plan(plan.bake(zstd=_keeps_zstd())) + "\n")
    return int(Exit.OK)


def _keeps_zstd() -> bool:
    """Whether the engine's image store keeps layers as zstd, as a build asks it; yes where none answers."""
    try:
        return Engine(timeout_s=ANSWER_TIMEOUT_S).info().containerd_store
    except ToolError as failure:
        error(f"{failure.message}: this is the plan for one with containerd's image store")
        return True


def _silent(_line: str) -> None:
    """Only the bake file is printed."""
