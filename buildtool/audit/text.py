"""An audit report as text: a terminal's table, Markdown for CI summaries, one row for a build's summary."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from buildtool.audit.answer import answer_lines, budget_line, judgement_text, largest_remedy
from buildtool.audit.baseline import Comparison
from buildtool.audit.findings import Finding, display_paths, size_text
from buildtool.audit.options import DEFAULT_RENDER_OPTIONS, RenderOptions
from buildtool.audit.packages import PackageRow
from buildtool.audit.report import AuditReport, GpuCode, ImageRow, Verdict
from buildtool.core.table import markdown_table, text_table
from probes.core.quoting import markdown, markdown_block, markdown_code, terminal
from probes.core.units import counted, decimal_bytes

MARKDOWN_BYTES = 1_000_000  # GitHub refuses step summaries above 1,024 KiB
_CUT = "\n\n*Cut here: the whole report is in the JSON file.*\n"
_FENCE = re.compile(r"^(`{3,})(.*)$", re.MULTILINE)
_COMMAND_WIDTH = 60
_PATHS = 4
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class SummaryRow:
    """One image in a build's summary, as text."""

    ref: str
    torch: str
    layers: str
    unpacked: str
    stored: str
    verdict: str
    biggest_finding: str


@dataclass(frozen=True)
class Section:
    """A table under its title, of texts that aren't quoted yet."""

    title: str
    headers: tuple[str, ...]
    rows: Rows

    def text(self) -> str:
        """For a terminal."""
        return f"\n{self.title}\n{text_table(self.headers, self.rows)}"

    def markdown(self) -> str:
        """For Markdown."""
        rows = [[markdown(cell) for cell in row] for row in self.rows]
        table = markdown_table(self.headers, rows)
        return f"\n## {self.title}\n\n{table}"


def render_table(report: AuditReport, options: RenderOptions = DEFAULT_RENDER_OPTIONS) -> str:
    """The answer in five lines, or all sections, for a terminal; with what got worse since a baseline."""
    blocks = _all_sections(report, options) if options.all_sections else answer_lines(report, options.paint)
    if options.comparison:
        blocks += [""] if options.all_sections else []
        blocks += [f"baseline {terminal(comparison_line(options.comparison))}"]
        blocks += [f"  {terminal(line)}" for line in change_lines(options.comparison)]
    return "\n".join(blocks) + "\n"


def _all_sections(report: AuditReport, options: RenderOptions) -> list[str]:
    blocks = [
        *map(terminal, _headline(report)),
        *(section.text() for section in _sections(report, options.top)),
    ]
    for finding in report.findings:
        paths = "".join(f"\n    {terminal(path)}" for path in display_paths(finding)[:_PATHS])
        more = f"\n    ... and {len(finding.paths) - _PATHS} more" if len(finding.paths) > _PATHS else ""
        remedy = terminal(finding.remedy, keep="\n").replace("\n", "\n      ")
        summary = terminal(f"{finding.id}: {finding.title}{_size_of(finding)}")
        blocks.append(f"\n[{finding.severity.value}] {summary}{paths}{more}\n    do: {remedy}")
    return blocks + [f"\nnote: {terminal(note)}" for note in report.notes]


def render_markdown(report: AuditReport, options: RenderOptions = DEFAULT_RENDER_OPTIONS) -> str:
    """The report for a CI summary or an issue: at most MARKDOWN_BYTES, cut at a line."""
    ref, *headline = map(markdown, _headline(report))
    lines = [f"# {ref}", "", *(f"- {line}" for line in headline)]
    if largest := largest_remedy(report):
        code = f": {markdown_code(largest.command)}" if largest.command else ""
        lines.append(f"- largest remedy: {markdown(largest.words)}{code}")
    if options.comparison:
        lines += ["", f"## Baseline {markdown(comparison_line(options.comparison))}", ""]
        lines += [f"- {markdown(line)}" for line in change_lines(options.comparison)]
    lines += [section.markdown() for section in _sections(report, options.top)]
    for finding in report.findings:
        title = markdown(f"{finding.title}{_size_of(finding)}")
        lines += ["", f"## {markdown(finding.id)} ({finding.severity.value}): {title}", ""]
        lines += [f"- {markdown_code(path)}" for path in display_paths(finding)[: options.top]]
        lines += ["", markdown_block(finding.remedy, "sh")]
    lines += ["", *(f"- note: {markdown(note)}" for note in report.notes)]
    return capped("\n".join(lines) + "\n")


