"""The difference of two images as text: terminal table and Markdown."""

from collections.abc import Callable
from dataclasses import replace

from buildtool.audit.report.diff import Change, ImageDiff
from buildtool.audit.report.render import Section, capped, shown_bytes
from buildtool.audit.report.schema import AuditReport
from probes.shared.quoting import markdown, terminal
from probes.shared.units import decimal_bytes


def render_diff_table(found: ImageDiff, top: int = 15) -> str:
    """The difference for a terminal."""
    lines = [f"A: {terminal(found.before.image.ref)}", f"B: {terminal(found.after.image.ref)}"]
    lines += [section.text() for section in _sections(found, top)]
    return "\n".join([*lines, *_notes(found)]) + "\n"


def render_diff_markdown(found: ImageDiff, top: int = 30) -> str:
    """The difference for a CI summary or an issue."""
    refs = markdown(found.before.image.ref), markdown(found.after.image.ref)
    lines = [f"# {refs[0]} against {refs[1]}", "", f"A is {refs[0]}, B is {refs[1]}."]
    lines += [section.markdown() for section in _sections(found, top)]
    return capped("\n".join([*lines, *_notes(found)]) + "\n")


def _sections(found: ImageDiff, top: int) -> list[Section]:
    parts = (
        ("Owners", "owner", found.owners),
        ("Kinds", "kind", found.kinds),
        ("GPU code by target", "target", found.gpu_code),
        ("Packages", "package", found.packages),
        ("Places", "place", tuple(replace(row, name=f"/{row.name}") for row in found.places)),
        ("Findings", "finding", found.findings),
    )
    sections = [_summary(found.before, found.after)]
    for title, noun, changes in parts:
        extra = ("version",) if any(change.note for change in changes) else ()
        headers = (noun, "A", "B", "B - A", *extra)
        rows = [_row(change) for change in changes[:top]]
        if len(changes) > top:
            rows.append((f"... and {len(changes) - top} more", "", "", "", ""))
        if changes:
            sections.append(Section(f"{title}, what differs", headers, [row[: len(headers)] for row in rows]))
    return sections


def _summary(before: AuditReport, after: AuditReport) -> Section:
    figures: tuple[tuple[str, Callable[[AuditReport], int | None]], ...] = (
        ("unpacked", lambda report: report.totals.unpacked_bytes),
        ("visible", lambda report: report.totals.visible_bytes),
        ("stored", lambda report: report.totals.stored_bytes),
    )
    rows = []
    for name, of in figures:
        a, b = of(before), of(after)
        delta = "unknown" if a is None or b is None else _signed(b - a)
        rows.append((name, shown_bytes(a), shown_bytes(b), delta))
    for name, a_text, b_text in (
        ("non-empty files", f"{before.totals.n_files:,}", f"{after.totals.n_files:,}"),
        ("layers", str(len(before.layers)), str(len(after.layers))),
        ("packages", str(len(before.packages)), str(len(after.packages))),
        ("torch", before.torch_build, after.torch_build),
        ("platform", before.image.platform, after.image.platform),
        ("budget", before.budget.verdict.value, after.budget.verdict.value),
    ):
        rows.append((name, a_text, b_text, ""))
    return Section("Side by side", ("", "A", "B", "B - A"), rows)


def _row(change: Change) -> tuple[str, ...]:
    """A side without its own bytes, such as a finding that isn't about size, is shown as present."""
    sides = [
        "there" if side == 0 else shown_bytes(side, "-") for side in (change.before_bytes, change.after_bytes)
    ]
    return (change.name, *sides, _signed(change.delta_bytes) if change.delta_bytes else "", change.note)


def _notes(found: ImageDiff) -> list[str]:
    if found.least_bytes is None:
        return ["", "note: places can't be compared, because one report was saved before reports held them"]
    least = decimal_bytes(found.least_bytes)
    return [
        "",
        f"note: - means none; for places it also means less than {least}; smaller differences aren't listed",
    ]


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{decimal_bytes(n_bytes)}"
