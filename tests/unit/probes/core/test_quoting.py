"""No text from an image is more than text to the reader of what we write: a slice of the bench's 10,000."""

import contextlib
import json
import re
import tracemalloc
from collections.abc import Callable
from xml.etree import ElementTree as Xml

import pytest
import strict_readers as read
from hostile_texts import hostile_texts

from probes.core import quoting
from probes.core.quoting import Unquotable, terminal

TEXTS = list(hostile_texts(600))
CODE = {"code"}
rendered_texts = pytest.mark.parametrize(  # two renderers take a second for all
    "texts",
    [TEXTS[:200], pytest.param(TEXTS[200:], marks=pytest.mark.thorough)],
    ids=["the first 200", "all others"],
)


def test_shell_reads_hostile_text_as_one_word() -> None:
    quoted = 0
    for text in TEXTS:
        with contextlib.suppress(Unquotable):
            assert read.shell_words(quoting.shell(text)) == [text]
            quoted += 1
    assert quoted > len(TEXTS) // 4


def test_shell_keeps_words_apart() -> None:
    assert read.shell_words(quoting.command("a b", "", "$(c)")) == ["a b", "", "$(c)"]


def test_shell_pattern_quotes_a_directory_that_looks_like_a_pattern() -> None:
    assert quoting.shell_pattern(b"/opt/*.$(touch x)/lib", b"so") == "'/opt/*.$(touch x)/lib'/*.so"
    with pytest.raises(Unquotable):
        quoting.shell_pattern(b"/opt", b"$(touch x)")


@pytest.mark.parametrize("text", [b"\xff", "a\nb", "\x1b[201~", "\u202egpj", "\udcff", "a\xa0b", b"a\x03"])
def test_text_that_would_name_something_else_is_never_pasted(text: str | bytes) -> None:
    with pytest.raises(Unquotable, match="it holds"):
        quoting.shell(text)
    with pytest.raises(Unquotable, match="it holds"):
        quoting.shell_pattern(text, "so")


@pytest.mark.thorough
@rendered_texts
@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{}", ["p"]),
        ("before {} after", ["p"]),
        ("- {}", ["ul", "li"]),
        ("# {}", ["h1"]),
        ("para\n{}", ["p"]),
        ("| a | b |\n|---|---|\n| {} | z |", ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]),
    ],
    ids=["paragraph", "middle", "item", "heading", "second line", "cell"],
)
def test_markdown_renders_hostile_text_as_itself(template: str, tags: list[str], texts: list[str]) -> None:
    for text in texts:
        shown = terminal(text)
        if not shown.strip() and template != "before {} after":
            continue  # an empty item or heading is rendered in several ways, all of them empty
        source = template.format(quoting.markdown(text))
        for rendered, found, attributes in read.markdown_renderings(source):
            assert shown in rendered, source
            assert [tag for tag in found if tag not in CODE] == tags, source
            assert not attributes, source


@rendered_texts
def test_markdown_code_renders_hostile_text_as_itself(texts: list[str]) -> None:
    for text in texts:
        shown = terminal(text)
        source = f"- x {quoting.markdown_code(text)} y"
        for rendered, found, attributes in read.markdown_renderings(source):
            assert rendered.strip() == f"x {shown} y", source
            assert not set(found) - {"ul", "li", "code"}, source
            assert not attributes, source


@rendered_texts
def test_markdown_block_cannot_be_closed_by_its_text(texts: list[str]) -> None:
    for text in texts:
        source = f"{quoting.markdown_block(text, 'sh')}\n\nafter"
        for rendered, found, _ in read.markdown_renderings(source):
            assert found == ["pre", "code", "p"], source
            assert terminal(text, keep="\n\t") in rendered, source


def test_html_holds_hostile_text_as_itself() -> None:
    for text in TEXTS:
        shown = terminal(text, keep="\n\t")
        assert read.html_of(f'<p title="{quoting.html(text)}">{quoting.html(text)}</p>') == (
            shown,
            ["p"],
            [("title", shown)],
        )


def test_script_element_is_not_closed_by_its_data() -> None:
    for text in map(terminal, TEXTS):
        written = quoting.script_json([text])
        assert json.loads(written) == [text]
        assert not set("<>&") & set(written)
        assert written.isascii()


def test_xml_holds_hostile_text() -> None:
    for text in TEXTS:
        element = Xml.Element("a")
        element.text = quoting.xml(text)
        assert read.xml_text(Xml.tostring(element, encoding="unicode")) == terminal(text, keep="\n\t")


