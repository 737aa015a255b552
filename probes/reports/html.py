"""One HTML page from a report and its plots: answer, plots, machine, doubts, tables. Loads nothing. Pure."""

import base64
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from probes.core.quoting import html
from probes.core.unknown import Unknown
from probes.hardware.snapshot import limit_text
from probes.records.facts import Link, Machine, TorchFacts
from probes.records.rounds import merged
from probes.records.rows import Timed
from probes.records.schema import ProbeReport, ProbeRun
from probes.reports.answers import all_records, answers
from probes.reports.headline import headline
from probes.reports.svg import css_variables
from probes.reports.tables import Table, doubts_of, facts, size, tables, text
from probes.reports.text import ended_line, notes

# nothing but what is in the file; browsers enforce it
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Plot:
    """A plot as SVG elements, one for each width that it is read at; or the reason why there is none."""

    name: str
    title: str
    caption: str = ""
    drawn: tuple[tuple[str, str], ...] = ()  # (sheet, SVG element)
    missing: str = ""


def render_page(report: ProbeReport, plots: Sequence[Plot], *, raw: str, name: str) -> str:
    """The whole page. `raw` is the report's file, which the page includes; `name` what to call that."""
    return framed(
        f"{subject(report.machine)}: memory placement, measured",
        header("Memory placement, measured", subject(report.machine), _details(report)),
        _answer(report),
        *map(figure, plots),
        machine_section(report.machine),
        _doubts(report),
        _all_tables(report),
        raw_section(raw, name),
    )


def framed(title: str, *sections: str) -> str:
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


def subject(machine: Machine) -> str:
    """What was measured, as a title."""
    if isinstance(machine.torch, TorchFacts) and machine.torch.gpus:
        return machine.torch.gpus[0].name
    known = "GPU unknown" if isinstance(machine.torch, Unknown) else "no GPU for torch"
    return f"{machine.cpus} CPUs, {known}"


def header(kicker: str, title: str, details: Iterable[str]) -> str:
    """The head of a page: of what kind it is, of what, and the circumstances."""
    return (
        f'<header><p class="kicker">{html(kicker)}</p><h1>{html(title)}</h1>'
        f'<p class="meta">{html(" · ".join(details))}</p></header>'
    )


def moment(started: str) -> str:
    """A report's `started` as people read it."""
    return started.replace("T", " ").replace("Z", " UTC")


def _details(report: ProbeReport) -> list[str]:
    asked = report.settings
    return [
        moment(report.started),
        "quick run" if asked.quick else "full run",
        *([] if asked.vram_cap_bytes is None else [f"VRAM capped to {size(asked.vram_cap_bytes)}"]),
        *([f"resumed {report.resumed} times"] if report.resumed else []),
        f"seed {asked.seed}",
        f"Weir {report.tool_version}",
    ]


def answer_section(sentences: Iterable[str], more: str = "") -> str:
    """The answer, a paragraph for each sentence, and what can be unfolded below it."""
    said = "".join(f"<p>{prose(sentence)}</p>" for sentence in sentences)
    return f'<section class="answer" aria-label="The answer">{said}{more}</section>'


def _answer(report: ProbeReport) -> str:
    more = "".join(f"<li>{prose(said)}</li>" for said in answers(report))
    rest = f"<details><summary>All that follows from the figures</summary><ul>{more}</ul></details>"
    outcomes = "".join(
        f'<li class="{type(run.outcome).__name__.lower()}"><b>{html(run.probe)}</b> {html(ended(run))}</li>'
        for run in merged(report).runs
    )
    return answer_section(headline(report), rest if more else "") + f'<ul class="outcomes">{outcomes}</ul>'


def ended(run: ProbeRun) -> str:
    """How a probe ended, in one line."""
    return " ".join(ended_line(run).split("\n  "))


def figure(plot: Plot) -> str:
    """A plot with its caption, or the reason why it is missing."""
    head = f'<h2 id="{plot.name}-heading">{html(plot.title)}</h2>'
    if not plot.drawn:
        inner = f'{head}<p class="missing">No plot: {prose(plot.missing)}.</p>'
    else:
        sheets = "".join(f'<div class="sheet {sheet}">{svg}</div>' for sheet, svg in plot.drawn)
        inner = f"{head}<figure>{sheets}<figcaption>{prose(plot.caption)}</figcaption></figure>"
    return f'<section class="plot" id="{plot.name}" aria-labelledby="{plot.name}-heading">{inner}</section>'


def machine_section(machine: Machine) -> str:
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


def _doubts(report: ProbeReport) -> str:
    records = all_records(report)
    rows = [record for record in records if isinstance(record, Timed)]
    doubted = [row for row in rows if doubts_of(row)]
    items = "".join(f"<li>{html(note)}</li>" for note in notes(records))
    said = "Nothing was timed, so there is nothing to doubt."
    if rows:
        said = f"{len(doubted)} of {len(rows)} measured rows raise a doubt; the tables say which and why."
    return f'<section id="doubts"><h2>Doubts</h2><p>{html(said)}</p><ul>{items}</ul></section>'


def _all_tables(report: ProbeReport) -> str:
    records = all_records(report)
    parts = []
    for run in merged(report).runs:
        found = "".join(map(table_section, tables(run, records)))
        parts.append(f"<h3>{html(run.probe)}</h3><p>{html(ended(run))}.</p>{found}")
    return f'<section id="tables"><h2>Tables</h2>{"".join(parts)}</section>'


def table_section(table: Table) -> str:
    """A table, folded."""
    note = f"<p>{prose(table.note)}</p>" if table.note else ""
    count = f"{len(table.rows)} row{'s' if len(table.rows) != 1 else ''}"
    return (
        f"<details><summary>{html(table.title)} <small>{count}</small></summary>{note}"
        f"{table_in_sight(table.title, table.headers, table.rows, words=table.words)}</details>"
    )


def table_in_sight(
    label: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str]
) -> str:
    """A table that isn't folded; columns of `words` are set left."""
    kinds = [' class="words"' if name in words else "" for name in headers]

    def cells(tag: str, row: Sequence[str]) -> str:
        texts = zip(kinds, row, strict=True)
        return "".join(f"<{tag}{kind}>{html(cell)}</{tag[:2]}>" for kind, cell in texts)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html(label)}">'
        f"<table><thead><tr>{cells('th scope=col', headers)}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def raw_section(raw: str, name: str) -> str:
    """The report's own file, to be saved from the page."""
    data = base64.b64encode(raw.encode()).decode()
    href = f"data:application/json;base64,{data}"
    return (
        '<section id="raw"><h2>Raw samples</h2><p>Every sample is in the report, which this page carries: '
        f'<a download="{html(name)}" href="{href}">save {html(name)}</a> ({size(len(raw.encode()))}). '
        "Times in seconds, sizes in bytes.</p></section>"
    )


def prose(said: str) -> str:
    """A sentence as markup: signs such as ±, figure and unit on one line, names as code."""
    signs = re.sub(r"(?<=\d) us\b", " µs", html(said).replace(" +- ", " ± "))
    kept = re.sub(r"(?<=\d) (?=(?:[KMGT]i?B|GB/s|B|s|ms|µs|ns|±|x)\b)", "\u00a0", signs)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", kept)
