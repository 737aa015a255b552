"""`buildtool build`: what `make images` does, from variants.yaml to proved images and their audit."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from buildtool.builder import pipeline, summary
from buildtool.builder.choices import Wanted, add_choices, more_names, require_platform, wanted, workplace
from buildtool.builder.plan import ImagePlan
from buildtool.builder.workplace import Workplace
from buildtool.engine import provision, registry
from buildtool.engine.client import Engine
from buildtool.engine.reference import Reference, parse_new_name
from buildtool.errors import ConfigError, Exit
from buildtool.files import require_writable
from buildtool.model import BuiltImage
from buildtool.progress import Progress, Say
from probes.shared.output import flag, option, tell

REPORTS = Path("reports/images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_choices(parser)
    flag(parser, "--update-lock", "look for newer inputs and pin them in the lock file")
    flag(parser, "--no-cache", "build every layer from nothing")
    flag(parser, "--no-audit", "don't audit the images")
    option(parser, "--reports", "DIR", "folder for the audits", Path, default=REPORTS)
    parser.add_argument(
        "--tag",
        metavar="NAME:TAG",
        action="append",
        default=[],
        help="another name for the finished image; {variant} in it means the variant's name; may be repeated",
    )
    flag(parser, "--push", "push the names of --tag, if no image is over its budget")
    option(parser, "--platform", "OS/ARCH", "refuse to build unless this is the host's platform")
    flag(
        parser,
        "--verbose",
        "print every line of BuildKit, pip, mmdebstrap and apt, not only the important ones",
    )
    flag(parser, "--yes", "install a missing engine without asking")


def run(args: argparse.Namespace) -> int:
    """Build, prove, audit; 1 when an image is over its budget."""
    with Progress() as progress:
        return int(_build(args, progress))


def _build(args: argparse.Namespace, progress: Progress) -> Exit:
    say = progress.say
    # a mistake in the command is reported before an engine is installed
    chosen = wanted(args, say)
    names = _names(args, chosen)
    if args.platform:
        require_platform(args.platform, "")
    require_writable(args.reports, "choose another directory for the reports: --reports DIR")
    place = workplace(say, verbose=args.verbose)
    engine = provision.ensure_engine(say, assume_yes=args.yes, verbose=args.verbose)
    if args.platform:
        require_platform(args.platform, engine.info().machine)
    with place.alone():
        plan = pipeline.make_plan(
            place,
            chosen.candidates,
            engine=engine,
            epoch=chosen.epoch,
            update_lock=args.update_lock,
            asked=chosen.by_name,
        )
        pipeline.stage(place, plan)
        images = pipeline.bake(plan, engine=engine, say=say, no_cache=args.no_cache, verbose=args.verbose)
    both = list(zip(plan.images, images, strict=True))
    proofs = [pipeline.prove(place, planned, image, engine) for planned, image in both]
    for (planned, image), proved in zip(both, proofs, strict=True):
        pipeline.record(planned, image, proved, args.reports)
    tell(summary.built(plan.images, images, proofs))
    for image in images:
        for name in names[image.variant]:
            engine.tag(image.digest, name)
            tell(f"{image.ref} is also {name}")
    heavy = [] if args.no_audit else _audit(args, place, both, engine)
    if args.push and heavy:
        tell(f"nothing was pushed: {', '.join(heavy)} over budget")
    elif args.push:
        _push(images, names, engine=engine, say=say, verbose=args.verbose)
    where = "" if args.no_audit else f"reports are in {args.reports}/; "
    say(f"{where}done in {progress.seconds:.1f} s")
    return Exit.FINDINGS if heavy else Exit.OK


def _audit(
    args: argparse.Namespace,
    place: Workplace,
    both: Sequence[tuple[ImagePlan, BuiltImage]],
    engine: Engine,
) -> list[str]:
    """Audit the images and write their reports; the names of those over their budget."""
    rows = [pipeline.audited(place, planned, image, engine, args.reports) for planned, image in both]
    pages = ", ".join(str(args.reports / f"{image.variant}.html") for _, image in both)
    tell(f"\n{summary.audited(rows)}\nwhere the bytes are, as a map for a browser: {pages}")
    return [row.ref for row in rows if row.verdict == "fail"]


def _names(args: argparse.Namespace, chosen: Wanted) -> dict[str, tuple[Reference, ...]]:
    """The names of --tag by variant. Raises ConfigError for a --push without any."""
    variants = [candidates[0] for candidates in chosen.candidates]
    if args.push and not args.tag:
        own = parse_new_name(variants[0].ref)
        raise ConfigError(
            f"--push needs a name of yours to push: {own} would be {own.canonical}",
            "say where to: --push --tag REGISTRY/NAME:TAG",
        )
    return more_names(args.tag, variants, chosen.every)


def _push(
    images: Sequence[BuiltImage],
    names: Mapping[str, Sequence[Reference]],
    *,
    engine: Engine,
    say: Say,
    verbose: bool,
) -> None:
    """Push every name of every image, in order; the first that fails ends it, listed with the rest."""
    left = [(image.digest, name) for image in images for name in names[image.variant]]
    try:
        while left:
            built, name = left[0]
            say(f"pushing {name}")
            digest = registry.push(built, name, engine=engine, say=say, verbose=verbose)
            tell(f"pushed {name}{f'@{digest}' if digest else ''}")
            del left[0]
    finally:
        if left:
            tell(f"not pushed: {', '.join(str(name) for _, name in left)}")
