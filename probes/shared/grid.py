"""Tables for terminals and in Markdown, of text that anybody may have chosen."""

from collections.abc import Callable, Sequence
from itertools import chain

from probes.shared.quoting import markdown, terminal

Rows = Sequence[Sequence[str]]


def text_table(headers: Sequence[str], rows: Rows) -> str:
    """Rows under their headers, for a terminal."""
    return "\n".join("  ".join(line).rstrip() for line in _aligned(headers, rows, terminal))


def markdown_table(headers: Sequence[str], rows: Rows, quote: Callable[[str], str] = markdown) -> str:
    """A table of GitHub's Markdown; `quote` is for the cells, headers are ours."""
    return "\n".join(f"| {' | '.join(line)} |" for line in _aligned(headers, rows, quote))


def _aligned(headers: Sequence[str], rows: Rows, quote: Callable[[str], str]) -> list[list[str]]:
    """All lines, with the rule below the headers, in columns that are as wide as their widest cell."""
    cells = [[quote(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    lines = chain([headers, ["-" * width for width in widths]], cells)
    return [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
