r"""Text from outside, quoted for the place where it is shown or pasted. Pure; the one module that quotes.

Paths, labels, names and versions in an image are written by the image's maker. Each function here
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
from functools import lru_cache

__all__ = [
    "Unquotable",
    "bake_text",
    "command",
    "html",
    "log_text",
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

_BYTES = range(0xDC80, 0xDD00)  # what Python's `surrogateescape` makes of bytes 0x80 to 0xFF
_SURROGATES = 0xDC00
# Characters with meaning within a line of CommonMark, or of GitHub's tables, autolinks, addresses and maths.
# Signs that only mean something at a line's ends (lists, headings, quotes) or before others are left
# readable elsewhere: `torch_build`, `sha256:0a1b`, `a > b`.
_MARKDOWN = (
    r"[\\`*\[\]<|~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|@+|(?<!#)#++(?= *+$)|^[>:#]|:(?=/)"
    r"|(?i:(?<=mailto)|(?<=xmpp)):|(?i:(?<=www))\.|^ | $"
)
_TEXT = re.compile(_MARKDOWN)
_SENTENCE = re.compile(rf"(?<![`@])`[^`]+`(?![`@])|{_MARKDOWN}")
_SIGNS = {sign: f"\\{sign}" for sign in "\\`*[]~$_>:#."} | {
    "&": "&amp;", "<": "&lt;", "|": "&#124;", " ": "&#32;", "@": "`@`",
}  # fmt: skip
_PORTION = 1 << 14  # pieces of a text that are joined at a time: a piece takes 50 times its letters
_START = re.compile(r"[-+=]|\d+[.)](?= |$)")  # would begin a list or underline a heading
_BACKTICKS = re.compile(r"`+")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_@%+:,./-]+")
_FOR_CI = re.compile(r"^(?P<indent>[ \t]*)(?P<sign>:)(?=:)|(?P<hash>#)(?=#(?:vso|teamcity)?\[)", re.MULTILINE)
_ENDING = re.compile(r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*")


class Unquotable(ValueError):
    """A text that can't stand in a command to paste. The message says why, without the text itself."""


def terminal(text: str | bytes, *, keep: str = "") -> str:
    r"""A text for people: an escape such as `\x1b` or `\u202e` replaces every character that doesn't print.

    That covers control characters (and so every escape sequence), bidirectional controls, invisible
    characters, unusual spaces and lone surrogates. Bytes are read as UTF-8; those that are not UTF-8
    become `\xff`, as surrogate escapes in a str do. Characters in `keep` (a line break, where a text has
    several lines) pass unchanged.
    """
    known = text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")
    if known.isprintable():
        return known
    return "".join([char if char.isprintable() or char in keep else _escape(ord(char)) for char in known])


@lru_cache(maxsize=1 << 12)
def _escape(code: int) -> str:
    if code in _BYTES:
        return f"\\x{code - _SURROGATES:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def log_text(text: str, *, keep: str = "") -> str:
    """What a program prints: as `terminal`, and nothing in it is a command to the CI that shows the output.

    GitHub obeys a line that begins with `::`, and `##[` within one; Azure `##vso[`, TeamCity `##teamcity[`.
    """
    return _FOR_CI.sub(
        lambda match: f"{match['indent'] or ''}{_escape(ord(match['sign'] or match['hash']))}",
        terminal(text, keep=keep),
    )


def markdown(text: str | bytes) -> str:
    """A text for a paragraph, list item, heading or table cell; a renderer shows `terminal(text)`."""
    return _unstarted(_without_syntax(_TEXT, terminal(text)))


def markdown_sentence(text: str) -> str:
    """A sentence of ours for the same places, in which names stand between backticks: they become code."""
    return _unstarted(_without_syntax(_SENTENCE, terminal(text)))


def _without_syntax(special: re.Pattern[str], text: str) -> str:
    portions: list[str] = []
    pieces: list[str] = []
    at = 0
    for match in special.finditer(text):
        sign = match[0]
        pieces += text[at : match.start()], _SIGNS.get(sign) or _literal(sign)
        at = match.end()
        if len(pieces) >= _PORTION:
            portions.append("".join(pieces))
            pieces.clear()
    return "".join([*portions, *pieces, text[at:]])


def _unstarted(escaped: str) -> str:
    start = _START.match(escaped)
    return f"{escaped[: start.end() - 1]}\\{escaped[start.end() - 1 :]}" if start else escaped


def _literal(special: str) -> str:
    """GitHub links addresses and mentions even where the `@` is escaped, but not where it is code."""
    if special[0] == "`" and len(special) > 1:
        return markdown(special) if "|" in special else markdown_code(special[1:-1])
    if special[0] == "#":
        return "\\#" * len(special)
    return f"`{special}`" if "@" in special else f"\\{special}"


def markdown_code(text: str | bytes) -> str:
    """A text as a code span, for a paragraph or a list item; in a table a `|` would end the cell."""
    shown = terminal(text)
    if not shown.strip():
        return markdown(shown)  # a code span can't hold only spaces
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

    A name that may begin with `-` also needs `--` before it. Raises Unquotable.
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
    """The text, if every character survives being shown, copied and pasted into one line."""
    try:
        word = text if isinstance(text, str) else text.decode()
        word.encode()
    except UnicodeError:
        raise Unquotable("it holds bytes that are not UTF-8") from None
    if not word.isprintable():
        raise Unquotable("it holds control or invisible characters")
    return word
