"""One HTML page from a throughput report: answer, plots, machine, tables, both halves. Loads nothing."""

from collections.abc import Sequence

from probes.report.page.html import (
    Plot,
    answer_section,
    figure,
    framed,
    header,
    machine_section,
    moment,
    raw_section,
    subject,
    table_section,
)
from probes.report.page.scan.scancharts import name_of_model
from probes.throughput.document import ThroughputReport
from probes.throughput.showing.scantext import answer, scan_tables


def render_scan_page(report: ThroughputReport, plots: Sequence[Plot], *, raw: str, name: str) -> str:
    """The whole page. `raw` is the report's file, which the page includes; `name` what to call that."""
    tables = "".join(map(table_section, scan_tables(report)))
    title = f"{name_of_model(report.direct, report.served)} on {subject(report.machine)}: throughput"
    return framed(
        title,
        header("Throughput, measured", title, _details(report)),
        answer_section(answer(report)),
        *map(figure, plots),
        machine_section(report.machine),
        f'<section id="tables"><h2>Tables</h2>{tables}</section>',
        raw_section(raw, name),
    )


def _details(report: ThroughputReport) -> list[str]:
    details = [moment(report.started), f"Weir {report.tool_version}"]
    if report.served:
        by = report.served.by
        details += [by.url, *([by.server] if by.server else []), by.request]
    return details
