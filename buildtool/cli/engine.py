"""`weir engine`: make sure that a Docker engine answers."""

import argparse

from buildtool.core.errors import Exit
from buildtool.core.progress import ProgressLog
from buildtool.engine import buildx, provision
from probes.core.output import echo, flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    flag(parser, "--yes", "install without asking")


def run(args: argparse.Namespace) -> int:
    """Find an engine, or install and start one."""
    with ProgressLog() as log:
        info = provision.ensure_engine(log.line, assume_yes=args.yes).info()
    store = "containerd" if info.containerd_store else "classic"
    echo(f"engine {info.version}, {store} image store, buildx {buildx.require_buildx()}")
    return int(Exit.OK)
