"""The verbs that write a saved report in another form: `show`, `html`, `compare`, `prometheus`, `schema`.

What each does for a kind of report is in `probes.reports.kinds`, which a verb imports when it runs.
"""

import argparse
import os
from pathlib import Path

from probes.cli.arguments import PLACE, Verbs, add_verb
from probes.core import files
from probes.core.errors import Exit, UsageError
from probes.core.output import echo, flag, option, write
from probes.records.files import reserving, writing

ANY_REPORT = "JSON report of run, throughput, watch, fit or epochs"
COMPARED = "run, throughput"  # whose reports have metrics and can be compared
WITH_SCHEMA = ("report", "plan", "cards", "throughput", "watch", "fit", "epochs")


def add_verbs(verbs: Verbs) -> None:
    """Add the verbs and their arguments."""
    show = add_verb(verbs, "show", "print a saved report as tables")
    show.add_argument("file", type=Path, metavar="FILE", help=ANY_REPORT)
    flag(show, "--markdown", "print Markdown, to paste into an issue")
    show.set_defaults(do=_show)
    page = add_verb(
        verbs, "html", "write a report as one HTML page with plots and tables, which opens offline"
    )
    page.add_argument("report", type=Path, metavar="FILE", help=ANY_REPORT)
    option(page, "--out", "FILE.html", "page to write (default: next to FILE, as .html)", Path)
    page.set_defaults(do=_html)
    two = add_verb(
        verbs,
        "compare",
        "compare two reports of run or throughput, or those of many machines; prints Markdown",
    )
    two.add_argument("a", type=Path, metavar="A", help="the earlier report")
    two.add_argument("b", type=Path, metavar="B", help="the later report")
    two.add_argument(
        "more", nargs="*", type=Path, metavar="MORE", help="reports of run of further machines: which is odd?"
    )
    flag(two, "--force", "compare even if machines or settings differ")
    option(two, "--html", "FILE", "page to write, for three reports or more (default: none)", Path)
    two.set_defaults(do=_compare)
    metrics = add_verb(verbs, "prometheus", "print a report's figures in Prometheus' text format")
    metrics.add_argument("report", type=Path, metavar="FILE", help="JSON report of run or throughput")
    metrics.set_defaults(do=_prometheus)
    schema = add_verb(verbs, "schema", "print the JSON Schema of a report or a plan")
    schema.add_argument(
        "of",
        nargs="?",
        choices=WITH_SCHEMA,
        default="report",
        help="kind of file; report: what run writes (default: %(default)s)",
    )
    schema.set_defaults(do=_schema)


def refusal(path: Path) -> str:
    """Why a file holds no report that the verbs here can read; empty where it does."""
    from probes.core.errors import ReportError
    from probes.reports.kinds import load_report

    try:
        load_report(path)
    except (ReportError, OSError) as error:
        return error.message if isinstance(error, ReportError) else str(error)
    return ""


def _show(args: argparse.Namespace) -> Exit:
    from probes.reports.kinds import load_report

    loaded = load_report(args.file)
    text = loaded.kind.text(loaded.report, markdown=args.markdown)
    if args.markdown:
        write(text + "\n")
    else:
        echo(text)
    return Exit.OK


def _html(args: argparse.Namespace) -> Exit:
    from probes.reports.kinds import load_report

    source: Path = args.report
    loaded = load_report(source)
    if args.out is None and not source.is_file():
        raise UsageError(f"a page can't be written beside {source}", "name it: --out FILE.html")
    out: Path = args.out or source.with_suffix(".html")
    if os.path.realpath(out) == os.path.realpath(source):
        raise UsageError(f"the page would replace {source}", "choose another file: --out FILE.html")
    with reserving(out, PLACE) as place:  # an unwritable file is reported before seconds of drawing
        page = loaded.kind.page(loaded.report, raw=loaded.raw, name=source.name)
        with writing(out, PLACE):
            files.write_text(place or out, page)
    echo(f"wrote {out}")
    return Exit.OK


def _compare(args: argparse.Namespace) -> Exit:
    from probes.reports.kinds import compared, fleet, load_report

    if args.more:
        markdown, page = fleet([args.a, args.b, *args.more])
        write(markdown)
        if args.html:
            with writing(args.html, PLACE):
                files.write_text(args.html, page)
        return Exit.OK
    if args.html:
        raise UsageError("two reports have no page", "leave --html out, or name three reports or more")
    a, b = (load_report(path, makers=COMPARED) for path in (args.a, args.b))
    write(compared(a, b, (args.a, args.b), force=args.force))
    return Exit.OK


def _prometheus(args: argparse.Namespace) -> Exit:
    from probes.reports.kinds import load_report, metrics_of

    write(metrics_of(load_report(args.report, makers=COMPARED), args.report))
    return Exit.OK


def _schema(args: argparse.Namespace) -> Exit:
    from probes.reports.kinds import SCHEMAS

    write(SCHEMAS[args.of]())
    return Exit.OK
