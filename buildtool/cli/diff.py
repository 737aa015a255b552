"""`weir diff A B`: two images side by side, and what differs between them."""

import argparse
from pathlib import Path

from buildtool.audit.audit import audit_source, require_source
from buildtool.audit.diff import diff, render_diff_markdown, render_diff_table
from buildtool.audit.diff_json import render_diff_json
from buildtool.audit.options import AuditOptions
from buildtool.core.errors import ConfigError, Exit
from buildtool.core.files import path_or_name, refuse_overwriting, write_text
from probes.core.output import flag, option, write

_FORMATS = {"table": render_diff_table, "json": render_diff_json, "markdown": render_diff_markdown}
_PRINT = Path("-")


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
    parser.add_argument(
        "--json",
        nargs="?",
        const=_PRINT,
        type=Path,
        metavar="FILE",
        help="write the difference as JSON, with all rows; without FILE, print it (as --format json does)",
    )
    option(parser, "--markdown", "FILE", "write the difference as Markdown", Path)
    parser.add_argument(
        "--format",
        choices=tuple(_FORMATS),
        default="table",
        help="what to print (default: %(default)s)",
    )
    flag(parser, "--no-pull", "fail if the engine doesn't have an image, instead of pulling it")
    option(parser, "--top", "N", "rows of each list", int, default=15)


def run(args: argparse.Namespace) -> int:
    """Compare two images; a difference isn't a failure."""
    if args.top < 0:
        raise ConfigError(f"--top {args.top} is not a count", "write 0 or more")
    prints_json = args.json == _PRINT
    files = {
        name: path
        for name, path in (("json", args.json), ("markdown", args.markdown))
        if path not in (None, _PRINT)
    }
    if prints_json and args.format == "markdown":
        raise ConfigError(
            "--json prints JSON and --format markdown Markdown: both go to standard output",
            "give one of them a file: --json FILE, or --markdown FILE",
        )
    refuse_overwriting(list(files.values()), inputs=[args.before, args.after])
    for name in (args.before, args.after):
        require_source(name)
    before, after = (
        audit_source(name, AuditOptions(), pull=not args.no_pull) for name in (args.before, args.after)
    )
    difference = diff(before, after)
    if "json" in files:
        write_text(files["json"], render_diff_json(difference))
    if "markdown" in files:
        write_text(files["markdown"], render_diff_markdown(difference))
    write(_FORMATS["json" if prints_json else args.format](difference, args.top))
    return int(Exit.OK)
