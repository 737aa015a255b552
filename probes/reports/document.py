"""What a report says, before it has a form: sentences, tables and plots.

Each kind of report makes a `Document`; text.py writes it for terminals and as Markdown, html.py as a page.
Its texts are not quoted yet, and some come from outside, such as names of devices, hosts and files: each form
quotes for itself.
"""

from dataclasses import dataclass
from typing import Literal

from probes.records.facts import Machine


@dataclass(frozen=True)
class Table:
    """Cells of text. Columns in `words` are set left, others are figures."""

    title: str
    notes: tuple[str, ...]
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()  # columns that only a page has room for
    only: Literal["text", "page"] | None = None  # the one form that has it


@dataclass(frozen=True)
class Plot:
    """A plot as SVG elements, one for each width that it is read at; or the reason why there is none."""

    name: str
    title: str
    caption: str = ""
    drawn: tuple[tuple[str, str], ...] = ()  # (sheet, SVG element)
    missing: str = ""


@dataclass(frozen=True)
class Section:
    """The tables of one part of a report, such as a probe.

    A page folds the tables, and has what `lines` and `notes` say elsewhere. Tables without rows aren't shown.
    """

    title: str = ""
    state: str = ""  # done, waived or failed, for a part that can be
    outcome: str = ""  # how it ended; a second line says what to do
    lines: tuple[str, ...] = ()  # before the tables
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()  # after them


@dataclass(frozen=True)
class PageSection:
    """A part of a page that isn't folded: sentences, tables, further sentences, lines in a fixed layout."""

    name: str
    title: str
    before: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    after: tuple[str, ...] = ()
    layout: str = ""


@dataclass(frozen=True)
class Document:
    """A report in words and figures; its plots are drawn apart, since drawing takes matplotlib."""

    kicker: str  # of what kind it is
    title: str
    subject: str  # what was measured, at the head of the page
    details: tuple[str, ...]  # when and how, below that
    headline: tuple[str, ...]  # the answer, a sentence each
    follows: tuple[str, ...] = ()  # everything else that the figures say
    machine: Machine | None = None
    settings: str = ""
    doubts: tuple[str, ...] = ()  # how many there are, then each, for a page
    sections: tuple[Section, ...] = ()
    page_sections: tuple[PageSection, ...] = ()
    notes: tuple[str, ...] = ()  # for a page
    has_samples: bool = False  # whether the report's own file holds measured samples
    layout: str = ""  # the whole text where it has a layout of its own, which replaces headline and sections
