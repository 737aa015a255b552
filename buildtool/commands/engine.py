"""`buildtool engine`: makes sure that a Docker engine answers."""

import argparse
import time

from buildtool import buildx, provision
from buildtool.commands.build import Teller
from buildtool.errors import Exit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument("--yes", action="store_true", help="install without asking")


def run(args: argparse.Namespace) -> int:
    """Find, or install and start."""
    say = Teller(time.monotonic()).say
    info = provision.ensure_engine(say, assume_yes=args.yes).info()
    store = "containerd" if info.containerd_store else "classic"
    print(f"engine {info.version}, {store} image store, buildx {buildx.require_buildx()}")
    return int(Exit.OK)
