"""An image held against an earlier report of it: whole comparisons, and each limit at its edge."""

from dataclasses import replace

import pytest
from report_maker import a_finding, with_findings

from buildtool.audit.baseline import Comparison, Regression, Tolerance, compare, parse_tolerance
from buildtool.audit.findings import Finding, Severity
from buildtool.audit.report import AuditReport
from buildtool.core.errors import ConfigError

MB = 1_000_000


def a_report(*findings: Finding, unpacked: int = 1000 * MB, stored: int | None = 100 * MB) -> AuditReport:
    report = with_findings(*findings)
    totals = replace(report.totals, unpacked_bytes=unpacked, stored_bytes=stored)
    return replace(report, totals=totals)


def compared(before: AuditReport, after: AuditReport, tolerance: Tolerance) -> Comparison:
    return compare(before, after, label="old.json", tolerance=tolerance)


def test_one_percent_is_forgiven_where_nobody_says_otherwise() -> None:
    assert Tolerance() == Tolerance(share=0.01, n_bytes=0)
    assert str(Tolerance()) == "1 %"


@pytest.mark.parametrize(
    ("text", "tolerance", "shown"),
    [
        ("2%", Tolerance(0.02, 0), "2 %"),
        (" 2.5 % ", Tolerance(0.025, 0), "2.5 %"),
        ("0%", Tolerance(0.0, 0), "0 %"),
        ("5 MB", Tolerance(0.0, 5 * MB), "5.00 MB"),
        ("1B", Tolerance(0.0, 1), "1 B"),
    ],
)
def test_a_tolerance_is_a_share_or_a_size_never_both(text: str, tolerance: Tolerance, shown: str) -> None:
    assert parse_tolerance(text) == tolerance
    assert str(tolerance) == shown


@pytest.mark.parametrize("text", ["2%%", "2.%", ".5%", "x2%", "2%x", "5", "5 MB or so"])
def test_a_tolerance_is_all_of_the_text_or_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_tolerance(text)
    assert repr(text) in str(refused.value)


def test_growth_is_forgiven_up_to_the_share_or_the_bytes_whichever_is_more() -> None:
    share = Tolerance(0.5)
    assert (share.forgives(100, 150), share.forgives(100, 151)) == (True, False)
    both = Tolerance(0.5, 60)
    assert (both.forgives(100, 160), both.forgives(100, 161), both.forgives(200, 300)) == (True, False, True)
    assert (Tolerance(0.0, 5).forgives(0, 5), Tolerance(0.0, 5).forgives(0, 6)) == (True, False)
    assert Tolerance(0.0).forgives(9, 0)


def test_both_sizes_and_then_findings_are_compared() -> None:
    before = a_report(a_finding("tests", n_bytes=5 * MB))
    large, small = a_finding("tests", n_bytes=7 * MB, title="t", paths=("p",)), a_finding("tests", n_bytes=1)
    after = a_report(large, small, a_finding("caches", n_bytes=0), unpacked=1020 * MB, stored=102 * MB)
    assert compared(before, after, Tolerance(0.01)) == Comparison(
        "old.json",
        Tolerance(0.01),
        (
            Regression("more stored bytes", 100 * MB, 102 * MB),
            Regression("more unpacked bytes", 1000 * MB, 1020 * MB),
            Regression("larger finding tests", 5 * MB, 7 * MB + 1, "t", ("p",)),
            Regression("new finding caches", 0, 0, "caches of package managers", ("var/cache",)),
        ),
    )
    forgiving = compared(before, after, Tolerance(0.02))
    assert [row.title for row in forgiving.regressions] == ["larger finding tests", "new finding caches"]


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [(None, 5, "the baseline"), (5, None, "the image"), (None, None, "the baseline")],
)
def test_stored_bytes_that_only_one_side_knows_are_reported_as_not_compared(
    before: int | None, after: int | None, where: str
) -> None:
    new = a_finding("tests")
    found = compared(a_report(stored=before), a_report(new, unpacked=2000 * MB, stored=after), Tolerance())
    assert [row.title for row in found.regressions] == ["more unpacked bytes", "new finding tests"]
    assert found.not_compared == (f"stored bytes, unknown for {where}",)
    assert (found.label, found.tolerance) == ("old.json", Tolerance())


def test_findings_that_shrank_or_are_information_are_no_regression() -> None:
    info = a_finding("info", severity=Severity.INFO)
    before = a_report(a_finding("tests"), a_finding("tests"), a_finding("gone"))
    assert compared(before, a_report(a_finding("tests"), info), Tolerance()).regressions == ()
    mixed = a_report(info, replace(info, severity=Severity.WARNING))
    [row] = compared(a_report(info), mixed, Tolerance()).regressions
    assert (row.title, row.before_bytes, row.after_bytes) == ("larger finding info", 5 * MB, 10 * MB)


def test_a_finding_within_the_tolerance_is_no_regression_unless_it_has_more_cases() -> None:
    before = a_report(a_finding("tests", n_bytes=100))
    assert compared(before, a_report(a_finding("tests", n_bytes=101)), Tolerance()).regressions == ()
    assert len(compared(before, a_report(a_finding("tests", n_bytes=102)), Tolerance()).regressions) == 1
    twice = a_report(a_finding("tests", n_bytes=50), a_finding("tests", n_bytes=50))
    assert len(compared(before, twice, Tolerance()).regressions) == 1


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (Regression("t", 1, 3), "t: 1 B before, 3 B now (+2 B)"),
        (Regression("t", 1, 3, "why"), "t: 1 B before, 3 B now (+2 B): why"),
        (Regression("t", 3, 3, "why"), "t: why"),
        (Regression("t", 3, 3), "t"),
    ],
)
def test_a_regression_is_reported_with_its_growth_where_there_is_any(row: Regression, text: str) -> None:
    assert str(row) == text
