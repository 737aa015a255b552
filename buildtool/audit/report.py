"""An audit's results as one value, and that value as JSON (schema: docs/schema/audit-report.schema.json)."""

import errno
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from buildtool.audit.counts import Duplicate, Facts, Tally
from buildtool.audit.findings import (
    WORTH_BYTES,
    Finding,
    Prediction,
    card_savings,
    find_waste,
    predict,
)
from buildtool.audit.packages import PackageRow
from buildtool.audit.treemap import NO_TREE, FileRow, Tree
from buildtool.core.errors import DataError
from buildtool.core.json_text import Json
from buildtool.core.model import Budget
from buildtool.image.reader import PLAIN_REASON, ImageContents
from probes.core import files
from probes.core.codec import Misfit, decode, load
from probes.core.invocation import host_command
from probes.core.quoting import terminal
from probes.core.units import counted

SCHEMA_VERSION = 1  # 1: first form, November 2026
_NO_DIGEST = "the archive holds no manifest digest (written by an engine without the containerd store)"
_KEPT_DUPLICATES = 100
MAX_REPORT_BYTES = 64 << 20
_LARGEST_COUNT = (1 << 63) - 1  # what 64-bit readers can hold

# The report.


@dataclass(frozen=True)
class ImageRow:
    """Which image was read. An unknown digest comes with the reason."""

    ref: str
    digest: str | None
    digest_reason: str | None
    manifest_digest: str | None
    config_digest: str
    platform: str
    labels: Mapping[str, str]
    attestations: int
    attestations_stored_bytes: int
    base_layers: int = 0  # number of lowest layers that are the base image; 0 where nothing shows one
    base_told_by: str = ""
    base_name: str = ""


@dataclass(frozen=True)
class Totals:
    """`unpacked_bytes` is the files' content in all layers; `visible_bytes` what the final tree still shows.

    `stored_bytes` is the compressed layers; None with a reason where the source doesn't give it.
    `tar_bytes` are the layers' tars with headers and padding. `n_files` are visible files; empty files and
    further names of a file (hard links) don't count.
    """

    unpacked_bytes: int
    visible_bytes: int
    stored_bytes: int | None
    stored_reason: str | None
    tar_bytes: int
    n_files: int


@dataclass(frozen=True)
class LayerRow:
    """One layer, bottom first."""

    digest: str | None
    diff_id: str
    unpacked_bytes: int
    stored_bytes: int | None
    tar_bytes: int
    n_entries: int
    command: str | None


@dataclass(frozen=True)
class GpuCode:
    """Visible bytes of GPU code by target, and how much of them are inside libraries.

    `saved_by_card` are the unpacked bytes that a prune to one card alone takes out. Compressed bytes by
    target aren't known: a layer is one compressed stream, and GPU code compresses unlike the rest of it.
    """

    by_target: Mapping[str, int]
    in_libraries: Mapping[str, int]
    saved_by_card: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DirectoryRow:
    """One directory with everything below it."""

    path: str
    visible_bytes: int


class Verdict(Enum):
    """`none`: no limit was set. `unknown`: a limit was set for bytes that aren't known."""

    PASS = "pass"
    FAIL = "fail"
    NONE = "none"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Judgement:
    """One limit and what was compared with it."""

    limit_bytes: int | None
    actual_bytes: int | None
    verdict: Verdict


@dataclass(frozen=True)
class BudgetResult:
    """The verdicts on unpacked and on stored bytes, and the graver of both."""

    unpacked: Judgement
    stored: Judgement

    @property
    def verdict(self) -> Verdict:
        """Fail, else unknown, else pass, else none."""
        order = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS, Verdict.NONE)
        return min(self.unpacked.verdict, self.stored.verdict, key=order.index)


def judge(budget: Budget, *, unpacked_bytes: int, stored_bytes: int | None) -> BudgetResult:
    """Compare an image's bytes with its limits; a limit that is just met passes."""
    return BudgetResult(
        _judge_limit(budget.unpacked_bytes, unpacked_bytes), _judge_limit(budget.stored_bytes, stored_bytes)
    )


