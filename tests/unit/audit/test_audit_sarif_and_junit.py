"""SARIF and JUnit as whole documents: every element, in order, and what is cut at which limit."""

import hashlib
import json
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from report_maker import a_finding, small_report, with_findings

from buildtool.audit.baseline import Comparison, Regression, Tolerance
from buildtool.audit.findings import Finding, Severity
from buildtool.audit.junit import render_junit
from buildtool.audit.options import RenderOptions
from buildtool.audit.report import AuditReport
from buildtool.audit.sarif import render_sarif
from buildtool.core import sarif as sarif_module
from buildtool.core.model import Budget

MB = 1_000_000
WORSE = Comparison(
    "old.json",
    Tolerance(),
    (Regression("larger finding x", MB, 3 * MB, "detail", ("opt/a", "opt/b")),),
    ("stored bytes",),
)
BETTER = Comparison("old.json", Tolerance(), ())
UNSIZED = Finding("new-one", Severity.ERROR, "no size", 0, (), "")


def over_budget(*findings: Finding) -> AuditReport:
    """A report of 3 MB unpacked and 2 MB stored, over both limits of 1 MB."""
    judged = small_report(Budget(1, 1)).budget
    both = (replace(row, limit_bytes=MB) for row in (judged.unpacked, judged.stored))
    unpacked, stored = (
        replace(row, actual_bytes=n_bytes) for row, n_bytes in zip(both, (3 * MB, 2 * MB), strict=True)
    )
    return replace(with_findings(*findings), budget=replace(judged, unpacked=unpacked, stored=stored))


def at_a_limit_of_nothing() -> AuditReport:
    report = over_budget()
    return replace(
        report, budget=replace(report.budget, unpacked=replace(report.budget.unpacked, limit_bytes=0))
    )


# SARIF


def run_of(report: AuditReport, comparison: Comparison | None = None) -> dict[str, Any]:
    document = json.loads(render_sarif(report, RenderOptions(comparison=comparison)))
    assert document["$schema"].endswith("sarif-schema-2.1.0.json")
    assert document["version"] == "2.1.0"
    [run] = document["runs"]
    return dict(run)


def result(rule: str, index: int, level: str, text: str, *places: str) -> dict[str, object]:
    told = f"weir/tiny:1\n{rule}\n{places[0] if places else ''}"
    return {
        "ruleId": rule,
        "ruleIndex": index,
        "level": level,
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": uri, "uriBaseId": "IMAGE"}},
                "logicalLocations": [{"name": "weir/tiny:1", "kind": "module"}],
            }
            for uri in places or ("weir/tiny%3A1",)
        ],
        "partialFingerprints": {"weirFinding/v1": hashlib.sha256(told.encode()).hexdigest()},
    }


def test_sarif_has_every_limit_regression_and_finding_with_its_rule() -> None:
    report = over_budget(a_finding(paths=("var/a", "var/b")), UNSIZED)
    assert run_of(report, WORSE) == {
        "tool": {
            "driver": {
                "name": "gpu-weir audit",
                "version": report.tool_version,
                "rules": [
                    {
                        "id": "caches",
                        "shortDescription": {"text": "caches"},
                        "defaultConfiguration": {"level": "warning"},
                        "help": {"text": "RUN rm -rf x"},
                    },
                    *(
                        {
                            "id": name,
                            "shortDescription": {"text": name.replace("-", " ")},
                            "defaultConfiguration": {"level": "error"},
                        }
                        for name in ("new-one", "over-budget", "regression")
                    ),
                ],
            }
        },
        "originalUriBaseIds": {"IMAGE": {"description": {"text": "root of weir/tiny:1"}}},
        "columnKind": "unicodeCodePoints",
        "results": [
            result("over-budget", 2, "error", "3.00 MB unpacked > 1.00 MB, the image's budget"),
            result("over-budget", 2, "error", "2.00 MB stored > 1.00 MB, the image's budget"),
            result("regression", 3, "error", str(WORSE.regressions[0]), "opt/a", "opt/b"),
            result(
                "caches",
                0,
                "warning",
                "caches of package managers (5.00 MB)\n\nRUN rm -rf x",
                "var/a",
                "var/b",
            ),
            result("new-one", 1, "error", "no size\n\n"),
        ],
    }


def test_a_limit_of_nothing_is_shown_as_that() -> None:
    text = "3.00 MB unpacked > 0 B"
    assert run_of(at_a_limit_of_nothing())["results"][0]["message"]["text"].startswith(text)
    assert cases(at_a_limit_of_nothing())[0][3] == text


def test_sarif_of_an_image_within_its_limits_has_no_result() -> None:
    run = run_of(replace(with_findings(), budget=small_report(Budget(10**12, None)).budget), BETTER)
    assert (run["results"], "invocations" in run) == ([], False)


