"""The tables of an audit's page: layers, and how the bytes are divided."""

from collections.abc import Mapping

from buildtool.audit.report.render import share, shown_bytes
from buildtool.audit.report.schema import AuditReport
from probes.shared.quoting import html
from probes.shared.units import decimal_bytes


def tables(report: AuditReport) -> str:
    """The layers, what the bytes are by owner, kind and GPU target, and the notes."""
    total = report.totals.unpacked_bytes
    layers = "".join(
        f'<tr><td class="number">{n}</td>'
        f"<td>{_base_mark(report, n)}<code>{html(row.command or 'unknown')}</code></td>"
        f"{_bar(row.unpacked_bytes, total)}"
        f'<td class="number">{shown_bytes(row.stored_bytes)}</td>'
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
