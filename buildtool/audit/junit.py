"""An audit as JUnit XML, for CI systems that show tests: limits, regressions and findings as test cases.

A case fails where a limit or the baseline is broken, or a finding is an `error`; waste passes and appears as
output.
"""

from xml.etree import ElementTree as Xml

from buildtool.audit.baseline import Comparison, Regression
from buildtool.audit.findings import Finding, Severity, size_text
from buildtool.audit.options import DEFAULT_RENDER_OPTIONS, RenderOptions
from buildtool.audit.report import AuditReport, Judgement, Verdict
from probes.core.quoting import xml
from probes.core.units import decimal_bytes


def render_junit(report: AuditReport, options: RenderOptions = DEFAULT_RENDER_OPTIONS) -> str:
    """The report as one test suite."""
    suite = Xml.Element("testsuite", name=xml(report.image.ref))
    for name, judgement in (("unpacked", report.budget.unpacked), ("stored", report.budget.stored)):
        if judgement.verdict is not Verdict.NONE:
            _limit(suite, name, judgement)
    if options.comparison:
        _baseline(suite, options.comparison)
    for finding in report.findings:
        _finding(suite, finding)
    root = Xml.Element("testsuites", name="gpu-weir audit")
    root.append(suite)
    for element in (root, suite):
        element.set("tests", str(len(suite)))
        element.set("failures", str(len(suite.findall("testcase/failure"))))
        element.set("errors", "0")
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))  # Jenkins' schema has none for the root
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _limit(suite: Xml.Element, name: str, judgement: Judgement) -> None:
    case = _case(suite, "budget", f"{name} bytes are within the budget")
    limit = decimal_bytes(judgement.limit_bytes or 0)
    if judgement.actual_bytes is None:
        _child(case, "skipped", f"{name} bytes are unknown, the limit is {limit}")
    elif judgement.verdict is Verdict.FAIL:
        _child(case, "failure", f"{decimal_bytes(judgement.actual_bytes)} {name} > {limit}")


def _baseline(suite: Xml.Element, comparison: Comparison) -> None:
    if not comparison.regressions:
        _case(suite, "baseline", f"nothing is worse than in {comparison.label}")
    for regression in comparison.regressions:
        case = _case(suite, "baseline", regression.title)
        _child(case, "failure", str(regression), _places(regression))
    for what in comparison.not_compared:
        _child(_case(suite, "baseline", what), "skipped", f"not compared: {what}")


def _finding(suite: Xml.Element, finding: Finding) -> None:
    case = _case(suite, "findings", finding.id)
    size = f" ({size_text(finding)})" if finding.bytes else ""
    message = f"{finding.title}{size}"
    details = f"{_places(finding)}\n\n{finding.remedy}".strip()
    if finding.severity is Severity.ERROR:
        _child(case, "failure", message, details)
    else:
        _child(case, "system-out", "", f"{finding.severity.value}: {message}\n{details}")


def _case(suite: Xml.Element, group: str, name: str) -> Xml.Element:
    return Xml.SubElement(suite, "testcase", classname=f"audit.{group}", name=xml(name), time="0")


def _child(case: Xml.Element, tag: str, message: str, details: str = "") -> None:
    child = Xml.SubElement(case, tag)
    if message:
        child.set("message", xml(message))
    child.text = xml(details) or None


def _places(row: Finding | Regression) -> str:
    return "\n".join(row.paths)
