"""`buildtool probes`: tell a probe report: an HTML page, a comparison of two, metrics, the schema."""

import argparse
from pathlib import Path

from buildtool.errors import ConfigError, DataError, EnvironmentMissing, Exit
from buildtool.files import write_text
from probes.errors import ReportError
from probes.records.schema import ProbeReport, named_report
from probes.shared.output import hand_over, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    ways = parser.add_subparsers(dest="way", required=True, metavar="html|compare|prometheus|schema")
    page = ways.add_parser("html", help="one file with plots and tables; it loads nothing from outside")
    page.add_argument("report", type=Path, metavar="FILE")
    page.add_argument("--out", type=Path, metavar="FILE.html", help="where to write it (beside FILE)")
    two = ways.add_parser("compare", help="two reports side by side, as Markdown")
    two.add_argument("a", type=Path, metavar="A")
    two.add_argument("b", type=Path, metavar="B")
    two.add_argument("--force", action="store_true", help="compare unlike machines or settings all the same")
    metrics = ways.add_parser("prometheus", help="metrics in Prometheus' text format")
    metrics.add_argument("report", type=Path, metavar="FILE")
    ways.add_parser("schema", help="the JSON Schema of reports")


def run(args: argparse.Namespace) -> int:
    """Tell one report, or two. Raises DataError for a file that is no report or two that are unlike."""
    match args.way:
        case "html":
            tell(_write_page(args.report, args.out or args.report.with_suffix(".html")))
        case "compare":
            from probes.report.compare import compare, render_markdown

            names = (str(args.a), str(args.b))
            found = compare(_read(args.a)[0], _read(args.b)[0], names=names, force=args.force)
            hand_over(render_markdown(found))
        case "prometheus":
            from probes.report.prometheus import exposition

            hand_over(exposition(_read(args.report)[0]))
        case _:
            from probes.records.json_schema import report_schema

            hand_over(report_schema())
    return int(Exit.OK)


def _write_page(source: Path, out: Path) -> str:
    if out.resolve() == source.resolve():
        raise ConfigError(
            f"the page would take the place of {source}", "choose another file: --out FILE.html"
        )
    report, raw = _read(source)
    try:
        from probes.report.page.plots import draw_plots
    except ImportError as error:
        raise EnvironmentMissing(
            f"the page needs {error.name}, which is not installed", "pip install 'gpu-weir[report]'"
        ) from error
    from probes.report.page.html import render_page

    page = render_page(report, draw_plots(report), raw=raw, name=source.name)
    write_text(out, page)
    return f"wrote {out}"


def _read(path: Path) -> tuple[ProbeReport, str]:
    """The report and the text it was read from. Raises DataError, naming the file."""
    try:
        return named_report(path)
    except ReportError as error:
        raise DataError(error.message, error.hint) from error
