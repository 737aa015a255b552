"""The verbs that write an earlier report in another form: `html`, `compare`, `prometheus`, `schema`.

Each imports what it needs when it runs: drawing takes matplotlib, which only the host has.
"""

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from probes.cli.arguments import PLACE, Verbs, add_verb
from probes.core import files
from probes.core.errors import Exit, LibraryMissing, ReportError, UsageError
from probes.core.invocation import probe_command
from probes.core.output import flag, hand_over, option, tell
from probes.core.quoting import markdown_block
from probes.records.files import reading, reserving, writing
from probes.records.schema import ProbeReport, named_report
from probes.records.watch import WatchReport
from probes.watch.recording import is_watch_file, named_watch

if TYPE_CHECKING:
    from probes.fit.report import FitReport
    from probes.throughput.document import ThroughputReport

    Report = ProbeReport | ThroughputReport | WatchReport | FitReport


ANY_REPORT = "JSON report of run, throughput, watch or fit"
ANY_MAKER, COMPARED = "run, throughput, watch, fit", "run, throughput"


def add_verbs(verbs: Verbs) -> None:
    """Add the verbs and their arguments."""
    page = add_verb(
        verbs, "html", "write a report as one HTML page with plots and tables, which opens offline"
    )
    page.add_argument("report", type=Path, metavar="FILE", help=ANY_REPORT)
    option(page, "--out", "FILE.html", "page to write (default: next to FILE, as .html)", Path)
    page.set_defaults(do=_html)
    two = add_verb(verbs, "compare", "compare two reports of run, or two of throughput; prints Markdown")
    two.add_argument("a", type=Path, metavar="A", help="the earlier report")
    two.add_argument("b", type=Path, metavar="B", help="the later report")
    flag(two, "--force", "compare even if machines or settings differ")
    two.set_defaults(do=_compare)
    metrics = add_verb(verbs, "prometheus", "print a report's figures in Prometheus' text format")
    metrics.add_argument("report", type=Path, metavar="FILE", help="JSON report of run or throughput")
    metrics.set_defaults(do=_prometheus)
    schema = add_verb(verbs, "schema", "print the JSON Schema of a report or a plan")
    schema.add_argument(
        "of",
        nargs="?",
        choices=("report", "plan", "cards", "throughput", "watch", "fit"),
        default="report",
        help="kind of file; report: what run writes (default: %(default)s)",
    )
    schema.set_defaults(do=_schema)


def shown(path: Path, *, markdown: bool) -> str:
    """A report of any kind as text or Markdown. Raises ReportError."""
    report, _ = _read(path)
    if isinstance(report, WatchReport):
        from probes.reports.watch import report_lines

        text = "\n".join(report_lines(report))
        return markdown_block(text) if markdown else text
    from probes.fit.report import FitReport

    if isinstance(report, FitReport):
        from probes.reports.fit import lines

        text = lines(report)
        return markdown_block(text) if markdown else text
    if isinstance(report, ProbeReport):
        from probes.reports.text import render

        return render(report, markdown=markdown)
    from probes.reports.scan import render_scan

    return render_scan(report, markdown=markdown)


def _html(args: argparse.Namespace) -> Exit:
    source: Path = args.report
    report, raw = _read(source)
    if args.out is None and not source.is_file():
        raise UsageError(f"a page can't be written beside {source}", "name it: --out FILE.html")
    out: Path = args.out or source.with_suffix(".html")
    if os.path.realpath(out) == os.path.realpath(source):
        raise UsageError(f"the page would replace {source}", "choose another file: --out FILE.html")
    with reserving(out, PLACE) as place:  # what can't be written is known before seconds of drawing
        page = _page(report, raw=raw, name=source.name)
        with writing(out, PLACE):
            files.write_text(place or out, page)
    tell(f"wrote {out}")
    return Exit.OK


