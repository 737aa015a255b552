"""A report's document as text for terminals, or as Markdown; tabulate draws tables where it is installed."""

from collections.abc import Sequence

from probes.core.quoting import markdown_block, markdown_sentence, terminal
from probes.hardware.snapshot import machine_lines
from probes.reports.document import Document, Section, Table


def render_text(document: Document, *, markdown: bool = False) -> str:
    """The whole report: the answer, what follows from the figures, the machine, each section's tables."""
    if document.layout:
        return markdown_block(document.layout) if markdown else document.layout
    machine = machine_lines(document.machine) if document.machine else []
    parts = [
        _titled("The answer", document.headline, markdown=markdown),
        _titled("What follows from the figures", document.follows, markdown=markdown),
        _titled("Machine", machine, markdown=markdown),
        _quoted(document.settings, markdown=markdown),
        *(_section(section, markdown=markdown) for section in document.sections),
    ]
    return "\n\n".join(part for part in parts if part)


def _titled(title: str, sentences: Sequence[str], *, markdown: bool) -> str:
    """A list under its title; nothing where it is empty."""
    if not sentences:
        return ""
    return _heading(title, markdown=markdown) + _bullets(sentences, markdown=markdown)


def _section(section: Section, *, markdown: bool) -> str:
    head = _heading(section.title, markdown=markdown) if section.title else ""
    outcome = _lines(section.outcome.split("\n"), markdown=markdown)
    parts = [
        head + outcome if outcome else "",
        _lines(section.lines, markdown=markdown),
        *(
            render_table(table, markdown=markdown)
            for table in section.tables
            if table.rows and table.only != "page"
        ),
        _with_notes("", section.notes, markdown=markdown),
    ]
    return (head if not outcome and any(parts) else "") + "\n\n".join(part for part in parts if part)


def _heading(text: str, *, markdown: bool) -> str:
    return f"## {markdown_sentence(text)}\n\n" if markdown else f"{terminal(text)}\n"


def _bullets(sentences: Sequence[str], *, markdown: bool) -> str:
    return "\n".join(f"- {_quoted(text, markdown=markdown)}" for text in sentences)


def _lines(lines: Sequence[str], *, markdown: bool) -> str:
    return "\n".join(_quoted(line, markdown=markdown) for line in lines)


def _quoted(text: str, *, markdown: bool) -> str:
    return markdown_sentence(text) if markdown else terminal(text)


def render_table(table: Table, *, markdown: bool = False) -> str:
    """A table with its title and notes, without the columns that only a page has room for."""
    kept = [at for at, header in enumerate(table.headers) if header not in table.wide]
    kept.sort(key=lambda at: table.headers[at] == "doubts")  # which may be long: last
    rows = [[row[at] for at in kept] for row in table.rows]
    grid = draw_grid([table.headers[at] for at in kept], rows, markdown=markdown)
    title = f"### {markdown_sentence(table.title)}\n\n" if markdown else f"{terminal(table.title)}\n"
    return (title if table.title else "") + _with_notes(grid, table.notes, markdown=markdown)


def _with_notes(grid: str, notes: Sequence[str], *, markdown: bool) -> str:
    """A table and the notes on it: in Markdown a separate list, since notes would otherwise become rows."""
    noted = _bullets(notes, markdown=True) if markdown else "\n".join(map(terminal, notes))
    return ("\n\n" if markdown else "\n").join(part for part in (grid, noted) if part)


def draw_grid(headers: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """The rows under their headers; figures keep the form they were given. Cells are quoted here."""
    cells = [[_quoted(cell, markdown=markdown) for cell in row] for row in rows]
    try:
        from tabulate import tabulate
    except ImportError:
        return plain_grid(headers, cells, markdown=markdown)
    return tabulate(cells, headers, tablefmt="github" if markdown else "simple", disable_numparse=True)


def plain_grid(headers: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Rows under their headers without tabulate, from cells that are quoted already."""
    lines = [list(headers), *rows]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(headers))]
    rule = ["-" * width for width in widths]
    edge, gap = ("| ", " | ") if markdown else ("", "  ")
    texts = (
        edge + gap.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in (lines[0], rule, *rows)
    )
    return "\n".join(text + " |" if markdown else text.rstrip() for text in texts)
