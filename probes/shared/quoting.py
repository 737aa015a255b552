r"""Text from outside, quoted for the place where it is shown or pasted. Pure; the one module that quotes.

Paths, labels, names and versions in an image are written by whoever made the image. Each function here
takes such a text and returns it so that the reader at that place (a shell, a Dockerfile parser, a Markdown
renderer, a browser, a terminal) sees exactly that text and no syntax. There are two kinds:

- What a person reads (`terminal`, `markdown`, `html`, ...) takes any text, and shows characters that don't
  print as escapes such as `\x1b`.
- What a person pastes (`shell`, `shell_pattern`) names something, and an escape would name something
  else. These functions raise Unquotable for a text that can't be pasted safely.
"""

import html as _html
import json
import re

from probes.shared.quoting import markdown, markdown_block, markdown_code, markdown_sentence, terminal

__all__ = [
    "Unquotable",
    "bake_text",
    "command",
    "html",
    "markdown",
    "markdown_block",
    "markdown_code",
    "markdown_sentence",
    "prometheus",
    "sarif",
    "script_json",
    "shell",
    "shell_pattern",
    "terminal",
    "xml",
]

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+:,./-]+")
_ENDING = re.compile(r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*")


class Unquotable(ValueError):
    """A text that can't stand in a command to paste. The message says why, without the text itself."""


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
    return terminal(text, keep="\n").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def shell(text: str | bytes) -> str:
    """A text as one word of a POSIX shell, also in the shell form of a Dockerfile's RUN.

    A name that may begin with `-` needs `--` before it besides. Raises Unquotable.
    """
    word = _pasteable(text)
    return word if _PLAIN_WORD.fullmatch(word) else "'" + word.replace("'", "'\"'\"'") + "'"


def command(*words: str) -> str:
    """A command to paste; a comment that says why there is none, where a word can't be pasted."""
    try:
        return " ".join(map(shell, words))
    except Unquotable as error:
        return f"# no command to paste: a name in it cannot be pasted ({error})"


def shell_pattern(directory: str | bytes, ending: str | bytes) -> str:
    """A pattern for all files of a directory with an ending such as `so`. Raises Unquotable."""
    suffix = _pasteable(ending)
    if not _ENDING.fullmatch(suffix):
        raise Unquotable("an ending holds characters that a shell would read as a pattern")
    return f"{shell(directory)}/*.{suffix}"


def bake_text(text: str) -> str:
    """A text in a bake file, where `${...}` and `%{...}` would be replaced by a variable's value."""
    return text.replace("${", "$${").replace("%{", "%%{")


def _pasteable(text: str | bytes) -> str:
    """The text if every character of it survives being shown, copied and pasted into one line."""
    try:
        word = text if isinstance(text, str) else text.decode()
        word.encode()
    except UnicodeError:
        raise Unquotable("it holds bytes that are not UTF-8") from None
    if not word.isprintable():
        raise Unquotable("it holds control or invisible characters")
    return word
