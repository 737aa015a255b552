"""What the verbs share about builds: which cards an image is for, where caches are kept."""

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from buildtool.audit.read.image import host_platform, parse_platform
from buildtool.builder import catalog
from buildtool.builder.workplace import Workplace
from buildtool.engine import host
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.errors import ConfigError
from buildtool.gpucode.target import parse_targets
from buildtool.model import Variant
from buildtool.progress import Say
from buildtool.shipped import CATALOG, lock_file, state_directory
from probes.shared.output import option

_VARIANT = "{variant}"
_BASELINE = {"amd64": "v1", "arm64": "v8"}  # the variants that every processor of an architecture runs


def add_choices(parser: argparse.ArgumentParser) -> None:
    """The arguments that name variants, where they are described, and the cards that an image is for."""
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="images to build, by their names in the catalog (default: the catalog's list `default`)",
    )
    parser.add_argument(
        "--catalog",
        type=Path,
        default=CATALOG,
        metavar="FILE",
        help="catalog of images (default: the images/variants.yaml that comes with weir)",
    )
    option(
        parser,
        "--targets",
        "GFX[,GFX...]",
        "cards to keep GPU code for, e.g. gfx906 (default: this machine's AMD cards; without one, the "
        "catalog's list)",
    )


def chosen_targets(asked: str | None, say: Say) -> tuple[bool, tuple[str, ...]]:
    """Whether targets were asked for, and the targets: those, else this host's cards, else none."""
    if asked is not None:
        return True, tuple(map(str, parse_targets(asked)))
    cards = host.amd_targets()
    if cards:
        say(f"this machine's cards: {', '.join(cards)}")
    return False, cards


@dataclass(frozen=True)
class Wanted:
    """What a command asks for, and what of the catalog it needs besides."""

    by_name: bool  # whether cards were asked for by name
    candidates: list[list[Variant]]  # for each image, best first
    epoch: int  # of the catalog
    every: tuple[Variant, ...]  # variant that the catalog has


def wanted(args: argparse.Namespace, say: Say) -> Wanted:
    """The variants that the arguments name.

    A variant is built for the cards asked for, else for this machine's, else for those of the catalog.
    Raises ConfigError for a name that the catalog doesn't have.
    """
    asked, cards = chosen_targets(args.targets, say)
    found = catalog.load(args.catalog)  # once: it may be a pipe, and change while it is read
    choices = [found.for_cards(cards)] if asked else [found.for_cards(cards), found]
    each = zip(*(choice.select(tuple(args.variants)) for choice in choices), strict=True)
    candidates = [list(dict.fromkeys(variants)) for variants in each]
    return Wanted(asked, candidates, found.source_date_epoch, found.variants)


def workplace(say: Say, catalog: Path = CATALOG, *, verbose: bool = False) -> Workplace:
    """Where builds keep their caches and a catalog's lock: see `buildtool.shipped`."""
    return Workplace(state_directory(), lock_file(catalog), say, verbose)


def more_names(
    tags: Sequence[str], variants: Sequence[Variant], every: Sequence[Variant]
) -> dict[str, tuple[Reference, ...]]:
    """The names that each variant's image gets besides its own; `{variant}` in one means the variant's name.

    `every` variant of the catalog keeps its own name, whether it is built now or not. Raises ConfigError for
    what no image can be called, and for a name that two images would get.
    """
    named = {variant.name: _own_names(variant, tags) for variant in variants}
    kept = {parse_new_name(variant.ref).canonical: variant.name for variant in every}
    owners: dict[str, str] = {}
    for variant, names in named.items():
        for name in names:
            if kept.get(name.canonical, variant) != variant:
                raise ConfigError(
                    f"--tag would give {variant} the name {name}, which is that of the variant "
                    f"{kept[name.canonical]}",
                    f"choose another name: --tag HOST/{_VARIANT}:1.0",
                )
            if owners.setdefault(name.canonical, variant) != variant:
                raise ConfigError(
                    f"--tag would give the name {name} to two images: {owners[name.canonical]} and {variant}",
                    f"build one of them, or write {_VARIANT} in the name: --tag HOST/{_VARIANT}:1.0",
                )
    return named


def _own_names(variant: Variant, tags: Sequence[str]) -> tuple[Reference, ...]:
    """Each name once, no matter in how many ways it is written."""
    names = (parse_new_name(tag.replace(_VARIANT, variant.name)) for tag in tags)
    return tuple({name.canonical: name for name in names}.values())


def require_platform(asked: str, engine_machine: str) -> None:
    """Refuse to build for a platform other than this host's. Raises ConfigError.

    Programs on this host make the base, choose the wheels and prove the image, and the engine has to run it.
    `engine_machine` is the engine's name for its processor (`x86_64`), empty when it isn't known yet.
    """
    here, wish = host_platform(), parse_platform(asked)
    plain = wish.variant in ("", _BASELINE.get(here.architecture))
    if not (wish.resembles(here) and plain):
        raise ConfigError(
            f"can't build for {wish}: bases, wheels and proofs are made on this host, which is {here}",
            f"run this on a {wish} machine, and push from there; or leave --platform out",
        )
    if engine_machine not in ("", platform.machine()):
        raise ConfigError(
            f"can't build for {wish}: the engine is on another machine, of type {engine_machine}",
            f"use an engine on {here}: see `docker context ls`",
        )
