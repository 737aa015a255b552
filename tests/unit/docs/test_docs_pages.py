"""The generated reference is complete: every option, key, exit code and module, and text as it is written."""

import json
import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import cmarkgfm
import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs" / "tools"))

import pages  # noqa: E402
import parsers  # noqa: E402

SCHEMAS = {
    "reference/variants.md": ROOT / "images" / "variants.schema.json",
    "reference/audit-report.md": ROOT / "docs" / "schema" / "audit-report.schema.json",
    "reference/audit-diff.md": ROOT / "docs" / "schema" / "audit-diff.schema.json",
    "reference/epochs.md": ROOT / "docs" / "schema" / "epochs.schema.json",
    "reference/fit.md": ROOT / "docs" / "schema" / "fit.schema.json",
    "reference/placement-plan.md": ROOT / "docs" / "schema" / "placement-plan.schema.json",
    "reference/watch-report.md": ROOT / "docs" / "schema" / "watch-report.schema.json",
    "reference/probe-report.md": ROOT / "docs" / "schema" / "probe-report.schema.json",
    "reference/throughput.md": ROOT / "docs" / "schema" / "throughput.schema.json",
}


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return pages.reference()


@pytest.mark.parametrize("program", ["weir", "python3 -m probes"])
def test_no_option_of_a_verb_is_missing(reference: dict[str, str], program: str) -> None:
    sections = dict(
        re.findall(r"^#+ `([^`]+)`\n(.*?)(?=^#|\Z)", reference["reference/commands.md"], re.M | re.S)
    )
    found = list(parsers.verbs(parsers.programs()[program]))
    assert len(found) >= 4
    for verb, parser in found:
        for action in parser._actions:
            for option in set(action.option_strings) - {"-h", "--help"}:
                assert option in sections[f"{program} {verb}"], f"{program} {verb} {option}"


@pytest.mark.parametrize("page", SCHEMAS)
def test_no_key_of_a_schema_is_missing(reference: dict[str, str], page: str) -> None:
    def keys(schema: Any) -> set[str]:
        if isinstance(schema, list):
            return set().union(*map(keys, schema))
        if not isinstance(schema, dict):
            return set()
        named = schema.get("properties")
        own = set(named) if isinstance(named, dict) and "type" not in named else set()
        return own.union(*map(keys, schema.values()))

    expected = keys(json.loads(SCHEMAS[page].read_text()))
    assert len(expected) > 10
    for key in expected:
        assert f"`{key}`" in reference[page], key


@pytest.mark.parametrize("program", ["buildtool", "probes"])
def test_every_exit_code_says_when_it_comes(reference: dict[str, str], program: str) -> None:
    exits = __import__(f"{program}.core.errors", fromlist=["Exit"]).Exit
    page = reference["reference/exit-codes.md"].partition(f"## `{pages.STARTED_BY[program]}`")[2]
    for member in exits:
        assert re.search(rf"^\| {member.value} \| `{member.name}` \| \w.*\|$", page, re.M), member


@pytest.mark.thorough
def test_every_module_has_a_section_and_none_is_imported_for_it() -> None:
    imported = set(sys.modules)
    made = pages.module_pages()
    assert set(sys.modules) == imported
    text = "\n".join(made.values())
    for program, folder in pages.PROGRAMS.items():
        for path in folder.rglob("*.py"):
            if not path.name.startswith("__"):
                name = ".".join((program, *path.relative_to(folder).with_suffix("").parts))
                assert f"\n## {name}\n" in text, name


@pytest.mark.parametrize(
    "text", ["a_b_c and *d*", "<b>bold</b> & <!-- x", "[a](b) ![c](d)", "1 | 2 ~3~ #4 {: .x }", r"a\b \* $x$"]
)
def test_text_that_looks_like_markdown_is_shown_as_it_was_written(text: str) -> None:
    html = cmarkgfm.github_flavored_markdown_to_html(pages.escaped(text))
    assert unescape(re.sub(r"<[^>]+>", "", html)).strip() == text


def test_a_code_span_is_kept_as_it_is() -> None:
    assert pages.escaped("`a_b|c` and a_b") == r"`a_b|c` and a\_b"
    assert pages.code("a|b") == r"`a\|b`"


def test_a_reference_page_leaves_the_programs_command_lines_as_they_are(reference: dict[str, str]) -> None:
    from probes.cli.program import build_parser

    list(pages.program_section("another name", parsers.programs()["python3 -m probes"]))
    assert reference
    assert build_parser().prog == "python3 -m probes"
