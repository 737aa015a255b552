"""A throughput report as a page, as metrics, and two of them compared."""

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_scan_shown import served, whole
from test_served_statistics import level

from probes.cli.program import main
from probes.core.codec import to_json
from probes.core.errors import Exit, ReportError
from probes.core.unknown import Unknown
from probes.records.facts import TorchFacts
from probes.reports.scan_compare import compare_scans, render_scan_markdown
from probes.reports.scan_metrics import HELP, scan_exposition
from probes.throughput.report import ThroughputReport
from probes.throughput.served.results import Conditions, Count, Level, ProgramUse, Verdict

HOSTILE = '<script>alert(1)</script>|`"\x1b[31m'


def with_levels(*levels: Level) -> ThroughputReport:
    return replace(whole(), direct=None, served=replace(served(), levels=levels))


def verdicts(a: ThroughputReport, b: ThroughputReport) -> dict[str, str]:
    return {" ".join(row.key): row.verdict for row in compare_scans(a, b, names=("A", "B")).rows}


def test_two_alike_reports_differ_nowhere() -> None:
    found = set(verdicts(whole(), whole()).values())
    assert found <= {"same within errors", "can't be judged: too few samples"}
    assert len(verdicts(whole(), whole())) == 6 + 5 * 4 + 2 * 3


def test_a_slower_service_is_worse_where_the_intervals_are_apart() -> None:
    windows = tuple(replace(level(1, 100).windows[0], answered=n) for n in (99, 100, 101))
    one = replace(level(1, 100), windows=windows)
    slow = tuple(replace(window, answered=window.answered - 20) for window in windows)
    other = replace(one, windows=slow, answered=240, latency_s=tuple(0.0125 for _ in one.latency_s))
    found = verdicts(with_levels(one), with_levels(other))
    assert found["served, closed loop 1 caller throughput"] == "worse"
    assert found["served, closed loop 1 caller p50"] == "worse"
    back = verdicts(with_levels(other), with_levels(one))
    assert back["served, closed loop 1 caller p50"] == "better"


def test_a_difference_within_the_scatter_of_windows_is_none() -> None:
    windows = tuple(replace(level(1, 100).windows[0], answered=n) for n in (80, 100, 120))
    one = replace(level(1, 100), windows=windows)
    other = replace(one, answered=270, windows=tuple(replace(w, answered=w.answered - 10) for w in windows))
    found = verdicts(with_levels(one), with_levels(other))
    assert found["served, closed loop 1 caller throughput"] == "same within errors"


def test_a_p99_of_too_few_requests_is_not_judged() -> None:
    few = level(1, 20)
    found = verdicts(with_levels(few), with_levels(few))
    assert found["served, closed loop 1 caller p99"] == "can't be judged: too few samples"


def test_a_level_without_a_good_answer_is_compared_without_dividing_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = level(1, 100)
    none = replace(level(1, 0), failed=(Count("connection reset", 300),))
    assert (
        verdicts(with_levels(none), with_levels(some))["served, closed loop 1 caller throughput"] == "better"
    )
    assert (
        verdicts(with_levels(some), with_levels(none))["served, closed loop 1 caller throughput"] == "worse"
    )
    assert set(verdicts(with_levels(none), with_levels(none)).values()) == {"same within errors"}
    for name, one in (("none", none), ("some", some)):
        (tmp_path / name).write_text(to_json(with_levels(one)))
    assert main(["compare", str(tmp_path / "none"), str(tmp_path / "some")]) == 0
    assert "A is 0" in capsys.readouterr().out
    for verb in ("show", "prometheus"):
        assert main([verb, str(tmp_path / "none")]) == 0


def test_rates_within_a_percent_are_the_same_level() -> None:
    a, b, far = (level(9, rate, loop="open", rate=rate) for rate in (100.0, 100.5, 110.0))
    found = compare_scans(with_levels(a), with_levels(b, far), names=("A", "B"))
    assert [row.key[1] for row in found.rows] == ["100/s"] * 3
    assert {key[1] for key in found.only[1]} == {"110/s"}


def test_scans_with_other_numbers_of_threads_are_unlike() -> None:
    torch = TorchFacts("2.13", "none", "", 2, (), "this torch is a CPU build")
    two = replace(
        whole(),
        machine=replace(whole().machine, torch=torch),
        settings=replace(whole().settings, threads=0),  # as torch chooses
    )
    one = replace(two, machine=replace(two.machine, torch=replace(torch, threads=1)))
    with pytest.raises(ReportError, match="CPU threads: 2 / 1"):
        compare_scans(two, one, names=("A", "B"))
    asked = replace(two, settings=replace(two.settings, threads=1))
    assert compare_scans(asked, replace(one, settings=asked.settings), names=("A", "B")).unlike == ()


