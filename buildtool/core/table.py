"""Tables for a terminal, and in Markdown; the one module that imports tabulate."""

from collections.abc import Sequence

from tabulate import tabulate

from probes.core.quoting import terminal


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal; figures keep the form they were given."""
    cells = [[terminal(cell) for cell in row] for row in rows]
    return tabulate(cells, headers, tablefmt="simple", disable_numparse=True)


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, of cells that are quoted for it."""
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)