def _judge_limit(limit: int | None, actual: int | None) -> Judgement:
    if limit is None:
        return Judgement(None, actual, Verdict.NONE)
    if actual is None:
        return Judgement(limit, None, Verdict.UNKNOWN)
    return Judgement(limit, actual, Verdict.PASS if actual <= limit else Verdict.FAIL)


@dataclass(frozen=True)
class AuditReport:
    """Everything that an audit found. Sums of `owners`, `kinds` and `layers` are equal."""

    tool_version: str
    image: ImageRow
    totals: Totals
    layers: tuple[LayerRow, ...]
    owners: Mapping[str, int]
    kinds: Mapping[str, int]
    packages: tuple[PackageRow, ...]
    gpu_code: GpuCode
    top_files: tuple[FileRow, ...]
    top_directories: tuple[DirectoryRow, ...]
    duplicates: tuple[Duplicate, ...]
    findings: tuple[Finding, ...]
    budget: BudgetResult
    notes: tuple[str, ...]
    prediction: Prediction | None = None  # None in reports that were saved before there was one
    tree: Tree = NO_TREE  # empty in reports that were saved before there was one

    @property
    def torch_build(self) -> str:
        """The torch in the image, by its package, else by its label."""
        torch = next((row for row in self.packages if row.name in ("torch", "python3-torch")), None)
        labelled = self.image.labels.get("io.weir.torch.build", "")
        version = f"{torch.version}" if torch else ""
        return " ".join(part for part in (version, f"({labelled})" if labelled else "") if part) or "none"


# From an image's facts.


def make_report(contents: ImageContents, facts: Facts, budget: Budget, tool_version: str) -> AuditReport:
    """Combine what was read, counted and found."""
    totals = _totals(contents, facts)
    budget_result = judge(budget, unpacked_bytes=totals.unpacked_bytes, stored_bytes=totals.stored_bytes)
    findings, gpu_code = find_waste(facts), _gpu_code(facts)
    return AuditReport(
        tool_version=tool_version,
        image=_image_row(contents, facts),
        totals=totals,
        layers=tuple(
            LayerRow(
                layer.digest,
                layer.diff_id,
                layer.unpacked_bytes,
                layer.stored_bytes,
                layer.tar_bytes,
                layer.index.n_entries if layer.index else 0,
                None if command is None else terminal(command, keep="\n\t"),
            )
            for layer, command in zip(contents.layers, facts.commands, strict=True)
        ),
        owners=dict(facts.owners),
        kinds={kind.value: n_bytes for kind, n_bytes in facts.kinds.items() if n_bytes},
        packages=facts.packages,
        gpu_code=gpu_code,
        top_files=facts.top_files,
        top_directories=tuple(
            DirectoryRow(terminal(path), n_bytes) for path, n_bytes in facts.top_directories
        ),
        duplicates=facts.duplicates[:_KEPT_DUPLICATES],
        findings=findings,
        budget=budget_result,
        notes=tuple(map(terminal, contents.notes + contents.layer_notes() + _notes(facts, gpu_code))),
        prediction=predict(facts, findings),
        tree=facts.tree,
    )


def _image_row(contents: ImageContents, facts: Facts) -> ImageRow:
    return ImageRow(
        ref=terminal(contents.ref),
        digest=contents.digest,
        digest_reason=None if contents.digest else _NO_DIGEST,
        manifest_digest=contents.manifest_digest,
        config_digest=contents.config_digest,
        platform=terminal(str(contents.config.platform)),
        labels={terminal(key): terminal(value) for key, value in facts.labels.items()},
        attestations=contents.attestations.count,
        attestations_stored_bytes=contents.attestations.stored_bytes,
        base_layers=facts.base.n_layers,
        base_told_by=facts.base.evidence,
        base_name=facts.base.name,
    )


def _totals(contents: ImageContents, facts: Facts) -> Totals:
    stored = [layer.stored_bytes for layer in contents.layers if layer.stored_bytes is not None]
    known = len(stored) == len(contents.layers)
    return Totals(
        unpacked_bytes=sum(layer.unpacked_bytes for layer in contents.layers),
        visible_bytes=facts.visible_bytes,
        stored_bytes=sum(stored) if known else None,
        stored_reason=None if known else PLAIN_REASON,
        tar_bytes=sum(layer.tar_bytes for layer in contents.layers),
        n_files=facts.n_files,
    )


