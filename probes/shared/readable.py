"""Text from outside, made fit for readers: a terminal, Markdown. Pure.

The probes can't import buildtool, so this part of its `quoting` is here, and is used through that module
on the host.
"""

import re
from functools import lru_cache

_BYTES = range(0xDC80, 0xDD00)  # what Python's `surrogateescape` makes of bytes 0x80 to 0xFF
_SURROGATES = 0xDC00
# What means something within a line of CommonMark, or of GitHub's tables, autolinks, addresses and maths.
# Signs that only mean something at a line's ends (lists, headings, quotes) or before others are left
# readable elsewhere: `torch_build`, `sha256:0a1b`, `a > b`.
_MARKDOWN = (
    r"[\\`*\[\]<|~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|@+|(?<!#)#++(?= *+$)|^[>:#]|:(?=/)"
    r"|(?i:(?<=mailto)|(?<=xmpp)):|(?i:(?<=www))\.|^ | $"
)
_TEXT = re.compile(_MARKDOWN)
_SENTENCE = re.compile(rf"(?<![`@])`[^`]+`(?![`@])|{_MARKDOWN}")
_REFERENCES = {"&": "&amp;", "<": "&lt;", "|": "&#124;", " ": "&#32;"}
_START = re.compile(r"[-+=]|\d+[.)](?= |$)")  # would begin a list or underline a heading
_BACKTICKS = re.compile(r"`+")


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


def markdown(text: str | bytes) -> str:
    """A text for a paragraph, list item, heading or table cell; a renderer shows `terminal(text)`."""
    return _unstarted(_TEXT.sub(lambda match: _literal(match[0]), terminal(text)))


def markdown_sentence(text: str) -> str:
    """A sentence of ours for the same places, in which names stand between backticks: they become code."""
    return _unstarted(_SENTENCE.sub(lambda match: _literal(match[0]), terminal(text)))


def _unstarted(escaped: str) -> str:
    start = _START.match(escaped)
    return f"{escaped[: start.end() - 1]}\\{escaped[start.end() - 1 :]}" if start else escaped


def _literal(special: str) -> str:
    """GitHub links addresses and mentions even where the `@` is escaped, but not where it is code."""
    if special[0] == "`" and len(special) > 1:
        return markdown(special) if "|" in special else markdown_code(special[1:-1])
    if special[0] == "#":
        return "\\#" * len(special)
    return f"`{special}`" if "@" in special else _REFERENCES.get(special, f"\\{special}")


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
