"""`buildtool build`: what `make images` does, from variants.yaml to proved images and their audit."""

import argparse
from pathlib import Path

from buildtool.builder import pipeline, summary
from buildtool.builder.choices import add_targets, require_platform, wanted, workplace
from buildtool.engine import provision
from buildtool.errors import Exit
from buildtool.progress import Progress
from buildtool.shipped import IMAGES
from probes.shared.output import tell

REPORTS = Path("reports/images")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="variants in variants.yaml (default: its list `default`)",
    )
    parser.add_argument("--catalog", type=Path, default=IMAGES / "variants.yaml", metavar="FILE")
    add_targets(parser)
    parser.add_argument("--update-lock", action="store_true", help="resolve every input again")
    parser.add_argument("--no-cache", action="store_true", help="build every layer again")
    parser.add_argument("--no-audit", action="store_true", help="stop after the proof")
    parser.add_argument(
        "--reports", type=Path, default=REPORTS, metavar="DIR", help="where audits go (%(default)s)"
    )
    parser.add_argument(
        "--platform",
        metavar="OS/ARCH",
        help="refuse to build for another one (only this host's can be built)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="every line of BuildKit, pip, mmdebstrap and apt, not a choice"
    )
    parser.add_argument("--yes", action="store_true", help="install a missing engine without asking")


def run(args: argparse.Namespace) -> int:
    """Build, prove, audit; 1 when an image is over its budget."""
    with Progress() as progress:
        return int(_build(args, progress))


def _build(args: argparse.Namespace, progress: Progress) -> Exit:
    say = progress.say
    asked, candidates, epoch = wanted(args, say)  # a wrong name is reported before an engine is installed
    if args.platform:
        require_platform(args.platform, "")
    place = workplace(say, verbose=args.verbose)
    engine = provision.ensure_engine(say, assume_yes=args.yes, verbose=args.verbose)
    if args.platform:
        require_platform(args.platform, engine.info().machine)
    with place.alone():
        plan = pipeline.make_plan(
            place, candidates, engine=engine, epoch=epoch, update_lock=args.update_lock, asked=asked
        )
        pipeline.stage(place, plan)
        images = pipeline.bake(plan, engine=engine, say=say, no_cache=args.no_cache, verbose=args.verbose)
    both = list(zip(plan.images, images, strict=True))
    proofs = [pipeline.prove(place, planned, image, engine) for planned, image in both]
    for (planned, image), proved in zip(both, proofs, strict=True):
        pipeline.record(planned, image, proved, args.reports)
    tell(summary.built(plan.images, images, proofs))
    if args.no_audit:
        return Exit.OK
    rows = [pipeline.audited(place, planned, image, engine, args.reports) for planned, image in both]
    pages = ", ".join(str(args.reports / f"{planned.variant.name}.html") for planned in plan.images)
    tell(f"\n{summary.audited(rows)}\nwhere the bytes are, as a map for a browser: {pages}")
    say(f"reports are in {args.reports}/; done in {progress.seconds:.1f} s")
    return Exit.FINDINGS if any(row.verdict == "fail" for row in rows) else Exit.OK
