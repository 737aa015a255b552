"""The difference of two audits as JSON (schema: docs/schema/audit-diff.schema.json)."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from buildtool.audit.diff import Change, ImageDiff
from buildtool.audit.report import AuditReport, Totals, Verdict
from probes.core.invocation import tool_version

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Side:
    """One of the two images."""

    ref: str
    digest: str | None
    config_digest: str
    platform: str
    torch: str
    totals: Totals
    layers: int
    packages: int
    budget: Verdict


@dataclass(frozen=True)
class ChangeRow:
    """Unpacked bytes on both sides; null where it isn't there or, for places, is too small to be listed.

    `note` is the version of a package, or both versions.
    """

    name: str
    before_bytes: int | None
    after_bytes: int | None
    delta_bytes: int
    note: str


@dataclass(frozen=True)
class DiffDocument:
    """Everything that differs, without a limit on rows; each list has the largest difference first.

    A place with less than `least_bytes` isn't listed; null where a report holds no places.
    """

    schema_version: int
    tool_version: str
    before: Side
    after: Side
    owners: tuple[ChangeRow, ...]
    kinds: tuple[ChangeRow, ...]
    gpu_code: tuple[ChangeRow, ...]
    packages: tuple[ChangeRow, ...]
    places: tuple[ChangeRow, ...]
    findings: tuple[ChangeRow, ...]
    least_bytes: int | None


def diff_document(difference: ImageDiff) -> DiffDocument:
    """The difference as a value to write."""
    return DiffDocument(
        schema_version=SCHEMA_VERSION,
        tool_version=tool_version(),
        before=_side(difference.before),
        after=_side(difference.after),
        owners=_rows(difference.owners),
        kinds=_rows(difference.kinds),
        gpu_code=_rows(difference.gpu_code),
        packages=_rows(difference.packages),
        places=_rows(difference.places),
        findings=_rows(difference.findings),
        least_bytes=difference.least_bytes,
    )


def render_diff_json(difference: ImageDiff, _top: int = 0) -> str:
    """Canonical JSON: keys sorted, two spaces, ASCII only, a newline at the end; with all rows."""
    document = asdict(diff_document(difference))
    return json.dumps(document, sort_keys=True, indent=2, default=lambda word: word.value) + "\n"


def _side(report: AuditReport) -> Side:
    return Side(
        ref=report.image.ref,
        digest=report.image.digest,
        config_digest=report.image.config_digest,
        platform=report.image.platform,
        torch=report.torch_build,
        totals=report.totals,
        layers=len(report.layers),
        packages=len(report.packages),
        budget=report.budget.verdict,
    )


def _rows(changes: Iterable[Change]) -> tuple[ChangeRow, ...]:
    return tuple(
        ChangeRow(row.name, row.before_bytes, row.after_bytes, row.delta_bytes, row.note) for row in changes
    )
