"""Samples and reports in files, on pages and on the command line; text from outside stays text."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator
from watch_samples import NONE, SUBJECT, sample

from probes.cli import watch
from probes.cli.program import main
from probes.core.codec import encode, to_json
from probes.core.errors import ReportError, UsageError
from probes.core.unknown import Unknown
from probes.records.watch import ProcessUse, Sample, watch_from_json, watch_schema, write_watch
from probes.reports.watch import report_lines
from probes.throughput.ceilings import Ceiling, Ceilings, DeviceCeilings
from probes.watch import recording
from probes.watch.allocator import AllocatorTotals, with_hook
from probes.watch.metrics_server import exposition
from probes.watch.recording import named_watch, open_recorders
from probes.watch.screen import sample_line
from probes.watch.watcher import CardCeilings, saturation

SCHEMA = Path(__file__).parents[4] / "docs" / "schema" / "watch-report.schema.json"
USE = ProcessUse(7, "py\x1b[2Jthon", 2**20, NONE, NONE)
SAMPLES = [
    sample(0.0, power_w=100.0, vram_bytes=1.0, uses=Unknown("hidden")),
    sample(0.2503, late_s=0.0003, power_w=120.0, slow=("power cap",), uses=(USE,)),
    replace(sample(0.5), late_s=None),
]


def lines(samples: list[Sample]) -> list[str]:
    writer = recording.LineWriter()
    return [recording.first_line(SUBJECT), *map(writer.line, samples)]


def test_samples_can_be_read_back_with_their_reasons() -> None:
    written = lines(SAMPLES)
    assert recording.subject_of(written[0]) == SUBJECT
    found = list(recording.samples_of(written[1:]))
    assert [one.at_s for one in found] == [0.0, 0.2503, 0.5]
    assert found[0].cards[0].processes == Unknown("hidden")
    assert found[1].cards[0].slowdowns == ("power cap",)
    assert found[1].cards[0].processes == (USE,)
    assert found[2].late_s is None


def test_a_reason_is_written_when_it_changes_and_not_with_every_sample() -> None:
    same = [sample(at / 4, uses=Unknown("hidden")) for at in range(5)]
    assert sum("hidden" in line for line in lines(same)) == 1


def write(path: Path, text: list[str], tail: str = "") -> Path:
    path.write_text("\n".join(text) + "\n" + tail)
    return path


def test_a_torn_last_line_costs_that_sample_alone(tmp_path: Path) -> None:
    whole = lines(SAMPLES)
    report, _ = named_watch(write(tmp_path / "a.jsonl", whole[:-1], whole[-1][:20]))
    assert report.pace.samples == 2


def test_a_broken_line_within_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    whole = lines(SAMPLES)
    with pytest.raises(ReportError, match="is broken"):
        named_watch(write(tmp_path / "a.jsonl", [*whole[:2], "{", *whole[2:]]))


def test_a_report_can_be_read_back_and_fits_its_schema(tmp_path: Path) -> None:
    report, _ = named_watch(write(tmp_path / "a.jsonl", lines(SAMPLES)))
    assert watch_from_json(to_json(report)) == report
    Draft202012Validator(json.loads(watch_schema())).validate(encode(report))
    write_watch(report, tmp_path / "a.json")
    assert named_watch(tmp_path / "a.json")[0] == report


def test_the_published_schema_is_the_programs() -> None:
    assert SCHEMA.read_text() == watch_schema(), "run: python3 -m probes schema watch"


@pytest.mark.parametrize(
    "text", ["", "{", '{"kind": "watch"}', '{"kind": "watch", "schema_version": 9}', "[]"]
)
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ReportError):
        named_watch(tmp_path / "x.json")


def test_a_csv_has_a_column_for_each_gauge_and_a_row_for_each_sample() -> None:
    head = recording.csv_header(SUBJECT).split(",")
    rows = [recording.csv_row(one).split(",") for one in SAMPLES]
    assert {len(row) for row in rows} == {len(head)}
    assert rows[1][head.index("card0_power_w")] == "120.0"
    assert rows[2][head.index("card0_power_w")] == ""
    assert rows[1][head.index("card0_slowdowns")] == "power cap"


def test_each_sample_is_in_the_file_before_the_next_one_is_taken(tmp_path: Path) -> None:
    recorders = open_recorders(SUBJECT, jsonl=tmp_path / "a.jsonl", csv=tmp_path / "a.csv")
    for one in SAMPLES[:2]:
        for recorder in recorders:
            recorder.add(one)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 3
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 3
    for recorder in recorders:
        recorder.close()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="can't write"):
        open_recorders(SUBJECT, jsonl=tmp_path / "no" / "a.jsonl", csv=None)


def test_metrics_are_in_base_units_and_unknown_ones_are_left_out() -> None:
    found = exposition(SUBJECT, SAMPLES[1])
    assert 'weir_watch_card_power_watts{card="0",pci="0000:03:00.0"} 120' in found
    assert "weir_watch_machine_cpu_ratio 0.5" in found
    assert 'weir_watch_card_slowed{card="0",pci="0000:03:00.0"} 1' in found
    assert "fan" not in found
    assert exposition(SUBJECT, None) == ""


def test_saturation_is_work_of_what_was_measured_and_unknown_without_it() -> None:
    rates = {"dram_percent": 50.0, "to_card_bytes_per_s": 4e9, "busy_percent": 100.0}
    report = _report(sample(0.0, **rates), sample(0.25, **rates))
    card = replace(SUBJECT.cards[0], memory_bytes_per_s=2e12)
    memory, to_card, from_card, units, _ = saturation(
        card, report.cards[0], CardCeilings(memory_bytes=1.6e12)
    )
    assert (memory.achieved, memory.ceiling) == (1e12, 1.6e12)
    assert to_card.achieved == 4e9
    assert isinstance(to_card.ceiling, Unknown)
    assert isinstance(from_card.achieved, Unknown)
    assert isinstance(units.achieved, Unknown)


def _report(*samples: Sample):
    from probes.watch.recording import report_of
    from probes.watch.totals import WatchTotals

    tally = WatchTotals(0.25, 1)
    for one in samples:
        tally.add(one)
    return report_of(SUBJECT, tally)


def test_a_report_in_words_says_energy_slowdowns_and_what_is_unknown() -> None:
    text = "\n".join(report_lines(_report(*SAMPLES)))
    assert text.startswith("Watched for ")
    assert "27.53 J ± " in text.splitlines()[1]  # what is asked for first
    assert "energy: 27.53 J" in text
    assert "slowed: 50.1% of the time: power cap 50.1%" in text
    assert "process 7 py" in text
    assert "unknown: " in text
    assert "power 120 W" in sample_line(SAMPLES[1])


@pytest.mark.thorough
def test_show_and_html_take_reports_and_samples_and_quote_what_others_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", lines(SAMPLES))
    assert main(["show", str(file)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["html", str(file), "--out", str(tmp_path / "a.html")]) == 0
    page = (tmp_path / "a.html").read_text()
    assert "<b>" not in page.replace("<b>Card", "")
    assert "Radeon \\x1b[31m&lt;b&gt;" in page
    assert page.count("<svg") == 4


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["python", "train.py", "-x"], ["python", "HOOK", "train.py", "-x"]),
        (
            ["/usr/bin/python3.12", "-u", "-W", "error", "a.py"],
            ["/usr/bin/python3.12", "-u", "-W", "error", "HOOK", "a.py"],
        ),
        (["python3", "-m", "pkg.train", "-m"], ["python3", "HOOK", "-m", "pkg.train", "-m"]),
        (["python3", "-c", "x"], ["python3", "HOOK", "-c", "x"]),
    ],
)
def test_the_hook_comes_before_the_program(words: list[str], changed: list[str]) -> None:
    assert with_hook(words, "HOOK") == changed


@pytest.mark.parametrize(
    "words",
    [
        ["sh", "x"],
        ["python"],
        ["python", "-u"],
        ["python", "-"],
        ["pythonic", "x"],
        ["python", "-Ic", "x"],
        ["python", "-mjson"],
        ["python", "-m"],
        ["python", "-u", "-c"],
    ],
)
def test_a_command_that_the_hook_cannot_join_is_refused(words: list[str]) -> None:
    for given in (words, tuple(words)):
        with pytest.raises(UsageError):
            with_hook(given, "HOOK")


def hook_line(**changes: int) -> bytes:
    plain = {
        "device": 0,
        "allocated": 60,
        "most_allocated": 70,
        "reserved": 100,
        "most_reserved": 100,
        "split": 10,
    }
    return json.dumps({**plain, "retries": 0, "out_of_memory": 0, **changes}).encode() + b"\n"


def test_fragmentation_is_that_of_the_moment_when_most_was_reserved() -> None:
    tally = AllocatorTotals()
    data = (
        hook_line(reserved=50) + hook_line(largest_free=25) + b"garbage\n" + hook_line(reserved=20, retries=2)
    )
    tally.add(data[:30])
    tally.add(data[30:])
    (found,) = tally.found()  # type: ignore[misc]
    assert (found.unused_share, found.split_share, found.largest_free_bytes) == (0.4, 0.1, 25)
    assert found.retries == 2


def test_a_program_without_torch_has_no_allocator() -> None:
    assert isinstance(AllocatorTotals().found(), Unknown)


@pytest.mark.thorough
def test_the_verb_watches_this_machine_and_writes_what_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / f"a.{kind}") for kind in ("json", "jsonl", "csv")]
    asked = ["--report", files[0], "--jsonl", files[1], "--csv", files[2], "--plain"]
    assert main(["watch", "--for", "0.1", "--interval", "0.02", *asked]) == 0
    assert "watching" in capsys.readouterr().out
    by_report, by_samples = named_watch(Path(files[0]))[0], named_watch(Path(files[1]))[0]
    assert by_report.pace.samples == by_samples.pace.samples >= 3
    # the lines round their times to a microsecond, which weighs the same values a little differently
    assert by_report.machine[1].mean == pytest.approx(by_samples.machine[1].mean, rel=1e-3)


@pytest.mark.parametrize(
    "words",
    [
        ["--interval", "0"],
        ["--interval", "nan"],
        ["--interval", "soon"],
        ["--listen", "9400x"],
        ["--listen", "host:99999"],
        ["--for", "1", "--", "true"],
        ["--torch-allocator"],
    ],
)
def test_a_wish_that_cannot_be_is_refused_with_exit_code_2(words: list[str]) -> None:
    assert exit_code(["watch", *words]) == 2


def exit_code(words: list[str]) -> object:
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


def test_ceilings_come_from_a_throughput_report(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Ceiling("made", 2e12, (1.0, 1.0, 1.0), "wall")
    gpu = DeviceCeilings("gpu", "made", (), rate, replace(rate, work=5e10), NONE, rate)
    made = SimpleNamespace(ceilings=Ceilings((gpu,)))
    monkeypatch.setattr("probes.throughput.report.named_scan", lambda _path: (made, ""))
    assert watch._ceilings(Path("x")) == (CardCeilings(2e12, 5e10, NONE),)
    made.ceilings = Ceilings(())
    (tops,) = watch._ceilings(Path("x"))
    assert isinstance(tops.memory_bytes, Unknown)
