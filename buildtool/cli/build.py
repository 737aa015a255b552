"""`weir build`: what `make images` does, from variants.yaml to proved images and their audit."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from buildtool.build import pipeline
from buildtool.build.plan import BuildPlan
from buildtool.build.workplace import Workplace, default_workplace
from buildtool.cli.arguments import (
    BuildOptions,
    add_variant_arguments,
    build_options,
    extra_names,
    require_platform,
)
from buildtool.core.errors import ConfigError, Exit
from buildtool.core.files import relative_to_cwd, require_writable
from buildtool.core.model import BuiltImage
from buildtool.core.progress import Progress, ProgressLog
from buildtool.core.shipped import reports_directory
from buildtool.engine import provision, registry
from buildtool.engine.client import Engine
from buildtool.engine.reference import Reference, parse_new_name
from probes.core.output import echo, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_variant_arguments(parser)
    flag(parser, "--update-lock", "look for newer inputs and pin them in the lock file")
    flag(parser, "--no-cache", "build every layer from nothing")
    flag(parser, "--no-audit", "don't audit the images")
    option(
        parser,
        "--reports",
        "DIR",
        "folder for the audits (default: reports/images of the checkout or, where weir was installed, of its "
        "state directory)",
        Path,
    )
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
    with ProgressLog() as log:
        return int(_build(args, log))


def _build(args: argparse.Namespace, log: ProgressLog) -> Exit:
    progress = log.line
    # a mistake in the command is reported before an engine is installed
    options = build_options(args, progress)
    extra = _extra_names(args, options)
    if args.platform:
        require_platform(args.platform, "")
    reports = args.reports or relative_to_cwd(reports_directory())
    require_writable(reports, "choose another directory for the reports: --reports DIR")
    workplace = default_workplace(progress, args.catalog, verbose=args.verbose)
    engine = provision.ensure_engine(progress, assume_yes=args.yes, verbose=args.verbose)
    if args.platform:
        require_platform(args.platform, engine.info().machine)
    with ExitStack() as held:
        plan, images = _bake(args, options, workplace, engine=engine, held=held)
        pairs = list(zip(plan.images, images, strict=True))
        proofs = [pipeline.prove(workplace, planned, image, engine) for planned, image in pairs]
        for (planned, image), proof in zip(pairs, proofs, strict=True):
            pipeline.record(planned, image, proof, reports)
        rows = (
            []
            if args.no_audit
            else [pipeline.audit(workplace, planned, image, engine, reports) for planned, image in pairs]
        )
        over_budget = {row.ref for row in rows if row.verdict == "fail"}
        own_names = [(image, (parse_new_name(image.ref),)) for image in images]
        others = [(image, extra[image.variant]) for image in images if image.ref not in over_budget]
        pipeline.name_all(workplace, [*own_names, *others], engine)
    echo(pipeline.built_text(plan.images, images, proofs))
    for image, names in others:
        for name in names:
            echo(f"{image.ref} is also {name}")
    if rows:
        pages = ", ".join(str(reports / f"{image.variant}.html") for image in images)
        echo(f"\n{pipeline.audited_text(rows)}\nwhere the bytes are, as a map for a browser: {pages}")
    if args.tag and over_budget:
        echo(f"no name of --tag was given to what is over its budget: {', '.join(sorted(over_budget))}")
    if args.push and over_budget:
        echo(f"nothing was pushed: {', '.join(sorted(over_budget))} over budget")
    elif args.push:
        _push(images, extra, engine=engine, progress=progress, verbose=args.verbose)
    where = "" if args.no_audit else f"reports are in {reports}/, "
    progress(f"{where}inputs are pinned in {relative_to_cwd(workplace.lock)}; done in {log.seconds:.1f} s")
    return Exit.FINDINGS if over_budget else Exit.OK


def _bake(
    args: argparse.Namespace, options: BuildOptions, workplace: Workplace, *, engine: Engine, held: ExitStack
) -> tuple[BuildPlan, list[BuiltImage]]:
    """The plan and its images, under temporary names that they have for as long as `held`."""
    with workplace.alone():
        plan = pipeline.make_plan(
            workplace,
            options.candidates,
            engine=engine,
            epoch=options.epoch,
            update_lock=args.update_lock,
            every_target=options.targets_given,
        )
        pipeline.stage(workplace, plan)
        prefix = held.enter_context(workplace.temporary_names(engine))
        images = pipeline.bake(
            plan,
            prefix,
            engine=engine,
            progress=workplace.progress,
            no_cache=args.no_cache,
            verbose=args.verbose,
        )
        return plan, images


def _extra_names(args: argparse.Namespace, options: BuildOptions) -> dict[str, tuple[Reference, ...]]:
    """The names of --tag by variant. Raises ConfigError for a --push without any."""
    variants = [candidates[0] for candidates in options.candidates]
    if args.push and not args.tag:
        own = parse_new_name(variants[0].ref)
        raise ConfigError(
            f"--push needs a name of yours to push: {own} would be {own.canonical}",
            "say where to: --push --tag REGISTRY/NAME:TAG",
        )
    return extra_names(args.tag, variants, options.all_variants)


def _push(
    images: Sequence[BuiltImage],
    names: Mapping[str, Sequence[Reference]],
    *,
    engine: Engine,
    progress: Progress,
    verbose: bool,
) -> None:
    """Push every name of every image, in order; the first that fails ends it, listed with the rest."""
    left = [(image.digest, name) for image in images for name in names[image.variant]]
    try:
        while left:
            built, name = left[0]
            progress(f"pushing {name}")
            digest = registry.push(built, name, engine=engine, progress=progress, verbose=verbose)
            echo(f"pushed {name}{f'@{digest}' if digest else ''}")
            del left[0]
    finally:
        if left:
            echo(f"not pushed: {', '.join(str(name) for _, name in left)}")
