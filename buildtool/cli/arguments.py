"""The arguments that several verbs share, and what the catalog makes of them.

Which image a source is; variants by name, the cards that they are for, the names that finished images get,
the platform.
"""

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buildtool.core.errors import ConfigError
from buildtool.core.model import Variant
from buildtool.core.progress import Progress
from buildtool.core.shipped import CATALOG
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.gpucode.target import parse_targets, target_of_override
from buildtool.image.reader import host_platform, parse_platform
from probes.core.output import flag, option

_VARIANT = "{variant}"  # in a --tag: the variant's name
_BASELINE = {"amd64": "v1", "arm64": "v8"}  # the CPU variants that every processor of an architecture runs


@dataclass(frozen=True)
class BuildOptions:
    """The images that a command line names, and what else of the catalog a build needs."""

    targets_given: bool  # whether the cards were named with --targets
    candidates: list[list[Variant]]  # for each image: the same variant for different cards, best first
    epoch: int  # the catalog's SOURCE_DATE_EPOCH
    all_variants: tuple[Variant, ...]  # of the catalog, also those that aren't built


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which image a source is: --no-pull, --image and --platform."""
    flag(parser, "--no-pull", "fail if the engine doesn't have the image, instead of pulling it")
    option(parser, "--image", "REF", "which image of an archive that holds several")
    option(parser, "--platform", "OS/ARCH", "which platform of an image for several (default: this host's)")


def add_variant_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the names of variants, --catalog and --targets."""
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
        "cards to keep GPU code for, e.g. gfx906 (default: this machine's cards; without one, the "
        "catalog's list)",
    )


def add_container_arguments(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Add --env and --volume of containers that a workload uses."""
    for name, metavar, what in (
        ("--env", "NAME=VALUE", "variable of the container; given twice, it means a run with each value"),
        ("--volume", "HOST:PLACE[:ro]", "directory or file of the host in the container; may be repeated"),
    ):
        parser.add_argument(name, metavar=metavar, action="append", default=[], help=f"{when}{what}")


def build_options(args: argparse.Namespace, progress: Progress) -> BuildOptions:
    """Look the arguments of `add_variant_arguments` up in the catalog.

    A variant is built for the cards of --targets, else for this machine's, else for those of the catalog.
    Raises ConfigError for a name that the catalog doesn't have.
    """
    from buildtool.build.catalog import load  # the verbs that read no catalog need no YAML

    given = args.targets is not None
    catalog = load(args.catalog)  # once: it may be a pipe, and change while it is read
    by_card = any(variant.gpu_targets for variant in catalog.select(tuple(args.variants)))
    targets = chosen_targets(args.targets, progress) if given or by_card else ()
    choices = [catalog.for_cards(targets, asked=given), *([] if given else [catalog])]
    each = zip(*(choice.select(tuple(args.variants)) for choice in choices), strict=True)
    candidates = [list(dict.fromkeys(variants)) for variants in each]
    return BuildOptions(given, candidates, catalog.source_date_epoch, catalog.variants)


def chosen_targets(given: str | None, progress: Progress) -> tuple[str, ...]:
    """The GPU targets of --targets, else of this machine's cards; none where it has none."""
    if given is not None:
        return tuple(map(str, parse_targets(given)))
    cards = (*amd_targets(), *nvidia_targets())
    if cards:
        progress(f"this machine's cards: {', '.join(cards)}")
    return cards


def amd_targets(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The targets of this host's AMD cards by the KFD topology, each once: `gfx906`. None without cards.

    With HSA_OVERRIDE_GFX_VERSION set, they are the target that it names. Old kernels don't report a
    card's target. Raises BadTarget when the variable isn't a version.
    """
    if not (root / "sys/class/kfd").exists():
        return ()
    from probes.hardware.sysfs import kfd_targets  # a rebuild needs no card, and saves 40 ms

    targets = kfd_targets(root)
    override = env.get("HSA_OVERRIDE_GFX_VERSION")
    if targets and override:
        return (str(target_of_override(override)),)
    return targets


def nvidia_targets() -> tuple[str, ...]:
    """The targets of this host's NVIDIA cards by NVML, each once: `sm_90`. None without cards."""
    from probes.hardware.nvml import Nvml, open_nvml

    nvml = open_nvml()
    cards = nvml.cards() if isinstance(nvml, Nvml) else ()
    return tuple(dict.fromkeys(card.target for card in cards if isinstance(card.target, str)))


def extra_names(
    tags: Sequence[str], variants: Sequence[Variant], all_variants: Sequence[Variant]
) -> dict[str, tuple[Reference, ...]]:
    """The names of --tag for each variant's image, by variant; `{variant}` in one means the variant's name.

    No image may get the own name of another of `all_variants`, whether that is built now or not. Raises
    ConfigError for what no image can be called, and for a name that two images would get.
    """
    extra = {variant.name: _names_of(variant, tags) for variant in variants}
    kept = {parse_new_name(variant.ref).canonical: variant.name for variant in all_variants}
    owners: dict[str, str] = {}
    for variant, names in extra.items():
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
    return extra


def _names_of(variant: Variant, tags: Sequence[str]) -> tuple[Reference, ...]:
    """The names of --tag for one variant, each once however it is written."""
    names = (parse_new_name(tag.replace(_VARIANT, variant.name)) for tag in tags)
    return tuple({name.canonical: name for name in names}.values())


def require_platform(text: str, engine_machine: str) -> None:
    """Refuse to build for a platform other than this host's. Raises ConfigError.

    Programs on this host make the base, choose the wheels and prove the image, and the engine has to run it.
    `engine_machine` is the engine's name for its processor (`x86_64`), empty when it isn't known yet.
    """
    here, wanted = host_platform(), parse_platform(text)
    plain = wanted.variant in ("", _BASELINE.get(here.architecture))
    if not (wanted.resembles(here) and plain):
        raise ConfigError(
            f"can't build for {wanted}: bases, wheels and proofs are made on this host, which is {here}",
            f"run this on a {wanted} machine, and push from there; or leave --platform out",
        )
    if engine_machine not in ("", platform.machine()):
        raise ConfigError(
            f"can't build for {wanted}: the engine is on another machine, of type {engine_machine}",
            f"use an engine on {here}: see `docker context ls`",
        )
