"""An audit as SARIF 2.1.0, for code scanning: a result for each finding, broken limit and regression."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from buildtool.audit.baseline import Comparison
from buildtool.audit.findings import Severity, size_text
from buildtool.audit.options import DEFAULT_RENDER_OPTIONS, RenderOptions
from buildtool.audit.report import AuditReport, Verdict
from buildtool.core.sarif import SarifTool, fitting_results, sarif_document
from probes.core.codec import Json
from probes.core.quoting import sarif, terminal
from probes.core.units import decimal_bytes

_MAX_TEXT = 4_000
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


@dataclass(frozen=True)
class _Result:
    rule: str
    level: str
    text: str
    paths: tuple[str, ...] = ()
    remedy: str = ""


def render_sarif(report: AuditReport, options: RenderOptions = DEFAULT_RENDER_OPTIONS) -> str:
    """The report as SARIF, within MAX_RESULTS and MAX_BYTES; results left out are counted."""
    results = list(_results(report, options.comparison))
    kept = fitting_results([_result(report, row) for row in results])
    rules = {row.rule: row for row in reversed(results[: len(kept)])}
    names = {name: n for n, name in enumerate(sorted(rules))}
    for row, result in zip(results, kept, strict=False):
        result["ruleIndex"] = names[row.rule]
    root: Json = {"description": {"text": sarif(_cut(f"root of {report.image.ref}"))}}
    return sarif_document(
        SarifTool("gpu-weir audit", report.tool_version, [_rule(rules[name]) for name in names]),
        kept,
        left_out=len(results) - len(kept),
        bases={"IMAGE": root},
    )


def _results(report: AuditReport, comparison: Comparison | None) -> Iterator[_Result]:
    """The most severe first, since the last are left out when there are too many."""
    for name, result in (("unpacked", report.budget.unpacked), ("stored", report.budget.stored)):
        if result.verdict is Verdict.FAIL:
            actual, limit = decimal_bytes(result.actual_bytes or 0), decimal_bytes(result.limit_bytes or 0)
            yield _Result("over-budget", "error", f"{actual} {name} > {limit}, the image's budget")
    for regression in comparison.regressions if comparison else ():
        yield _Result("regression", "error", str(regression), regression.paths)
    for finding in report.findings:
        size = f" ({size_text(finding)})" if finding.bytes else ""
        text = f"{finding.title}{size}\n\n{finding.remedy}"
        yield _Result(finding.id, _LEVELS[finding.severity], text, finding.paths, finding.remedy)


def _rule(row: _Result) -> Json:
    rule: dict[str, Json] = {
        "id": row.rule,
        "shortDescription": {"text": sarif(row.rule.replace("-", " "))},
        "defaultConfiguration": {"level": row.level},
    }
    return rule | ({"help": {"text": sarif(_cut(row.remedy))}} if row.remedy else {})


def _result(report: AuditReport, row: _Result) -> dict[str, Json]:
    """One result. Its fingerprint stays when sizes change, so builds don't reopen the same alert."""
    identity = terminal(f"{report.image.ref}\n{row.rule}\n{''.join(row.paths[:1])}", keep="\n")
    return {
        "ruleId": row.rule,
        "level": row.level,
        "message": {"text": sarif(_cut(row.text))},
        "locations": [*_locations(row.paths or (report.image.ref,), report.image.ref)],
        "partialFingerprints": {"weirFinding/v1": hashlib.sha256(identity.encode()).hexdigest()},
    }


def _locations(paths: Sequence[str], ref: str) -> Iterable[Json]:
    """Duplicates name several places separated by ` = `; the first one is the location."""
    for path in paths:
        yield {
            "physicalLocation": {
                "artifactLocation": {"uri": quote(terminal(_cut(path.split(" = ")[0]))), "uriBaseId": "IMAGE"}
            },
            "logicalLocations": [{"name": terminal(_cut(ref)), "kind": "module"}],
        }


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
