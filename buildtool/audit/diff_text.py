"""A difference of two images as text: terminal table and Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from buildtool.audit.diff import Change, ImageDiff
from buildtool.audit.render import capped, markdown_cell
from buildtool.audit.report import AuditReport
from probes.units import decimal_bytes


@dataclass(frozen=True)
class _Block:
    title: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left_out: int = 0


def render_diff_table(found: ImageDiff, top: int = 15) -> str:
    """The difference for a terminal."""
    lines = [f"A: {found.before.image.ref}", f"B: {found.after.image.ref}"]
    for block in _blocks(found, top):
        rows = [*block.rows, *_more(block)]
        table = tabulate(rows, block.headers, tablefmt="simple", disable_numparse=True)
        lines.append(f"\n{block.title}\n{table}")
    return "\n".join([*lines, *_notes(found)]) + "\n"


def render_diff_markdown(found: ImageDiff, top: int = 30) -> str:
    """The difference for a CI summary or an issue."""
    refs = markdown_cell(found.before.image.ref), markdown_cell(found.after.image.ref)
    lines = [f"# {refs[0]} against {refs[1]}", "", f"A is {refs[0]}, B is {refs[1]}."]
    for block in _blocks(found, top):
        rows = [[markdown_cell(cell) for cell in row] for row in [*block.rows, *_more(block)]]
        table = tabulate(rows, block.headers, "github", disable_numparse=True)
        lines += ["", f"## {block.title}", "", table]
    return capped("\n".join([*lines, *_notes(found)]) + "\n")


def _blocks(found: ImageDiff, top: int) -> list[_Block]:
    least = f"below {decimal_bytes(found.least_bytes)}" if found.least_bytes else ""
    parts = (
        ("Owners", "owner", found.owners, "none"),
        ("Kinds", "kind", found.kinds, "none"),
        ("GPU code by target", "target", found.gpu_code, "none"),
        ("Packages", "package", found.packages, "none"),
        ("Places", "place", tuple(_rooted(row) for row in found.places), least),
        ("Findings", "finding", found.findings, "none"),
    )
    blocks = [
        _Block(
            f"{title}, what differs",
            (noun, "A", "B", "B - A", ""),
            [_row(change, missing) for change in changes[:top]],
            max(0, len(changes) - top),
        )
        for title, noun, changes, missing in parts
        if changes
    ]
    return [_summary(found.before, found.after), *blocks]


def _summary(before: AuditReport, after: AuditReport) -> _Block:
    figures: tuple[tuple[str, Callable[[AuditReport], int | None]], ...] = (
        ("unpacked", lambda report: report.totals.unpacked_bytes),
        ("visible", lambda report: report.totals.visible_bytes),
        ("stored", lambda report: report.totals.stored_bytes),
    )
    rows = []
    for name, of in figures:
        a, b = of(before), of(after)
        delta = "unknown" if a is None or b is None else _signed(b - a)
        rows.append((name, _bytes(a), _bytes(b), delta))
    for name, a_text, b_text in (
        ("files", f"{before.totals.n_files:,}", f"{after.totals.n_files:,}"),
        ("layers", str(len(before.layers)), str(len(after.layers))),
        ("packages", str(len(before.packages)), str(len(after.packages))),
        ("torch", before.torch_build, after.torch_build),
        ("platform", before.image.platform, after.image.platform),
        ("budget", before.budget.verdict.value, after.budget.verdict.value),
    ):
        rows.append((name, a_text, b_text, ""))
    return _Block("Side by side", ("", "A", "B", "B - A"), rows)


def _row(change: Change, missing: str) -> tuple[str, ...]:
    sides = (_bytes(side, missing) for side in (change.before_bytes, change.after_bytes))
    return (change.name, *sides, _signed(change.delta_bytes), change.note)


def _rooted(change: Change) -> Change:
    return Change(f"/{change.name}", change.before_bytes, change.after_bytes)


def _more(block: _Block) -> list[tuple[str, ...]]:
    return [(f"... and {block.left_out} more", "", "", "", "")] if block.left_out else []


def _notes(found: ImageDiff) -> list[str]:
    if found.least_bytes is None:
        return ["", "note: places can't be compared, a report was saved before it held them"]
    return ["", f"note: places with less than {decimal_bytes(found.least_bytes)} of difference aren't listed"]


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{decimal_bytes(n_bytes)}"


def _bytes(n_bytes: int | None, missing: str = "unknown") -> str:
    return missing if n_bytes is None else decimal_bytes(n_bytes)