def _read(source: Path, *, makers: str = ANY_MAKER) -> "tuple[Report, str]":
    """A report of any kind, and the text that it was read from. Raises ReportError.

    `makers`: the verbs whose reports are wanted. A report's kind is seen by reading it, so what can be read
    only once, a pipe, is copied first.
    """
    from probes.fit.report import is_fit, named_fit
    from probes.throughput.document import MOST_BYTES, is_scan, named_scan

    make_one = f"name a report that one of these has written: {probe_command()} {makers}"
    with ExitStack() as stack:
        with reading(source, make_one):
            path = stack.enter_context(files.rereadable(source, most_bytes=MOST_BYTES))
        if is_watch_file(path):
            return named_watch(path, name=source)
        if is_fit(path):
            return named_fit(path, name=source)
        if is_scan(path):
            return named_scan(path, name=source)
        return named_report(path, name=source, make_one=make_one)


def _page(report: "Report", *, raw: str, name: str) -> str:
    """The page of a report, by its kind. Raises LibraryMissing."""
    from probes.fit.report import FitReport

    if isinstance(report, FitReport):  # its picture is our own
        from probes.reports.fit_page import render_fit

        return render_fit(report, raw=raw, name=name)
    try:
        from probes.reports.charts import draw_plots
        from probes.reports.scan_charts import draw_scan
        from probes.reports.watch_page import draw_watch
    except ImportError as error:
        raise LibraryMissing(
            f"the page needs {error.name}, which is not installed", "pip install 'gpu-weir[report]'"
        ) from error
    from probes.reports.html import render_page
    from probes.reports.scan_charts import render_scan_page
    from probes.reports.watch_page import render_watch

    if isinstance(report, ProbeReport):
        return render_page(report, draw_plots(report), raw=raw, name=name)
    if isinstance(report, WatchReport):
        return render_watch(report, draw_watch(report), raw=raw, name=name)
    return render_scan_page(report, draw_scan(report), raw=raw, name=name)


def _compare(args: argparse.Namespace) -> Exit:
    from probes.reports.compare import compare, render_markdown
    from probes.reports.scan_compare import compare_scans, render_scan_markdown
    from probes.throughput.document import ThroughputReport

    a, b = (_read(path, makers=COMPARED)[0] for path in (args.a, args.b))
    names = str(args.a), str(args.b)
    if isinstance(a, ProbeReport) and isinstance(b, ProbeReport):
        hand_over(render_markdown(compare(a, b, names=names, force=args.force)))
    elif isinstance(a, ThroughputReport) and isinstance(b, ThroughputReport):
        hand_over(render_scan_markdown(compare_scans(a, b, names=names, force=args.force)))
    else:
        raise ReportError(
            f"{args.a} and {args.b} can't be compared: {_kind(a)} and {_kind(b)}",
            "name two probe reports, or two throughput reports",
        )
    return Exit.OK


def _kind(report: "Report") -> str:
    if isinstance(report, ProbeReport):
        return "a probe report"
    from probes.fit.report import FitReport

    if isinstance(report, FitReport):
        return "an answer of `fit`"
    return "a watch" if isinstance(report, WatchReport) else "a throughput report"


def _prometheus(args: argparse.Namespace) -> Exit:
    from probes.reports.prometheus import exposition
    from probes.reports.scan_metrics import scan_exposition
    from probes.throughput.document import ThroughputReport

    report, _ = _read(args.report, makers=COMPARED)
    if isinstance(report, WatchReport):
        raise ReportError(
            f"{args.report} is a watch, whose samples Prometheus takes while it runs",
            f"{probe_command()} watch --listen HOST:PORT",
        )
    if isinstance(report, ProbeReport):
        hand_over(exposition(report))
    elif isinstance(report, ThroughputReport):
        hand_over(scan_exposition(report))
    else:
        raise ReportError(f"{args.report} has no metrics: {_kind(report)}", "show it, or write a page: html")
    return Exit.OK


def _schema(args: argparse.Namespace) -> Exit:
    from probes.fit.report import fit_schema
    from probes.placement.plan_file import cards_schema, plan_schema
    from probes.records.json_schema import report_schema
    from probes.records.watch import watch_schema
    from probes.throughput.document import throughput_schema

    made = {
        "report": report_schema,
        "plan": plan_schema,
        "cards": cards_schema,
        "throughput": throughput_schema,
        "watch": watch_schema,
        "fit": fit_schema,
    }
    hand_over(made[args.of]())
    return Exit.OK
