"""An audit report as one HTML file that loads nothing: styles, scripts and data are in it.

All text of an image is quoted here or set as text by the scripts; the page's policy allows no others.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from importlib.resources import files

from buildtool.audit.answer import largest_remedy
from buildtool.audit.baseline import Comparison, Regression
from buildtool.audit.findings import Finding, Prediction, display_paths, size_text
from buildtool.audit.options import DEFAULT_RENDER_OPTIONS, LISTED_FILES, RenderOptions
from buildtool.audit.report import AuditReport, Judgement, Verdict
from buildtool.audit.text import display_bytes, one_line, share
from probes.core.quoting import html, script_json
from probes.core.units import counted, decimal_bytes

_HTML_PACKAGES = 5000
_LIST_BYTES = 1_000_000  # of text in one list: names may have 4 KiB each
_SCRIPTS = ("d3-hierarchy.min.js", "words.js", "treemap.js", "list.js", "page.js")
_VIEWS = ("folders", "layers", "owners", "kinds")
_LAYER_WORDS = 48
_MAP_TITLE = "<h2>Where the bytes are</h2>"
_Row = tuple[str | int, ...]


def render_html(report: AuditReport, options: RenderOptions = DEFAULT_RENDER_OPTIONS) -> str:
    """The report as a whole page, for a separate file, with what got worse since a baseline."""
    licence = _asset("d3-hierarchy.LICENSE")  # has to be in every copy
    script = "\n".join([f"/*\n{licence}*/", *map(_asset, _SCRIPTS)])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    body = "\n".join(
        (
            _header(report),
            _baseline(options.comparison) if options.comparison else "",
            _treemap(report),
            _findings(report.findings, report.totals.unpacked_bytes),
            _lists(report),
            _tables(report),
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'">
<meta name="referrer" content="no-referrer">
<title>{html(report.image.ref)}: where its bytes are</title>
<style>{_asset("report.css")}</style>
</head>
<body>
<main>
{body}
</main>
<footer>{_footer(report)}</footer>
<script type="application/json" id="data">{_data(report)}</script>
<script>{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files("buildtool.audit") / "assets" / name).read_text(encoding="utf-8")


def _data(report: AuditReport) -> str:
    """What the scripts draw: rows as lists, in the order that page.js reads."""
    return script_json(
        {
            "ref": report.image.ref,
            "total": report.totals.unpacked_bytes,
            "layerNames": [
                f"layer {n}: {one_line(row.command or 'unknown', _LAYER_WORDS, '…')}"
                for n, row in enumerate(report.layers)
            ],
            "rows": [astuple(row) for row in report.tree.rows],
            "files": _listed(_file_rows(report), LISTED_FILES),
            "packages": _listed(_package_rows(report), _HTML_PACKAGES),
        }
    )


def _file_rows(report: AuditReport) -> list[_Row]:
    return [(row.path, row.unpacked_bytes, row.layer, row.owner) for row in report.top_files]


def _package_rows(report: AuditReport) -> list[_Row]:
    return [
        (row.manager, row.name, row.version, row.unpacked_bytes, row.n_files, row.place)
        for row in report.packages
    ]


def _listed(rows: Sequence[_Row], most: int) -> Sequence[_Row]:
    """The first rows, as many as a page takes."""
    left = _LIST_BYTES
    for count, row in enumerate(rows[:most]):
        left -= sum(len(cell) for cell in row if isinstance(cell, str))
        if left < 0:
            return rows[:count]
    return rows[:most]


# The page's parts, from top to bottom.


def _header(report: AuditReport) -> str:
    image, totals = report.image, report.totals
    hidden = totals.unpacked_bytes - totals.visible_bytes
    figures = (
        (
            "Unpacked",
            decimal_bytes(totals.unpacked_bytes),
            f"{decimal_bytes(hidden)} of it hidden by later layers" if hidden else "all of it visible",
        ),
        ("Compressed", display_bytes(totals.stored_bytes), totals.stored_reason or "as a registry stores it"),
        ("Non-empty files", f"{totals.n_files:,}", f"in {counted(len(report.layers), 'layer')}"),
        ("Findings", str(len(report.findings)), _predicted(report.prediction)),
    )
    tiles = "".join(
        f"<div><dt>{html(name)}</dt><dd>{html(value)}<small>{html(note)}</small></dd></div>"
        for name, value, note in figures
    )
    digest = image.digest or f"digest unknown: {image.digest_reason}"
    return f"""<header>