def verdict_lines(report: AuditReport, comparison: Comparison | None, *, baseline: str) -> list[str]:
    """Why a gate fails, in one line, and which limit couldn't be checked; none where all is well."""
    limits = (("unpacked", report.budget.unpacked), ("stored", report.budget.stored))
    causes = [f"{name} {judgement_text(row)}" for name, row in limits if row.verdict is Verdict.FAIL]
    failed = [f"over budget ({'; '.join(causes)})"] if causes else []
    if comparison is not None and comparison.regressions:
        failed.append(f"worse than {baseline} ({counted(len(comparison.regressions), 'regression')})")
    lines = [f"failed: {report.image.ref}: {', '.join(failed)}"] if failed else []
    if report.budget.stored.verdict is Verdict.UNKNOWN:
        why = report.totals.stored_reason
        lines.append(f"not checked: the budget of stored bytes, which are unknown: {why}")
    return lines


def summary_row(report: AuditReport) -> SummaryRow:
    """The image in one line."""
    biggest = max(report.findings, key=lambda row: row.bytes, default=None)
    worst = next((row for row in report.findings if row.severity.value == "error"), biggest)
    size = f": {size_text(worst)}" if worst and worst.bytes else ""
    summary = f"{worst.id}{size}" if worst else "none"
    return SummaryRow(
        ref=report.image.ref,
        torch=report.torch_build,
        layers=str(len(report.layers)),
        unpacked=decimal_bytes(report.totals.unpacked_bytes),
        stored=display_bytes(report.totals.stored_bytes),
        verdict=report.budget.verdict.value,
        biggest_finding=summary,
    )


# What the table and Markdown have in common.


def _headline(report: AuditReport) -> list[str]:
    totals, image = report.totals, report.image
    stored = f"{display_bytes(totals.stored_bytes)} stored (compressed layers)"
    lines = [
        image.ref,
        f"digest {image.digest or 'unknown'}, platform {image.platform}, torch {report.torch_build}",
        f"{decimal_bytes(totals.unpacked_bytes)} unpacked in {counted(len(report.layers), 'layer')}, "
        f"{decimal_bytes(totals.visible_bytes)} visible in {counted(totals.n_files, 'non-empty file')}, "
        f"{stored}",
        budget_line(report),
    ]
    if report.prediction and report.prediction.saved_bytes:
        after, saved = report.prediction.unpacked_bytes, report.prediction.saved_bytes
        lines.append(
            f"after the remedies below: {decimal_bytes(after)} unpacked, {decimal_bytes(saved)} less"
        )
    if image.base_layers:
        lines.append(_base(image))
    if totals.stored_reason:
        lines.append(f"stored bytes unknown: {totals.stored_reason}")
    if image.attestations:
        size = decimal_bytes(image.attestations_stored_bytes)
        manifests = counted(image.attestations, "attestation manifest")
        lines.append(f"not counted: {manifests} beside the image, {size} stored")
    return lines


def _base(image: ImageRow) -> str:
    name = f" {image.base_name}" if image.base_name else ""
    layers = "layer 0" if image.base_layers == 1 else f"layers 0 to {image.base_layers - 1}"
    return f"base image{name}: {layers}, known from {image.base_told_by}"


