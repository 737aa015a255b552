"""Readers of what `probes.core.quoting` writes, as strict as can be: what isn't plainly literal is refused.

They stand in for a shell, BuildKit and a browser where no process can be started; `tests/bench/injection.py`
asks the real ones.
"""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree as Xml

import cmarkgfm
from markdown_it import MarkdownIt

_PART = re.compile(r"([A-Za-z0-9_@%+:,./-]+)|'([^']*)'|\"([^\"$`\\!]*)\"")
_MARKDOWN_IT = MarkdownIt("commonmark").enable(["table", "strikethrough"])


class Syntax(AssertionError):
    """Something that its reader would not take literally."""


def shell_words(line: str) -> list[str]:
    """Words of plain characters and of quoted parts in which nothing is special."""
    words: list[str] = [""]
    at = 0
    while at < len(line):
        if line[at] == " ":
            words.append("")
            at += 1
            continue
        part = _PART.match(line, at)
        if part is None or not line.isprintable():
            raise Syntax(line)
        words[-1] += next(text for text in part.groups() if text is not None)
        at = part.end()
    return words


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_comment(self, data: str) -> None:
        raise Syntax(data)

    def handle_data(self, data: str) -> None:
        self.text += data


def html_of(page: str) -> tuple[str, list[str], list[tuple[str, str | None]]]:
    """The text, the tags and the attributes of a piece of HTML."""
    parser = _Text()
    parser.feed(page)
    parser.close()
    return parser.text, parser.tags, parser.attributes


def markdown_renderings(source: str) -> list[tuple[str, list[str], list[tuple[str, str | None]]]]:
    """What two renderers, GitHub's own among them, make of Markdown: as `html_of`."""
    return [
        html_of(cmarkgfm.github_flavored_markdown_to_html(source)),
        html_of(_MARKDOWN_IT.render(source)),
    ]


def xml_text(written: str) -> str:
    """The text of an element, through a real parser."""
    return Xml.fromstring(written).text or ""