<p class="eyebrow">Image audit</p>
<h1><bdi>{html(image.ref)}</bdi></h1>
<p class="about">{html(image.platform)} · torch {html(report.torch_build)} · \
<code>{html(digest)}</code></p>
<dl class="figures">{tiles}{_budget(report)}</dl>
{_largest_remedy(report)}</header>"""


def _largest_remedy(report: AuditReport) -> str:
    remedy = largest_remedy(report)
    if remedy is None:
        return ""
    link = f'<a href="#finding-{html(remedy.id)}">{html(remedy.words)}</a>'
    code = f"<br><code>{html(remedy.command)}</code>" if remedy.command else ""
    return f'<p class="first-remedy">First: {link}{code}</p>\n'


def _predicted(prediction: Prediction | None) -> str:
    if prediction is None or not prediction.saved_bytes:
        return "no bytes to save"
    return f"{decimal_bytes(prediction.unpacked_bytes)} after their remedies"


def _budget(report: AuditReport) -> str:
    verdict = report.budget.verdict
    words = {Verdict.PASS: "kept", Verdict.FAIL: "exceeded", Verdict.NONE: "none set"}.get(verdict, "unknown")
    lines = [
        _against(name, judgement)
        for name, judgement in (("unpacked", report.budget.unpacked), ("compressed", report.budget.stored))
        if judgement.limit_bytes is not None
    ]
    note = "; ".join(lines) or "set one with --budget-unpacked"
    return f'<div><dt>Budget</dt><dd class="{verdict.value}">{words}<small>{html(note)}</small></dd></div>'


def _against(name: str, judgement: Judgement) -> str:
    sign = {Verdict.PASS: "≤", Verdict.FAIL: ">"}.get(judgement.verdict, "against")
    return f"{name} {display_bytes(judgement.actual_bytes)} {sign} {display_bytes(judgement.limit_bytes)}"


def _baseline(comparison: Comparison) -> str:
    """What is worse than in an earlier report; first on the page because it makes the command fail."""
    worse = "".join(_regression(row) for row in comparison.regressions)
    left_out = "".join(f"<p>Not compared: {html(what)}.</p>" for what in comparison.not_compared)
    words = worse or f"<p>Nothing is worse, at a tolerance of {html(str(comparison.tolerance))}.</p>"
    count = f": {len(comparison.regressions)} worse" if comparison.regressions else ""
    return f"<h2>Since the baseline {html(comparison.label)}{count}</h2>\n{words}{left_out}"


def _regression(row: Regression) -> str:
    grown = row.after_bytes - row.before_bytes
    figures = f"{decimal_bytes(row.before_bytes)} before, {decimal_bytes(row.after_bytes)} now"
    size = f'<span class="bytes">+{decimal_bytes(grown)}</span>' if grown > 0 else ""
    detail = f'<p class="muted">{html(" · ".join(filter(None, (figures if grown else "", row.detail))))}</p>'
    return f"""<article class="finding error">
<div class="line"><h3><bdi>{html(row.title)}</bdi></h3>{size}</div>
{detail}{_places(row.paths)}
</article>"""


def _treemap(report: AuditReport) -> str:
    if not report.tree.rows:
        return f"{_MAP_TITLE}<p>This report was saved before it held what a map is drawn from.</p>"
    views = "".join(
        f'<label><input type="radio" name="view" value="{name}"{checked}>{name.title()}</label>'
        for name, checked in zip(_VIEWS, (" checked", "", "", ""), strict=True)
    )
    return f"""{_MAP_TITLE}
<div class="bar-line">
<nav aria-label="Place in the image"><ol id="crumbs"></ol></nav>
<fieldset class="views" aria-label="Group by">{views}</fieldset>
</div>
<div id="map" role="group" aria-label="Treemap: area is unpacked bytes, colour is the kind of content"></div>
<p id="detail" aria-live="polite"></p>
<div id="legend" role="group" aria-label="Kinds of content: select one"></div>
<p class="keys">Click a box, or move with the arrow keys and press Enter, to zoom in; Escape goes back. \
Hatched: replaced or deleted by a later layer, still stored. Files and folders below \
{decimal_bytes(report.tree.least_bytes)} are drawn together.</p>
<noscript><p>The map and the lists need JavaScript; the rest of this page doesn't.</p></noscript>"""


def _findings(findings: Sequence[Finding], total: int) -> str:
    cards = "\n".join(_finding(row, total) for row in findings)
    return f"<h2>Findings</h2>\n{cards or '<p>None: nothing in this image looks like waste.</p>'}"


