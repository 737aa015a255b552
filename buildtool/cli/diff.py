"""`weir diff A B`: two images side by side, and what differs between them."""

import argparse
from pathlib import Path

from buildtool.audit.audit import audit_source, require_source
from buildtool.audit.diff import DIFF_FORMATS, diff, render_diff_markdown
from buildtool.audit.options import AuditOptions
from buildtool.core.errors import ConfigError, Exit
from buildtool.core.files import path_or_name, refuse_overwriting, write_text
from probes.core.output import flag, option, write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    what = "image in the engine, archive, layout directory or saved JSON report"
    parser.add_argument("before", type=path_or_name, metavar="A", help=what)
    parser.add_argument(
        "after",
        type=path_or_name,
        metavar="B",
        help="image, archive, layout directory or saved report to compare with A",
    )
    option(parser, "--markdown", "FILE", "write the difference as Markdown", Path)
    parser.add_argument(
        "--format",
        choices=tuple(DIFF_FORMATS),
        default="table",
        help="what to print (default: %(default)s)",
    )
    flag(parser, "--no-pull", "fail if the engine doesn't have an image, instead of pulling it")
    option(parser, "--top", "N", "rows of each list", int, default=15)


def run(args: argparse.Namespace) -> int:
    """Compare two images; a difference isn't a failure."""
    if args.top < 0:
        raise ConfigError(f"--top {args.top} is not a count", "write 0 or more")
    if args.markdown:
        refuse_overwriting([args.markdown], inputs=[args.before, args.after])
    for name in (args.before, args.after):
        require_source(name)
    before, after = (
        audit_source(name, AuditOptions(), pull=not args.no_pull) for name in (args.before, args.after)
    )
    difference = diff(before, after)
    if args.markdown:
        write_text(args.markdown, render_diff_markdown(difference))
    write(DIFF_FORMATS[args.format](difference, args.top))
    return int(Exit.OK)
