r"""Text from outside, quoted for the place where it is shown or pasted. Pure; the one module that quotes.

Paths, labels, names and versions in an image are written by whoever made the image. Each function here
takes such a text and returns it so that the reader at that place (a shell, a Dockerfile parser, a Markdown
renderer, a browser, a terminal) sees exactly that text and no syntax. There are two kinds:

- What a person reads (`terminal`, `markdown`, `html`, ...) takes any text, and shows characters that don't
  print as escapes such as `\x1b`.
- What a person pastes (`shell`, `dockerfile_value`, ...) names something, and an escape would name something
  else. These functions raise Unquotable for a text that can't be pasted safely.
"""

import html as _html
import json
import re
from collections.abc import Iterable, Sequence

from probes.printable import printable

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+:,./-]+")
_ENDING = re.compile(r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*")
# What means something within a line: CommonMark's syntax, and GitHub's tables, autolinks, maths and emoji.
_MARKDOWN = re.compile(r"[\\`*_\[\]<>|~$:#&]|(?<=[Ww]{3})\.|@+|^ | $")
_MARKDOWN_REFERENCES = {"&": "&amp;", "<": "&lt;", "|": "&#124;", " ": "&#32;"}
_MARKDOWN_START = re.compile(r"[-+=]|\d+[.)](?= |$)")  # would begin a list or underline a heading
_BACKTICKS = re.compile(r"`+")


class Unquotable(ValueError):
    """A text that can't stand in a command to paste. The message says why, without the text itself."""


def terminal(text: str | bytes, *, keep: str = "") -> str:
    r"""A text for people, on a terminal or in a report: everything that doesn't print becomes an escape.

    Bytes are read as UTF-8; those that are not UTF-8 become `\xff`, as surrogate escapes in a str do.
    Characters in `keep` (a line break, where a text has several lines) pass unchanged.
    """
    return printable(text if isinstance(text, str) else text.decode("utf-8", "surrogateescape"), keep=keep)


def html(text: str) -> str:
    """A text inside an HTML element or a quoted attribute."""
    return _html.escape(terminal(text, keep="\n\t"))


def script_json(value: object) -> str:
    """JSON that can stand inside an HTML script element: ASCII, and nothing that HTML would read."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def xml(text: str) -> str:
    """A text for an XML writer, which escapes XML's syntax; XML 1.0 can't hold most control characters."""
    return terminal(text, keep="\n\t")


def sarif(text: str) -> str:
    r"""A text in a SARIF message, where `[words](target)` would be a link (SARIF 2.1.0, section 3.11.6)."""
    return terminal(text, keep="\n\t").replace("](", "]\\(")


def prometheus(text: str) -> str:
    """The value of a label in Prometheus' text format, without the quotation marks around it."""
    return terminal(text).replace("\\", "\\\\").replace('"', '\\"')


def markdown(text: str | bytes) -> str:
    """A text for a paragraph, list item, heading or table cell; a renderer shows `terminal(text)`."""
    shown = _MARKDOWN.sub(lambda match: _markdown_literal(match[0]), terminal(text))
    start = _MARKDOWN_START.match(shown)
    return f"{shown[: start.end() - 1]}\\{shown[start.end() - 1 :]}" if start else shown


def _markdown_literal(special: str) -> str:
    """GitHub links addresses and mentions even where the `@` is escaped, but not where it is code."""
    return f"`{special}`" if "@" in special else _MARKDOWN_REFERENCES.get(special, f"\\{special}")


def markdown_code(text: str | bytes) -> str:
    """A text as a code span, for a paragraph or a list item; in a table a `|` would end the cell."""
    shown = terminal(text)
    if not shown.strip():
        return markdown(shown)  # a code span can't hold spaces alone
    fence = "`" * (1 + _longest_run(shown))
    room = " " if shown[0] in " `" or shown[-1] in " `" else ""
    return f"{fence}{room}{shown}{room}{fence}"


def markdown_block(text: str, language: str = "") -> str:
    """Lines of text as a fenced block, whose fence is longer than any in the text."""
    shown = terminal(text, keep="\n\t")
    fence = "`" * max(3, 1 + _longest_run(shown))
    return f"{fence}{language}\n{shown}\n{fence}"


def _longest_run(text: str) -> int:
    return max(map(len, _BACKTICKS.findall(text)), default=0)


def shell(text: str | bytes) -> str:
    """A text as one word of a POSIX shell, also in the shell form of a Dockerfile's RUN.

    A name that may begin with `-` needs `--` before it besides. Raises Unquotable.
    """
    word = _pasteable(text)
    return word if _PLAIN_WORD.fullmatch(word) else "'" + word.replace("'", "'\"'\"'") + "'"


def shell_words(texts: Iterable[str | bytes]) -> str:
    """Texts as the words of one command. Raises Unquotable."""
    return " ".join(map(shell, texts))


def shell_pattern(directory: str | bytes, ending: str | bytes) -> str:
    """A pattern for all files of a directory with an ending such as `so`. Raises Unquotable."""
    suffix = _pasteable(ending)
    if not _ENDING.fullmatch(suffix):
        raise Unquotable("an ending holds characters that a shell would read as a pattern")
    return f"{shell(directory)}/*.{suffix}"


def dockerfile_value(text: str) -> str:
    """A text as the value of ENV or LABEL, or a path of COPY or ADD, in double quotation marks.

    It stays itself under the default escape character, a backslash. Raises Unquotable.
    """
    escaped = _pasteable(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def dockerfile_words(texts: Sequence[str]) -> str:
    """Texts as the JSON form of RUN, CMD, ENTRYPOINT or SHELL, where no variable is replaced.

    Raises Unquotable for text that is not Unicode; control characters stand as JSON's escapes.
    """
    for text in texts:
        if not _is_unicode(text):
            raise Unquotable("it holds bytes that are not UTF-8")
    return json.dumps(list(texts))


def bake_text(text: str) -> str:
    """A text in a bake file, where `${...}` and `%{...}` would be replaced by a variable's value."""
    return text.replace("${", "$${").replace("%{", "%%{")


def _pasteable(text: str | bytes) -> str:
    """The text if every character of it survives being shown, copied and pasted into one line."""
    try:
        word = text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError:
        raise Unquotable("it holds bytes that are not UTF-8") from None
    if not _is_unicode(word):
        raise Unquotable("it holds bytes that are not UTF-8")
    if not word.isprintable():
        raise Unquotable("it holds control or invisible characters")
    return word


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