def test_a_rule_is_as_grave_as_its_first_result() -> None:
    run = run_of(with_findings(a_finding(severity=Severity.ERROR), a_finding(remedy="other")))
    assert [rule["help"]["text"] for rule in run["tool"]["driver"]["rules"]] == ["RUN rm -rf x"]
    assert run["tool"]["driver"]["rules"][0]["defaultConfiguration"] == {"level": "error"}


def test_sarif_texts_are_cut_at_4000_characters() -> None:
    for length, text in ((4000, "x" * 4000), (4001, "x" * 3999 + "…")):
        run = run_of(
            with_findings(a_finding(title="x", n_bytes=0, remedy="x" * length, paths=("x" * length,)))
        )
        place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert run["tool"]["driver"]["rules"][0]["help"]["text"] == text
        assert place.replace("%E2%80%A6", "…") == text


def test_sarif_has_as_many_results_as_fit_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    report = with_findings(a_finding(), a_finding(), a_finding())
    rows = run_of(report)["results"]
    # how results are measured: without the index of their rule, which is added afterwards
    n_bytes = [len(json.dumps({k: v for k, v in row.items() if k != "ruleIndex"})) for row in rows]
    for room, kept in ((2 * sum(n_bytes), 3), (2 * sum(n_bytes) - 1, 2)):
        monkeypatch.setattr(sarif_module, "MAX_BYTES", 100_000 + room)
        assert len(run_of(report)["results"]) == kept


def test_sarif_says_how_many_results_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarif_module, "MAX_RESULTS", 2)
    run = run_of(with_findings(a_finding("a"), a_finding("b"), a_finding("c")))
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["a", "b"]
    [invocation] = run["invocations"]
    assert invocation["executionSuccessful"] is True
    [note] = invocation["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("1 results were left out")


# JUnit


def cases(report: AuditReport, comparison: Comparison | None = None) -> list[tuple[str | None, ...]]:
    """Group, name, and the outcome, its message and its text, where there is one."""
    root = ElementTree.fromstring(render_junit(report, RenderOptions(comparison=comparison)))
    found: list[tuple[str | None, ...]] = []
    for case in root.iter("testcase"):
        assert case.get("time") == "0"
        plain = (case.get("classname"), case.get("name"))
        for child in case:
            plain += (child.tag, child.get("message"), child.text)  # type: ignore[assignment]
        found.append(plain)
    return found


def test_junit_has_a_case_for_each_limit_regression_and_finding() -> None:
    info = a_finding("hint", severity=Severity.INFO, n_bytes=0, remedy="")
    error = a_finding("wrong", severity=Severity.ERROR, paths=("a", "b"))
    assert cases(over_budget(info, error), WORSE) == [
        (
            "audit.budget",
            "unpacked bytes are within the budget",
            "failure",
            "3.00 MB unpacked > 1.00 MB",
            None,
        ),
        ("audit.budget", "stored bytes are within the budget", "failure", "2.00 MB stored > 1.00 MB", None),
        ("audit.baseline", "larger finding x", "failure", str(WORSE.regressions[0]), "opt/a\nopt/b"),
        ("audit.baseline", "stored bytes", "skipped", "not compared: stored bytes", None),
        (
            "audit.findings",
            "hint",
            "system-out",
            None,
            "info: caches of package managers\nvar/cache",
        ),
        (
            "audit.findings",
            "wrong",
            "failure",
            "caches of package managers (5.00 MB)",
            "a\nb\n\nRUN rm -rf x",
        ),
    ]


def test_junit_counts_its_cases_in_the_suite_and_in_the_whole() -> None:
    unknown = over_budget(a_finding(severity=Severity.ERROR))
    stored = replace(unknown.budget.stored, actual_bytes=None)
    report = replace(unknown, budget=replace(unknown.budget, stored=stored))
    text = render_junit(report, RenderOptions(comparison=WORSE))
    assert text.startswith("<?xml version=")
    assert text.endswith(">\n")
    assert "\n  <testsuite " in text
    root = ElementTree.fromstring(text)
    [suite] = root
    assert root.attrib == {"name": "gpu-weir audit", "tests": "5", "failures": "3", "errors": "0"}
    assert suite.attrib == {
        "name": "weir/tiny:1",
        "tests": "5",
        "failures": "3",
        "errors": "0",
        "skipped": "2",
    }
    assert cases(report)[1][:3] == ("audit.budget", "stored bytes are within the budget", "skipped")
    assert "1.00 MB" in str(cases(report)[1][3])


def test_junit_of_limits_that_are_kept_has_cases_that_pass() -> None:
    kept = replace(with_findings(), budget=small_report(Budget(10**12, None)).budget)
    assert cases(kept, BETTER) == [
        ("audit.budget", "unpacked bytes are within the budget"),
        ("audit.baseline", "nothing is worse than in old.json"),
    ]
    assert cases(with_findings()) == []
