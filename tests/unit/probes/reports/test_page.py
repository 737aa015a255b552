import base64
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import made_reports as make
import pytest

from probes.core.codec import to_json
from probes.records.rows import Measurement
from probes.records.schema import ProbeRun
from probes.records.stats import summarize
from probes.reports.document import Plot, Section, Table
from probes.reports.figures import facts, rate, span
from probes.reports.html import render_page
from probes.reports.kinds import RUN
from probes.reports.palette import PALETTE
from probes.reports.run import run_document
from probes.reports.run_compare import compare
from probes.reports.run_findings import all_records, pick
from probes.reports.run_metrics import exposition
from probes.reports.run_tables import page_tables, run_tables
from probes.reports.svg import embed
from probes.reports.text import render_text

VOID = {"meta", "link", "br", "hr", "img", "input"}
PLOTS = (
    Plot(
        "bandwidth",
        "Bandwidth over size",
        "a caption",
        (("desk", "<svg></svg>"), ("phone", "<svg></svg>")),
        "",
    ),
    Plot("break-even", "k*", "", (), "zero_copy_read: <too few> sizes"),
)


class Reader(HTMLParser):
    """Fails on tags that don't nest; keeps text, attributes and elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


REPORTS = {
    "rounds": make.three_rounds(),
    "full": make.full_report(),
    "cpu": make.cpu_report(),
    "broken": make.broken_report(),
}


@cache
def page(name: str) -> str:
    return render_page(run_document(REPORTS[name]), PLOTS, raw=to_json(REPORTS[name]), name="report.json")


def tables(run: ProbeRun) -> tuple[Table, ...]:
    return (*run_tables(run.records, ()), *page_tables(run))


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.thorough
@pytest.mark.parametrize("name", REPORTS)
def test_page_nests_and_has_no_id_twice(name: str) -> None:
    reader = read(page(name))
    ids = [attributes["id"] for _, attributes in reader.seen if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", REPORTS)
def test_page_names_no_address_but_its_own_data(name: str) -> None:
    text = page(name)
    addresses = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "url(" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert "default-src 'none'" in text


def test_text_from_a_report_is_never_markup() -> None:
    text = page("broken")
    assert "alert('x')" not in text
    assert "&lt;script&gt;" in text
    assert "<too few>" not in text


def test_page_carries_the_report_unchanged() -> None:
    data = re.search(r'href="data:application/json;base64,([^"]+)"', page("full"))
    assert data
    assert base64.b64decode(data[1]).decode() == to_json(make.full_report())


def test_missing_plot_says_why_in_its_place() -> None:
    assert "No plot: zero_copy_read: &lt;too few&gt; sizes." in page("full")


def test_unknown_figures_stay_unknown_with_their_reason() -> None:
    text = " ".join(read(page("full")).text)
    for reason in (
        "the driver doesn't say",
        "no limit is set",
        "not told",
        "no fdinfo of this process has gtt",
    ):
        assert f"unknown ({reason})" in text
    assert "nan" not in text.lower().split()


def test_waived_and_wedged_probes_are_shown_with_their_reason() -> None:
    assert "waived: no GPU to measure" in page("cpu")
    assert "WEDGED after 3.0 s, 0 records kept" in page("broken")


def test_every_timed_row_is_reported_with_n_figure_and_its_error() -> None:
    for run in make.full_report().runs:
        timed = [t for t in tables(run) if t.title.endswith(", measured")]
        assert timed or run.probe not in ("transfer", "breakeven", "spill", "scenarios")
        for table in timed:
            n, figure = table.headers.index("n"), table.headers.index("median ± error")
            assert all(row[n].isdigit() and "±" in row[figure] for row in table.rows)
            assert {"processes", "within", "between"} <= set(table.headers)


@pytest.mark.thorough
def test_page_shows_one_figure_for_one_row_everywhere() -> None:
    """Terminal, page, comparison and metrics: the same median of the processes' medians."""
    report = make.three_rounds()
    row = next(m for m in pick(all_records(report), Measurement) if m.case == f"h2d_pinned {256 * make.MIB}")
    told = summarize(row.times_s)
    lines = [re.split(" {2,}", line) for line in RUN.text(report).splitlines()]
    shown = next(line for line in lines if line[:2] == ["h2d_pinned", "256 MiB"])
    assert span(told.median, told.error) in shown
    assert str(rate(row.moved_bytes, row.times_s)) in shown
    assert span(told.median, told.error) in render_page(
        run_document(report), PLOTS, raw="{}", name="report.json"
    )
    labels = f'{{path="h2d_pinned",payload_bytes="{256 * make.MIB}",clock="device"}}'
    assert f"weir_transfer_time_seconds{labels} {told.median!r}" in exposition(report)
    lines = compare(report, report, names=("a", "b")).lines
    line = next(x for x in lines if x.key[1:] == ("h2d_pinned", "256 MiB"))
    assert line.a.startswith(span(told.median, told.error))