def _gpu_code(facts: Facts) -> GpuCode:
    return GpuCode(
        by_target=_by_target(facts.gpu_files, facts.gpu_in_libraries),
        in_libraries=_by_target(facts.gpu_in_libraries),
        saved_by_card=card_savings(facts),
    )


def _by_target(*groups: Mapping[str, Tally]) -> Mapping[str, int]:
    totals: Counter[str] = Counter()
    for group in groups:
        totals.update({target: tally.unpacked_bytes for target, tally in group.items()})
    return dict(totals)


def _notes(facts: Facts, code: GpuCode) -> tuple[str, ...]:
    notes = []
    targets = {*facts.gpu_files, *facts.gpu_in_libraries}
    if not facts.wanted_targets and sum(name.startswith("gfx") for name in targets) > 1:
        notes.append(
            "name the cards that this image is for (--targets GFX) to learn which GPU code they can't run"
        )
    if max(code.saved_by_card.values(), default=0) >= WORTH_BYTES:
        notes.append(
            "how many stored bytes GPU code takes is unknown: a layer is one compressed stream, and GPU code "
            "may compress far better than the rest of it"
        )
    if facts.packages_left_out:
        notes.append(f"{facts.packages_left_out:,} packages are beyond the limit; their files have no owner")
    if facts.dangling_links:
        notes.append(f"hard links without a target: {facts.dangling_links}")
    if facts.unread:
        path, why = facts.unread[0]
        more = f" (and {counted(len(facts.unread) - 1, 'more file')})" if len(facts.unread) > 1 else ""
        notes.append(f"couldn't be inspected: /{terminal(path)}: {why}{more}")
    return tuple(notes)


# As JSON.


def to_json(report: AuditReport) -> str:
    """Canonical JSON: keys sorted, two spaces, ASCII only, a newline at the end."""
    document = {
        **asdict(report),
        "schema_version": SCHEMA_VERSION,
        "budget": {
            "limit_bytes": report.budget.unpacked.limit_bytes,
            "verdict": report.budget.verdict,
            **asdict(report.budget),
        },
    }
    return json.dumps(document, sort_keys=True, indent=2, default=lambda word: word.value) + "\n"


def read_report(path: Path) -> AuditReport:
    """The report in a file. Raises DataError for one that can't be read or isn't a report."""
    try:
        text = files.read_text(path, most_bytes=MAX_REPORT_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DataError(
                f"{path} is too large to be read as an audit report: more than {MAX_REPORT_BYTES >> 20} MiB",
                "audit the image itself",
            ) from error
        raise DataError(
            f"can't read {path}: {error.strerror or error}",
            "check the path, or write a report with: weir audit IMAGE --json FILE",
        ) from error
    except UnicodeDecodeError as error:
        raise _not_a_report(f"{path}: not UTF-8 text") from error
    return parse_report(text, str(path))


def parse_report(text: str, label: str) -> AuditReport:
    """The report that `to_json` wrote. Raises DataError naming the faulty place."""
    try:
        document = load(text)
    except ValueError as error:
        raise _not_a_report(f"{label}: not JSON ({error})") from error
    try:
        top = _trusted(document, label)
        if isinstance(top, Mapping) and (version := top.get("schema_version")) != SCHEMA_VERSION:
            raise Misfit(
                f"{label}: schema_version is {repr(version)[:60]}, this program reads {SCHEMA_VERSION}"
            )
        return decode(AuditReport, top, label)
    except Misfit as error:
        raise _not_a_report(error) from error


def _trusted(value: Json, where: str) -> Json:
    """The value with texts fit for a terminal. Raises Misfit for an integer that is no count."""
    if isinstance(value, str):
        return terminal(value, keep="\n\t")
    if isinstance(value, Mapping):
        return {terminal(key): _trusted(item, f"{where}.{key[:60]}") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_trusted(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, int) and not 0 <= value <= _LARGEST_COUNT:
        raise Misfit(f"{where}: expected a count, found '{str(value)[:60]}'")
    return value


def _not_a_report(why: object) -> DataError:
    return DataError(
        terminal(f"{why}: this is not an audit report"),
        f"write one with: {host_command()} audit IMAGE --json FILE",
    )
