"""A report's document and its plots as one HTML page, which loads nothing. Pure."""

import base64
import re
from collections.abc import Iterable, Sequence
from importlib import resources

from probes.core.quoting import html
from probes.core.unknown import Unknown
from probes.hardware.snapshot import limit_text
from probes.records.facts import Link, Machine, TorchFacts
from probes.reports.document import Document, PageSection, Plot, Section, Table
from probes.reports.figures import facts, size, text
from probes.reports.palette import css_variables

# nothing but what is in the file; browsers enforce it
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_page(document: Document, plots: Sequence[Plot], *, raw: str, name: str) -> str:
    """The whole page.

    `raw` is the text of the report's file, which the page includes unless it is empty, and `name` its name.
    """
    folded = [section for section in document.sections if _shown(section)]
    return _framed(
        document.title,
        _header(document),
        _answer(document),
        *map(_figure, plots),
        *([_machine(document.machine)] if document.machine else []),
        *([_doubts(document.doubts)] if document.doubts else []),
        *([_tables(folded)] if folded else []),
        *map(_page_section, document.page_sections),
        *([_notes(document.notes)] if document.notes else []),
        *([_raw(raw, name, has_samples=document.has_samples)] if raw else []),
    )


def _framed(title: str, *sections: str) -> str:
    """A page around its sections. Loads nothing."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{html(title)}</title>\n'
        f"<style>\n{_style()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _style() -> str:
    rules = resources.files("probes.reports").joinpath("page.css").read_text(encoding="utf-8")
    return (
        f":root {{ {css_variables(dark=False)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(dark=True)} }} }}\n{rules}"
    )


def _header(document: Document) -> str:
    """Of what kind it is, of what, and the circumstances."""
    return (
        f'<header><p class="kicker">{html(document.kicker)}</p><h1>{html(document.subject)}</h1>'
        f'<p class="meta">{html(" · ".join(document.details))}</p></header>'
    )


def _answer(document: Document) -> str:
    """The answer, a paragraph for each sentence; folded, what else follows; how each section ended."""
    paragraphs = "".join(f"<p>{prose(sentence)}</p>" for sentence in document.headline)
    more = "".join(f"<li>{prose(sentence)}</li>" for sentence in document.follows)
    if more:
        more = f"<details><summary>All that follows from the figures</summary><ul>{more}</ul></details>"
    outcomes = "".join(
        f'<li class="{section.state}"><b>{html(section.title)}</b> {html(_in_one_line(section.outcome))}</li>'
        for section in document.sections
        if section.state
    )
    if outcomes:
        outcomes = f'<ul class="outcomes">{outcomes}</ul>'
    return f'<section class="answer" aria-label="The answer">{paragraphs}{more}</section>{outcomes}'


def _in_one_line(outcome: str) -> str:
    return " ".join(outcome.split("\n  "))


def _figure(plot: Plot) -> str:
    """A plot with its caption, or the reason why it is missing. Without a title it has no heading either."""
    drawn = f'<p class="missing">No plot: {prose(plot.missing)}.</p>'
    if plot.drawn:
        sheets = "".join(_sheet(sheet, svg) for sheet, svg in plot.drawn)
        drawn = f"<figure>{sheets}<figcaption>{prose(plot.caption)}</figcaption></figure>"
    if not plot.title:
        return f'<section class="plot" id="{plot.name}" aria-label="Picture">{drawn}</section>'
    return (
        f'<section class="plot" id="{plot.name}" aria-labelledby="{plot.name}-heading">'
        f'<h2 id="{plot.name}-heading">{html(plot.title)}</h2>{drawn}</section>'
    )


def _sheet(sheet: str, svg: str) -> str:
    focus = ' tabindex="0"' if sheet == "scroll" else ""  # so that the keyboard can scroll it
    return f'<div class="sheet {sheet}"{focus}>{svg}</div>'


def _machine(machine: Machine) -> str:
    """What this machine has."""
    terms = "".join(f"<div><dt>{html(k)}</dt><dd>{html(v)}</dd></div>" for k, v in _machine_terms(machine))
    every = "".join(
        f"<tr><th>{html(k.replace('_', ' '))}</th><td>{html(v)}</td></tr>" for k, v in facts(machine)
    )
    return (
        f'<section id="machine"><h2>The machine</h2><dl>{terms}</dl>'
        '<details><summary>Every fact read</summary><div class="scroll" tabindex="0">'
        f'<table class="facts">{every}</table></div></details></section>'
    )


def _machine_terms(machine: Machine) -> list[tuple[str, str]]:
    terms = []
    torch = machine.torch
    if isinstance(torch, TorchFacts):
        for gpu in torch.gpus:
            name = f"{gpu.name} ({gpu.target}), PCI {text(gpu.pci_id)}"
            free = f"{size(gpu.vram_total_bytes)}, {size(gpu.vram_free_bytes)} free; L2 {size(gpu.l2_bytes)}"
            terms += [("GPU", name), ("VRAM", free), ("Link under load", _link(gpu.link_under_load))]
        build = "CPU build" if torch.api == "none" else f"{torch.api.upper()} {torch.api_version}"
        terms.append(("torch", f"{torch.version}, {build}, {torch.threads} threads"))
        if torch.obstacle:
            terms.append(("GPU", f"none for this torch: {torch.obstacle}"))
    else:
        terms.append(("torch", text(torch)))
    return [
        *terms,
        ("GPU driver", text(machine.gpu_driver)),
        (
            "System RAM",
            f"{size(machine.ram_total_bytes)}, {size(machine.ram_available_bytes)} available; "
            f"container limit: {limit_text(machine.cgroup_limit_bytes)}",
        ),
        ("Host", f"{machine.host}, {machine.cpus} CPUs, kernel {text(machine.kernel)}"),
        ("Seen from", "WSL" if machine.wsl else "a container" if machine.container else "no container seen"),
    ]


def _link(link: Link | Unknown) -> str:
    if isinstance(link, Unknown):
        return text(link)
    return f"PCIe {link.generation}.0 x{link.lanes}, {link.raw_gb_per_s:.3g} GB/s each way by the standard"


def _doubts(doubts: Sequence[str]) -> str:
    count, *each = doubts
    items = "".join(f"<li>{html(note)}</li>" for note in each)
    return f'<section id="doubts"><h2>Doubts</h2><p>{html(count)}</p><ul>{items}</ul></section>'


def _shown(section: Section) -> list[Table]:
    """Those of its tables that a page has."""
    return [table for table in section.tables if table.rows and table.only != "text"]


def _tables(sections: Iterable[Section]) -> str:
    parts = []
    for section in sections:
        head = f"<h3>{html(section.title)}</h3>" if section.title else ""
        outcome = f"<p>{html(_in_one_line(section.outcome))}.</p>" if section.outcome else ""
        folded = "".join(map(_folded, _shown(section)))
        parts.append(f"{head}{outcome}{folded}")
    return f'<section id="tables"><h2>Tables</h2>{"".join(parts)}</section>'


def _folded(table: Table) -> str:
    notes = "".join(f"<p>{prose(note)}</p>" for note in table.notes)
    count = f"{len(table.rows)} row{'s' if len(table.rows) != 1 else ''}"
    return (
        f"<details><summary>{html(table.title)} <small>{count}</small></summary>{notes}"
        f"{_grid(table, label=table.title)}</details>"
    )


def _page_section(section: PageSection) -> str:
    before, after = (
        "".join(f"<p>{prose(text)}</p>" for text in texts) for texts in (section.before, section.after)
    )
    tables = "".join(_grid(table, label=table.headers[0]) for table in section.tables if table.rows)
    layout = (
        f'<div class="scroll" tabindex="0"><pre>{html(section.layout)}</pre></div>' if section.layout else ""
    )
    head = f'<section id="{section.name}"><h2>{html(section.title)}</h2>'
    return f"{head}{before}{tables}{after}{layout}</section>"


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{prose(note)}</li>" for note in notes)
    return f'<section id="notes"><h2>Notes</h2><ul>{items}</ul></section>'


def _grid(table: Table, *, label: str) -> str:
    """The cells; columns of words are set left."""
    kinds = [' class="words"' if name in table.words else "" for name in table.headers]

    def cells(tag: str, row: Sequence[str]) -> str:
        texts = zip(kinds, row, strict=True)
        return "".join(f"<{tag}{kind}>{html(cell)}</{tag[:2]}>" for kind, cell in texts)

    head = f"<thead><tr>{cells('th scope=col', table.headers)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html(label)}">'
        f"<table>{head}<tbody>{body}</tbody></table></div>"
    )


def _raw(raw: str, name: str, *, has_samples: bool) -> str:
    """The report's own file, to be saved from the page."""
    data = base64.b64encode(raw.encode()).decode()
    href = f"data:application/json;base64,{data}"
    title, words = "The report", "This page carries the file that it was made from: "
    if has_samples:
        title, words = "Raw samples", "Every sample is in the report, which this page carries: "
    return (
        f'<section id="raw"><h2>{title}</h2><p>{words}'
        f'<a download="{html(name)}" href="{href}">save {html(name)}</a> ({size(len(raw.encode()))}). '
        "Times in seconds, sizes in bytes.</p></section>"
    )


def prose(sentence: str) -> str:
    """A sentence as markup: signs such as ±, figure and unit on one line, names as code."""
    signs = re.sub(r"(?<=\d) us\b", " µs", html(sentence).replace(" +- ", " ± "))
    kept = re.sub(r"(?<=\d) (?=(?:[KMGT]i?B|GB/s|B|s|ms|µs|ns|±|x)\b)", "\u00a0", signs)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", kept)
