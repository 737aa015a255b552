"""Text from an image, made fit for people: no control characters, nothing that isn't Unicode."""


def show_text(text: str, keep: str = "") -> str:
    """The text with everything unprintable, except characters in `keep`, as an escape."""
    return "".join(char if char.isprintable() or char in keep else _escape(ord(char)) for char in text)


def show_path(path: bytes) -> str:
    """A path as text: bytes that aren't UTF-8 become escapes, too."""
    return show_text(path.decode("utf-8", "backslashreplace"))


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
