"""Compares two audits: what changed by owner, kind, package, place and finding. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from buildtool.audit.packages import PackageRow
from buildtool.audit.report import AuditReport
from buildtool.audit.text import Section, capped, display_bytes
from buildtool.audit.treemap import Tree
from probes.core.quoting import markdown, terminal
from probes.core.units import decimal_bytes


@dataclass(frozen=True)
class Change:
    """Unpacked bytes of one thing on both sides; None where it isn't there, or too small to be listed."""

    name: str
    before_bytes: int | None
    after_bytes: int | None
    note: str = ""

    @property
    def delta_bytes(self) -> int:
        """After minus before; a missing side counts as 0."""
        return (self.after_bytes or 0) - (self.before_bytes or 0)


@dataclass(frozen=True)
class ImageDiff:
    """Two images. Each list has what differs, the largest difference first."""

    before: AuditReport
    after: AuditReport
    owners: tuple[Change, ...]
    kinds: tuple[Change, ...]
    gpu_code: tuple[Change, ...]
    packages: tuple[Change, ...]
    places: tuple[Change, ...]
    findings: tuple[Change, ...]
    least_bytes: int | None  # a place with less isn't listed; None where a report holds no places


def diff(before: AuditReport, after: AuditReport) -> ImageDiff:
    """What changed from one image to the other."""
    known = bool(before.tree.rows and after.tree.rows)
    return ImageDiff(
        before=before,
        after=after,
        owners=_changes(before.owners, after.owners),
        kinds=_changes(before.kinds, after.kinds),
        gpu_code=_changes(before.gpu_code.by_target, after.gpu_code.by_target),
        packages=_packages(before.packages, after.packages),
        places=_places(before.tree, after.tree) if known else (),
        findings=_changes(_finding_bytes(before), _finding_bytes(after)),
        least_bytes=max(before.tree.least_bytes, after.tree.least_bytes) if known else None,
    )


EXPLAINS = 0.9  # a directory is left out where one thing in it makes up this share of its change


def _changes(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[Change, ...]:
    rows = (Change(name, before.get(name), after.get(name)) for name in before.keys() | after.keys())
    return _sorted(row for row in rows if row.before_bytes != row.after_bytes)


def _sorted(rows: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(rows, key=lambda row: (-abs(row.delta_bytes), row.name)))


def _finding_bytes(report: AuditReport) -> Mapping[str, int]:
    sums: Counter[str] = Counter()
    for row in report.findings:
        sums[row.id] += row.bytes
    return sums


def _packages(before: Iterable[PackageRow], after: Iterable[PackageRow]) -> tuple[Change, ...]:
    """Packages by manager and name; a changed version is listed even without a difference in bytes."""
    sides = _by_name(before), _by_name(after)
    rows = []
    for manager, name in sides[0].keys() | sides[1].keys():
        old, new = (side.get((manager, name), ()) for side in sides)
        versions = [", ".join(sorted({row.version for row in rows_of})) for rows_of in (old, new)]
        sums = [sum(row.unpacked_bytes for row in rows_of) if rows_of else None for rows_of in (old, new)]
        if versions[0] != versions[1] or sums[0] != sums[1]:
            note = " -> ".join(version or "none" for version in dict.fromkeys(versions))
            rows.append(Change(f"{name} ({manager})", sums[0], sums[1], note))
    return _sorted(rows)


def _by_name(packages: Iterable[PackageRow]) -> Mapping[tuple[str, str], list[PackageRow]]:
    grouped: defaultdict[tuple[str, str], list[PackageRow]] = defaultdict(list)
    for row in packages:
        grouped[row.manager, row.name].append(row)
    return grouped


def _places(before: Tree, after: Tree) -> tuple[Change, ...]:
    """Directories and files, without directories whose change comes almost entirely from one thing inside."""
    least = max(before.least_bytes, after.least_bytes)
    rows = {row.name: row for row in _changes(_sums(before), _sums(after)) if abs(row.delta_bytes) >= least}
    heaviest: Counter[str] = Counter()
    for name, row in rows.items():
        above = name.rpartition("/")[0]
        heaviest[above] = max(heaviest[above], abs(row.delta_bytes))
    kept = (
        row
        for name, row in rows.items()
        if name and (name not in heaviest or heaviest[name] < EXPLAINS * abs(row.delta_bytes))
    )
    return _sorted(kept)


def _sums(tree: Tree) -> Mapping[str, int]:
    """Bytes below each directory that holds enough to be kept, and of each large file: exact sums."""
    below: Counter[str] = Counter()
    for row in tree.rows:
        place = row.path
        below[place] += row.unpacked_bytes
        while place:
            place = place.rpartition("/")[0]
            below[place] += row.unpacked_bytes
    return below


# As text.


def render_diff_table(difference: ImageDiff, top: int = 15) -> str:
    """The difference for a terminal."""
    lines = [f"A: {terminal(difference.before.image.ref)}", f"B: {terminal(difference.after.image.ref)}"]
    lines += [section.text() for section in _sections(difference, top)]
    return "\n".join([*lines, *_notes(difference)]) + "\n"


def render_diff_markdown(difference: ImageDiff, top: int = 30) -> str:
    """The difference for a CI summary or an issue."""
    refs = markdown(difference.before.image.ref), markdown(difference.after.image.ref)
    lines = [f"# {refs[0]} against {refs[1]}", "", f"A is {refs[0]}, B is {refs[1]}."]
    lines += [section.markdown() for section in _sections(difference, top)]
    return capped("\n".join([*lines, *_notes(difference)]) + "\n")


def _sections(difference: ImageDiff, top: int) -> list[Section]:
    parts = (
        ("Owners", "owner", difference.owners),
        ("Kinds", "kind", difference.kinds),
        ("GPU code by target", "target", difference.gpu_code),
        ("Packages", "package", difference.packages),
        ("Places", "place", tuple(replace(row, name=f"/{row.name}") for row in difference.places)),
        ("Findings", "finding", difference.findings),
    )
    sections = [_summary(difference.before, difference.after)]
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
        rows.append((name, display_bytes(a), display_bytes(b), delta))
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
        "there" if side == 0 else display_bytes(side, "-")
        for side in (change.before_bytes, change.after_bytes)
    ]
    return (change.name, *sides, _signed(change.delta_bytes) if change.delta_bytes else "", change.note)


def _notes(difference: ImageDiff) -> list[str]:
    if difference.least_bytes is None:
        return ["", "note: places can't be compared, because one report was saved before reports held them"]
    least = decimal_bytes(difference.least_bytes)
    return [
        "",
        f"note: - means none; for places it also means less than {least}; smaller differences aren't listed",
    ]


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{decimal_bytes(n_bytes)}"