def _sections(report: AuditReport, top: int) -> list[Section]:
    total = report.totals.unpacked_bytes
    owners = sorted(report.owners.items(), key=lambda row: -row[1])
    kinds = sorted(report.kinds.items(), key=lambda row: -row[1])
    gpu = sorted(report.gpu_code.by_target.items(), key=lambda row: -row[1])
    used = any(row.used_bytes is not None for row in report.packages)
    sections = [
        Section(
            "Layers (bottom first)",
            ("#", "unpacked", "stored", "entries", "made by"),
            [
                (
                    str(n),
                    decimal_bytes(row.unpacked_bytes),
                    display_bytes(row.stored_bytes),
                    f"{row.n_entries:,}",
                    one_line(row.command or "unknown"),
                )
                for n, row in enumerate(report.layers)
            ],
        ),
        Section("Owners", ("owner", "unpacked", "share"), [_share(*row, total) for row in owners]),
        Section("Kinds", ("kind", "unpacked", "share"), [_share(*row, total) for row in kinds]),
        Section(
            f"Largest packages (of {len(report.packages)})",
            ("package", "version", "by", "unpacked", *(("used",) if used else ())),
            [
                (row.name, row.version, row.manager, decimal_bytes(row.unpacked_bytes), *_used(row))
                for row in report.packages[:top]
            ],
        ),
        Section(
            "Largest directories",
            ("directory", "visible"),
            [(f"/{row.path}", decimal_bytes(row.visible_bytes)) for row in report.top_directories[:top]],
        ),
        Section(
            "Largest files",
            ("file", "unpacked", "layer", "owner"),
            [
                (f"/{row.path}", decimal_bytes(row.unpacked_bytes), str(row.layer), row.owner)
                for row in report.top_files[:top]
            ],
        ),
        Section(
            "GPU code by target",
            ("target", "visible", "of it inside libraries", "keeping it alone saves"),
            [_gpu_row(report.gpu_code, *row) for row in gpu],
        ),
    ]
    return [section for section in sections if section.rows]


def _used(row: PackageRow) -> tuple[str, ...]:
    """The bytes that a keep-list names, where there was one."""
    return () if row.used_bytes is None else (decimal_bytes(row.used_bytes),)


def _gpu_row(code: GpuCode, target: str, n_bytes: int) -> tuple[str, ...]:
    saved = code.saved_by_card.get(target)
    return (
        target,
        decimal_bytes(n_bytes),
        decimal_bytes(code.in_libraries.get(target, 0)),
        display_bytes(saved, "-"),
    )


def _size_of(finding: Finding) -> str:
    """A finding's bytes in brackets, and the image's size without them; empty where it isn't about size."""
    if not finding.bytes:
        return ""
    after = finding.predicted_unpacked_bytes
    summary = "" if after is None else f"; {decimal_bytes(after)} without"
    return f" ({size_text(finding)}{summary})"


def comparison_line(comparison: Comparison) -> str:
    """The baseline and whether anything is worse, in one line."""
    count = len(comparison.regressions)
    summary = (
        "nothing is worse" if not count else f"{count} {'thing is' if count == 1 else 'things are'} worse"
    )
    return f"{comparison.label}: {summary} (tolerance {comparison.tolerance})"


def change_lines(comparison: Comparison) -> list[str]:
    """A line for each regression, and for each thing that couldn't be compared."""
    worse = [f"worse: {row}" for row in comparison.regressions]
    return worse + [f"not compared: {what}" for what in comparison.not_compared]


# Words, sizes and tables.


def display_bytes(n_bytes: int | None, missing: str = "unknown") -> str:
    """A size for people; `missing` where it isn't known."""
    return missing if n_bytes is None else decimal_bytes(n_bytes)


def share(n_bytes: int, total: int) -> str:
    """A part of a whole, in percent."""
    return f"{100 * n_bytes / total:.1f} %" if total else "0.0 %"


def _share(name: str, n_bytes: int, total: int) -> tuple[str, str, str]:
    return name, decimal_bytes(n_bytes), share(n_bytes, total)


def one_line(text: str, width: int = _COMMAND_WIDTH, cut: str = "...") -> str:
    """A text in one line of at most `width` characters; `cut` ends one that is longer."""
    words = " ".join(text.split())
    return words if len(words) <= width else words[: width - len(cut)] + cut


# Markdown that isn't too long.


def capped(text: str) -> str:
    """Markdown of at most MARKDOWN_BYTES, cut at a line, with a note that it was cut."""
    raw = text.encode()
    if len(raw) <= MARKDOWN_BYTES:
        return text
    room = MARKDOWN_BYTES - len(_CUT.encode())
    kept = raw[:room].rpartition(b"\n")[0].decode("utf-8", "ignore")
    fence = _open_fence(kept)
    while fence and len(kept.encode()) + 1 + len(fence) > room:
        kept = kept.rpartition("\n")[0]
        fence = _open_fence(kept)
    return kept + (f"\n{fence}" if fence else "") + _CUT


def _open_fence(text: str) -> str:
    """The fence of the block that the text ends within; empty where it ends in none."""
    fence = ""
    for match in _FENCE.finditer(text):
        if not fence:
            fence = match[1]
        elif match[1] == fence and not match[2]:
            fence = ""
    return fence