def test_every_record_has_its_row() -> None:
    run = make.full_report().runs[0]
    rows = {table.title: len(table.rows) for table in tables(run)}
    assert rows["Transfers, measured"] == len(make.PATHS) * len(make.SIZES)
    assert rows["Not measured"] == 1


def test_predicted_and_measured_columns_say_which_they_are() -> None:
    text = page("full")
    assert "<th scope=col>k* predicted</th><th scope=col>k* measured</th>" in text
    assert "Fits, from the model" in text


def test_noise_beside_a_row_is_a_doubt_about_it() -> None:
    scenarios = make.full_report().runs[-1]
    table = next(t for t in tables(scenarios) if t.title == "Passes, measured")
    assert all("another process used the GPU" in row[table.headers.index("doubts")] for row in table.rows)


def test_split_of_a_pass_is_reported_or_unknown() -> None:
    table = next(t for t in tables(make.full_report().runs[-1]) if t.title == "Passes, measured")
    column = table.headers.index("copy / wait / compute")
    told = {row[table.headers.index("scenario")]: row[column] for row in table.rows}
    assert told["streamed"] == "6.5 ms / 100 µs / 400 µs"
    assert told["resident"] == "unknown (not measured)"


def test_facts_reach_every_leaf_of_the_machine() -> None:
    told = dict(facts(make.MACHINE))
    assert told["torch gpus 0 name"] == "Some GPU"
    assert told["torch gpus 0 vram_total_bytes"] == "4 GiB"
    assert told["gpu_driver"] == "unknown (the driver doesn't say)"
    assert told["wsl"] == "no"


DRAWN = (
    "<?xml version='1.0'?><!DOCTYPE svg><svg width='1' xmlns=\"http://www.w3.org/2000/svg\">"
    '<metadata><a href="https://example.invalid"/></metadata>'
    '<defs><style type="text/css">*{x: y}</style></defs>'
    '<g id="figure_1"><path id="m1" style="fill: #0069A8"/><use href="#m1"/>'
    "<text style=\"font-size: 9px; font-family: 'DejaVu Sans'; fill: #1b2330\">a</text></g></svg>\n"
)


def test_embedded_drawing_takes_the_pages_colours_and_font() -> None:
    found = embed(DRAWN, name="x", title="A <title>", description="words")
    assert "fill: var(--blue)" in found
    assert "fill: var(--ink)" in found
    assert "font-family" not in found
    assert "example.invalid" not in found
    assert "*{x" not in found
    assert '<title id="x-title">A &lt;title&gt;</title>' in found


def test_embedded_ids_are_kept_only_where_used_and_made_its_own() -> None:
    found = embed(DRAWN, name="x", title="t", description="d")
    assert 'id="x-m1"' in found
    assert 'href="#x-m1"' in found
    assert "figure_1" not in found


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["blue", "vermillion", "green", "purple", "amber", "ink", "muted"])
def test_colours_stand_out_from_the_paper_as_wcag_asks(name: str, dark: bool) -> None:
    bright, dim = sorted((luminance(PALETTE[name][dark]), luminance(PALETTE["paper"][dark])), reverse=True)
    needed = 4.5 if name in ("ink", "muted") else 3.0
    assert (bright + 0.05) / (dim + 0.05) >= needed


def test_what_has_no_rows_has_no_section_in_any_form() -> None:
    """A heading with nothing below it makes a reader look for what is missing."""
    empty = Section("nothing", tables=(Table("Empty", (), ("a",), ()),))
    document = replace(
        run_document(REPORTS["cpu"]), sections=(empty,), headline=(), follows=(), has_samples=False
    )
    shown = render_page(document, (), raw="{}", name="report.json")
    assert "<h2>Tables</h2>" not in shown
    assert "Raw samples" not in shown
    for form in (shown, render_text(document), render_text(document, markdown=True)):
        assert "Empty" not in form
        assert "nothing" not in form


def test_raw_samples_are_offered_where_there_are_some() -> None:
    assert "<h2>Raw samples</h2>" in page("full")
    assert "<h2>Raw samples</h2>" not in page("broken")
