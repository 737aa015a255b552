"""One HTML page from a throughput report: answer, plots, machine, tables, both halves. Loads nothing."""

from collections.abc import Sequence

from probes.report.page.html import (
    Plot,
    figure,
    framed,
    machine_section,
    prose,
    raw_section,
    subject,
    table_section,
)
from probes.report.page.scan.scancharts import name_of_model
from probes.shared.quoting import html
from probes.throughput.document import ThroughputReport
from probes.throughput.showing.scantext import answer, scan_tables


def render_scan_page(report: ThroughputReport, plots: Sequence[Plot], *, raw: str, name: str) -> str:
    """The whole page. `raw` is the report's file, which the page includes; `name` what to call that."""
    tables = "".join(map(table_section, scan_tables(report)))
    said = "".join(f"<p>{prose(sentence)}</p>" for sentence in answer(report))
    title = f"{name_of_model(report.direct, report.served)} on {subject(report.machine)}: throughput"
    body = "\n".join(
        (
            _header(report, title),
            f'<section class="answer" aria-label="The answer">{said}</section>',
            *map(figure, plots),
            machine_section(report.machine),
            f'<section id="tables"><h2>Tables</h2>{tables}</section>',
            raw_section(raw, name),
        )
    )
    return framed(title, body)


def _header(report: ThroughputReport, title: str) -> str:
    details = [report.started.replace("T", " ").replace("Z", " UTC"), f"Weir {report.tool_version}"]
    if report.served:
        by = report.served.by
        details += [by.url, *([by.server] if by.server else []), by.request]
    return (
        f'<header><p class="kicker">Throughput, measured</p><h1>{html(title)}</h1>'
        f'<p class="meta">{html(" · ".join(details))}</p></header>'
    )
