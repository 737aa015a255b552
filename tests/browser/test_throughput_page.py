"""A throughput report as a browser shows it: every plot drawn, nothing fetched, no complaint."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_pipe import Browser, Page
from page_layout import in_every_form

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "probes" / "throughput"))

from test_scan_shown import whole  # noqa: E402

from probes.core.codec import to_json  # noqa: E402
from probes.reports.kinds import THROUGHPUT  # noqa: E402
from probes.throughput.report import named_scan  # noqa: E402

RESULTS = sorted((ROOT / "docs" / "results").glob("scan-*.json"))
DESK, PHONE = 1400, 400


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every report's page; that of a probe run is made by the command line, in test_probe_report."""
    place = tmp_path_factory.mktemp("scans")
    reports = {"made": whole(), **{path.stem: named_scan(path)[0] for path in RESULTS}}
    for name, report in reports.items():
        (place / f"{name}.html").write_text(THROUGHPUT.page(report, raw=to_json(report), name=f"{name}.json"))
    return {name: place / f"{name}.html" for name in reports}


NAMES = ("made", *(path.stem for path in RESULTS))


@pytest.fixture(
    scope="module", params=[(n, w, d) for n in NAMES for w, d in ((DESK, False), (PHONE, True))], ids=str
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
    assert len(plots) == 4 if name == "made" else 3 <= len(plots) <= 4
    assert all(width > 300 and height > 200 for width, height in plots)
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1], "the page scrolls sideways"  # type: ignore[index]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_overlaps_and_nothing_is_cut(browser: Browser, pages: dict[str, Path], name: str) -> None:
    assert in_every_form(browser, pages[name]) == []
