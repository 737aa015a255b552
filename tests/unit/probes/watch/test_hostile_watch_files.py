"""Files of a watch that lie: each is refused with its place, in no time and without a traceback."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from watch_samples import NONE, SUBJECT, sample

from probes.core.codec import to_json
from probes.core.errors import ReportError
from probes.records.watch import Saturation, Subject
from probes.reports.watch import report_lines, saturation_text
from probes.watch import recording
from probes.watch.recording import named_watch, report_of
from probes.watch.totals import WatchTotals

LINE = recording.LineWriter().line(sample(0.25, power_w=100.0))


def write(path: Path, subject: Subject, *lines: str) -> Path:
    path.write_text("\n".join([recording.first_line(subject), *lines, ""]))
    return path


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(LINE), **values})


@pytest.mark.parametrize("interval_s", [0.0, -1.0, 1e-320])
def test_an_interval_that_is_no_time_does_not_make_show_run_for_ever(
    interval_s: float, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.jsonl", replace(SUBJECT, interval_s=interval_s), LINE, changed(at_s=1))
    with pytest.raises(ReportError, match="interval_s"):
        named_watch(file)


@pytest.mark.parametrize(
    "line",
    [
        changed(at_s=-5),
        changed(at_s=1e308),
        changed(late_s=-1e308),
        changed(cards=[{"look": {"power_w": 1e300}}]),
        changed(machine={"ram_bytes": 10**31}),
    ],
)
def test_times_and_figures_that_no_watch_has_are_refused_instead_of_ending_in_a_traceback(
    line: str, tmp_path: Path
) -> None:
    with pytest.raises(ReportError, match="is broken"):
        named_watch(write(tmp_path / "a.jsonl", SUBJECT, LINE, line, LINE))


def test_a_first_line_without_a_subject_is_refused_instead_of_ending_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"form": recording.FORM}) + "\n")
    with pytest.raises(ReportError, match="is broken"):
        named_watch(tmp_path / "a.jsonl")


def test_a_command_with_many_words_leaves_samples_that_can_be_read(tmp_path: Path) -> None:
    long = replace(SUBJECT, command=("python", *("file.txt" for _ in range(20_000))))
    assert named_watch(write(tmp_path / "a.jsonl", long, LINE))[0].subject == long


def test_a_line_without_an_end_is_refused_before_memory_is_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_LINE_CHARS", 1000)
    with pytest.raises(ReportError, match="a line of"):
        named_watch(write(tmp_path / "a.jsonl", SUBJECT, LINE, "0" * 5000))


def report_with(change: Callable[[dict[str, Any]], object]) -> str:
    tally = WatchTotals(0.25, 1)
    tally.add(sample(0.0))
    report = json.loads(to_json(report_of(SUBJECT, tally)))
    change(report)
    return json.dumps(report)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found["machine"][0].update(gauge="\x1b[31m"), "no gauge"),
        (lambda found: found.update(cards=[]), "as many as the subject names"),
        (lambda found: found.update(step_s=1e308), "beyond"),
    ],
)
def test_a_report_that_lies_is_refused_instead_of_ending_in_a_traceback(
    change: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(report_with(change))
    with pytest.raises(ReportError, match=words):
        named_watch(tmp_path / "a.json")


def test_an_unchanged_report_is_still_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(report_with(lambda _found: None))
    assert report_lines(named_watch(tmp_path / "a.json")[0])


def test_a_ceiling_of_nothing_has_no_share() -> None:
    one = Saturation("memory", 5.0, 0.0, "bytes/s", "made")
    assert saturation_text(one) == "saturation of memory: 5 B/s of 0 B/s measured"
    assert NONE.reason in saturation_text(replace(one, ceiling=NONE))
