"""The formats of an audit report: one table, from which `weir audit` makes its options.

To add a format, write its renderer in a file beside this one, and add a row to FORMATS.
"""

from collections.abc import Callable
from dataclasses import dataclass

from buildtool.audit.html import render_html
from buildtool.audit.junit import render_junit
from buildtool.audit.options import DEFAULT_RENDER_OPTIONS, RenderOptions
from buildtool.audit.report import AuditReport, to_json
from buildtool.audit.sarif import render_sarif
from buildtool.audit.text import render_markdown, render_table


@dataclass(frozen=True)
class ReportFormat:
    """A renderer, and whether `weir audit` offers it as `--NAME FILE` and as `--format NAME`."""

    summary: str  # for --help, where it ends "write the report as"
    render: Callable[[AuditReport, RenderOptions], str]
    to_file: bool = True
    to_stdout: bool = True


FORMATS = {
    "table": ReportFormat("the answer, or all sections, as text", render_table, to_file=False),
    "json": ReportFormat("JSON", lambda report, _options: to_json(report)),
    "markdown": ReportFormat("Markdown", render_markdown),
    "html": ReportFormat("one HTML file: a map to zoom, searchable lists", render_html, to_stdout=False),
    "sarif": ReportFormat("SARIF 2.1.0", render_sarif),
    "junit": ReportFormat("JUnit XML", render_junit),
}
FILE_FORMATS = {name: row for name, row in FORMATS.items() if row.to_file}
STDOUT_FORMATS = {name: row for name, row in FORMATS.items() if row.to_stdout}


def render(report: AuditReport, name: str, options: RenderOptions = DEFAULT_RENDER_OPTIONS) -> str:
    """The report in the format called `name`."""
    return FORMATS[name].render(report, options)