def test_terminal_gets_no_control_or_invisible_character() -> None:
    for text in TEXTS:
        assert terminal(text).isprintable()
        terminal(text).encode()  # nothing that UTF-8 can't write
    assert terminal(b"\xff\x1b\n") == "\\xff\\x1b\\x0a"
    assert terminal("\u202ea\U000e0041\ud800\n", keep="\n") == "\\u202ea\\U000e0041\\ud800\n"


def test_sarif_message_has_no_link() -> None:
    assert "](" not in quoting.sarif("[a](http://evil.example) [b](1)")


def test_prometheus_label_stays_within_its_quotation_marks() -> None:
    for text in TEXTS:
        written = quoting.prometheus(text)
        assert re.fullmatch(r'([^"\\\n]|\\["\\n])*', written)
        assert re.sub(r"\\(.)", lambda f: {"n": "\n"}.get(f[1], f[1]), written) == terminal(text, keep="\n")


def test_a_command_with_a_name_that_can_not_be_pasted_is_none() -> None:
    assert quoting.command("docker", "pull", "a b") == "docker pull 'a b'"
    assert quoting.command("docker", "pull", "a\x1b").startswith("# no command to paste")


def test_bake_does_not_interpolate() -> None:
    assert quoting.bake_text("${FOO:-x} %{if} $x") == "$${FOO:-x} %%{if} $x"


def test_a_plain_word_stays_itself_wherever_it_is_written() -> None:
    ways = [name for name in quoting.__all__ if name not in ("Unquotable", "shell_pattern")]
    written = {name: getattr(quoting, name)("gfx906") for name in ways}
    assert {name for name, text in written.items() if text == "gfx906"} == {
        "bake_text", "command", "html", "log_text", "markdown", "markdown_sentence", "prometheus", "sarif",
        "shell", "terminal", "xml",
    }  # fmt: skip
    assert written["markdown_code"] == "`gfx906`"
    assert written["markdown_block"] == "```\ngfx906\n```"
    assert written["script_json"] == '"gfx906"'


def test_every_sign_of_a_syntax_gets_its_one_replacement() -> None:
    assert quoting.html("<a href=\"x\">'&'\t\n\x1b") == (
        "&lt;a href=&quot;x&quot;&gt;&#x27;&amp;&#x27;\t\n\\x1b"
    )
    assert quoting.script_json({"a": ["<", ">", "&", "é"], "b": 1}) == (
        '{"a":["\\u003c","\\u003e","\\u0026","\\u00e9"],"b":1}'
    )
    assert quoting.xml("<a>\t\n\x1b") == "<a>\t\n\\x1b"
    assert quoting.sarif("[a](b)\t\n\x1b") == "[a]\\(b)\t\n\\x1b"
    assert quoting.prometheus('a\\b"c\nd\te') == 'a\\\\b\\"c\\nd\\\\x09e'
    assert quoting.shell("it's") == "'it'\"'\"'s'"
    assert quoting.shell("") == "''"
    assert quoting.shell("a_@%+:,./-9Z") == "a_@%+:,./-9Z"


@pytest.mark.parametrize("char", '~*?[]{}!$`"\\|&;<>() #=^')
def test_no_sign_of_the_shell_is_taken_for_a_part_of_a_plain_word(char: str) -> None:
    assert quoting.shell(f"a{char}") == f"'a{char}'"
    with pytest.raises(Unquotable, match="pattern"):
        quoting.shell_pattern("/opt", f"so{char}")


@pytest.mark.parametrize("ending", ["so", "tar.gz", "so.1.2", "c++", "x-y_z"])
def test_an_ending_of_several_parts_is_a_pattern(ending: str) -> None:
    assert quoting.shell_pattern("/opt", ending) == f"/opt/*.{ending}"


@pytest.mark.parametrize(
    ("text", "why"),
    [(b"\xff", "UTF-8"), *((chr(code), "UTF-8") for code in (0xD800, 0xDC80, 0xDFFF)),
     (chr(0xE000), "invisible"), (chr(0x7F), "control")],
)  # fmt: skip
def test_what_can_not_be_pasted_is_reported_with_the_true_reason(text: str | bytes, why: str) -> None:
    with pytest.raises(Unquotable, match=why):
        quoting.shell(text)
    if isinstance(text, str):
        assert why in quoting.command("rm", text)


@pytest.mark.thorough
@pytest.mark.parametrize("quote", [quoting.markdown, quoting.markdown_sentence])
@pytest.mark.parametrize("unit", ["\udcff", "*"])
def test_a_long_text_of_signs_takes_a_few_times_its_own_memory(
    quote: Callable[[str], str], unit: str
) -> None:
    """1 MiB of bytes that aren't UTF-8 took 150 MiB: a small text for each sign, all at once."""
    text = unit * (1 << 15)
    tracemalloc.start()
    try:
        found = quote(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * (len(text) + len(found)) + 1_500_000
