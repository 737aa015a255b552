"""What is wrong with how a page is laid out: page_layout.js says it, at each width and in each colour scheme.

SHOTS=FOLDER in the environment keeps a picture of each page there.
"""

import os
from pathlib import Path

from browser_pipe import Browser, Page

LAYOUT = Path(__file__).with_name("page_layout.js").read_text(encoding="utf-8")
WIDTHS = (1400, 400)
SHOTS = os.environ.get("SHOTS", "")


def faults(page: Page, width: int, *, dark: bool, boxes: bool = True) -> list[str]:
    """What is wrong with a page at a width and in a colour scheme, a sentence each."""
    page.resize(width, 900)
    page.scheme(dark=dark)
    if page.evaluate("document.body?.hasAttribute('data-md-color-scheme') ?? false"):  # the site has a switch
        scheme = "slate" if dark else "default"
        page.evaluate(f"document.body.setAttribute('data-md-color-scheme', {scheme!r})")
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    page.settle()
    page.evaluate("Promise.allSettled(document.getAnimations().map(each => each.finished)).then(() => 0)")
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