def _finding(row: Finding, total: int) -> str:
    severity = row.severity.value
    size = f"{size_text(row)} · {share(row.bytes, total)}"
    size_tag = f'<span class="bytes">{size}</span>' if row.bytes else ""
    after = row.predicted_unpacked_bytes
    without = "" if after is None else f" · the image would be {decimal_bytes(after)} without"
    return f"""<article class="finding {severity}" id="finding-{html(row.id)}">
<div class="line"><h3><bdi>{html(row.title)}</bdi></h3>{size_tag}</div>
<p class="muted"><span class="tag {severity}">{severity}</span> <code>{html(row.id)}</code>{without}</p>
{_places(display_paths(row))}<div class="remedy"><pre>{html(row.remedy)}</pre>\
<button type="button" class="copy">Copy</button></div>
</article>"""


def _places(paths: Sequence[str]) -> str:
    if not paths:
        return ""
    items = "".join(f"<li><bdi>{html(path)}</bdi></li>" for path in paths)
    words = counted(len(paths), "place")
    return f"<details><summary>{words}</summary><ul>{items}</ul></details>"


def _lists(report: AuditReport) -> str:
    n_files = len(_listed(_file_rows(report), LISTED_FILES))
    n_packages, n_listed = len(report.packages), len(_listed(_package_rows(report), _HTML_PACKAGES))
    packages = (
        f"All {n_packages:,}" if n_listed == n_packages else f"The {n_listed:,} largest of {n_packages:,}"
    )
    return "\n".join(
        (
            f"<h2>The {n_files:,} largest files</h2>",
            _list("files", "Search files: part of a path, an owner"),
            f"<h2>{packages} packages</h2>",
            _list("packages", "Search packages: name, version, manager"),
        )
    )


def _list(name: str, hint: str) -> str:
    return f"""<div class="list" id="{name}">
<div class="bar-line"><input type="search" placeholder="{hint}" aria-label="{hint}"><output></output></div>
<div class="scroller" tabindex="0"><table><thead><tr></tr></thead><tbody></tbody></table></div>
</div>"""


def _tables(report: AuditReport) -> str:
    """The layers, what the bytes are by owner, kind and GPU target, and the notes."""
    total = report.totals.unpacked_bytes
    layers = "".join(
        f'<tr><td class="number">{n}</td>'
        f"<td>{_base_mark(report, n)}<code>{html(row.command or 'unknown')}</code></td>"
        f"{_bar(row.unpacked_bytes, total)}"
        f'<td class="number">{display_bytes(row.stored_bytes)}</td>'
        f'<td class="number">{row.n_entries:,}</td></tr>'
        for n, row in enumerate(report.layers)
    )
    notes = "".join(f"<li>{html(note)}</li>" for note in report.notes)
    gpu_total = sum(report.gpu_code.by_target.values())
    return f"""<h2>Layers, bottom first</h2>
<div class="wide"><table><thead><tr><th class="number">#</th><th>made by</th><th class="number">unpacked</th>\
<th class="number">compressed</th><th class="number">entries</th></tr></thead>
<tbody>{layers}</tbody></table></div>
<div class="tables">
{_breakdown("Owners", report.owners, total)}
{_breakdown("Kinds", report.kinds, total)}
{_breakdown("GPU code by target", report.gpu_code.by_target, gpu_total)}
</div>
{f"<h2>Notes</h2><ul>{notes}</ul>" if notes else ""}"""


def _base_mark(report: AuditReport, layer: int) -> str:
    if layer >= report.image.base_layers:
        return ""
    words = f"base image {report.image.base_name}, known from {report.image.base_told_by}"
    return f'<span class="tag" title="{html(words)}">base</span> '


def _breakdown(title: str, parts: Mapping[str, int], total: int) -> str:
    rows = "".join(
        f"<tr><td><bdi>{html(name)}</bdi></td>{_bar(n_bytes, total)}</tr>"
        for name, n_bytes in sorted(parts.items(), key=lambda row: -row[1])
        if n_bytes
    )
    return f"<section><h2>{title}</h2><table><tbody>{rows}</tbody></table></section>" if rows else ""


def _bar(n_bytes: int, total: int) -> str:
    part = share(n_bytes, total)
    return (
        f'<td class="number">{decimal_bytes(n_bytes)} <small>{part}</small>'
        f'<span class="share" style="--share: {part.replace(" ", "")}"></span></td>'
    )


def _footer(report: AuditReport) -> str:
    return (
        f"Written by gpu-weir {html(report.tool_version)}. This file loads nothing from anywhere. "
        "Sizes are decimal (1 MB = 10<sup>6</sup> bytes) and unpacked unless stated otherwise. "
        "Map layout by d3-hierarchy, © Mike Bostock, ISC licence."
    )