def test_unlike_scans_are_refused_unless_forced() -> None:
    other = whole()
    assert other.served is not None
    other = replace(other, served=replace(other.served, by=replace(other.served.by, model="other")))
    with pytest.raises(ReportError, match="model served: m / other"):
        compare_scans(whole(), other, names=("A", "B"))
    forced = compare_scans(whole(), other, names=("A", "B"), force=True)
    assert "Unlike" in render_scan_markdown(forced)


def test_a_comparison_of_served_scans_leads_with_whether_their_answers_agree() -> None:
    shown = render_scan_markdown(compare_scans(whole(), whole(), names=("A", "B")))
    assert shown.index("Is the server saturated?") < shown.index("B over A")
    assert "- A: Saturated: yes, from 4 callers on" in shown
    assert "The answers agree: yes" in shown
    direct = replace(whole(), served=None)
    assert "saturated?" not in render_scan_markdown(compare_scans(direct, direct, names=("A", "B")))


def test_metrics_are_what_prometheus_reads() -> None:
    text = scan_exposition(whole())
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert found.keys() <= HELP.keys()
    speeds = found["weir_scan_served_answers_per_second"].samples
    assert {sample.labels["loop"] for sample in speeds} == {"closed", "open"}
    assert max(sample.value for sample in speeds) == 200
    assert len(found["weir_scan_direct_inputs_per_second"].samples) == 6
    assert [sample.value for sample in found["weir_scan_served_saturated"].samples] == [1]
    low = found["weir_scan_served_latency_low_seconds"].samples
    assert all(isinstance(sample.value, float) for sample in low)


@pytest.mark.thorough
def test_the_page_has_every_plot_of_both_halves_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "scan.json"
    path.write_text(to_json(whole()))
    assert main(["html", str(path)]) == 0
    page = path.with_suffix(".html").read_text()
    for name in ("throughput", "latency", "saturation", "load"):
        assert f'id="{name}-desk-title"' in page
        assert f'id="{name}-phone-title"' in page
    assert "default-src 'none'" in page
    assert 'src="http' not in page
    assert "Most answers" in page


@pytest.mark.thorough
def test_a_page_of_one_half_says_how_to_get_the_other(tmp_path: Path) -> None:
    path = tmp_path / "scan.json"
    path.write_text(to_json(replace(whole(), direct=None)))
    assert main(["html", str(path)]) == 0
    page = path.with_suffix(".html").read_text()
    assert "without --url" in page
    path.write_text(to_json(replace(whole(), served=None)))
    assert main(["html", str(path)]) == 0
    assert "with --url" in path.with_suffix(".html").read_text()


@pytest.mark.thorough
def test_what_a_server_says_of_itself_is_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = whole()
    assert report.served is not None
    by = replace(report.served.by, model=HOSTILE, server=HOSTILE, request=HOSTILE)
    path = tmp_path / "scan.json"
    seen = Conditions(2, 1.2, 0.1, 0.1, HOSTILE, 1.0, 0.0, (ProgramUse(HOSTILE, 1.0),))
    levels = tuple(replace(one, conditions=seen) for one in report.served.levels)
    told = replace(report.served, by=by, ended=HOSTILE, levels=levels, saturated=Verdict("no", HOSTILE, 1))
    path.write_text(to_json(replace(report, served=told)))
    for words in (["show"], ["show", "--markdown"], ["prometheus"], ["compare", str(path)]):
        assert main([*words, str(path)]) == 0
        assert "\x1b" not in capsys.readouterr().out
    assert main(["html", str(path)]) == 0
    page = path.with_suffix(".html").read_text()
    assert "<script" not in page
    assert "\x1b" not in page


def test_a_scan_and_a_probe_report_can_not_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scan.json"
    path.write_text(to_json(whole()))
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert main(["compare", str(path), str(other)]) == Exit.DATA
    assert "is not a probe report" in capsys.readouterr().err


def test_an_unknown_figure_is_no_metric() -> None:
    report = whole()
    assert report.direct is not None
    assert all(isinstance(row.joules, Unknown) for row in report.direct.series[0].rows)
    assert "joules" not in scan_exposition(report)
