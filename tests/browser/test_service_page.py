"""The service's page in a real browser: it says what answers, and answers."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_pipe import Browser, Page

sys.path.insert(0, str(Path(__file__).parents[2] / "images"))
sys.path.insert(0, str(Path(__file__).parents[1] / "loopback"))

from test_service_sockets import Served, served
from waiting import until


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with served() as made:
        yield made


def wait_for(page: Page, expression: str) -> object:
    until(lambda: page.evaluate(expression))
    return page.evaluate(expression)


@pytest.fixture(params=[(1280, False), (390, True)], ids=["desk", "phone"])
def page(request: pytest.FixtureRequest, browser: Browser, here: Served) -> Page:
    width, dark = request.param
    return browser.open(f"http://127.0.0.1:{here.port}/", width=width, dark=dark)


def test_the_page_says_which_model_weights_and_device_answer(page: Page) -> None:
    said = wait_for(page, "document.querySelector('#about.random')?.textContent")
    assert "finbert: random weights (seed 0), float32, on cpu." in str(said)
    assert "the answers mean nothing" in str(said)
    assert page.complaints() == []
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1], "the page scrolls sideways"  # type: ignore[index]


def test_a_text_gets_labels_and_timings(page: Page) -> None:
    page.evaluate("document.querySelector('#text').value = '<b>Profits</b> rose'; 1")
    page.evaluate("document.querySelector('#ask').click(); 1")
    wait_for(page, "!document.querySelector('#answer').hidden")
    rows = page.evaluate("[...document.querySelectorAll('#scores tr')].map(row => row.innerText)")
    assert [str(row).split() for row in rows] == [  # type: ignore[attr-defined]
        ["yes", "(most", "likely)", "1.0000"],
        ["no", "0.0000"],
    ]
    timing = str(page.evaluate("document.querySelector('#timing').textContent"))
    assert timing.startswith("2 tokens; waited ")
    assert timing.endswith(" ms in this browser.")


def test_a_refusal_is_shown_as_text(page: Page, here: Served) -> None:
    here.service.admission.draining = True
    try:
        page.evaluate("document.querySelector('#ask').click(); 1")
        assert wait_for(page, "document.querySelector('#error').textContent") == "shutting down"
    finally:
        here.service.admission.draining = False
