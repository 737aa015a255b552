"""The site as a browser shows it from a disk: whole, searchable, and with nothing asked of another host."""

from pathlib import Path

import pytest
from browser_pipe import Browser, Page

SITE = Path(__file__).parents[2] / ".weir" / "site"
PAGES = ("index.html", "tutorial/first-audit.html", "reference/commands.html", "decisions/index.html")
SEARCH = """(async () => {
    const input = document.querySelector("[data-md-component=search-query]");
    document.querySelector("#__search").click();
    input.focus();
    input.value = "HSA_OVERRIDE_GFX_VERSION";
    input.dispatchEvent(new KeyboardEvent("keyup", { key: "N" }));
    for (let turn = 0; turn < 300; turn++) {
        const links = [...document.querySelectorAll(".md-search-result__link")];
        if (links.length) return links.map(link => link.getAttribute("href"));
        await new Promise(done => setTimeout(done, 100));
    }
    return [];
})()"""


def opened(browser: Browser, name: str) -> Page:
    path = SITE / name
    assert path.exists(), "no site here: make docs"
    return browser.open(path.as_uri())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_from_a_disk_is_whole_and_asks_no_other_host(browser: Browser, name: str) -> None:
    page = opened(browser, name)
    assert [url for url in page.requests() if not url.startswith("file:")] == []
    assert page.complaints() == []
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)") is True


def test_the_search_finds_pages_without_a_server(browser: Browser) -> None:
    page = opened(browser, "index.html")
    found = page.evaluate(SEARCH)
    assert isinstance(found, list)
    assert any("howto/unsupported-card.html" in link for link in found), found
    assert [url for url in page.requests() if not url.startswith("file:")] == []


def test_a_copied_block_is_what_one_types(browser: Browser) -> None:
    page = opened(browser, "index.html")
    copied = page.evaluate(
        """(() => {
            const blocks = [...document.querySelectorAll("pre code")];
            const block = blocks.find(each => each.innerText.includes("make probe"));
            block.setAttribute("data-md-copying", "");
            return block.innerText.trim().split("\\n").map(line => line.split("#")[0].trim());
        })()"""
    )
    assert copied == ["make images", "docker compose up -d --wait", "make probe"]
