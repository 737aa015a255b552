"""What the verbs share about builds: which cards an image is for, where caches are kept."""

import argparse
import platform

from buildtool.audit.read.image import host_platform, parse_platform
from buildtool.builder import catalog, pipeline
from buildtool.engine import host
from buildtool.errors import ConfigError
from buildtool.gpucode.target import parse_targets
from buildtool.model import Variant
from buildtool.shipped import lock_file, state_directory

_BASELINE = {"amd64": "v1", "arm64": "v8"}  # the variants that every processor of an architecture runs


def add_targets(parser: argparse.ArgumentParser) -> None:
    """The argument that names the cards that an image is for."""
    parser.add_argument(
        "--targets",
        metavar="GFX[,GFX...]",
        help="cards to keep GPU code for (default: this machine's AMD cards, or else those in variants.yaml)",
    )


def chosen_targets(asked: str | None, say: pipeline.Say) -> tuple[bool, tuple[str, ...]]:
    """Whether targets were asked for, and the targets: those, else this host's cards, else none."""
    if asked is not None:
        return True, tuple(map(str, parse_targets(asked)))
    cards = host.amd_targets()
    if cards:
        say(f"this machine's cards: {', '.join(cards)}")
    return False, cards


def wanted(args: argparse.Namespace, say: pipeline.Say) -> tuple[bool, list[list[Variant]], int]:
    """Whether cards were asked for by name; candidates for each image, best first; the catalog's epoch.

    A variant is built for the cards asked for, else for this machine's, else for those of the catalog.
    Raises ConfigError for a name that the catalog doesn't have.
    """
    asked, cards = chosen_targets(args.targets, say)
    catalogs = [catalog.load(args.catalog, gpu_targets=cards)]
    if cards and not asked:
        catalogs.append(catalog.load(args.catalog))
    each = zip(*(found.select(tuple(args.variants)) for found in catalogs), strict=True)
    return asked, [list(dict.fromkeys(variants)) for variants in each], catalogs[0].source_date_epoch


def workplace(say: pipeline.Say, *, verbose: bool = False) -> pipeline.Workplace:
    """Where builds keep their caches and their lock: see `buildtool.shipped`."""
    return pipeline.Workplace(state_directory(), lock_file(), say, verbose)


def require_platform(asked: str, engine_machine: str) -> None:
    """Refuse to build for a platform other than this host's. Raises ConfigError.

    Programs on this host make the base, choose the wheels and prove the image, and the engine has to run it.
    `engine_machine` is the engine's name for its processor (`x86_64`), empty when it isn't known yet.
    """
    here, wish = host_platform(), parse_platform(asked)
    plain = wish.variant in ("", _BASELINE.get(here.architecture))
    if (wish.os, wish.architecture) != (here.os, here.architecture) or not plain:
        raise ConfigError(
            f"can't build for {wish}: bases, wheels and proofs are made on this host, which is {here}",
            f"run this on a {wish} machine, and push from there; or leave --platform out",
        )
    if engine_machine not in ("", platform.machine()):
        raise ConfigError(
            f"can't build for {wish}: the engine is on another machine, of type {engine_machine}",
            f"use an engine on {here}: see `docker context ls`",
        )
