"""`weir audit IMAGE|ARCHIVE|DIRECTORY|REPORT`: where bytes are, and what to do about them."""

import argparse
from dataclasses import replace
from pathlib import Path

from buildtool.audit.audit import Wish
from buildtool.audit.baseline import Comparison, compare, parse_tolerance
from buildtool.audit.budget import Verdict
from buildtool.audit.html import render_html
from buildtool.audit.junit import render_junit
from buildtool.audit.report import AuditReport, read_report, to_json
from buildtool.audit.sarif import render_sarif
from buildtool.audit.subject import report_of
from buildtool.audit.text import render_markdown, render_table, verdict_lines
from buildtool.core.errors import ConfigError, Exit
from buildtool.core.files import path_or_name, refuse_overwriting, write_text
from buildtool.core.model import Budget, parse_size
from buildtool.image.faults import LIMITS
from buildtool.image.image import parse_platform
from probes.core.output import error, flag, option, write

_FORMS = {
    "json": "JSON",
    "markdown": "Markdown",
    "html": "one HTML file: a map to zoom, searchable lists",
    "sarif": "SARIF 2.1.0",
    "junit": "JUnit XML",
}
_PAGES = {"html": render_html, "sarif": render_sarif, "junit": render_junit}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "source",
        type=path_or_name,
        metavar="IMAGE|ARCHIVE|LAYOUT-DIR|REPORT.json",
        help="image by name, docker save archive, OCI layout directory, or a saved report to show again",
    )
    for form, summary in _FORMS.items():
        parser.add_argument(f"--{form}", metavar="FILE", type=Path, help=f"write the report as {summary}")
    parser.add_argument(
        "--format",
        choices=("table", *(form for form in _FORMS if form != "html")),
        default="table",
        help="what to print (default: %(default)s)",
    )
    option(parser, "--baseline", "REPORT.json", "exit with 1 if worse than this saved report", Path)
    tolerated = "growth since the baseline to accept, e.g. '2%%' or '5 MB'"
    option(parser, "--tolerance", "SHARE|SIZE", tolerated, default="1%")
    option(parser, "--budget-unpacked", "SIZE", "exit with 1 if the files take more than this, e.g. '1.0 GB'")
    option(parser, "--budget-stored", "SIZE", "exit with 1 if the compressed layers take more than this")
    parser.add_argument(
        "--targets",
        metavar="GFX[,GFX...]",
        action="append",
        default=[],
        help="GPUs that the image is for, e.g. gfx906 or sm_89; may be repeated (default: the image's label)",
    )
    option(parser, "--top", "N", "rows of each list", int, default=10)
    flag(parser, "--no-pull", "fail if the engine doesn't have the image, instead of pulling it")
    option(parser, "--image", "REF", "which image of an archive that holds several")
    option(parser, "--platform", "OS/ARCH", "which platform of an image for several (default: this host's)")
    option(
        parser,
        "--max-unpacked",
        "SIZE",
        "read up to this much of an archive, however small it is (default: 100 times its size or 1 GiB, "
        "at most 256 GiB)",
    )
    option(
        parser,
        "--memory",
        "SIZE",
        "memory for the list of files (default: 200 MiB, enough for about 600,000 files)",
    )


def run(args: argparse.Namespace) -> int:
    """Audit one image; exit 1 when it is over its budget, or worse than its baseline."""
    wish = _wish(args)
    tolerance = parse_tolerance(args.tolerance)
    refuse_overwriting(
        [getattr(args, form) for form in _FORMS if getattr(args, form)],
        inputs=[args.source, args.baseline] if args.baseline else [args.source],
    )
    earlier = read_report(args.baseline) if args.baseline else None
    report = report_of(args.source, wish, pull=not args.no_pull)
    comparison = compare(earlier, report, label=str(args.baseline), tolerance=tolerance) if earlier else None
    for form in _FORMS:
        if getattr(args, form):
            write_text(getattr(args, form), _rendered(report, comparison, form, top=20))
    write(_rendered(report, comparison, args.format, args.top))
    for line in verdict_lines(report, comparison, baseline=str(args.baseline)):
        error(line)
    worse = comparison is not None and bool(comparison.regressions)
    return int(Exit.FINDINGS if worse or report.budget.verdict is Verdict.FAIL else Exit.OK)


def _wish(args: argparse.Namespace) -> Wish:
    limits = replace(LIMITS, index_bytes=parse_size(args.memory)) if args.memory else LIMITS
    if args.max_unpacked:
        most = parse_size(args.max_unpacked)
        limits = replace(limits, unpacked_bytes=most, unpacked_free_bytes=most)
    targets = tuple(name for word in args.targets for name in word.replace(";", ",").split(",") if name)
    if args.targets and not targets:
        raise ConfigError("--targets names no card", "write one such as gfx1100, or leave --targets out")
    if args.top < 0:
        raise ConfigError(f"--top {args.top} is not a count", "write 0 or more")
    return Wish(
        budget=Budget(
            parse_size(args.budget_unpacked) if args.budget_unpacked else None,
            parse_size(args.budget_stored) if args.budget_stored else None,
        ),
        targets=targets,
        image=args.image,
        platform=parse_platform(args.platform) if args.platform else None,
        top=max(args.top, Wish.top),
        limits=limits,
    )


def _rendered(report: AuditReport, comparison: Comparison | None, form: str, top: int) -> str:
    if form in _PAGES:
        return _PAGES[form](report, comparison)
    if form == "json":
        return to_json(report)
    return (render_markdown if form == "markdown" else render_table)(report, top, comparison)
