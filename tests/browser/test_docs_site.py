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


@pytest.mark.parametrize("name", ["service.html", "tutorial/first-probe.html", "howto/gate-in-ci.html"])
def test_a_copied_block_keeps_its_variables(browser: Browser, name: str) -> None:
    """A `$` at the beginning of a line is the prompt; any other belongs to the command."""
    page = opened(browser, name)
    blocks = page.evaluate(
        """[...document.querySelectorAll("pre > code")].map(block => {
            const shown = block.innerText;
            block.setAttribute("data-md-copying", "");
            return [shown, block.innerText];
        })"""
    )
    assert isinstance(blocks, list)
    variables = 0
    for shown, copied in blocks:
        typed = [line.removeprefix("$ ") for line in shown.splitlines()]
        for line in (line for line, whole in zip(typed, shown.splitlines(), strict=True) if "$" in whole[1:]):
            assert line in copied
            variables += 1
    assert variables
    page.close()


def test_the_map_is_dark_in_the_dark_scheme(browser: Browser) -> None:
    page = opened(browser, "tutorial/first-audit.html")
    filters = {}
    for scheme in ("default", "slate"):
        page.evaluate(f"document.body.setAttribute('data-md-color-scheme', {scheme!r})")
        filters[scheme] = page.evaluate("getComputedStyle(document.querySelector('.md-content img')).filter")
    assert filters["default"] == "none"
    assert "invert" in str(filters["slate"])
    page.close()


def test_the_first_pages_examples_fit_on_a_desk(browser: Browser) -> None:
    page = opened(browser, "index.html")
    page.resize(1400, 900)
    hidden = page.evaluate(
        "[...document.querySelectorAll('.md-content pre > code')].map(e => e.scrollWidth - e.clientWidth)"
    )
    assert max(hidden) <= 0  # type: ignore[call-overload]
    page.close()
