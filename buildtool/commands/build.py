"""`buildtool build`: what `make images` does, from variants.yaml to proved images and their audit."""

import argparse
from pathlib import Path

from buildtool import catalog, host, pipeline, provision, table
from buildtool.engine import Engine
from buildtool.errors import Exit
from buildtool.gpucode.target import parse_targets
from buildtool.model import Catalog
from buildtool.plan import Target
from buildtool.progress import Progress
from buildtool.pruned import CardsUnserved
from buildtool.shipped import IMAGES, lock_file, state_directory
from probes.output import tell

REPORTS = Path("reports/images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "variants", nargs="*", metavar="VARIANT", help="as variants.yaml names them; none: its default"
    )
    parser.add_argument("--catalog", type=Path, default=IMAGES / "variants.yaml", metavar="FILE")
    add_targets(parser)
    parser.add_argument("--update-lock", action="store_true", help="resolve every input afresh")
    parser.add_argument("--no-cache", action="store_true", help="build every layer anew")
    parser.add_argument("--no-audit", action="store_true", help="stop after the proof")
    parser.add_argument(
        "--reports", type=Path, default=REPORTS, metavar="DIR", help="where audits go (%(default)s)"
    )
    parser.add_argument("--yes", action="store_true", help="install a missing engine without asking")


def run(args: argparse.Namespace) -> int:
    """Build, prove, audit; 1 when an image is over its budget."""
    with Progress() as progress:
        return int(_build(args, progress))


def _build(args: argparse.Namespace, progress: Progress) -> Exit:
    say = progress.say
    targets_asked, gpu_targets = chosen_targets(args.targets, say)
    chosen = catalog.load(args.catalog, gpu_targets=gpu_targets)
    chosen.select(tuple(args.variants))  # a wrong name is told before an engine is installed
    place = workplace(say)
    engine = provision.ensure_engine(say, assume_yes=args.yes)
    with place.alone():
        targets = _targets(args, place, engine, chosen, gpu_targets=gpu_targets, targets_asked=targets_asked)
        images = pipeline.build(
            targets, engine=engine, epoch=chosen.source_date_epoch, say=say, no_cache=args.no_cache
        )
    proofs = [pipeline.prove(place, t, image, engine) for t, image in zip(targets, images, strict=True)]
    for target, image, proved in zip(targets, images, proofs, strict=True):
        pipeline.record(target, image, proved, args.reports)
    tell(table.built(targets, images, proofs))
    if args.no_audit:
        return Exit.OK
    rows = [
        pipeline.audited(place, target, image, engine, args.reports)
        for target, image in zip(targets, images, strict=True)
    ]
    pages = ", ".join(str(args.reports / f"{target.variant.name}.html") for target in targets)
    tell(f"\n{table.audited(rows)}\nwhere the bytes are, as a map for a browser: {pages}")
    say(f"reports are in {args.reports}/; done in {progress.seconds:.1f} s")
    return Exit.FINDINGS if any(row.verdict == "fail" for row in rows) else Exit.OK


def _targets(
    args: argparse.Namespace,
    place: pipeline.Workplace,
    engine: Engine,
    chosen: Catalog,
    *,
    gpu_targets: tuple[str, ...],
    targets_asked: bool,
) -> list[Target]:
    """What to build, with its inputs; for the catalog's cards where a stack has no code for this host's."""

    def prepared(wanted: Catalog) -> list[Target]:
        return pipeline.prepare(
            place,
            wanted,
            wanted.select(tuple(args.variants)),
            engine=engine,
            update_lock=args.update_lock,
            targets_asked=targets_asked,
        )

    try:
        return prepared(chosen)
    except CardsUnserved as error:
        if targets_asked or not gpu_targets:
            raise
        place.say(f"{error.message}: building for the cards that {args.catalog.name} names")
        return prepared(catalog.load(args.catalog))


def add_targets(parser: argparse.ArgumentParser) -> None:
    """The argument that says which cards an image is for."""
    parser.add_argument(
        "--targets",
        metavar="GFX[,GFX...]",
        help="cards to keep GPU code for; not said: this machine's AMD cards, else what variants.yaml names",
    )


def chosen_targets(asked: str | None, say: pipeline.Say) -> tuple[bool, tuple[str, ...]]:
    """Whether targets were asked for, and the targets: those, else this host's cards, else none."""
    if asked is not None:
        return True, tuple(map(str, parse_targets(asked)))
    cards = host.amd_targets()
    if cards:
        say(f"this machine's cards: {', '.join(cards)}")
    return False, cards


def workplace(say: pipeline.Say) -> pipeline.Workplace:
    """Where builds keep their caches and their lock: `buildtool.shipped` says."""
    return pipeline.Workplace(state_directory(), lock_file(), say)
