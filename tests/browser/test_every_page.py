"""Every page that Weir writes, on a desk and on a phone, light and dark: nothing overlaps, nothing is cut.

By hand, with a picture of each page at each width: SHOTS=FOLDER .venv/bin/python -m pytest tests/browser/test_every_page.py
"""

import os
from pathlib import Path

import pytest
from browser_pipe import Browser, Page
from every_page import NAMES, write_page

LAYOUT = Path(__file__).with_name("page_layout.js").read_text(encoding="utf-8")
SITE = Path(__file__).parents[2] / ".weir" / "site"
OF_SITE = ("index.html", "architecture.html", "service.html", "reference/compatibility.html")
WIDTHS = (1400, 400)
SHOTS = os.environ.get("SHOTS", "")


def faults(page: Page, width: int, *, dark: bool, boxes: bool = True) -> list[str]:
    """What is wrong with a page at a width and in a colour scheme, a sentence each."""
    page.resize(width, 900)
    page.scheme(dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    page.settle()
    found = page.evaluate(f"({LAYOUT})({str(boxes).lower()})")
    assert isinstance(found, list)
    return [f"{width} px, {'dark' if dark else 'light'}: {fault}" for fault in found]


def in_every_form(browser: Browser, path: Path) -> list[str]:
    """A page's faults at both widths in both colour schemes; boxes are where they are in either."""
    page = browser.open(path.as_uri(), width=WIDTHS[0])
    found = []
    for width in WIDTHS:
        found += faults(page, width, dark=False)
        found += faults(page, width, dark=True, boxes=False)
        if SHOTS:
            page.screenshot(Path(SHOTS, f"{path.stem}-{width}.png"))
    page.close()
    return found


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
    "outside its picture": "<svg width=50 height=50 style='overflow: visible'><text y=20>a long label</text></svg>",
}


@pytest.mark.parametrize("said", PLANTED)
def test_a_planted_fault_is_found(browser: Browser, tmp_path: Path, said: str) -> None:
    path = tmp_path / "faulty.html"
    path.write_text(FAULTY + PLANTED[said], encoding="utf-8")
    page = browser.open(path.as_uri(), width=400)
    found = faults(page, 400, dark=False)
    page.close()
    assert any(said in fault for fault in found), found
