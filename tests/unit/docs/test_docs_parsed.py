"""Commands in README and the site exist as they are shown, and each is tested in one of two ways."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests" / "shown"))

import shown  # noqa: E402
from parsers import Refused, parse, programs  # noqa: E402

PAGES = shown.pages()
COMMANDS = list(dict.fromkeys(command for page in PAGES for command in shown.commands(page)))
PROMPTS = re.compile(r"^\s*(\$ |weir |make |docker |python3? -m )", re.MULTILINE)
TOUCHING = re.compile(r"^(?![-\s|>]).+\n- .*", re.MULTILINE)
MOST_WORDS = 700  # of README
DIAGRAM = re.compile(r"[\u2500-\u257f]")  # lines and corners of boxes


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text}")
def test_no_command_is_shown_that_its_program_refuses(command: shown.Command) -> None:
    shown.check(command)


def test_no_sentence_mentions_a_verb_target_or_option_that_is_not_there() -> None:
    wrong = []
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for text in shown.mentions(page):
            try:
                shown.check_mention(text)
            except Refused as refused:
                wrong.append(f"{name(page)}: {text}: {refused}")
    assert wrong == []


def test_no_command_hides_in_a_block_that_is_not_tested() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in shown.FENCE.finditer(text):
            assert block["kind"], f"{page}: a block without a kind: console, text, json, ..."
            if block["kind"] != "console" and not DIAGRAM.search(block["body"]):
                assert not PROMPTS.search(block["body"]), f"{page}: commands belong into a console block"
        assert text.count("```") == 2 * len(shown.FENCE.findall(text)), f"{page}: a fence that isn't closed"


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_no_list_touches_the_paragraph_before_it() -> None:
    """GitHub shows a list there, the site a paragraph: leave a line empty."""
    texts = {name(page): shown.FENCE.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    assert [page for page, text in texts.items() if TOUCHING.search(text)] == []


def test_no_reason_is_kept_for_a_command_that_is_not_shown() -> None:
    assert set(shown.NOT_RUN) <= {command.text for command in COMMANDS}


@pytest.mark.parametrize(
    "text",
    [
        "weir audit",
        "weir audit x --no-such-option",
        "weir no-such-verb",
        "weir audit x --tolerance",
        "python3 -m probes run --model no-such-model",
        "make no-such-target",
        "make images NO_SUCH_VARIABLE=1",
        "docker compose up api-no-such",
        "NO_SUCH_SETTING=1 docker compose up",
        "docker compose run --rm no-such-service",
        "docker compose run --rm probe python3 -m probes run --no-such-option",
        "source <(weir completion no-such-shell)",
    ],
)
def test_a_mistyped_command_is_noticed(text: str) -> None:
    with pytest.raises(Refused):
        shown.check(shown.Command("page", text))


def test_a_command_that_is_neither_run_nor_parsed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shown.NOT_RUN, "rocminfo", "needs an AMD card")
    with pytest.raises(shown.Unaccounted):
        shown.check(shown.Command("page", "rocminfo"))


@pytest.mark.parametrize(
    "text", ["weir audit --no-such", "weir nothing", "make nothing", "weir prune --baseline"]
)
def test_a_mistyped_mention_is_noticed(text: str) -> None:
    with pytest.raises(Refused):
        shown.check_mention(text)


def test_commands_are_found_without_prompts_comments_and_output() -> None:
    page = "```console\n$ make images   # two images\nweir/cpu:latest\n$ weir audit x \\\n    --top 3\n```\n"
    assert list(shown.typed(page)) == ["make images", "weir audit x --top 3"]


def test_parsing_a_command_starts_nothing(tmp_path: Path) -> None:
    parse(programs()["weir"], ["audit", "x", "--json", str(tmp_path / "report.json")])
    parse(programs()["weir"], ["engine", "--yes"])
    assert not list(tmp_path.iterdir())
