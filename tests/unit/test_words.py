"""Docstrings, comments, messages and pages are in plain English: none has a banned phrasing.

The list holds phrasings of this repository that readers stumbled over, each with plain words instead.
"""

import ast
import re
from pathlib import Path

import architecture
import pytest

# pattern -> plain words instead
BANNED = {
    r"fore(tells?|telling|told)": "predict",
    r"tells|told|telling": "report, show, print, list, known",
    r"lies?|lain": "is, are",
    r"to be had|can't be had|couldn't be had": "available, unavailable, unknown",
    r"looked (at beside|into)": "measured as well, inspected",
    r"whoever": "its owner, its maker, anyone who",
    r"(which|these) alone": "which only, only these",
    r"stands? for": "represents, means",
    r"anew|afresh": "again",
    r"passed over": "skipped, ignored",
    r"(?<!there )is no(?! (?:longer|larger|slower|faster|better|more|other|such|GPU|card))": "is not a",
    r"but for": "except",
    r"held against": "compared with",
    r"stands? beside|looks? beside": "is next to, is shown with",
    r"takes? the place of": "replaces",
    r"(is|are|be) at work": "is running, is busy",
    r"gravest": "most severe",
    r"needn't|shan't|mayn't|hasn't (this|a|an|any)": "don't need to, doesn't have",
    r"lets? go of": "release, free",
    r"outside of": "outside",
    r"speaks? of|hears? of": "describe, receive",
    r"mends?|mended": "fix",
    r"hence|thereof|therein|lest|upon|aught": "so, of it, in it, on",
    r"worth telling|worth a line": "notable",
}
WORDS = re.compile(rf"\b(?:{'|'.join(BANNED).lower()})(?!\w)")  # of lower case: any case takes twice as long
COMMENT = re.compile(r"(?:^|  ) *# (.*(?:\n *# .*)*)", re.MULTILINE)
PIECES = re.compile(r"""["']\s*\n\s*[rbf]*["']""")  # between two literals that Python joins
# The names of bars come from the benches' stored results, where they are keys.
FIGURES = re.compile(r"<!--f .*?<!--/f-->|```.*?```|`[^`\n]*`", re.DOTALL)
PAGES = [
    *architecture.ROOT.glob("*.md"),
    *(architecture.ROOT / "docs").rglob("*.md"),
]


def texts(path: Path) -> list[str]:
    """The docstrings, other string literals with a space in them, and comments of a module.

    None where the whole source, each string in one piece, has no banned phrasing: to parse takes longer.
    """
    if not banned(PIECES.sub("", architecture.text_of(path)).replace("\\n", " ")):
        return []
    strings = [
        node.value
        for node in architecture.nodes(path, ast.Constant)
        if isinstance(node.value, str) and " " in node.value
    ]
    return strings + COMMENT.findall(architecture.text_of(path))


def banned(text: str) -> list[str]:
    """The banned phrasings in a text, wherever its lines break."""
    return [found[0] for found in WORDS.finditer(re.sub(r"\s+(?:# )?", " ", text.lower()))]


@pytest.mark.parametrize("top", ["buildtool", "probes"])
def test_no_banned_phrasing_is_in_a_program(top: str) -> None:
    modules = [path for path in architecture.MODULES if path.is_relative_to(architecture.ROOT / top)]
    found = {architecture.name_of(path): banned("\n\n".join(texts(path))) for path in modules}
    assert {name: words for name, words in found.items() if words} == {}


def test_no_banned_phrasing_is_on_a_page() -> None:
    found = {page.name: banned(FIGURES.sub("", page.read_text())) for page in PAGES}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What is here, told by\nits path."""', ["told"]),
        ('def f():\n    """A doc.\n\n    Made\n    anew.\n    """', ["anew"]),
        ("x = 1  # what stands\ny = 2  # for it", []),
        ("# a comment that takes\n# the place of another", ["takes the place of"]),
        ('say(f"{path} is no file")', ["is no"]),
        ('say("there is no file")\nsay("it is no longer there")', []),
        ("told = foretold(lie)", []),
    ],
)
def test_phrasings_are_found_in_words_and_not_in_code(tmp_path: Path, source: str, found: list[str]) -> None:
    (tmp_path / "module.py").write_text(source)
    assert [word for text in texts(tmp_path / "module.py") for word in banned(text)] == found


def test_stored_names_and_code_on_a_page_are_not_words() -> None:
    page = "<!--f bars-->\n| whole time foretold |\n<!--/f-->\n`told`\n```console\n$ lie\n```\nIt tells."
    assert banned(FIGURES.sub("", page)) == ["tells"]
