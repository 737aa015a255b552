"""What a throughput report says: sentences, tables, both halves side by side."""

from dataclasses import replace
from pathlib import Path

import pytest
from made_scans import direct, report
from test_served_statistics import BY, SETTINGS, level

from probes.cli.program import main
from probes.core.codec import to_json
from probes.core.errors import Exit
from probes.core.unknown import Unknown
from probes.reports.scan import side_by_side
from probes.reports.scan_served import interval, level_line, served_findings, served_tables
from probes.throughput.report import ThroughputReport
from probes.throughput.served.results import ClientSide, Count, Percentile, ServedScan


def served() -> ServedScan:
    closed = (level(1, 80), level(2, 160), level(4, 200), level(8, 200), level(16, 200))
    opened = tuple(level(512, rate, loop="open", rate=rate) for rate in (100.0, 180.0))
    return ServedScan(BY, SETTINGS, (*closed, *opened), "every rate was measured")


def whole() -> ThroughputReport:
    return replace(report(), served=served())


def test_the_answer_names_the_most_the_knee_the_slo_and_the_end() -> None:
    answer, most, bend, slo, _, ended = served_findings(served())
    assert answer.startswith("Saturated: yes, from 4 callers on: 200")
    assert "200" in most
    assert "at 4 callers" in most
    assert bend.startswith(
        "Requests begin to wait for each other between 2 and 4 callers (the knee: the most"
    )
    assert slo.startswith("Up to 180 requests a second, 99 % are answered within 50 ms")
    assert "every rate was measured" in ended


def test_inputs_are_named_apart_from_requests_where_one_has_several() -> None:
    many = replace(served(), settings=replace(SETTINGS, rows=8))
    assert "1600 inputs/s" in served_findings(many)[1]
    closed = served_tables(many)[0]
    assert closed.rows[0][closed.headers.index("inputs/s")] == "640"


def test_every_level_is_a_row_with_what_makes_it_doubtful() -> None:
    odd = replace(
        level(4, 100), unstable="latency rises by 30% between windows", refused=7, refused_median_s=0.002,
        failed=(Count("connection reset", 2),), client=ClientSide(0.9, 0.0, 0.0, 0, "busy 90%"),
    )  # fmt: skip
    table = served_tables(replace(served(), levels=(odd,)))[0]
    cells = dict(zip(table.headers, table.rows[0], strict=True))
    assert cells["refused"] == "7, p50 2 ms"
    assert cells["failed"] == "2 connection reset"
    assert cells["doubts"] == ("unstable: latency rises by 30% between windows; client-bound: busy 90%")
    assert "client-bound" in level_line(odd)


def test_a_level_without_a_good_answer_says_how_requests_ended() -> None:
    dead = replace(level(2, 0), failed=(Count("connection refused", 9),))
    assert level_line(dead) == "closed loop, 2 callers: no good answer; connection refused 9"
    assert served_tables(replace(served(), levels=(dead,)))[0].rows[0][2] == "none"


def test_an_interval_that_the_sample_is_too_small_for_is_open() -> None:
    few = Unknown("too few samples")
    assert interval(Percentile(0.99, 0.0123, 0.0119, few)) == "12.3 ms [11.9, >]"
    assert interval(Percentile(0.5, 2.0, few, 2.5)) == "2 s [<, 2.5]"


def test_naive_and_corrected_percentiles_are_both_shown() -> None:
    waited = level(1, 100, loop="open", rate=100.0, latency_s=0.5)
    waited = replace(waited, waited_s=tuple(0.49 for _ in waited.latency_s))
    table = served_tables(replace(served(), levels=(waited,)))[0]
    cells = dict(zip(table.headers, table.rows[0], strict=True))
    assert cells["p99"].startswith("500 ms")
    assert cells["naive p99"] == "10 ms"


def test_served_levels_are_set_next_to_the_largest_batch_that_their_callers_fill() -> None:
    table = side_by_side(direct(), served())[0]
    shown = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert [row["direct batch"] for row in shown] == ["1", "2", "4", "8", "16"]
    assert shown[2]["direct inputs/s"] == "100"
    assert shown[2]["served/direct"] == "2.00"
    assert shown[0]["difference"] == "-30 ms"  # 40 ms of a pass, 10 ms served


@pytest.mark.thorough
def test_show_prints_a_throughput_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scan.json"
    path.write_text(to_json(whole()))
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Served, closed loop" in text
    assert "Direct and served" in text
    assert main(["show", "--markdown", str(path)]) == 0
    assert "### Served, open loop" in capsys.readouterr().out


def test_a_broken_throughput_report_is_a_data_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scan.json"
    path.write_text(to_json(whole()).replace('"callers": 1,', '"callers": "one",'))
    assert main(["show", str(path)]) == Exit.DATA
    assert "served.levels[0].callers" in capsys.readouterr().err
