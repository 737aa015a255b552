"""What each sign becomes for a terminal and in Markdown, to the letter."""

import pytest

from probes.core import quoting


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ÿ 漢", "plain ÿ 漢"),
        (b"plain \xc3\xbf", "plain ÿ"),
        (b"\x7f\x80\xff", r"\x7f\x80\xff"),
        ("\udc80\udcff", r"\x80\xff"),  # bytes that were no UTF-8
        ("\udc7f\udd00\udbff", r"\udc7f\udd00\udbff"),  # other halves of pairs
        ("\x00\n\x85\xad", r"\x00\x0a\x85\xad"),
        ("\u200b\uffff", r"\u200b\uffff"),
        ("\U0001fffe\U0010ffff", r"\U0001fffe\U0010ffff"),
    ],
)
def test_terminal_shows_signs_and_escapes_everything_else(text: str | bytes, shown: str) -> None:
    assert quoting.terminal(text) == shown


def test_terminal_keeps_the_characters_in_keep() -> None:
    assert quoting.terminal("a\n\tb\x1b", keep="\n") == "a\n\\x09b\\x1b"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("sha256:0a1b torch_build a > b", "sha256:0a1b torch_build a > b"),
        ("*a* [b] ~c $d \\e `f`", "\\*a\\* \\[b\\] \\~c \\$d \\\\e \\`f\\`"),
        ("_a_", "\\_a\\_"),
        ("a & b < c | d", "a &amp; b &lt; c &#124; d"),
        (" a ", "&#32;a&#32;"),
        ("a@b", "a`@`b"),
        ("a@@b", "a`@@`b"),
        ("http://x", "http\\://x"),
        ("mailto:x", "mailto\\:x"),
        ("www.x", "www\\.x"),
        ("a ##", "a \\#\\#"),
        ("C#", "C\\#"),
        ("# a", "\\# a"),
        ("> a", "\\> a"),
        ("- a", "\\- a"),
        ("+", "\\+"),
        ("===", "\\==="),
        ("1. a", "1\\. a"),
        ("12) a", "12\\) a"),
        ("1.5 a", "1.5 a"),
        ("", ""),
    ],
)
def test_markdown_escapes_what_would_mean_something_and_no_more(text: str, written: str) -> None:
    assert quoting.markdown(text) == written


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("run `make x` now", "run `make x` now"),
        ("run `a` and `b_c*`", "run `a` and `b_c*`"),
        ("`a|b` & c", "\\`a&#124;b\\` &amp; c"),  # it may stand in a table
        ("a ``b`` *c*", "a \\`\\`b\\`\\` \\*c\\*"),
        ("an odd ` sign", "an odd \\` sign"),
        ("- `a`", "\\- `a`"),
    ],
)
def test_markdown_of_a_sentence_shows_what_stands_between_backticks_as_code(text: str, written: str) -> None:
    assert quoting.markdown_sentence(text) == written


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a", "`a`"),
        ("a`b", "``a`b``"),
        ("a`b```c``d", "````a`b```c``d````"),
        ("`", "`` ` ``"),
        ("`ab", "`` `ab ``"),
        ("ab`", "`` ab` ``"),
        ("a`bc", "``a`bc``"),
        (" a", "`  a `"),
        ("a ", "` a  `"),
        ("a\x1b", "`a\\x1b`"),
        ("", ""),
        ("   ", "&#32; &#32;"),
    ],
)
def test_code_span_has_a_fence_longer_than_its_text_s_and_room_where_it_needs_any(
    text: str, written: str
) -> None:
    assert quoting.markdown_code(text) == written


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a\n\tb", "```\na\n\tb\n```"),
        ("a``b", "```\na``b\n```"),
        ("```\na", "````\n```\na\n````"),
        ("a`````b`c", "``````\na`````b`c\n``````"),
        ("a\rb", "```\na\\x0db\n```"),
    ],
)
def test_block_has_a_fence_of_three_signs_or_one_more_than_its_text_s(text: str, written: str) -> None:
    assert quoting.markdown_block(text) == written


def test_block_names_its_language() -> None:
    assert quoting.markdown_block("a", "sh") == "```sh\na\n```"
