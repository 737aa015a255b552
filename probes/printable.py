"""Text from outside, made fit for a terminal. Pure; buildtool's `quoting` shows text through it, too."""

_BYTES = range(0xDC80, 0xDD00)  # what Python's `surrogateescape` makes of bytes 0x80 to 0xFF
_STEP = 0xDC00


def printable(text: str, *, keep: str = "") -> str:
    r"""The text, with an escape such as `\x1b` or `\u202e` in place of every character that doesn't print.

    That covers control characters (and so every escape sequence), bidirectional controls, invisible
    characters, unusual spaces, lone surrogates, and bytes of a path that are not UTF-8 (`\xff`).
    Characters in `keep` pass unchanged.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else _escape(ord(char)) for char in text)


def _escape(code: int) -> str:
    if code in _BYTES:
        return f"\\x{code - _STEP:02x}"
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
