"""A throughput report as text or Markdown. Pure."""

from probes.machine.describe import machine_lines
from probes.records.facts import Surroundings
from probes.report.render import bullets, drawn_table, heading
from probes.report.tables import Table
from probes.shared.unknown import Unknown
from probes.throughput.document import ThroughputReport
from probes.throughput.showing.directtables import direct_tables
from probes.throughput.showing.servedtables import served_answer, served_tables
from probes.throughput.showing.sidebyside import side_by_side
from probes.throughput.showing.verdict import direct_answer


def render_scan(report: ThroughputReport, *, markdown: bool = False) -> str:
    """The whole report: what follows, the machine, then the tables of each half and of both."""
    parts = [
        heading("The answer", markdown=markdown) + bullets(answer(report), markdown=markdown),
        heading("Machine", markdown=markdown) + bullets(machine_lines(report.machine), markdown=markdown),
    ]
    parts += [drawn_table(table, markdown=markdown) for table in scan_tables(report)]
    return "\n\n".join(parts)


def answer(report: ThroughputReport) -> tuple[str, ...]:
    """What follows from both halves, in sentences."""
    direct = direct_answer(report.direct, report.ceilings) if report.direct else ()
    served = served_answer(report.served) if report.served else ()
    return (*direct, *_limited(report), *served) or (
        "Nothing was measured: the scan ended before its first row.",
    )


def _limited(report: ThroughputReport) -> tuple[str, ...]:
    """That a limit holds the CPU back; torch starts a thread for each processor all the same."""
    around, cpus = report.machine.surroundings, report.machine.cpus
    limit = around.cpu_limit if isinstance(around, Surroundings) else 0.0
    measured = report.direct and any(one.rows and one.way.device == "cpu" for one in report.direct.series)
    if not measured or isinstance(limit, Unknown) or not 0 < limit < cpus:
        return ()
    return (
        f"A CPU limit of {limit:g} of {cpus} processors holds this container back: passes stop in the middle "
        f"when it is used up. Raise it, or measure with --threads {max(int(limit), 1)}.",
    )


def scan_tables(report: ThroughputReport) -> tuple[Table, ...]:
    """The tables of both halves, and of both side by side, those with rows."""
    found = [
        *(direct_tables(report.direct, report.ceilings) if report.direct else ()),
        *(served_tables(report.served) if report.served else ()),
        *(side_by_side(report.direct, report.served) if report.direct and report.served else ()),
    ]
    return tuple(table for table in found if table.rows)
