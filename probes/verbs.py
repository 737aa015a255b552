"""The verbs that write an earlier report in another form: `html`, `compare`, `prometheus`, `schema`.

Each imports what it needs when it runs: drawing takes matplotlib, which only the host has.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from probes.errors import Exit, LibraryMissing, ReportError, UsageError
from probes.records.schema import ProbeReport, named_report
from probes.records.watched import WatchReport
from probes.shared import files
from probes.shared.output import hand_over, tell
from probes.shared.quoting import markdown_block
from probes.watch.savedwatch import is_watch_file, named_watch

if TYPE_CHECKING:
    from probes.throughput.document import ThroughputReport

    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_verbs(verbs: "Verbs") -> None:
    """Add the verbs and their arguments."""
    page = verbs.add_parser("html", help="write a page with plots and tables that loads nothing else")
    page.add_argument("report", type=Path, metavar="FILE")
    page.add_argument(
        "--out", type=Path, metavar="FILE.html", help="where to write it (default: beside FILE)"
    )
    two = verbs.add_parser("compare", help="compare two reports, as Markdown")
    two.add_argument("a", type=Path, metavar="A")
    two.add_argument("b", type=Path, metavar="B")
    two.add_argument("--force", action="store_true", help="compare unlike machines or settings all the same")
    metrics = verbs.add_parser("prometheus", help="print metrics in Prometheus' text format")
    metrics.add_argument("report", type=Path, metavar="FILE")
    schema = verbs.add_parser("schema", help="print the JSON Schema of a kind of file")
    schema.add_argument(
        "of",
        nargs="?",
        choices=("report", "plan", "cards", "throughput", "watch", "fit"),
        default="report",
        help="(%(default)s)",
    )


def shown(path: Path, *, markdown: bool) -> str:
    """A report of any kind as text or Markdown. Raises ReportError."""
    if is_watch_file(path):
        from probes.watch.showing.words import report_lines

        text = "\n".join(report_lines(named_watch(path)[0]))
        return markdown_block(text) if markdown else text
    from probes.throughput.document import is_scan

    if is_scan(path):
        from probes.throughput.document import named_scan
        from probes.throughput.showing.scantext import render_scan

        return render_scan(named_scan(path)[0], markdown=markdown)
    from probes.report.render import render

    return render(named_report(path)[0], markdown=markdown)


def _html(args: argparse.Namespace) -> Exit:
    source: Path = args.report
    report, raw = _read(source)
    out: Path = args.out or source.with_suffix(".html")
    if os.path.realpath(out) == os.path.realpath(source):
        raise UsageError(f"the page would replace {source}", "choose another file: --out FILE.html")
    page = _page(report, raw=raw, name=source.name)
    try:
        files.write_text(out, page)
    except OSError as error:
        raise ReportError(
            f"can't write {out}: {error.strerror or error}", "check the path, its permissions and the disk"
        ) from error
    tell(f"wrote {out}")
    return Exit.OK


def _read(source: Path) -> "tuple[ProbeReport | ThroughputReport | WatchReport, str]":
    """A report of any kind, and the text that it was read from. Raises ReportError."""
    if is_watch_file(source):
        return named_watch(source)
    from probes.throughput.document import is_scan, named_scan

    return named_scan(source) if is_scan(source) else named_report(source)


def _page(report: "ProbeReport | ThroughputReport | WatchReport", *, raw: str, name: str) -> str:
    """The page of a report, by its kind. Raises LibraryMissing."""
    try:
        from probes.report.page.plots import draw_plots
        from probes.report.page.scan.scanplots import draw_scan
        from probes.report.page.watchplots import draw_watch
    except ImportError as error:
        raise LibraryMissing(
            f"the page needs {error.name}, which is not installed", "pip install 'gpu-weir[report]'"
        ) from error
    from probes.report.page.html import render_page
    from probes.report.page.scan.scanpage import render_scan_page
    from probes.report.page.watchpage import render_watch

    if isinstance(report, ProbeReport):
        return render_page(report, draw_plots(report), raw=raw, name=name)
    if isinstance(report, WatchReport):
        return render_watch(report, draw_watch(report), raw=raw, name=name)
    return render_scan_page(report, draw_scan(report), raw=raw, name=name)


def _compare(args: argparse.Namespace) -> Exit:
    from probes.report.compare import compare, render_markdown
    from probes.throughput.document import is_scan, named_scan

    if is_scan(args.a) and is_scan(args.b):
        from probes.throughput.showing.scancompare import compare_scans, render_scan_markdown

        scans = named_scan(args.a)[0], named_scan(args.b)[0]
        names = str(args.a), str(args.b)
        hand_over(render_scan_markdown(compare_scans(*scans, names=names, force=args.force)))
        return Exit.OK
    reports = named_report(args.a)[0], named_report(args.b)[0]
    hand_over(render_markdown(compare(*reports, names=(str(args.a), str(args.b)), force=args.force)))
    return Exit.OK


def _prometheus(args: argparse.Namespace) -> Exit:
    from probes.report.prometheus import exposition
    from probes.throughput.document import is_scan, named_scan

    if is_scan(args.report):
        from probes.throughput.showing.scanmetrics import scan_exposition

        hand_over(scan_exposition(named_scan(args.report)[0]))
        return Exit.OK
    hand_over(exposition(named_report(args.report)[0]))
    return Exit.OK


def _schema(args: argparse.Namespace) -> Exit:
    from probes.fit.answering.answer import fit_schema
    from probes.placement.showing.planfile import cards_schema, plan_schema
    from probes.records.json_schema import report_schema
    from probes.records.watched import watch_schema
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


VERBS: Mapping[str, Callable[[argparse.Namespace], Exit]] = MappingProxyType(
    {"html": _html, "compare": _compare, "prometheus": _prometheus, "schema": _schema}
)
