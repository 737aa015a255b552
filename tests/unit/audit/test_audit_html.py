"""The HTML page: one file that loads nothing, and text of an image that stays text."""

import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_maker import HOSTILE, a_finding, a_row, audited, small_report, with_findings

from buildtool.audit.baseline import Comparison, Regression, Tolerance
from buildtool.audit.findings import Prediction, Severity
from buildtool.audit.html import render_html
from buildtool.audit.options import LISTED_FILES, RenderOptions
from buildtool.audit.packages import PackageRow
from buildtool.audit.report import GpuCode, LayerRow
from buildtool.audit.treemap import MAX_ROWS, NO_TREE, FileRow, Tree
from buildtool.core.model import Budget
from probes.core.quoting import script_json, terminal
from probes.core.units import decimal_bytes

LOADING = {"src", "href", "data", "srcset", "poster", "action", "background", "xlink:href"}


class Page(HTMLParser):
    """Elements, attributes, and the text of what matters, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.preformatted: list[str] = []
        self.words = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")
        if tag == "pre":
            self.preformatted.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "pre":
            self.preformatted[-1] += data
        else:
            self.words += data

    @property
    def data(self) -> dict[str, list[list[object]]]:
        found: dict[str, list[list[object]]] = json.loads(self.scripts[0])
        return found


def named(name: str) -> str:
    """A page of a report in which everything is called so."""
    report = small_report()
    return render_html(
        replace(
            report,
            image=replace(report.image, ref=name, platform=name, labels={name: name}),
            layers=(LayerRow(None, "sha256:0", 5, None, 5, 1, name),),
            owners={name: 5},
            kinds={name: 5},
            gpu_code=GpuCode({name: 5}, {}),
            packages=(PackageRow("deb", name, name, name, 5, 5, 1),),
            top_files=(FileRow(name, 5, 0, name),),
            findings=(a_finding(title=name, paths=(name,), remedy=name),),
            notes=(name,),
            tree=Tree(1, (a_row(name, 5, owner=name, group=name, kind=name, target=name),)),
        )
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_adds_an_element_or_an_attribute(name: str) -> None:
    harmless, hostile = Page(named("harmless")), Page(named(name))
    assert [tag for tag, _ in hostile.elements] == [tag for tag, _ in harmless.elements]
    assert [set(attrs) for _, attrs in hostile.elements] == [set(attrs) for _, attrs in harmless.elements]
    assert hostile.scripts[1] == harmless.scripts[1]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_arrive_as_they_are_and_what_does_not_print_is_seen(name: str) -> None:
    found = Page(named(name))
    assert found.data["rows"][0][0] == found.data["files"][0][0] == found.data["packages"][0][1] == name
    assert terminal(name, keep="\n\t").strip() in found.words


def test_data_in_a_script_has_nothing_that_html_reads() -> None:
    text = script_json({name: [name] for name in HOSTILE})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {name: [name] for name in HOSTILE}


def test_the_page_loads_nothing_and_its_policy_admits_its_own_script_alone() -> None:
    text = render_html(small_report())
    found = Page(text)
    assert not [attrs for _, attrs in found.elements if LOADING & set(attrs)]
    assert not {"link", "img", "iframe", "object", "base", "form"} & {tag for tag, _ in found.elements}
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(attrs["content"] for _, attrs in found.elements if "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_no_script_of_ours_holds_what_would_end_or_hide_it() -> None:
    script = Page(render_html(small_report())).scripts[1].lower()
    assert len(script) > 20_000
    assert "<!--" not in script
    assert "permission to use, copy, modify" in script, "the library's licence goes with each copy"
    assert render_html(small_report()).lower().count("</script") == 2


def test_findings_are_reported_most_severe_first_with_the_remedy_to_copy() -> None:
    remedy = "RUN rm -rf 'a&b' \\\n && true"
    found = Page(render_html(with_findings(a_finding(remedy=remedy, severity=Severity.ERROR))))
    assert found.preformatted == [remedy]
    assert ("article", {"class": "finding error", "id": "finding-caches"}) in found.elements
    assert "5.00 MB" in found.words
    assert "nothing in this image looks like waste" in Page(render_html(with_findings())).words


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (Budget(), "none set"),
        (Budget(10_000, None), "kept"),
        (Budget(1, None), "exceeded"),
    ],
)
def test_the_budget_is_reported_with_both_numbers(budget: Budget, told: str) -> None:
    report = small_report(budget)
    words = Page(render_html(report)).words
    assert told in words
    if budget.unpacked_bytes:
        sign = "≤" if told == "kept" else ">"
        actual, limit = report.totals.unpacked_bytes, budget.unpacked_bytes
        assert f"unpacked {decimal_bytes(actual)} {sign} {decimal_bytes(limit)}" in words


def test_unknown_stored_bytes_are_reported_with_the_reason() -> None:
    report = small_report()
    totals = replace(report.totals, stored_bytes=None, stored_reason="layers lie uncompressed")
    words = Page(render_html(replace(report, totals=totals))).words
    assert "unknown" in words
    assert "layers lie uncompressed" in words


def test_a_report_without_a_tree_has_its_page_all_the_same() -> None:
    text = render_html(replace(small_report(), tree=NO_TREE))
    assert 'id="map"' not in text
    assert "saved before" in text


def test_an_image_without_a_byte_has_a_page() -> None:
    assert "0 B" in Page(render_html(audited())).words


def test_the_file_list_is_capped_and_the_page_small() -> None:
    files = tuple(FileRow(f"usr/lib/{'x' * 80}/{n}", n, 0, "libc6") for n in range(5 * LISTED_FILES))
    text = render_html(replace(small_report(), top_files=files))
    assert len(Page(text).data["files"]) == LISTED_FILES
    assert len(text) < 1_000_000


@pytest.mark.thorough
def test_the_largest_report_that_an_audit_makes_is_a_page_of_a_few_megabytes() -> None:
    rows = tuple(a_row(f"opt/{'d' * 240}/{n}", 10**6 + n, owner=f"package{n}") for n in range(MAX_ROWS))
    report = replace(
        small_report(),
        tree=Tree(10, rows),
        top_files=tuple(FileRow(f"{'f' * 4000}/{n}", n, 0, "libc6") for n in range(LISTED_FILES)),
        packages=tuple(PackageRow("deb", f"{'p' * 300}{n}", "1", "", n, n, 1) for n in range(9000)),
    )
    text = render_html(report)
    assert len(text) < 6_000_000
    page = Page(text)
    assert len(page.data["rows"]) == MAX_ROWS
    assert 200 < len(page.data["files"]) < LISTED_FILES
    assert f"The {len(page.data['packages']):,} largest of 9,000 packages" in page.words


def test_the_base_image_is_reported_with_its_layers() -> None:
    report = small_report()
    image = replace(report.image, base_layers=1, base_told_by="a test", base_name="<debian>")
    assert not [attrs for _, attrs in Page(render_html(report)).elements if attrs.get("class") == "tag"]
    page = Page(render_html(replace(report, image=image)))
    [tag] = [attrs for _, attrs in page.elements if attrs.get("class") == "tag"]
    assert tag["title"] == "base image <debian>, known from a test"


def test_what_is_worse_than_the_baseline_is_on_the_page() -> None:
    worse = (
        Regression("more unpacked bytes", 2_000_000, 5_000_000),
        Regression("new finding tests", 0, 0, "tests of <packages>", ("usr/lib/tests",)),
    )
    comparison = Comparison("<main>.json", Tolerance(), worse, ("stored bytes, unknown for the image",))
    text = render_html(small_report(), RenderOptions(comparison=comparison))
    words = Page(text).words
    assert "Since the baseline <main>.json: 2 worse" in words
    assert "+3.00 MB" in words
    assert "2.00 MB before, 5.00 MB now" in words
    assert "tests of <packages>" in words
    assert "usr/lib/tests" in words
    assert "Not compared: stored bytes, unknown for the image." in words
    better = Comparison("main.json", Tolerance(), ())
    assert (
        "Nothing is worse, at a tolerance of 1 %."
        in Page(render_html(small_report(), RenderOptions(comparison=better))).words
    )
    assert "Since the baseline" not in Page(render_html(small_report())).words


def test_what_remedies_would_leave_is_reported_for_all_and_for_each() -> None:
    report = replace(
        with_findings(a_finding(predicted_unpacked_bytes=3_000_000)),
        prediction=Prediction(unpacked_bytes=2_000_000, saved_bytes=6_000_000),
    )
    words = Page(render_html(report)).words
    assert "2.00 MB after their remedies" in words
    assert "the image would be 3.00 MB without" in words
    nothing = Prediction(unpacked_bytes=2_000_000, saved_bytes=0)
    for told in (None, nothing):
        assert "no bytes to save" in Page(render_html(replace(report, prediction=told))).words
