"""The probe report's page as a browser shows it: plots drawn, nothing fetched, nothing complained about."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import made_reports as make
import pytest
from browser_pipe import Browser, Page
from page_layout import in_every_form

from probes.core.codec import to_json
from probes.reports.kinds import RUN, LoadedReport, load_report

ROOT = Path(__file__).parents[2]
RESULTS = [
    path
    for path in sorted((ROOT / "docs" / "results").glob("*.json"))
    if not path.name.startswith("bench-") and '"runs"' in path.read_text()
]
MADE = {"full": make.full_report(), "cpu": make.cpu_report(), "broken": make.broken_report()}
REPORTS: dict[str, LoadedReport] = {
    **{name: LoadedReport(RUN, report, to_json(report)) for name, report in MADE.items()},
    **{path.stem: load_report(path) for path in RESULTS},
}
PLOTS = {"full": 4, "cpu": 1, "broken": 0}
DESK, PHONE = 1400, 400


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every report's page: one made by the command line as a user makes it, the others in this process."""
    place = tmp_path_factory.mktemp("pages")
    for name, loaded in REPORTS.items():
        if name != "cpu":
            page = loaded.kind.page(loaded.report, raw=loaded.raw, name=f"{name}.json")
            (place / f"{name}.html").write_text(page)
            continue
        (place / f"{name}.json").write_text(loaded.raw)
        command = [sys.executable, "-m", "buildtool", "probe", "html", str(place / f"{name}.json")]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return {name: place / f"{name}.html" for name in REPORTS}


@pytest.fixture(
    scope="module", params=[(n, w, d) for n in REPORTS for w, d in ((DESK, False), (PHONE, True))], ids=str
)
def shown(
    request: pytest.FixtureRequest, browser: Browser, pages: dict[str, Path]
) -> Iterator[tuple[str, Page]]:
    name, width, dark = request.param
    page = browser.open(pages[name].as_uri(), width=width, dark=dark)
    yield name, page
    page.close()


def test_page_is_whole_and_quiet(shown: tuple[str, Page]) -> None:
    name, page = shown
    assert page.requests() == []
    assert page.complaints() == []
    plots = page.boxes("section.plot svg")
    assert len(plots) == PLOTS.get(name, len(plots))
    assert all(width > 300 and height > 200 for width, height in plots)
    shapes = page.boxes("section.plot svg path, section.plot svg use")
    assert sum(width > 0 or height > 0 for width, height in shapes) >= 20 * len(plots)
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1], "the page scrolls sideways"  # type: ignore[index]


def test_no_word_of_ours_is_shown_as_an_escape(shown: tuple[str, Page]) -> None:
    """The caption of the bandwidths read `α\\xa0+\\xa0S`: its spaces were taken for a stranger's."""
    _, page = shown
    captions = page.evaluate("[...document.querySelectorAll('figcaption')].map(e => e.textContent).join(' ')")
    assert "\\x" not in str(captions)
    assert "\\u" not in str(captions)


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_overlaps_and_nothing_is_cut(browser: Browser, pages: dict[str, Path], name: str) -> None:
    assert in_every_form(browser, pages[name]) == []


def test_words_of_plots_are_large_enough_to_read(shown: tuple[str, Page]) -> None:
    _, page = shown
    heights = page.evaluate(
        """[...document.querySelectorAll('section.plot svg text')].filter(e => e.checkVisibility()).map(e => {
            const scale = e.getScreenCTM();  // turned words have their scale in c
            return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(scale.c, scale.d);
        })"""
    )
    assert isinstance(heights, list)
    assert min(heights, default=10) >= 10


def test_three_sentences_stand_on_top(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["full"].as_uri())
    assert page.evaluate("document.querySelectorAll('.answer > p').length") == 3
    assert page.text(".answer > p").startswith("Copy large inputs into VRAM")
    assert page.evaluate("document.querySelector('.answer').getBoundingClientRect().bottom < innerHeight")


def test_tables_open_and_scroll_within_themselves(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["full"].as_uri(), width=PHONE)
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert len(page.boxes("#tables tbody tr")) > 100
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]  # type: ignore[index]


def test_dark_page_has_dark_paper_and_light_plots(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["full"].as_uri(), dark=True)
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(18, 23, 31)"
    assert page.evaluate("getComputedStyle(document.querySelector('section.plot text')).fill") == (
        "rgb(230, 234, 240)"
    )


def test_browser_would_tell_of_a_request_and_a_complaint(browser: Browser, tmp_path: Path) -> None:
    """The other tests mean something only if these are seen."""
    loud = tmp_path / "loud.html"
    loud.write_text("<img src='missing.png'><script>console.error('oh'); throw new Error('no')</script>")
    page = browser.open(loud.as_uri())
    assert [url.rsplit("/", 1)[-1] for url in page.requests()] == ["missing.png"]
    assert len(page.complaints()) >= 3
