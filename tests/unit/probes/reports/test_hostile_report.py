"""A probe report whose names somebody else wrote: the page and the metrics take them as text."""

from dataclasses import replace

import made_reports as make
import pytest
import strict_readers as read

from probes.records.rows import Pass
from probes.records.schema import ProbeReport
from probes.reports.html import render_page
from probes.reports.run import run_document
from probes.reports.run_metrics import exposition

EVIL = "$\\frac{a$ \x1b[2J </style><script>x</script> \u202e `y` ${A} &amp; \udce9"


def hostile() -> ProbeReport:
    full = make.full_report()
    runs = tuple(
        replace(
            run,
            records=tuple(replace(r, model=EVIL) if isinstance(r, Pass) else r for r in run.records),
        )
        for run in full.runs
    )
    return replace(full, runs=runs, machine=replace(full.machine, host=EVIL, kernel=EVIL), tool_version=EVIL)


def test_no_name_in_a_probe_report_adds_an_element_to_its_page() -> None:
    pages = [
        read.html_of(render_page(run_document(report), (), raw="{}", name=name))
        for report, name in ((hostile(), EVIL), (make.full_report(), "r.json"))
    ]
    (text, tags, _), (_, plain, _) = pages
    assert [tag for tag in tags if tag != "code"] == [tag for tag in plain if tag != "code"]
    assert "\\x1b[2J </style><script>x</script> \\u202e" in text
    assert not {char for char in text if not char.isprintable()} - {"\n", "\xa0"}


@pytest.mark.thorough
def test_a_dollar_sign_in_a_name_is_no_formula_of_a_plot() -> None:
    from matplotlib.figure import Figure  # here, for a second worker that doesn't need it

    from probes.reports.canvas import DESK, svg_of

    def paint(figure: Figure) -> None:
        figure.subplots().set_title("$\\frac{a$")

    assert "$\\frac{a$" in svg_of(paint, DESK, 3.0)


def test_metrics_of_a_hostile_report_are_a_line_each() -> None:
    for line in exposition(hostile()).splitlines():
        assert line.isprintable()
        assert line.startswith(("weir_", "# "))
        line.encode()
