"""`weir audit IMAGE|ARCHIVE|DIRECTORY|REPORT`: where bytes are, and what to do about them."""

import argparse
from dataclasses import replace
from pathlib import Path

from buildtool.audit.audit import audit_source
from buildtool.audit.baseline import Comparison, compare, parse_tolerance
from buildtool.audit.formats import FILE_FORMATS, STDOUT_FORMATS, render
from buildtool.audit.options import AuditOptions, RenderOptions
from buildtool.audit.report import Verdict, read_report
from buildtool.audit.text import verdict_lines
from buildtool.cli.arguments import add_source_arguments, amd_targets
from buildtool.core.errors import ConfigError, Exit
from buildtool.core.files import path_or_name, refuse_overwriting, write_text
from buildtool.core.model import Budget, parse_size
from buildtool.gpucode.source import BadTarget
from buildtool.image.errors import LIMITS
from buildtool.image.reader import parse_platform
from buildtool.keep.keep_list import read_keep_list
from probes.core.output import error, flag, option, paint, write

_ROWS = 10  # of each list, unless --top says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "source",
        type=path_or_name,
        metavar="IMAGE|ARCHIVE|LAYOUT-DIR|REPORT.json",
        help="image by name, docker save archive, OCI layout directory, or a saved report to show again",
    )
    for name, row in FILE_FORMATS.items():
        parser.add_argument(f"--{name}", metavar="FILE", type=Path, help=f"write the report as {row.summary}")
    parser.add_argument(
        "--format",
        choices=tuple(STDOUT_FORMATS),
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
    flag(parser, "--all", "print every section of the report, not only the five lines of the answer")
    option(parser, "--top", "N", "rows of each list; implies --all (default: 10)", int)
    add_source_arguments(parser)
    option(
        parser,
        "--keep",
        "FILE",
        "show what each package ships against what this keep-list of weir observe has of it",
        Path,
    )
    option(
        parser,
        "--max-unpacked",
        "SIZE",
        "read up to this much of an archive, however small it is (default: 100 times its size or 1 GiB, "
        "of one layer 100 times its size or 16 GiB; at most 256 GiB)",
    )
    option(
        parser,
        "--memory",
        "SIZE",
        "memory for the list of files (default: 200 MiB, enough for about 600,000 files)",
    )


def run(args: argparse.Namespace) -> int:
    """Audit one image; exit 1 when it is over its budget, or worse than its baseline."""
    options = _audit_options(args)
    tolerance = parse_tolerance(args.tolerance)
    files = {name: getattr(args, name) for name in FILE_FORMATS if getattr(args, name)}
    refuse_overwriting(
        list(files.values()), inputs=[args.source, args.baseline] if args.baseline else [args.source]
    )
    baseline = read_report(args.baseline) if args.baseline else None
    report = audit_source(args.source, options, pull=not args.no_pull)
    comparison = None
    if baseline:
        comparison = compare(baseline, report, label=str(args.baseline), tolerance=tolerance)
    for name, path in files.items():
        write_text(path, render(report, name, RenderOptions(comparison=comparison)))
    write(render(report, args.format, _render_options(args, comparison)))
    for line in verdict_lines(report, comparison, baseline=str(args.baseline)):
        error(line)
    worse = comparison is not None and bool(comparison.regressions)
    return int(Exit.FINDINGS if worse or report.budget.verdict is Verdict.FAIL else Exit.OK)


def _render_options(args: argparse.Namespace, comparison: Comparison | None) -> RenderOptions:
    top = _ROWS if args.top is None else args.top
    all_sections = args.all or args.top is not None or args.keep is not None
    return RenderOptions(top, comparison, all_sections=all_sections, paint=paint)


def _audit_options(args: argparse.Namespace) -> AuditOptions:
    limits = replace(LIMITS, index_bytes=parse_size(args.memory)) if args.memory else LIMITS
    if args.max_unpacked:
        most = parse_size(args.max_unpacked)
        limits = replace(limits, unpacked_bytes=most, unpacked_free_bytes=most)
    targets = tuple(name for word in args.targets for name in word.replace(";", ",").split(",") if name)
    if args.targets and not targets:
        raise ConfigError("--targets names no card", "write one such as gfx1100, or leave --targets out")
    if args.top is not None and args.top < 0:
        raise ConfigError(f"--top {args.top} is not a count", "write 0 or more")
    return AuditOptions(
        budget=Budget(
            parse_size(args.budget_unpacked) if args.budget_unpacked else None,
            parse_size(args.budget_stored) if args.budget_stored else None,
        ),
        targets=targets,
        all_needed=bool(targets),
        host_cards=_host_cards(),
        image=args.image,
        platform=parse_platform(args.platform) if args.platform else None,
        top=max(args.top or 0, AuditOptions.top),
        limits=limits,
        keep=read_keep_list(args.keep) if args.keep else None,
    )


def _host_cards() -> tuple[str, ...]:
    """This host's AMD cards; none where HSA_OVERRIDE_GFX_VERSION is no version: remedies only name them."""
    try:
        return amd_targets()
    except BadTarget:
        return ()
