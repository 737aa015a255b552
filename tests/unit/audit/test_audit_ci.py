"""What CI systems read: SARIF, JUnit, and the comparison with a baseline."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import jsonschema
import pytest
from report_maker import HOSTILE, a_finding, small_report, with_findings

from buildtool.audit.baseline import Comparison, Regression, Tolerance, compare, parse_tolerance
from buildtool.audit.findings import Severity
from buildtool.audit.junit import render_junit
from buildtool.audit.options import RenderOptions
from buildtool.audit.report import AuditReport, to_json
from buildtool.audit.sarif import render_sarif
from buildtool.audit.text import render_table
from buildtool.cli import audit as command
from buildtool.cli.program import main
from buildtool.core import sarif as sarif_module
from buildtool.core.errors import ConfigError, DataError, Exit
from buildtool.core.model import Budget
from probes.core.quoting import terminal

MB = 1_000_000
ONE_PERCENT = Tolerance()
MESSAGE = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
URI = {"type": "string", "pattern": r"^([A-Za-z0-9/._~-]|%[0-9A-F]{2})+$"}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
# the parts of SARIF 2.1.0 (OASIS, 2020) that code scanning needs, in our words
SARIF = {
    "type": "object",
    "required": ["version", "runs"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string", "format": "uri"},
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "required": ["driver"],
                        "additionalProperties": False,
                        "properties": {
                            "driver": {
                                "required": ["name"],
                                "properties": {
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "required": ["id"],
                                            "additionalProperties": False,
                                            "properties": {
                                                "id": {"type": "string"},
                                                "shortDescription": MESSAGE,
                                                "help": MESSAGE,
                                                "defaultConfiguration": {"properties": {"level": LEVEL}},
                                            },
                                        },
                                    }
                                },
                            }
                        },
                    },
                    "invocations": {"type": "array", "items": {"required": ["executionSuccessful"]}},
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["ruleId", "ruleIndex", "level", "message", "locations"],
                            "additionalProperties": False,
                            "properties": {
                                "ruleId": {"type": "string"},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "level": LEVEL,
                                "message": MESSAGE,
                                "partialFingerprints": {"additionalProperties": {"type": "string"}},
                                "locations": {
                                    "type": "array",
                                    "minItems": 1,
                                    "items": {
                                        "required": ["physicalLocation"],
                                        "properties": {
                                            "physicalLocation": {
                                                "required": ["artifactLocation"],
                                                "properties": {
                                                    "artifactLocation": {
                                                        "required": ["uri"],
                                                        "properties": {"uri": URI},
                                                    }
                                                },
                                            }
                                        },
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


VALIDATOR = jsonschema.Draft202012Validator(SARIF)


def sarif(report: AuditReport, comparison: Comparison | None = None) -> dict:  # type: ignore[type-arg]
    document = json.loads(render_sarif(report, RenderOptions(comparison=comparison)))
    VALIDATOR.validate(document)
    run: dict = document["runs"][0]  # type: ignore[type-arg]
    rules = run["tool"]["driver"]["rules"]
    assert all(rules[row["ruleIndex"]]["id"] == row["ruleId"] for row in run["results"])
    return run


def suite(report: AuditReport, comparison: Comparison | None = None) -> ElementTree.Element:
    found = ElementTree.fromstring(render_junit(report, RenderOptions(comparison=comparison))).find(
        "testsuite"
    )
    assert found is not None
    return found


def failures(of: ElementTree.Element) -> list[str]:
    return [case.get("name", "") for case in of if case.find("failure") is not None]


WORSE = Comparison(
    "old.json", Tolerance(), (Regression("more unpacked bytes", MB, 3 * MB),), ("stored bytes",)
)


def test_sarif_has_a_result_for_each_finding_with_level_places_and_remedy() -> None:
    findings = [a_finding(severity.value, severity=severity) for severity in Severity]
    run = sarif(with_findings(*findings))
    assert [(row["ruleId"], row["level"]) for row in run["results"]] == [
        ("error", "error"),
        ("warning", "warning"),
        ("info", "note"),
    ]
    text = run["results"][0]["message"]["text"]
    assert "5.00 MB" in text
    assert "RUN rm -rf x" in text
    place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "var/cache", "uriBaseId": "IMAGE"}


def test_sarif_puts_broken_limits_and_regressions_first() -> None:
    run = sarif(replace(with_findings(a_finding()), budget=small_report(Budget(1, 1)).budget), WORSE)
    assert [row["ruleId"] for row in run["results"]] == ["over-budget", "over-budget", "regression", "caches"]
    assert {row["level"] for row in run["results"][:3]} == {"error"}


def test_a_finding_without_a_place_is_located_at_the_image() -> None:
    run = sarif(with_findings(a_finding(paths=())))
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "weir/tiny%3A1"


def test_copies_are_located_at_the_first() -> None:
    run = sarif(with_findings(a_finding(paths=("opt/a b = usr/c",))))
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "opt/a%20b"


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_make_valid_sarif_and_junit(name: str) -> None:
    report = with_findings(a_finding(paths=(name,), title=name, remedy=name))
    uri = sarif(report)["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri) == terminal(name)
    case = suite(report).find("testcase[@name='caches']/system-out")
    assert case is not None
    assert all(char.isprintable() or char in "\n\t" for char in case.text or "")


def test_a_fingerprint_stays_when_only_the_bytes_change() -> None:
    prints = [
        sarif(with_findings(a_finding(n_bytes=n)))["results"][0]["partialFingerprints"] for n in (MB, 2 * MB)
    ]
    assert prints[0] == prints[1]
    assert prints[0] != sarif(with_findings(a_finding("tests")))["results"][0]["partialFingerprints"]


def test_sarif_keeps_to_what_code_scanning_takes_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (sarif_module.MAX_RESULTS, sarif_module.MAX_BYTES) == (5_000, 10_000_000)
    monkeypatch.setattr(sarif_module, "MAX_RESULTS", 20)
    run = sarif(with_findings(*(a_finding() for _ in range(27))))
    assert len(run["results"]) == 20
    notes = run["invocations"][0]["toolExecutionNotifications"]
    assert notes[0]["message"]["text"].startswith("7 results were left out")
    monkeypatch.setattr(sarif_module, "MAX_RESULTS", 5_000)
    monkeypatch.setattr(sarif_module, "MAX_BYTES", 500_000)
    text = render_sarif(with_findings(*(a_finding(remedy="é" * 10_000) for _ in range(60))))
    assert 500_000 / 3 < len(text.encode()) <= 500_000
    assert "results were left out" in text


def test_junit_fails_for_limits_regressions_and_errors_only() -> None:
    findings = [a_finding(severity.value, severity=severity) for severity in Severity]
    report = replace(with_findings(*findings), budget=small_report(Budget(1, 10_000)).budget)
    found = suite(report, WORSE)
    assert failures(found) == ["unpacked bytes are within the budget", "more unpacked bytes", "error"]
    assert (found.get("tests"), found.get("failures"), found.get("skipped")) == ("7", "3", "1")


def test_junit_skips_what_is_unknown() -> None:
    report = small_report(Budget(None, 5))
    unknown = replace(report.budget, stored=replace(report.budget.stored, actual_bytes=None))
    found = suite(replace(report, budget=unknown))
    assert found.find("testcase/skipped") is not None
    assert failures(found) == []


JENKINS = {  # the attributes that the schema of Jenkins' xUnit plugin (junit-10.xsd) knows
    "testsuites": {"name", "time", "tests", "failures", "disabled", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "time", "disabled", "skipped", "id"},
    "testcase": {"name", "assertions", "time", "classname", "status"},
    "failure": {"message", "type"},
    "skipped": {"message", "type"},
    "system-out": set(),
}


def test_junit_has_no_attribute_that_jenkins_schema_refuses() -> None:
    report = replace(
        with_findings(a_finding("x", severity=Severity.INFO)), budget=small_report(Budget(1, 1)).budget
    )
    for element in ElementTree.fromstring(render_junit(report, RenderOptions(comparison=WORSE))).iter():
        assert set(element.attrib) <= JENKINS[element.tag], element.tag


def test_junit_passes_where_nothing_is_worse() -> None:
    found = suite(with_findings(), Comparison("old.json", Tolerance(), ()))
    assert [case.get("name") for case in found] == ["nothing is worse than in old.json"]


def grown(report: AuditReport, by: int, stored: int | None = 1000) -> AuditReport:
    totals = replace(report.totals, unpacked_bytes=report.totals.unpacked_bytes + by, stored_bytes=stored)
    return replace(report, totals=totals)


def worse(before: AuditReport, after: AuditReport, tolerance: Tolerance = ONE_PERCENT) -> list[str]:
    found = compare(before, after, label="old.json", tolerance=tolerance)
    return [row.title for row in found.regressions]


def test_growth_within_the_tolerance_is_none() -> None:
    before = grown(with_findings(), 100 * MB)
    assert worse(before, grown(before, MB)) == []
    assert worse(before, grown(before, 2 * MB)) == ["more unpacked bytes"]
    assert worse(before, grown(before, 2 * MB), parse_tolerance("2%")) == []
    assert worse(before, grown(before, 2 * MB), parse_tolerance("2 MB")) == []
    assert worse(before, grown(before, 2 * MB + 1), parse_tolerance("2 MB")) == ["more unpacked bytes"]
    assert worse(before, grown(before, -50 * MB)) == []
    assert worse(before, grown(before, 0, stored=1011)) == ["more stored bytes"]


def test_stored_bytes_that_are_unknown_are_reported_as_not_compared() -> None:
    before = with_findings()
    found = compare(grown(before, 0, None), before, label="old.json", tolerance=Tolerance())
    assert found.regressions == ()
    assert "unknown for the baseline" in found.not_compared[0]
    assert "not compared: stored bytes" in render_table(small_report(), RenderOptions(comparison=found))


def test_new_and_larger_findings_are_worse_and_gone_ones_are_not() -> None:
    old = with_findings(a_finding(n_bytes=5 * MB), a_finding("tests"))
    new = with_findings(
        a_finding(n_bytes=6 * MB), a_finding("secrets", n_bytes=0), a_finding("hint", severity=Severity.INFO)
    )
    assert worse(old, new) == ["larger finding caches", "new finding secrets"]
    assert worse(new, new) == []


def test_one_more_finding_of_an_id_is_worse_even_without_bytes() -> None:
    secret = a_finding("secrets", n_bytes=0)
    assert worse(with_findings(secret), with_findings(secret, secret)) == ["larger finding secrets"]


def test_another_platform_is_no_baseline() -> None:
    other = replace(small_report(), image=replace(small_report().image, platform="linux/arm64"))
    with pytest.raises(DataError, match=r"old\.json is for linux/arm64"):
        worse(other, small_report())


@pytest.mark.parametrize("text", ["", "2 percent", "%", "-1%", "much"])
def test_what_is_no_tolerance_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a tolerance"):
        parse_tolerance(text)


def told(*words: str) -> tuple[int, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(words)
    return command.run(args), args


def saved(path: Path, report: AuditReport) -> str:
    path.write_text(to_json(report))
    return str(path)


def test_a_saved_report_is_reported_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(tmp_path / "r.json", with_findings(a_finding()))
    forms = {"--html": "<!DOCTYPE html>", "--sarif": '"2.1.0"', "--junit": "<testsuites", "--json": '"tree"'}
    files = {form: tmp_path / f"out{form}" for form in forms}
    code, _ = told(source, *(word for form, path in files.items() for word in (form, str(path))))
    assert code == Exit.OK
    assert all(forms[form] in path.read_text() for form, path in files.items())
    assert "caches" in capsys.readouterr().out
    for form in ("sarif", "junit"):
        told(source, "--format", form)
        assert capsys.readouterr().out == files[f"--{form}"].read_text()


def test_a_report_is_not_written_over_what_is_audited_or_over_another_report(tmp_path: Path) -> None:
    path = saved(tmp_path / "r.json", small_report())
    before = (tmp_path / "r.json").read_bytes()
    (tmp_path / "link").symlink_to("r.json")
    for words in (["--json", path], ["--html", str(tmp_path / "link")], ["--sarif", "x", "--junit", "./x"]):
        assert main(["audit", path, *words]) == Exit.USAGE
    assert (tmp_path / "r.json").read_bytes() == before
    assert main(["audit", path, "--json", "/dev/null", "--html", "/dev/null"]) == Exit.OK


def test_a_regression_is_exit_code_one_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = saved(tmp_path / "old.json", with_findings())
    new = saved(tmp_path / "new.json", with_findings(a_finding()))
    assert told(new, "--baseline", old)[0] == Exit.FINDINGS
    assert "worse: new finding caches: 0 B before, 5.00 MB now (+5.00 MB)" in capsys.readouterr().out
    assert told(old, "--baseline", new)[0] == Exit.OK
    assert "nothing is worse" in capsys.readouterr().out
    assert told(new, "--baseline", old, "--tolerance", "5 MB")[0] == Exit.FINDINGS  # a new one is new


def test_a_saved_report_is_judged_by_the_budget_of_the_command_line(tmp_path: Path) -> None:
    source = saved(tmp_path / "r.json", small_report())
    assert told(source)[0] == Exit.OK
    assert told(source, "--budget-unpacked", "1 kB")[0] == Exit.FINDINGS


@pytest.mark.parametrize("option", [("--targets", "gfx906"), ("--image", "x"), ("--platform", "linux/amd64")])
def test_what_a_saved_report_cannot_answer_is_refused(tmp_path: Path, option: tuple[str, str]) -> None:
    source = saved(tmp_path / "r.json", small_report())
    with pytest.raises(ConfigError, match="is a saved report"):
        told(source, *option)


def test_a_wrong_tolerance_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a tolerance"):
        told(str(tmp_path / "none.json"), "--tolerance", "much")


def test_no_report_replaces_what_the_command_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (tmp_path / name for name in ("a.json", "b.json"))
    for path in (a, b):
        saved(path, small_report())
    for words in (
        ["diff", a, b, "--markdown", a],
        ["diff", a, b, "--markdown", tmp_path / "." / "b.json"],
        ["audit", a, "--baseline", b, "--json", b],
        ["audit", a, "--html", a],
    ):
        assert main(list(map(str, words))) == Exit.USAGE
        assert "is what this command reads" in capsys.readouterr().err
    assert a.read_text() == b.read_text()
