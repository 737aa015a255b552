"""Pages on a desk and on a phone, light and dark: nothing overlaps, nothing is cut.

Those of probe runs and throughput are looked at where they are made: test_probe_report, test_throughput_page.
"""

from pathlib import Path

import pytest
from browser_pipe import Browser
from every_page import NAMES, write_page
from page_layout import faults, in_every_form

SITE = Path(__file__).parents[2] / ".weir" / "site"
OF_SITE = ("index.html", "architecture.html", "reference/lint-rules.html")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_overlaps_and_nothing_is_cut(browser: Browser, tmp_path: Path, name: str) -> None:
    assert in_every_form(browser, write_page(name, tmp_path)) == []


@pytest.mark.parametrize("name", OF_SITE)
def test_nothing_overlaps_and_nothing_is_cut_on_the_site(browser: Browser, name: str) -> None:
    assert (SITE / name).exists(), "no site here: make docs"
    assert in_every_form(browser, SITE / name) == []


FAULTY = """<!doctype html><style>
body { margin: 0; font: 16px/1.5 sans-serif; background: #fff; color: #000 }
div { position: absolute; left: 0; white-space: nowrap }
</style>"""
PLANTED = {
    "overlaps": "<div>one word</div><div style='left: 20px'>another word</div>",
    "beyond the edge": "<div style='top: 50px'>" + "a long line " * 200 + "</div>",
    "cut by": "<div style='width: 40px; overflow: hidden'>a word that is cut</div>",
    "contrast 1.": "<p style='color: #eee'>pale</p>",
    "line runs through": "<svg width=200 height=50><text x=0 y=20>a label</text>"
    "<line x1=20 x2=20 y1=0 y2=50 stroke=black /></svg>",
    "outside its picture": "<svg width=50 height=50 style='overflow: visible'>"
    "<text y=20>a long label</text></svg>",
}


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_fault_is_found(browser: Browser, tmp_path: Path, said: str) -> None:
    path = tmp_path / "faulty.html"
    path.write_text(FAULTY + PLANTED[said], encoding="utf-8")
    page = browser.open(path.as_uri(), width=400)
    found = faults(page, 400, dark=False)
    page.close()
    assert any(said in fault for fault in found), found
